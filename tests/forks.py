import ctypes
import os
from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, simplefilter

from tests.waiting import pulse

fork_in_c: Callable[[], int] = ctypes.PyDLL(None).fork
"""As uWSGI forks: none of Python's hooks is called."""


def in_a_fork(body: Callable[[], Any], fork: Callable[[], int] = os.fork) -> str:
    """Run *body* in a forked child; its return value or its error, as text."""
    reader, writer = os.pipe()
    with pulse().paused(), catch_warnings():
        # Other threads run, from Python 3.12 on a reason to warn.
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
    """Write what *body* returns or raises, and end the process: a child of fork must not go on, whatever happens."""
    try:
        text = repr(body())
    except BaseException as error:  # noqa: BLE001 (the parent reads it)
        text = f"{type(error).__name__}: {error}"
    os.write(writer, text.encode())
    os._exit(0)
