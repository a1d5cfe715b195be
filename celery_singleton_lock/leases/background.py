"""A thread for calls that may block, such as receivers of signals, so that no renewal waits for them."""

import os
from _queue import Empty, SimpleQueue
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.log import log
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.redis.answers import Part
from celery_singleton_lock.stores.threads import LINGERS, DaemonThread, patched_by

_LOOK_AGAIN = 0.05
_PAUSE = 0.5
# Seconds for which a silent server is not asked again, otherwise releases at other servers would wait.
_SILENCE = 1.0
# Seconds after which a request without an answer has arrived, or never will.
_UNDER_WAY = 3.0


class Background(DaemonThread):
    """Calls functions in order, in a thread or greenlet that ends when idle, unless `stays()` is true."""

    def __init__(self, stays: Callable[[], bool] = bool) -> None:
        self._stays = stays
        self._order = count()
        self.start_over()

    def start_over(self) -> None:
        self._pid = os.getpid()
        self._running = None
        # A signal handler may interrupt `put`, and call it again. The `SimpleQueue` of `_queue`, in C,
        # allows that. gevent and eventlet replace only `queue.SimpleQueue`.
        self._calls: SimpleQueue[tuple[float, int, Callable[[], object]]] = SimpleQueue()
        self._waiting: list[tuple[float, int, Callable[[], object]]] = []

    def submit(self, call: Callable[[], object], delay: float = 0.0) -> None:
        self.put(call, delay)
        self.ensure()

    def put(self, call: Callable[[], object], delay: float = 0.0) -> None:
        if self._pid != os.getpid():
            # After a fork the queued calls are the parent's. uWSGI by default calls no hook of `os.register_at_fork`.
            self.start_over()
        self._calls.put((clock() + delay, next(self._order), call))

    def _step(self) -> bool:
        due_in = self._waiting[0][0] - clock() if self._waiting else LINGERS
        try:
            heappush(self._waiting, self._get(max(0.0, due_in)))
        except Empty:
            if not self._waiting:
                return False
        if self._calls.empty() and self._waiting[0][0] <= clock():
            call = heappop(self._waiting)[2]
            try:
                call()
            except Exception:  # noqa: BLE001 (the thread must go on; the log tells)
                log.error("lock.bug", "the thread goes on", where="background", exc_info=True)
        return True

    def _get(self, timeout: float) -> tuple[float, int, Callable[[], object]]:
        greenlets = patched_by()
        if greenlets is None:
            return self._calls.get(timeout=timeout)
        # A blocking `get` would stop all greenlets.
        give_up_at = clock() + timeout
        while self._calls.empty() and (left := give_up_at - clock()) > 0:
            greenlets.sleep(min(left, _LOOK_AGAIN))
        return self._calls.get_nowait()

    def _has_work(self) -> bool:
        return not self._calls.empty() or bool(self._waiting) or self._stays()


background = Background()


@dataclass(eq=False)
class PendingRelease:
    """The release of a lease, a turn or a mark, repeated until the store answers."""

    part: Callable[[], Part]  # asked before each try, because a cluster may move the key
    give_up_at: float  # on `clock()`
    release: Callable[[], object]  # raises `StoreError` without an answer
    may_release: Callable[[], bool] = lambda: True
    # Whether an acquire or mark without an answer may arrive after the release. The release is then repeated.
    may_arrive: bool = False

    def __call__(self) -> None:
        pause = _PAUSE
        try:
            pause = self._try()
        finally:
            if pause and clock() + pause < self.give_up_at:
                background.submit(self, pause)

    def _try(self) -> float:
        """Returns seconds until the next try, or 0.0 if none is needed."""
        part = self.part()
        silence = part.silent_until - clock()
        if silence > 0 or not self.may_release():
            return max(silence, _PAUSE)
        try:
            self.release()
        except StoreError:
            part.silent_until = clock() + _SILENCE
            return _PAUSE
        part.silent_until = 0.0
        if not self.may_arrive:
            return 0.0
        # Without `min` each answer would postpone the end.
        self.give_up_at = min(self.give_up_at, clock() + _UNDER_WAY)
        return _PAUSE
