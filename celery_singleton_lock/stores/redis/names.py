"""From a name to its addresses, in the time there is: a resolver may take half a minute for one answer."""

import _thread
import os
import socket
import threading
from typing import Any

# How long to wait for fresh addresses where there are old ones to go by.
_PATIENCE = 0.25

_Name = tuple[str, int]
_known: dict[_Name, list[str]] = {}


class _Lookup:
    """One question to the resolver, in a thread of its own, because nothing can break it off."""

    def __init__(self, name: _Name) -> None:
        self._name = name
        self._answered = _thread.allocate_lock()
        self._answered.acquire()
        self.error: OSError | None = None
        self.is_over = False

    def start(self) -> None:
        _thread.start_new_thread(self._run, ())

    def wait(self, timeout: float) -> None:
        """Until it is answered, for *timeout* seconds at most."""
        if not self.is_over:
            self._answered.acquire(timeout=max(0.0, timeout))

    def _run(self) -> None:
        try:
            _known[self._name] = _resolved(*self._name)
        except OSError as error:
            self.error = error
        finally:
            self.is_over = True
            self._answered.release()


# By thread as well: greenlets of two threads must not wait for one another.
_under_way: dict[tuple[int, _Name], _Lookup] = {}
if hasattr(os, "register_at_fork"):
    # The threads do not survive it, so nobody would ever answer.
    os.register_at_fork(after_in_child=_under_way.clear)


def addresses_of(host: str, port: int, timeout: float) -> list[str]:
    """The addresses of *host*; the last that were known, if the resolver does not answer soon or knows none.

    Raises:
        OSError: No answer in time, or that there is no such name, and none was known before.
    """
    try:
        return _resolved(host, port, socket.AI_NUMERICHOST)
    except OSError:
        # It is a name.
        lookup = _lookup((host, port))
    before = _known.get((host, port))
    lookup.wait(timeout if before is None else min(timeout, _PATIENCE))
    if (host, port) in _known:
        return _known[host, port]
    raise lookup.error or OSError(f"the name {host} was not resolved in time")


def _lookup(name: _Name) -> _Lookup:
    """The one that is under way in this thread, or a new one: those that hang shall not pile up."""
    mine = threading.get_native_id(), name
    lookup = _under_way.get(mine)
    if lookup is None or lookup.is_over:
        lookup = _under_way[mine] = _Lookup(name)
        lookup.start()
    return lookup


def _resolved(host: str, port: int, flags: int = 0) -> list[str]:
    found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys(address[0] for *_, address in found))
