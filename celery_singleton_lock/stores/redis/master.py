"""The server that Sentinel calls the master, for as long as it is."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

from redis import RedisError

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.redis.aside import aside
from celery_singleton_lock.stores.redis.opening import REPLY_TIMEOUT, hear, opened, pool_of, shut
from celery_singleton_lock.stores.redis.refusals import NoMaster
from celery_singleton_lock.stores.redis.sentinel_url import read
from celery_singleton_lock.stores.redis.sentinels import Report, Sentinels

logger = logging.getLogger("celery_singleton_lock")

# A former master may take writes for ten seconds, until Sentinel tells it: nothing breaks the connections to it.
_LOOK_AGAIN = 1.0
# Seconds for which an answer is used again: many connections that are opened at once need one answer.
_FRESH = 0.1
# Seconds until the lease of a grant is renewed with all others, and a connection whose reply has come is idle. On a
# very busy machine it may take longer.
_ON_ITS_WAY = 0.5
# Seconds for which the last master that a sentinel has named is trusted, if all sentinels are silent since, or those
# that answer know less. Not for ever, because sentinels that are set up anew count from the beginning.
_REMEMBERED = 30.0
# The part of the time that is for the question; the rest is for the connection.
_TO_ASK = 0.75
# The seconds that a failover takes after the silence before it, and the part of a ttl that is left if its renewal is
# due.
_FAILOVER = 2.5
_LEFT = 2 / 3
# By store, the shortest ttl that was logged as too short, so that pool processes do not log it again.
_told: dict[str, float] = {}


class SentinelMaster:
    """Opens connections to the master that the sentinels name at that time.

    Arguments:
        url: `sentinel://`, in several parts.
        options: Arguments for redis-py's connections to the master, its name, and what concerns the sentinels.
        leave: Closes what is connected and idle, when there is another master.
        renew: Has all leases renewed there.

    Raises:
        ConfigurationError: The URL or an option cannot be used.
    """

    may_move = True

    def __init__(
        self, url: str, options: Mapping[str, Any], leave: Callable[[], None], renew: Callable[[], None]
    ) -> None:
        deployment = read(url, options)
        self.address = deployment.address
        self.pool = pool_of(deployment.master_url, deployment.master_options, deployment.address)
        self._sentinels = Sentinels(deployment)
        self._leave, self._renew = leave, renew
        self._begin()

    def _begin(self) -> None:
        self._known: Report | None = None
        self._heard_at = self._fresh_until = self._look_at = float("-inf")
        # Weak references: the users of connections close them.
        self._opened: dict[ref[Any], None] = {}
        self._pid = os.getpid()

    def open(self, timeout: float) -> Any:
        """Ask the sentinels, connect, and ask the server as well: it may not have heard of its promotion yet."""
        if self._pid != os.getpid():
            # Those that are open are the parent's.
            self._begin()
        give_up_at = clock() + timeout
        master = self._master(timeout)
        try:
            connection = opened(self.pool, give_up_at - clock(), host=master.host, port=master.port)
            _check_role(connection, give_up_at)
        except BaseException:
            self._fresh_until = float("-inf")
            raise
        self._keep(connection, master)
        return connection

    def look_again(self) -> None:
        """Ask the sentinels in the background, once in a second, and leave a former master."""
        now = clock()
        if now >= self._look_at and self._known is not None and self._pid == os.getpid():
            self._look_at = now + _LOOK_AGAIN
            aside(self._look)

    def _look(self) -> None:
        with suppress(RedisError):
            self._master(REPLY_TIMEOUT)

    def weigh(self, ttls: Iterable[float]) -> None:
        """A lease must outlast the silence of a dead master and the failover, at any moment between two renewals."""
        known, shortest = self._known, min(ttls, default=math.inf)
        if known is None or shortest * _LEFT >= known.down_after + _FAILOVER:
            return
        if shortest >= _told.get(self.address, math.inf):
            return
        _told[self.address] = shortest
        takes = known.down_after + _FAILOVER
        event = (
            "lock.failover store=%s ttl=%g down_after=%g: if the master dies, the next one takes %g s, and a lease may "
            "have %.1f s left, so running tasks lose theirs; set lock_ttl to %d or more, or lower "
            "down-after-milliseconds"
        )
        numbers = takes, shortest * _LEFT, math.ceil(takes / _LEFT)
        aside(partial(logger.warning, event, self.address, shortest, known.down_after, *numbers))

    def _master(self, timeout: float) -> Report:
        if self._known is not None and clock() < self._fresh_until:
            return self._known
        try:
            found = self._sentinels.ask(timeout * _TO_ASK)
        except NoMaster as error:
            if self._known is not None and error.is_silence and clock() < self._heard_at + _REMEMBERED:
                return self._known
            raise
        known, now = self._known, clock()
        if known is not None and found.epoch < known.epoch and now < self._heard_at + _REMEMBERED:
            return known
        self._known, self._heard_at = found, now
        self._fresh_until, self._look_at = now + _FRESH, now + _LOOK_AGAIN
        if known is not None and found.names_another_than(known):
            self._move(known, found)
        return found

    def _move(self, known: Report, found: Report) -> None:
        """End all connections to the former master, including those of waiters and those with a reply under way."""
        event = "lock.moved store=%s master=%s before=%s: all leases are renewed at the new master"
        aside(partial(logger.warning, event, self.address, found.master, known.master))
        for opened_before in list(self._opened):
            connection = opened_before()
            if connection is not None and (connection.host, connection.port) != (found.host, found.port):
                shut(connection)
        self._leave()
        self._renew()
        aside(self._move_once_more)

    def _move_once_more(self) -> None:
        """The same for what was on its way: the former master's last reply to a caller, its grant to the heartbeat."""
        time.sleep(_ON_ITS_WAY)
        self._leave()
        self._renew()

    def _keep(self, connection: Any, master: Report) -> None:
        for opened_before in list(self._opened):
            if opened_before() is None:
                self._opened.pop(opened_before, None)
        self._opened[ref(connection)] = None
        if self._known is not None and self._known.names_another_than(master):
            connection.disconnect()
            raise NoMaster(f"{master.master} is the master no more")


def _check_role(connection: Any, give_up_at: float) -> None:
    try:
        connection.send_command("ROLE", check_health=False)
        hear(connection, min(REPLY_TIMEOUT, give_up_at - clock()))
        role, *_ = connection.read_response()
        if role != "master":
            raise NoMaster(f"{connection.host}:{connection.port} is no master, but a {role}")
    except BaseException:
        connection.disconnect()
        raise
