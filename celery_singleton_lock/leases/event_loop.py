"""The position of a thread in the asyncio event loop that it runs, if it runs one.

Nothing here imports asyncio, so a process without an event loop does not pay for it.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def callback_around(frame: FrameType | None) -> FrameType | None:
    """The innermost callback of an event loop that has called the code in *frame*; each step of a task is one."""
    asyncio = sys.modules.get("asyncio.events")
    if asyncio is None or asyncio._get_running_loop() is None:  # noqa: SLF001
        return None
    return frame_of(asyncio.Handle._run, frame)  # noqa: SLF001


def is_what_the_loop_runs_for(callback: FrameType) -> bool:
    """Whether *callback* is a step of the task whose end ends the loop."""
    asyncio = sys.modules["asyncio"]
    running = frame_of(asyncio.BaseEventLoop.run_until_complete, callback)
    if running is None:
        return False
    return bool(running.f_locals.get("future") is asyncio.current_task(running.f_locals["self"]))


def call_uncaught(delay: float, callback: Callable[[], object]) -> bool:
    """Have the running loop call *callback*; an exception from it ends the loop, as `KeyboardInterrupt` would.

    Returns:
        False if the loop is not one of Python's own: nothing is called then.
    """
    asyncio = sys.modules["asyncio"]
    handle = asyncio.get_running_loop().call_later(max(0.0, delay), callback)
    if not isinstance(handle, asyncio.TimerHandle):
        handle.cancel()
        return False
    kind = asyncio.TimerHandle
    handle.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "_run": lambda self: self._callback()})
    return True


def frame_of(function: Any, frame: FrameType | None) -> FrameType | None:
    """The innermost frame of *function* from *frame* outwards."""
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame
