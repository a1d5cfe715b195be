"""The sources of connections."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from redis import ConnectionPool

from celery_singleton_lock.stores.redis.master import SentinelMaster
from celery_singleton_lock.stores.redis.opening import opened, pool_of
from celery_singleton_lock.stores.redis.sentinel_url import SCHEME


class Source(Protocol):
    """Opens connections to the server that keeps the locks.

    Attributes:
        address: Where the store is, fit for logs: never with credentials.
        pool: Class and arguments of the connections.
        may_move: Another server may take over while connections to this one are open.
    """

    address: str
    pool: ConnectionPool
    may_move: bool

    def open(self, timeout: float) -> Any:
        """A connection that is ready for a command, within *timeout* seconds.

        Raises:
            RedisError: There is none in that time.
        """

    def look_again(self) -> None:
        """Look in the background whether the server is still the right one, unless that was done just now."""

    def weigh(self, ttls: Iterable[float]) -> None:
        """Tell in the log, once, if leases of so many seconds do not outlast a failover of the store."""


class OneServer:
    """The server that a URL names.

    Raises:
        ConfigurationError: The URL or an option is not one that redis-py knows.
    """

    may_move = False

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        scheme, _, rest = url.partition("://")
        self.address = f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
        self.pool = pool_of(url, options, self.address)

    def open(self, timeout: float) -> Any:
        """Connect to it."""
        return opened(self.pool, timeout)

    def look_again(self) -> None:
        """Nothing to do: the server stays where it is."""

    def weigh(self, ttls: Iterable[float]) -> None:
        """Nothing to do: nobody knows how long the server may be away."""


def source_of(url: str, options: Mapping[str, Any], leave: Callable[[], None], renew: Callable[[], None]) -> Source:
    """The source that *url* names.

    Arguments:
        url: As `RedisStore` takes it.
        options: As `RedisStore` takes them.
        leave: Closes idle connections, because another server is the right one from now on.
        renew: Has all leases renewed there.

    Raises:
        ConfigurationError: The URL or an option cannot be used.
    """
    if url.startswith(SCHEME):
        return SentinelMaster(url, options, leave, renew)
    return OneServer(url, options)
