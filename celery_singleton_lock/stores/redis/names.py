"""From a name to its addresses within a bound: a resolver may take half a minute for one answer."""

import _thread
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

# Seconds to wait for fresh addresses if old ones are known.
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
        life = self._live()
        next(life)
        _thread.start_new_thread(next, (life, None))

    def wait(self, timeout: float) -> None:
        """Wait until it is answered, for *timeout* seconds at most."""
        if not self.is_over:
            self._answered.acquire(timeout=max(0.0, timeout))

    def _live(self) -> Iterator[None]:
        """A generator, so that the thread begins inside the `try`: a function may be broken off before that."""
        try:
            yield
            _known[self._name] = _resolved(*self._name)
        except OSError as error:
            self.error = error
        finally:
            self.is_over = True
            self._answered.release()


# The thread is a part of the key, because greenlets of two threads must not wait for one another.
_under_way: dict[tuple[int, _Name], _Lookup] = {}
if hasattr(os, "register_at_fork"):
    # The threads do not survive a fork, so the questions would have no answer for ever.
    os.register_at_fork(after_in_child=_under_way.clear)


def addresses_of(host: str, port: int, timeout: float) -> list[str]:
    """The addresses of *host*; the last known ones if the resolver does not answer soon or knows none.

    Raises:
        OSError: No answer in time, or that there is no such name, and none was known before.
    """
    try:
        return _resolved(host, port, socket.AI_NUMERICHOST)
    except OSError:
        # It is a name and not an address.
        lookup = _lookup((host, port))
    before = _known.get((host, port))
    lookup.wait(timeout if before is None else min(timeout, _PATIENCE))
    if (host, port) in _known:
        return _known[host, port]
    raise lookup.error or OSError(f"the name {host} was not resolved in time")


def _lookup(name: _Name) -> _Lookup:
    """The question that is under way in this thread, or a new one, so that questions that hang do not pile up."""
    mine = threading.get_native_id(), name
    lookup = _under_way.get(mine)
    if lookup is None or lookup.is_over:
        lookup = _Lookup(name)
        lookup.start()
        # Only now: a signal may raise before, and a question that nobody has asked would have no answer for ever.
        _under_way[mine] = lookup
    return lookup


def _resolved(host: str, port: int, flags: int = 0) -> list[str]:
    try:
        found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:
        raise OSError(f"the name {host} cannot be one of a host: {error}") from error
    return list(dict.fromkeys(address[0] for *_, address in found))
