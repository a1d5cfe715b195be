"""Turns in the queue of a lock, and how their waiters are woken."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from redis import exceptions

from celery_singleton_lock.stores.base import ACQUIRE_BOUND, Waiter, clock
from celery_singleton_lock.stores.records import Claim, Conflict, Done, Grant
from celery_singleton_lock.stores.redis.opening import REPLY_TIMEOUT
from celery_singleton_lock.stores.redis.wire import Wire

# A poll takes no more than 24 days at once.
_LONGEST_SLEEP = 3600.0
# Seconds of the bound for listening, so that enough of it is left for the question.
_LISTEN_BOUND = 2.0
# A server of a cluster says so when its channel has moved to another server; the next `ask` listens there.
_LEFT = "sunsubscribe"


class RedisWaiter(Waiter):
    """A turn in a queue, with a connection that hears the release."""

    def __init__(self, wire: Wire, claim: Claim, ask: Callable[[float], Grant | Conflict | Done | float]) -> None:
        self._wire = wire
        self._channel = f"{claim.key}:{claim.token}"
        self._ask = ask
        self._patience = claim.patience
        self._granted = False
        self._ears: Any = None

    def __exit__(self, *_: object) -> None:
        """Stop listening. Without a grant, disconnect, so that the server passes over a turn that may be left."""
        if self._ears is not None and self._granted:
            self._wire.unsubscribe(self._ears)
        elif self._ears is not None:
            self._ears.disconnect()

    def ask(self) -> Grant | Conflict | Done | float:
        """Listen first, and then run acquire.lua to take a turn, so that no wake-up is missed."""
        give_up_at = clock() + ACQUIRE_BOUND
        self._listen()
        answer = self._ask(give_up_at - clock())
        self._granted = isinstance(answer, Grant)
        return answer

    def sleep(self, seconds: float) -> None:
        """Wait for a message on the channel."""
        try:
            if self._ears is not None and self._ears.can_read(timeout=min(seconds, _LONGEST_SLEEP)):
                message = self._ears.read_response()
                if message[0] == _LEFT:
                    self._ears.disconnect()
                    self._ears = None
                    return
        except exceptions.RedisError:
            self._ears.disconnect()
            self._ears = None
        if self._ears is None:
            # It cannot hear a release, so it looks a little more often; `ask` reports a broken store.
            time.sleep(min(seconds, REPLY_TIMEOUT))

    def _listen(self) -> None:
        if self._ears is None:
            with suppress(exceptions.RedisError):
                self._ears = self._wire.subscribe(self._channel, min(_LISTEN_BOUND, self._patience))
