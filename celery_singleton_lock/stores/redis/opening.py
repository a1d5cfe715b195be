"""Opening a connection, from its name to its database, within one bound."""

import codecs
import inspect
import re
import socket
import ssl
import struct
from collections.abc import Mapping
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UsernamePasswordCredentialProvider,
    exceptions,
)
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.retry import Retry

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.redis.names import addresses_of
from celery_singleton_lock.stores.redis.refusals import Unfit

REPLY_TIMEOUT = 1.0
_SHORTEST_TIMEOUT = 0.01
# A server tells that there is none below 0.
_DATABASE = re.compile(r"(-?[0-9]+)?")
# Seconds idle, seconds between probes, probes: sooner than most routers forget a connection.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

# Linger for no second.
_AT_ONCE = struct.pack("ii", 1, 0)

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
    """A TCP connection that opens by `give_up_at`, with old addresses if there are no new ones in time."""

    give_up_at = float("inf")
    bare: Any = None

    def _connect(self) -> Any:
        name = self.host
        addresses = addresses_of(name, self.port, _left(self))
        try:
            sock = self._connect_to_one(addresses)
        finally:
            # TLS checks the name.
            self.host = name
        # The timeout is for the handshake of TLS.
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
            except (TypeError, ValueError) as error:
                raise Unfit(error) from error
        raise OSError("the name has no address")


class Tls(SSLConnection, Tcp):
    """The same with TLS."""

    def _connect(self) -> Any:
        # Without one, OpenSSL would ask for it on the terminal, and wait.
        self.certificate_password = self.certificate_password or ""
        try:
            return super()._connect()
        except BaseException as error:
            if self.bare is None:
                raise
            # redis-py leaves it open.
            self.bare.close()
            if isinstance(error, FileNotFoundError | IsADirectoryError):
                raise ssl.SSLError(f"CERTIFICATE file not found: {error}") from error
            if isinstance(error, TimeoutError):
                raise exceptions.TimeoutError(
                    "no answer to the handshake of TLS; if this port has no TLS, its URL begins with redis, not rediss"
                ) from error
            # What is wrong with a certificate is a ValueError as well.
            if isinstance(error, TypeError | ValueError) and not isinstance(error, OSError):
                raise Unfit(error) from error
            raise


_OPENING_IN_TIME = {Connection: Tcp, SSLConnection: Tls}


def pool_of(url: str, options: Mapping[str, Any], address: str) -> ConnectionPool:
    """A pool for *url*; only the class and the arguments of its connections are used.

    Raises:
        ConfigurationError: redis-py does not know the URL or an option; the error names *address*.
    """
    try:
        return _pool_of(url, options)
    except (TypeError, exceptions.RedisError) as error:
        raise ConfigurationError(f"singleton_lock_url: {address} cannot be used: {error}") from error
    except ValueError:
        raise unreadable() from None


def _pool_of(url: str, options: Mapping[str, Any]) -> ConnectionPool:
    _check_parts(url)
    keepalive = {} if url.startswith("unix:") else _keepalive()
    pool = ConnectionPool.from_url(url, **{**keepalive, "redis_connect_func": _introduce, **options, **_OURS})
    # Again, because in from_url the URL goes before the arguments.
    pool.connection_kwargs.update(_OURS)
    _settle_provider(pool.connection_kwargs)
    pool.connection_class = _OPENING_IN_TIME.get(pool.connection_class, pool.connection_class)
    _check_values(pool.connection_class(**pool.connection_kwargs))
    return pool


def _check_parts(url: str) -> None:
    """Refuse what redis-py passes over: it takes database 12 for /1/2, and 0 for what is no number.

    Raises:
        ValueError: *url* cannot be read.
    """
    parts = urlsplit(url)
    is_in_path = parts.scheme != "unix" and "db" not in parse_qs(parts.query)
    if parts.fragment or (is_in_path and not _DATABASE.fullmatch(unquote(parts.path).strip("/"))):
        raise ValueError("it has a fragment, or a database that is no number")


def _settle_provider(arguments: dict[str, Any]) -> None:
    """Make a credential provider of its dotted path, as Celery does; it stands for user and password.

    Raises:
        TypeError: There is no provider of that name.
    """
    provider = arguments.get("credential_provider")
    if isinstance(provider, str):
        try:
            arguments["credential_provider"] = resolve_name(provider)()
        except Exception as error:
            # Do not quote the text: there may be a password in it.
            raise TypeError(
                "credential_provider cannot be made of the text that was given: give a redis.CredentialProvider, or "
                f"the dotted path of a class that takes no arguments ({type(error).__name__})"
            ) from error
    if provider is not None:
        for stood_for in ("username", "password"):
            arguments.pop(stood_for, None)


def unreadable() -> ConfigurationError:
    """The advice about a URL; not Python's message, which would show a password that was not escaped."""
    return ConfigurationError(
        "singleton_lock_url cannot be read: give redis://user:password@host:port/database, "
        "the database as a number, with any other character in user and password percent-encoded"
    )


def _check_values(connection: Any) -> None:
    """Refuse values with which redis-py would fail as it connects, without quoting them.

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
    database = connection.db or 0
    if isinstance(database, bool) or not isinstance(database, int | str) or not _DATABASE.fullmatch(str(database)):
        raise TypeError("db in singleton_lock_client_options, or redis_db, has to be the number of a database")
    provider = connection.credential_provider
    if provider is not None and not hasattr(provider, "get_credentials"):
        raise TypeError(
            "credential_provider in singleton_lock_client_options has to be a redis.CredentialProvider, or the dotted "
            "path of one"
        )


def opened(pool: ConnectionPool, timeout: float, **where: Any) -> Any:
    """A connection that is ready for a command, within *timeout* seconds; each reply may take one second.

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


def abort(connection: Any) -> None:
    """Close *connection*; what it has sent, and the server has not got yet, never comes."""
    # Otherwise the kernel goes on to repeat lost packets, for minutes, and a question may come after its asker is gone.
    with suppress(OSError, AttributeError, TypeError):
        connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)  # noqa: SLF001 (as above)
        connection._sock.close()  # noqa: SLF001 (redis-py shuts it down before, which sends what is left)
    connection.disconnect()


def shut(connection: Any) -> None:
    """End *connection*, so that its reader hears of it at once; the reader has to close it."""
    # A close here would free the number of the socket. With the method of TLS, readers would get encrypted bytes.
    with suppress(OSError, AttributeError, TypeError):
        socket.socket.shutdown(connection._sock, socket.SHUT_RDWR)  # noqa: SLF001 (there is no other way)


def _keepalive() -> dict[str, Any]:
    known = {getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}
    return {"socket_keepalive": True, "socket_keepalive_options": known}


def _introduce(connection: Any) -> None:
    """Sign in and select the database in one round trip; redis-py takes one for each."""
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
        # As text, because no signal may interrupt a parser in C at a number.
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
