"""Opening a connection, from its name to its database, within one bound."""

import codecs
import inspect
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any
from urllib.parse import urlsplit

from redis import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
    UsernamePasswordCredentialProvider,
    exceptions,
)
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.retry import Retry

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.redis.names import addresses_of

REPLY_TIMEOUT = 1.0
_SHORTEST_TIMEOUT = 0.01
# Seconds idle, seconds between probes, probes: sooner than most routers forget a connection.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

# A new connection tells the server its library's name and version, each a round
# trip that the bounds would have to include. The names of these arguments have changed.
_NO_INTRODUCTION: dict[str, None] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)
_OURS = {
    "socket_timeout": REPLY_TIMEOUT,
    "socket_connect_timeout": REPLY_TIMEOUT,
    "retry": Retry(NoBackoff(), 0),
    "health_check_interval": 0,
    "decode_responses": True,
    "protocol": 2,
    **_NO_INTRODUCTION,
}


class Tcp(Connection):
    """A connection over TCP that opens until `give_up_at`, and by old addresses if there are no new ones in time."""

    give_up_at = float("inf")
    bare: Any = None

    def _connect(self) -> Any:
        name = self.host
        addresses = addresses_of(name, self.port, _left(self))
        try:
            sock = self._connect_to_one(addresses)
        finally:
            # TLS asks for the name.
            self.host = name
        # For the handshake of TLS.
        sock.settimeout(_left(self))
        self.bare = sock
        return sock

    def _connect_to_one(self, addresses: list[str]) -> Any:
        for number, address in enumerate(addresses, start=1):
            self.host = address
            self.socket_connect_timeout = _left(self) / (len(addresses) - number + 1)
            try:
                return super()._connect()
            except OSError:
                if number == len(addresses):
                    raise
        raise OSError("the name has no address")


class Tls(SSLConnection, Tcp):
    """The same with TLS."""

    def _connect(self) -> Any:
        try:
            return super()._connect()
        except FileNotFoundError as error:
            # Early versions of redis-py leave it open.
            self.bare.close()
            raise ssl.SSLError(f"CERTIFICATE file not found: {error}") from error


_OPENING_IN_TIME = {Connection: Tcp, SSLConnection: Tls}


def pool_of(url: str, options: Mapping[str, Any], address: str) -> ConnectionPool:
    """A pool for *url*, of which only class and arguments of its connections are of use.

    Raises:
        ConfigurationError: The URL or an option is not one that redis-py knows; it names *address*.
    """
    try:
        return _pool_of(url, options)
    except (TypeError, exceptions.RedisError) as error:
        raise ConfigurationError(f"singleton_lock_url: {address} cannot be used: {error}") from error
    except ValueError:
        raise unreadable() from None


def _pool_of(url: str, options: Mapping[str, Any]) -> ConnectionPool:
    keepalive = {} if url.startswith("unix:") else _keepalive()
    pool = ConnectionPool.from_url(url, **{**keepalive, "redis_connect_func": _introduce, **options, **_OURS})
    if pool.connection_class is not UnixDomainSocketConnection and "db" not in pool.connection_kwargs:
        # redis-py takes database 0 if it cannot read the number.
        int(urlsplit(url).path.strip("/") or 0)
    # Again, because from_url lets what the URL says win.
    pool.connection_kwargs.update(_OURS)
    _settle_provider(pool.connection_kwargs)
    pool.connection_class = _OPENING_IN_TIME.get(pool.connection_class, pool.connection_class)
    _check_values(pool.connection_class(**pool.connection_kwargs))
    return pool


def _settle_provider(arguments: dict[str, Any]) -> None:
    """Make a credential provider of its dotted path, as Celery does; it stands for user and password.

    Raises:
        TypeError: There is none of that name.
    """
    provider = arguments.get("credential_provider")
    if isinstance(provider, str):
        try:
            arguments["credential_provider"] = resolve_name(provider)()
        except Exception as error:
            # Not its text: somebody may have written a password there.
            raise TypeError(
                "credential_provider cannot be made of the text that was given: give a redis.CredentialProvider, or "
                f"the dotted path of a class that takes no arguments ({type(error).__name__})"
            ) from error
    if provider is not None:
        for stood_for in ("username", "password"):
            arguments.pop(stood_for, None)


def unreadable() -> ConfigurationError:
    """What is to be told of a URL; not in Python's words, in which a password that was not escaped would stand."""
    return ConfigurationError(
        "singleton_lock_url cannot be read: give redis://user:password@host:port/database, "
        "the database as a number, with any other character in user and password percent-encoded"
    )


def _check_values(connection: Any) -> None:
    """Refuse what redis-py would stumble over when it connects, in words that do not quote it.

    Raises:
        TypeError: An option has a value that can never work.
    """
    try:
        codecs.lookup_error(connection.encoder.encoding_errors)
        understood = "PING".encode(connection.encoder.encoding) == b"PING"
    except (LookupError, TypeError):
        understood = False
    if not understood:
        raise TypeError(
            "encoding in singleton_lock_client_options has to be one like 'utf-8', encoding_errors 'strict'"
        )
    provider = connection.credential_provider
    if provider is not None and not hasattr(provider, "get_credentials"):
        raise TypeError(
            "credential_provider in singleton_lock_client_options has to be a redis.CredentialProvider, or the dotted "
            "path of one"
        )


def opened(pool: ConnectionPool, timeout: float, **where: Any) -> Any:
    """A connection that is ready for a command, within *timeout* seconds, of which each reply may take one.

    Until `sure_until` its server counts as a master. *where* goes before the host and port of *pool*.
    """
    connection = pool.connection_class(**{**pool.connection_kwargs, **where})
    connection.give_up_at, connection.sure_until = clock() + timeout, 0.0
    try:
        connection.connect()
        connection._sock.settimeout(REPLY_TIMEOUT)  # noqa: SLF001 (there is no other way)
    except BaseException:
        connection.disconnect()
        raise
    return connection


def hear(connection: Any, timeout: float) -> None:
    """Wait until there is something to read.

    Raises:
        TimeoutError: There was nothing for *timeout* seconds.
    """
    if not connection.can_read(timeout=max(0.0, timeout)):
        raise exceptions.TimeoutError("no reply in time")


def shut(connection: Any) -> None:
    """Have whoever reads from *connection* hear at once that it has ended; it is for them to close it."""
    # To close it here would free its number. And not the method of TLS, which would have others read what is encrypted.
    with suppress(OSError, AttributeError, TypeError):
        socket.socket.shutdown(connection._sock, socket.SHUT_RDWR)  # noqa: SLF001 (there is no other way)


def _keepalive() -> dict[str, Any]:
    known = {getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}
    return {"socket_keepalive": True, "socket_keepalive_options": known}


def _introduce(connection: Any) -> None:
    """Say who we are and which database we want, in one round trip; redis-py takes one for each."""
    connection._parser.on_connect(connection)  # noqa: SLF001 (what redis-py's own introduction begins with)
    commands = _introduction(connection)
    connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    for _ in commands:
        hear(connection, _left(connection))
        connection.read_response()


def _introduction(connection: Any) -> list[tuple[str, ...]]:
    commands: list[tuple[str, ...]] = []
    if connection.credential_provider:
        commands.append(("AUTH", *_provided(connection.credential_provider)))
    elif connection.username or connection.password:
        own = UsernamePasswordCredentialProvider(connection.username, connection.password)
        commands.append(("AUTH", *own.get_credentials()))
    if connection.client_name:
        commands.append(("CLIENT", "SETNAME", connection.client_name))
    if connection.db:
        # As text, because a parser in C may not be interrupted over a number.
        commands.append(("SELECT", str(connection.db)))
    return commands


def _provided(provider: Any) -> tuple[str, ...]:
    try:
        credentials: tuple[str, ...] = tuple(provider.get_credentials())
    except Exception as error:
        # Whatever it asks may be there again soon. What it says may hold a secret.
        raise exceptions.ConnectionError(f"credential_provider has failed with {type(error).__name__}") from error
    return credentials


def _left(connection: Any) -> float:
    """Seconds for the next step."""
    left: float = connection.give_up_at - clock()
    return min(REPLY_TIMEOUT, max(_SHORTEST_TIMEOUT, left))
