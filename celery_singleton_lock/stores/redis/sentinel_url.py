"""The meaning of a URL of sentinels and of its options, as Celery or redis-py spells them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from celery_singleton_lock.errors import ConfigurationError

SCHEME = "sentinel://"
WHERE = (
    "in singleton_lock_client_options, or in broker_transport_options or result_backend_transport_options if the URL "
    "is the broker's or the result backend's"
)
_PORT = 26379
_NO = (None, False, "", "0", "no", "false", "False")
_NAMES = ("master_name", "service_name")


@dataclass(frozen=True)
class Deployment:
    """Sentinels, and the master they watch.

    Attributes:
        address: Where that is, fit for logs.
        name: What the sentinels call the master.
        sentinels: Host and port of each.
        sentinel_options: Arguments for redis-py's connections to them.
        least_others: A sentinel is trusted only if it knows of at least so many others.
        master_url: The master's URL, with a host that does not exist.
        master_options: Arguments for redis-py's connections to it.
    """

    address: str
    name: str
    sentinels: tuple[str, ...]
    sentinel_options: Mapping[str, Any]
    least_others: int
    master_url: str
    master_options: Mapping[str, Any]

    @property
    def sentinel_scheme(self) -> str:
        """How redis-py connects to the sentinels."""
        return "redis" if self.sentinel_options.get("ssl") in _NO else "rediss"


def read(url: str, options: Mapping[str, Any]) -> Deployment:
    """Read a URL of one sentinel or more, between semicolons, with its options.

    User, password and database are those of the master, and of the first part that has them. A sentinel without a
    port has that of the option `default_port`, or 26379.

    Raises:
        ConfigurationError: It cannot be read, or there is no name of a master.
    """
    try:
        parts = [_split(part.strip()) for part in url.split(";") if part.strip()]
        hosts = tuple(dict.fromkeys(_host(part, options.get("default_port", _PORT)) for part in parts))
        query = dict(pair for part in reversed(parts) for pair in parse_qsl(part.query))
    except ValueError as error:
        raise error if isinstance(error, ConfigurationError) else _unreadable() from None
    user = next((part.netloc.rpartition("@")[0] + "@" for part in parts if "@" in part.netloc), "")
    database = next((path for part in parts if (path := part.path.strip("/"))), "")
    if any(part.fragment for part in parts) or not (database.isdigit() or not database or "db" in query):
        raise _unreadable()
    address = f"{SCHEME}{';'.join(hosts)}/{query.get('db', database)}"
    rest = {**query, **options}
    rest.pop("default_port", None)
    name = _take_name(rest, address)
    of_sentinels = _take_sentinel_kwargs(rest)
    least_others = _take_least_others(rest)
    # An option of redis-py's client; a connection has a class of its own instead.
    has_tls = rest.pop("ssl", False) not in _NO or any(option.startswith("ssl_") for option in rest)
    asked = urlencode({option: value for option, value in query.items() if option in rest and option not in options})
    return Deployment(
        address=f"{address}?master_name={name}",
        name=name,
        sentinels=hosts,
        sentinel_options=of_sentinels,
        least_others=least_others,
        master_url=f"{'rediss' if has_tls else 'redis'}://{user}master.invalid/{database}?{asked}",
        master_options={option: value for option, value in rest.items() if option in options},
    )


def _unreadable() -> ConfigurationError:
    """The advice, without the URL, in which there may be a password."""
    return ConfigurationError(
        "singleton_lock_url cannot be read: give sentinel://host:port;host:port/database?master_name=name, with "
        "semicolons between the sentinels, the database as a number, and user:password@ of the master, if any, before "
        "the first host, with any other character in them percent-encoded"
    )


def _split(part: str) -> SplitResult:
    return urlsplit(part if "://" in part else SCHEME + part)


def _host(part: SplitResult, port: int) -> str:
    if part.scheme != SCHEME.partition(":")[0]:
        raise ConfigurationError(
            f"singleton_lock_url: a part of it begins with {part.scheme}://, where each names a sentinel: give "
            "sentinel://host:port;sentinel://host:port/database"
        )
    if "," in part.netloc.rpartition("@")[2]:
        raise _unreadable()
    if not part.hostname:
        raise ConfigurationError(
            "singleton_lock_url: a part of it names no host: give sentinel://host:port;sentinel://host:port/database"
        )
    host = f"[{part.hostname}]" if ":" in part.hostname else part.hostname
    return f"{host}:{part.port or port}"


def _take_name(options: dict[str, Any], address: str) -> str:
    named = {name: options.pop(name) for name in _NAMES if options.get(name) is not None}
    for name in _NAMES:
        options.pop(name, None)
    if not named:
        raise ConfigurationError(
            f"singleton_lock_url: {address} does not say which master: set master_name, as the sentinels call it, "
            f"{WHERE}; or let the URL end with ?master_name=..."
        )
    for option, value in named.items():
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f"{option}={value!r} is not allowed: give what the sentinels call the master")
    if len(set(named.values())) > 1:
        told = " and ".join(f"{option}={value!r}" for option, value in named.items())
        raise ConfigurationError(f"{told} are two names for one thing: give master_name alone")
    return str(next(iter(named.values())))


def _take_sentinel_kwargs(options: dict[str, Any]) -> dict[str, Any]:
    given = options.pop("sentinel_kwargs", None) or {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            # Do not quote the value: there may be a password in it.
            f"sentinel_kwargs=<a {type(given).__name__}> is not allowed: give a dict of arguments for redis-py's "
            "connections to the sentinels, such as {'password': '...'}"
        )
    # redis-py's client ignores these options if it uses no TLS.
    return {
        option: value for option, value in given.items() if given.get("ssl") not in _NO or not option.startswith("ssl")
    }


def _take_least_others(options: dict[str, Any]) -> int:
    number = options.pop("min_other_sentinels", None) or 0
    if not str(number).isdigit():
        raise ConfigurationError(f"min_other_sentinels={number!r} is not allowed: give a number, such as 1")
    return int(number)
