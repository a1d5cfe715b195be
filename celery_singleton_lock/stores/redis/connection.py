"""Connections of redis-py, with a deadline for each request."""

import inspect
import re
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import getpid
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis import ConnectionPool, CredentialProvider, SSLConnection, exceptions
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, parse_url
from redis.retry import Retry

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.log import log
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.redis import Input, packed
from celery_singleton_lock.stores.redis.answers import NotUsable, Part, is_elsewhere, not_connected
from celery_singleton_lock.stores.threads import patched_by

if TYPE_CHECKING:
    from celery_singleton_lock.stores.redis.encoding import Script

REPLY_TIMEOUT = 1.0
_SHORTEST_TIMEOUT = 0.01
_HAS_DRIVER_INFO = "driver_info" in inspect.signature(AbstractConnection.__init__).parameters
OURS: dict[str, Any] = {
    "socket_timeout": REPLY_TIMEOUT,
    "socket_connect_timeout": REPLY_TIMEOUT,
    "retry": Retry(NoBackoff(), 0),
    "health_check_interval": 0,
    "decode_responses": True,
    "encoding": "utf-8",
    # Another program's key may be no UTF-8, and would fail the whole reply.
    "encoding_errors": "surrogateescape",
    "protocol": 2,
    # None: otherwise redis-py would send its name and version, which costs two round trips on each new connection.
    **dict.fromkeys(["driver_info"] if _HAS_DRIVER_INFO else ["lib_name", "lib_version"]),
}
"""Users cannot set these arguments. Otherwise requests could take too long, or replies could not be read."""

_DATABASE = re.compile(r"(-?[0-9]+)?")
_LONGEST_WAIT = 0.5  # seconds for WAIT; must be less than `REPLY_TIMEOUT`
_LEAST_FOR_REPLY = 0.25
_USUAL_REPLY = 448  # bytes; Python allocates an object more slowly if it has more than 512 bytes
_LARGE_REPLY = 65536  # bytes

Address = tuple[str, int]

Reader: Any = None
with suppress(ImportError):
    from hiredis import Reader

_NOT_YET = object()


class Link:
    """A connection of redis-py. Most requests use its socket directly, at half the cost."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._socket: Any = getattr(connection, "_sock", None)
        self._reader: Any = None
        if Reader is not None and isinstance(self._socket, socket.socket):
            errors = {"protocolError": exceptions.InvalidResponse, "replyError": connection._parser.parse_error}  # noqa: SLF001
            text = {"encoding": OURS["encoding"], "errors": OURS["encoding_errors"]}
            self._reader = Reader(**errors, **text, notEnoughData=_NOT_YET)

    def exchange(self, commands: Sequence[bytes], until: float) -> list[Any]:
        """A refusal is raised once all replies were read."""
        if len(commands) == 1 and self._reader is not None and until - clock() >= REPLY_TIMEOUT:
            reply, at_once = _NOT_YET, _USUAL_REPLY
            try:
                self._socket.sendall(commands[0])
                while reply is _NOT_YET:
                    received = self._socket.recv(at_once)
                    at_once = _LARGE_REPLY
                    if not received:
                        raise exceptions.ConnectionError("Connection closed by server.")
                    self._reader.feed(received)
                    reply = self._reader.gets()
            except OSError as error:
                kind = exceptions.TimeoutError if isinstance(error, TimeoutError) else exceptions.ConnectionError
                raise kind(str(error)) from error
            if isinstance(reply, exceptions.RedisError):
                raise reply
            return [reply]
        self.connection.send_packed_command([b"".join(commands)], check_health=False)
        replies = []
        refusal = None
        for _ in commands:
            left = until - clock()
            # No time is left if this process was paused. Look for the reply all the same, because it may have come.
            if left < REPLY_TIMEOUT and not self.connection.can_read(timeout=left if left > 0 else _LEAST_FOR_REPLY):
                raise exceptions.TimeoutError("no reply in time")
            try:
                replies.append(self.connection.read_response())
            except exceptions.ResponseError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal
        return replies


class Connections:
    """Connections to one server, kept while they are idle.

    A signal handler may raise anywhere, so a connection is taken or kept by a single step of a deque.
    """

    is_sharded = False  # in a cluster
    publish: str = "PUBLISH"
    subscribe: str = "SUBSCRIBE"
    unsubscribe: str = "UNSUBSCRIBE"
    looks_every: float = float("inf")  # seconds between polls, for a store without sockets
    _pid = 0

    def __init__(self, pool: ConnectionPool, address: str, store: str = "") -> None:
        self.pool: ConnectionPool = pool
        self.address: str = address  # without credentials, for logs
        self.part: Part = Part(store or address, pool.connection_kwargs)
        self._begin()

    def _begin(self) -> None:
        # If sockets are patched but threads are not, a socket works only in its own thread, so keep none.
        is_of_one_thread = patched_by("socket") is not None and patched_by() is None
        self._idle = deque[Link](maxlen=0 if is_of_one_thread else None)
        self._pid = getpid()

    def call(self, key: str, commands: Sequence[bytes], until: float) -> list[Any]:  # noqa: ARG002 (`Cluster` uses it)
        """*until* is a deadline on `clock()`."""
        if self._pid != getpid():
            # After a fork, the sockets are the parent's.
            self._begin()
        idle = self._idle
        try:
            link = idle.pop()
        except IndexError:
            link = Link(self.open(until))
        try:
            replies = link.exchange(commands, until)
        except BaseException as error:
            if isinstance(error, exceptions.ResponseError) and not is_elsewhere(error):
                # All replies were read, so the connection can be kept.
                idle.append(link)
                raise
            # Otherwise a late reply would be taken for the answer to the next request.
            link.connection.disconnect()
            if isinstance(error, exceptions.RedisError):
                # The idle connections are most likely broken, too.
                self.close()
            raise
        # After `close`, `idle` is the old deque, so the connection is not used again.
        idle.append(link)
        return replies

    def run(self, script: "Script", inputs: Sequence[Input], until: float, replicas: int = 0) -> list[Any]:
        key = inputs[0][0]
        commands = [command for _, command in inputs]
        if self.is_sharded:
            commands = [each.replace(script.by_digest, script.sharded.by_digest, 1) for each in commands]
            script = script.sharded
        if replicas:
            # WAIT covers only the writes of its own connection. A repeated request may come by another connection, so
            # acquire.lua and renew.lua write again even if nothing changes. With a timeout of 0, WAIT would never end.
            wait = max(1, round(1000 * min((until - clock()) / 2, _LONGEST_WAIT)))
            commands.append(packed("WAIT", str(replicas), str(wait)))
        try:
            replies = self.call(key, commands, until)
        except exceptions.NoScriptError:
            # One EVAL loads the script for all inputs.
            commands[0] = commands[0].replace(script.by_digest, script.by_text, 1)
            replies = self.call(key, commands, until)
        if not replicas:
            return replies
        *others, acknowledged = replies
        if acknowledged < replicas:
            raise exceptions.ConnectionError(
                f"what this server wrote is acknowledged by {acknowledged} of its replicas, but "
                f"singleton_lock_replicas={replicas}"
            )
        return others

    def listen(self, channel: str, until: float) -> Any:
        """The caller must disconnect the connection."""
        connection = self.open(until)
        try:
            Link(connection).exchange([packed(self.subscribe, channel)], until)
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def open(self, until: float) -> Any:
        arguments = self.pool.connection_kwargs
        timeout = max(_SHORTEST_TIMEOUT, min(REPLY_TIMEOUT, until - clock()))
        connection = self.pool.connection_class(**{**arguments, "socket_connect_timeout": timeout})
        try:
            connection.connect()
        except BaseException as error:
            connection.disconnect()
            if isinstance(error, exceptions.RedisError):
                self.close()
            elif isinstance(error, TypeError | ValueError):
                raise not_connected(error) from error
            raise
        return connection

    def part_of(self, key: str) -> Part:  # noqa: ARG002 (`Cluster` uses it)
        return self.part

    def at_owner_of(self, key: str, until: float) -> "Connections":  # noqa: ARG002 (`Cluster` uses it)
        return self

    def to_masters(self, bound: float) -> Sequence["Connections"]:  # noqa: ARG002 (`Cluster` uses it)
        return [self]

    def tell_of_move(self, before: Address, after: Address | None) -> None:
        text = "this process uses the new master from now on"
        servers = {"master": where(after) if after else None, "before": where(before)}
        log.warning("lock.moved", text, store=self.address, **servers)

    def close_spare(self) -> None:
        """Close one idle connection of several, which a burst of requests may have left."""
        if len(self._idle) > 1:
            with suppress(IndexError):
                self._idle.popleft().connection.disconnect()

    def close(self) -> None:
        idle = self._idle
        self._idle = deque(maxlen=idle.maxlen)
        with suppress(IndexError):
            while True:
                idle.pop().connection.disconnect()


def settled(make: Callable[..., Any], options: Mapping[str, Any], address: str) -> Any:
    try:
        pool = make(**{**options, **OURS})
        arguments = pool.connection_kwargs
        # `from_url` prefers the arguments in the URL.
        arguments.update(OURS)
        settle(arguments, has_tls=issubclass(pool.connection_class, SSLConnection))
        database = arguments.get("db") or 0
        if not _DATABASE.fullmatch(str(database)):
            raise TypeError("db in singleton_lock_client_options, or redis_db, is not the number of a database")
        # Text, because a number could crash Python: see `encoding.milliseconds`.
        arguments["db"] = str(database) if int(database) else 0
        pool.connection_class(**arguments)
    except (TypeError, exceptions.RedisError) as error:
        raise ConfigurationError(f"singleton_lock_url: {address} cannot be used: {error}") from error
    except ValueError:
        raise unreadable() from None
    return pool


class _Provider(CredentialProvider):
    """Turns errors of the user's provider into `NotUsable`, without their text, which may hold a secret."""

    def __init__(self, provider: CredentialProvider) -> None:
        self._provider = provider

    def get_credentials(self) -> Any:
        try:
            return tuple(self._provider.get_credentials())
        except Exception as error:
            # Give no advice, so that the request is retried: the source of the credentials may be down for a moment.
            raise NotUsable(f"credential_provider has failed with {type(error).__name__}") from error


def settle(arguments: dict[str, Any], *, has_tls: bool) -> None:
    if has_tls:
        # With None, OpenSSL would ask for the password on the terminal, and wait.
        arguments["ssl_password"] = arguments.get("ssl_password") or ""
        # If the certificate is checked, check its host name, too, as redis-py does since 6.0.
        is_checked = arguments.get("ssl_cert_reqs", "required") not in (None, "none", ssl.CERT_NONE)
        arguments.setdefault("ssl_check_hostname", is_checked)
    provider = arguments.pop("credential_provider", None)
    if provider is None:
        return
    try:
        provider = resolve_name(provider)() if isinstance(provider, str) else provider
        # Fail now rather than at the first connection.
        _ = provider.get_credentials
    except Exception as error:
        # Do not quote the error, which may have a password.
        raise TypeError(
            f"credential_provider cannot be used ({type(error).__name__}): give a redis.CredentialProvider, or the "
            "dotted path of a provider class that takes no arguments"
        ) from error
    for stood_for in ("username", "password"):
        arguments.pop(stood_for, None)
    arguments["credential_provider"] = _Provider(provider)


def hosts_of(url: str, scheme: str, port: int, example: str) -> tuple[list[Address], dict[str, Any]]:
    """If an argument is repeated, the first counts."""
    hosts = list[Address]()
    said = dict[str, Any]()
    try:
        for part in filter(None, map(str.strip, url.split(";"))):
            begins, _, rest = part.rpartition("://")
            check_parts(f"redis://{rest}")
            arguments = parse_url(f"redis://{rest}")
            host = arguments.pop("host", "")
            if begins.lower() not in ("", scheme) or not host or "," in host:
                raise ValueError
            hosts.append((host, arguments.pop("port", port)))
            said = {**arguments, **said}
    except ValueError:
        form = f"{example}, all hosts of one scheme, separated by semicolons, with any user:password@ before the first"
        raise unreadable(form) from None
    return list(dict.fromkeys(hosts)), said


def where(server: Address) -> str:
    host, port = server
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_parts(url: str) -> None:
    """Raise a ValueError for a URL that redis-py would misread: /1/2 as database 12, /x as database 0."""
    parts = urlsplit(url)
    is_in_path = parts.scheme != "unix" and "db" not in parse_qs(parts.query)
    if parts.fragment or (is_in_path and not _DATABASE.fullmatch(unquote(parts.path).strip("/"))):
        raise ValueError("it has a fragment, or a database that is no number")


def unreadable(form: str = "redis://user:password@host:port/database") -> ConfigurationError:
    """Python's own message could show a password that was not escaped."""
    return ConfigurationError(
        f"singleton_lock_url cannot be read: give {form}. The database is a number. Special characters in user and "
        "password have to be percent-encoded"
    )
