"""Where a connection comes from."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from redis import ConnectionPool

from celery_singleton_lock.stores.redis.opening import opened, pool_of


class Source(Protocol):
    """Opens connections to the server that keeps the locks.

    Attributes:
        address: Where the store is, fit for logs: never with credentials.
        pool: Class and arguments of the connections.
    """

    address: str
    pool: ConnectionPool

    def open(self, timeout: float) -> Any:
        """A connection that is ready for a command, within *timeout* seconds.

        Raises:
            RedisError: There is none in that time.
        """

    def weigh(self, ttls: Iterable[float]) -> None:
        """Tell in the log, once, if leases of so many seconds do not outlast what the store may need to come back."""


class OneServer:
    """The server that a URL names.

    Raises:
        ConfigurationError: The URL or an option is not one that redis-py knows.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        scheme, _, rest = url.partition("://")
        self.address = f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
        self.pool = pool_of(url, options, self.address)

    def open(self, timeout: float) -> Any:
        """Connect to it."""
        return opened(self.pool, timeout)

    def weigh(self, ttls: Iterable[float]) -> None:
        """Nothing is known of how long it may be away."""


def source_of(url: str, options: Mapping[str, Any]) -> Source:
    """The source that *url* names.

    Arguments:
        url: As `RedisStore` takes it.
        options: As `RedisStore` takes them.

    Raises:
        ConfigurationError: The URL or an option cannot be used.
    """
    return OneServer(url, options)
