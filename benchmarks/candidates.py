"""The locks that are measured: ours, redis-py's own, and python-redis-lock's."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import redis_lock
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock import Lock
from celery_singleton_lock.definition.keys import key_of
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import Claim, Renewal
from celery_singleton_lock.stores.redis.connection import REPLY_TIMEOUT

OURS, REDIS_PY, PYTHON_REDIS_LOCK = "celery-singleton-lock", "redis-py", "python-redis-lock"

# Longer than any part of a run, so that no lock expires.
TTL = 60
PATIENCE = 5

# python-redis-lock warns of every conflict; writing that down is not what is measured.
logging.getLogger("redis_lock.acquire").setLevel(logging.ERROR)


def client_of(url: str) -> Redis:
    """A plain redis-py client with the settings of our own connections."""
    return Redis.from_url(
        url,
        decode_responses=True,
        protocol=2,
        socket_timeout=REPLY_TIMEOUT,
        socket_connect_timeout=REPLY_TIMEOUT,
        retry=Retry(NoBackoff(), 0),
    )


class Candidate(ABC):
    """One kind of lock, on one server, with connections of its own."""

    label: str

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = client_of(url)

    @abstractmethod
    def lock(self, name: str) -> Any:
        """A lock with `acquire(blocking=...)` and `release()`."""

    @abstractmethod
    def stored_as(self, name: str) -> str:
        """Under which key the server has it."""

    @abstractmethod
    def wait(self, lock: Any) -> bool:
        """Acquire *lock*, in line for a few seconds at most."""

    @abstractmethod
    def queued(self, name: str) -> bool:
        """The server knows of somebody who waits for the lock, since its statistics were reset."""

    @abstractmethod
    def renewal(self, number: int) -> Callable[[], object]:
        """Take so many leases; what is returned renews all of them."""


class Ours(Candidate):
    """`celery_singleton_lock.Lock`: fence, facts, renewal, queue."""

    label = OURS

    def lock(self, name: str) -> Lock:
        """Each has connections of its own, as with the two others."""
        return Lock(name, url=self._url, ttl=TTL)

    def stored_as(self, name: str) -> str:
        """The key in the prefix, with its digest."""
        return key_of("singleton", name, {})

    def wait(self, lock: Any) -> bool:
        """Woken by a message."""
        return lock.acquire(timeout=PATIENCE) is not None

    def queued(self, name: str) -> bool:
        """A turn in the hash."""
        return bool(self._client.hexists(self.stored_as(name), "first"))

    def renewal(self, number: int) -> Callable[[], object]:
        """All at once, as the heartbeat renews the leases of a process."""
        backend = store_from_url(self._url)
        who: dict[str, Any] = {"hostname": "localhost", "pid": 12345}
        claims = [Claim(self.stored_as(f"renewed-{n}"), f"{n:016}", TTL, **who) for n in range(number)]
        for claim in claims:
            backend.acquire(claim)

        def renew() -> None:
            assert backend.renew(claims, REPLY_TIMEOUT).count(Renewal.RENEWED) == number

        return renew


class RedisPy(Candidate):
    """`redis.lock.Lock`: a key with a token; waiters look every 0.1 s."""

    label = REDIS_PY

    def lock(self, name: str) -> Any:
        """As `Redis.lock` makes it."""
        return self._client.lock(name, timeout=TTL)

    def stored_as(self, name: str) -> str:
        """The name as it is."""
        return name

    def wait(self, lock: Any) -> bool:
        """Looks again and again."""
        return bool(lock.acquire(blocking_timeout=PATIENCE))

    def queued(self, name: str) -> bool:  # noqa: ARG002 (nothing in the store tells of those who wait)
        """The waiter has looked once."""
        return "cmdstat_set" in self._client.info("commandstats")

    def renewal(self, number: int) -> Callable[[], object]:
        """One by one; there is no other way."""
        locks = [self.lock(f"renewed-{n}") for n in range(number)]
        for lock in locks:
            lock.acquire()
        return lambda: [lock.reacquire() for lock in locks]


class PythonRedisLock(Candidate):
    """`redis_lock.Lock`: a key with a token; waiters sleep in BLPOP."""

    label = PYTHON_REDIS_LOCK

    def lock(self, name: str) -> Any:
        """Without `auto_renewal`, which would start a thread for each."""
        return redis_lock.Lock(self._client, name, expire=TTL)

    def stored_as(self, name: str) -> str:
        """The name behind a prefix."""
        return f"lock:{name}"

    def wait(self, lock: Any) -> bool:
        """Woken by the list of signals."""
        return bool(lock.acquire(timeout=PATIENCE))

    def queued(self, name: str) -> bool:  # noqa: ARG002 (the server counts them, whatever they wait for)
        """A client is blocked."""
        return bool(self._client.info("clients")["blocked_clients"])

    def renewal(self, number: int) -> Callable[[], object]:
        """One by one; there is no other way."""
        locks = [self.lock(f"renewed-{n}") for n in range(number)]
        for lock in locks:
            lock.acquire()
        return lambda: [lock.extend() for lock in locks]


def candidates(url: str) -> list[Candidate]:
    """All of them, ours first."""
    return [Ours(url), RedisPy(url), PythonRedisLock(url)]
