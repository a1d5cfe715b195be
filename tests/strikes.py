"""An exception at one moment of our code, raised as the interpreter raises it: by a signal's handler, or from outside.

The interpreter looks for either only where a function begins or goes on, after a call, and as it jumps back. So these
are all the moments there are. A tracer counts them and, at one, only leaves a note that something is pending: what
raises then, and where, is the interpreter itself.
"""

import ctypes
import dis
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

from tests.waiting import until

How = Literal["by a signal", "from outside"]
HOWS: tuple[How, ...] = ("by a signal", "from outside")

LOOKING = {
    "CALL",
    "CALL_KW",
    "CALL_FUNCTION_EX",
    "JUMP_BACKWARD",
    "POP_JUMP_BACKWARD_IF_TRUE",
    "POP_JUMP_BACKWARD_IF_FALSE",
    "POP_JUMP_BACKWARD_IF_NONE",
    "POP_JUMP_BACKWARD_IF_NOT_NONE",
}
"""After these the interpreter looks whether something is pending; and where a function begins, or goes on."""

EVERYWHERE = bool(os.environ.get("STRIKE_EVERYWHERE"))
"""All moments are tried. Otherwise every so many-eth, from one that a fixed seed has drawn."""

_SEED = 14
_PYTHONS = Path(threading.__file__).parent
_SIGNAL = signal.SIGUSR2
_PATIENCE = 20.0


class StruckError(Exception):
    """What a time limit raises."""


class HangsError(BaseException):
    """It would never have ended."""


@cache
def looks(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions after which the interpreter looks whether something is pending."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname in LOOKING)


@cache
def _is_pythons(file: str) -> bool:
    return Path(file).parent == _PYTHONS


class Strike:
    """Has an exception raised once, at one moment in some files; they are counted from 0.

    Attributes:
        seen: How many moments there have been.
        where: At which it was, or "nowhere".
        error: What it has ended with, if that was something else.
        wrong: What was seen to be wrong at once.
    """

    def __init__(self, moment: float, files: frozenset[str], how: How) -> None:
        self._moment, self._files, self._how = moment, files, how
        self._note: Any = None
        self.seen = 0
        self.where = "nowhere"
        self.error: BaseException | None = None
        self.wrong: str | None = None

    def during(self, body: Callable[[], object]) -> None:
        """Run *body*, in the main thread or in one of its own.

        Raises:
            HangsError: It would never have ended.
        """
        if self._how == "from outside":
            thread = threading.Thread(target=self._traced, args=(body,), daemon=True)
            thread.start()
            thread.join(_PATIENCE)
            if thread.is_alive():
                raise HangsError(self.where)
            return
        before = signal.signal(_SIGNAL, self._handle), signal.signal(signal.SIGALRM, self._hangs)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE)
        try:
            self._traced(body)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(_SIGNAL, before[0])
            signal.signal(signal.SIGALRM, before[1])

    def _traced(self, body: Callable[[], object]) -> None:
        self._note = note(self._how)
        try:
            sys.settrace(self._called)
            try:
                body()
            finally:
                sys.settrace(None)
        except StruckError:
            pass
        except HangsError:
            raise
        except BaseException as error:  # noqa: BLE001 (what is struck may raise anything)
            self.error = error.with_traceback(None)
        take_what_is_pending()

    def _handle(self, *_: object) -> None:
        raise StruckError(self.where)

    def _hangs(self, *_: object) -> None:
        raise HangsError(self.where)

    # Both end with the note: nothing of theirs comes after it where the interpreter looks.

    def _called(self, frame: FrameType, _event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files or self._serves_others(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.seen += 1
        if self.seen == self._moment + 1:
            self.where = f"{code.co_qualname}, line {frame.f_lineno}, as it begins or goes on"
            _ = -self._note
        return self._stepped

    def _serves_others(self, frame: FrameType) -> bool:
        """Python's own, in the service of a library that may not survive it: a queue whose lock stays taken, say."""
        if not _is_pythons(frame.f_code.co_filename):
            return False
        caller = frame.f_back
        # One of Python's own may serve another.
        while caller is not None and _is_pythons(caller.f_code.co_filename):
            caller = caller.f_back
        return caller is not None and caller.f_code.co_filename not in self._files

    def _stepped(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti in looks(frame.f_code):
            self.seen += 1
            if self.seen == self._moment + 1:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}, instruction {frame.f_lasti}"
                _ = -self._note
        return self._stepped


def note(how: How) -> Any:
    """Something whose negation has an exception raised in this thread as soon as the interpreter looks.

    An operator, because after a call the interpreter would look at once, in the tracer.
    """
    if how == "by a signal":
        leave = partial(ctypes.pythonapi.PyErr_SetInterruptEx, int(_SIGNAL))
    else:
        me = ctypes.c_ulong(threading.get_ident())
        leave = partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, me, ctypes.py_object(StruckError))
    return type("Note", (), {"__neg__": staticmethod(leave)})()


def take_what_is_pending() -> None:
    """Let it be raised here, so that it is not later."""
    with suppress(StruckError):
        for _ in range(100):
            pass


def nothing_pending() -> None:
    """Where one was sent to a thread and taken back, Python 3.11 keeps a flag and then traces in circles."""
    with suppress(StruckError):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(StruckError))
        for _ in range(1000):
            pass


def moments(total: int, tries: int) -> Iterator[int]:
    """All moments, or about so many of them."""
    stride = 1 if EVERYWHERE else max(1, total // tries)
    return iter(range(random.Random(_SEED).randrange(stride), total, stride))


def is_free(lock: Any) -> bool:
    """Nobody has kept it; somebody may have it for a moment."""
    owned = getattr(lock, "_is_owned", None)
    if (owned is not None and owned()) or not lock.acquire(timeout=2):
        return False
    lock.release()
    return True


def is_reached(condition: Callable[[], object], timeout: float = 2.0) -> bool:
    """It comes true in time; what only a cycle keeps alive is thrown away for that."""
    if condition():
        return True
    gc.collect()
    with suppress(AssertionError):
        return bool(until(condition, "", timeout))
    return False


def is_begun_too_late(where: str) -> bool:
    """What leaves a block was broken off before its first line, so nothing was released: its ttl ends the lease."""
    # A run that retries is released by the handler of its end.
    begins = where.startswith(("Lock._leave", "_after_its_end,")) and where.endswith("goes on")
    return begins or where.startswith("_With.__call__")
