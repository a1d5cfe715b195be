import ctypes
import os
from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, simplefilter

from tests.waiting import pulse

fork_in_c: Callable[[], int] = ctypes.PyDLL(None).fork
"""Forks as uWSGI does, without Python's hooks."""


def in_a_fork(body: Callable[[], Any], fork: Callable[[], int] = os.fork) -> str:
    """Run *body* in a forked child. Return its result or its error, as text."""
    reader, writer = os.pipe()
    with pulse().paused(), catch_warnings():
        # Python 3.12 warns of a fork while other threads run.
        simplefilter("ignore", DeprecationWarning)
        pid = fork()
        if pid == 0:
            _answer(body, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def _answer(body: Callable[[], Any], writer: int) -> None:
    """Write what *body* returns or raises, and end the child, which would otherwise go on with the tests."""
    try:
        text = repr(body())
    except BaseException as error:  # noqa: BLE001 (the parent reads it)
        text = f"{type(error).__name__}: {error}"
    os.write(writer, text.encode())
    os._exit(0)
