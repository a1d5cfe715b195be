"""The meaning of a URL of a cluster and of its options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores.redis.opening import unreadable

SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
"""How a URL of a cluster begins, and that of one of its servers."""

_PORT = 6379
_EXAMPLE = "redis+cluster://host:port;host:port"


class Node(NamedTuple):
    """The address of a server of a cluster."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Membership:
    """Some servers of a cluster, and how to connect to any of them.

    Attributes:
        address: Where that is, fit for logs.
        nodes: Those that the URL names; they know the others.
        url: The URL of any of its servers, with a host that does not exist.
        options: Arguments for redis-py's connections.
        remap: Turns the address that the cluster tells into the one at which we reach the server.
    """

    address: str
    nodes: tuple[Node, ...]
    url: str
    options: Mapping[str, Any]
    remap: Callable[[tuple[str, int]], tuple[str, int]]


def read(url: str, options: Mapping[str, Any]) -> Membership:
    """Read a URL of one server or more, between semicolons, with its options.

    User and password are those of the first part that has them, for all servers.

    Raises:
        ConfigurationError: It cannot be read, or it asks for a database.
    """
    scheme = url.partition("://")[0]
    try:
        parts = [_split(part.strip(), scheme) for part in url.split(";") if part.strip()]
        nodes = tuple(dict.fromkeys(_node(part, scheme) for part in parts))
    except ValueError as error:
        raise error if isinstance(error, ConfigurationError) else unreadable() from None
    if any(part.fragment for part in parts):
        raise unreadable()
    user = next((part.netloc.rpartition("@")[0] + "@" for part in parts if "@" in part.netloc), "")
    query = "&".join(part.query for part in parts if part.query)
    address = f"{scheme}://{';'.join(map(str, nodes))}"
    rest = dict(options)
    _refuse_databases([part.path.strip("/") for part in parts], query, rest.pop("db", 0), address)
    return Membership(
        address=address,
        nodes=nodes,
        url=f"{SCHEMES[scheme]}://{user}node.invalid?{query}",
        remap=_checked(rest.pop("address_remap", None)),
        options=rest,
    )


def _split(part: str, scheme: str) -> SplitResult:
    return urlsplit(part if "://" in part else f"{scheme}://{part}")


def _node(part: SplitResult, scheme: str) -> Node:
    if part.scheme != scheme:
        raise ConfigurationError(
            f"singleton_lock_url: a part of it begins with {part.scheme}://, where each names a server of one cluster: "
            f"give {_EXAMPLE}"
        )
    if not part.hostname or "," in part.netloc.rpartition("@")[2]:
        raise ConfigurationError(f"singleton_lock_url: a part of it does not name one host: give {_EXAMPLE}")
    return Node(part.hostname, part.port or _PORT)


def _refuse_databases(paths: list[str], query: str, option: Any, address: str) -> None:
    asked = [pair.partition("=")[2] for pair in query.split("&") if pair.startswith("db=")]
    wrong = [database for database in (*paths, *asked, str(option or 0)) if database not in ("", "0")]
    if wrong:
        raise ConfigurationError(
            f"singleton_lock_url: {address} cannot be used with database {wrong[0]}: a cluster has database 0 alone, "
            "so let the URL end without one; give singleton_lock_prefix to keep apps apart"
        )


def _checked(remap: Any) -> Callable[[tuple[str, int]], tuple[str, int]]:
    if remap is not None and not callable(remap):
        raise ConfigurationError(
            f"address_remap={remap!r} is not allowed: give a function that takes (host, port) as the cluster tells it, "
            "and returns (host, port) as this process reaches it"
        )
    return remap or (lambda address: address)
