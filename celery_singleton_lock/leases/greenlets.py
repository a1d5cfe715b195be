"""If gevent or eventlet has turned all threads into greenlets: the things that greenlets need and threads do not."""

import _thread
import sys
from collections.abc import Callable
from typing import Any


def patched_by() -> Any:
    """The module, gevent or eventlet, that has patched threads in this process; None if neither has."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        return sys.modules["gevent"]
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return sys.modules["eventlet"]
    return None


def hub() -> Any:
    library = patched_by()
    return library.get_hub() if library.__name__ == "gevent" else library.hubs.get_hub()


def call_soon(hub: Any, call: Callable[[], None]) -> None:
    """Have *hub* call something; with gevent from any thread, with eventlet from the hub's own."""
    if patched_by().__name__ == "gevent":
        hub.loop.run_callback_threadsafe(call)
    else:
        hub.schedule_call_global(0, call)


def current() -> Any:
    """The greenlet that runs this; None if no greenlets are in use."""
    return sys.modules["greenlet"].getcurrent() if patched_by() is not None else None


def start_native_thread(run: Callable[[], None]) -> None:
    """Run something in a thread that the greenlets of this process cannot starve."""
    start: Any = _thread.start_new_thread
    # What it was before anybody patched it.
    if "gevent.monkey" in sys.modules:
        start = sys.modules["gevent.monkey"].get_original("_thread", "start_new_thread")
    elif "eventlet.patcher" in sys.modules:
        start = sys.modules["eventlet.patcher"].original("_thread").start_new_thread
    start(run, ())
