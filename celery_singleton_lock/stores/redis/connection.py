"""Connections of redis-py, each request bounded, and none waiting for another."""

import inspect
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from os import getpid
from pkgutil import resolve_name
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from weakref import WeakSet

from redis import ConnectionPool, SSLConnection, exceptions
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, parse_url
from redis.retry import Retry

from celery_singleton_lock.errors import ConfigurationError, StoreError, StoreRefused
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, clock
from celery_singleton_lock.stores.redis.encoding import Script
from celery_singleton_lock.stores.redis.errors import (
    PROVIDED,
    advice_about,
    is_elsewhere,
    is_passing,
    not_connected,
    problem_of,
)

REPLY_TIMEOUT = 1.0
_SHORTEST_TIMEOUT = 0.01
# Otherwise a new connection tells the server its library's name and version, a round trip each.
_HAS_DRIVER_INFO = "driver_info" in inspect.signature(AbstractConnection.__init__).parameters
OURS: dict[str, Any] = {
    "socket_timeout": REPLY_TIMEOUT,
    "socket_connect_timeout": REPLY_TIMEOUT,
    "retry": Retry(NoBackoff(), 0),
    "health_check_interval": 0,
    "decode_responses": True,
    "encoding": "utf-8",
    "encoding_errors": "strict",
    "protocol": 2,
    **dict.fromkeys(["driver_info"] if _HAS_DRIVER_INFO else ["lib_name", "lib_version"]),
}
"""Arguments of all connections; the bounds rest on them, so nobody can set them."""

# A server tells that there is none below 0.
_DATABASE = re.compile(r"(-?[0-9]+)?")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25
# Seconds; less than a connection waits for a reply. The rest is for another try.
_LONGEST_WAIT = 0.5
# Seconds for which a server that was a master still counts as one.
_SURE_FOR = 1.0
# A server that has not read all that was sent resets the connection as it closes it.
_HANGS_UP = re.compile("Connection closed by server|Connection reset|Broken pipe|EOF occurred|Timeout connecting")
_WITH_TLS = " If this port is one with TLS, its URL begins with rediss, not redis."
_WITHOUT_TLS = (
    " If this port has no TLS, its URL begins with redis, not rediss. If this server asks for certificates, give "
    "ssl_certfile and ssl_keyfile in singleton_lock_client_options."
)

Command = tuple[str, ...]
Call = tuple[Sequence[str], Sequence[str]]
"""Keys and arguments of a script."""


def _joined(command: Command) -> bytes:
    words = [word.encode() for word in command]
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


# A command as it goes over the wire, in a fraction of the time that redis-py takes.
try:
    import hiredis
except ImportError:
    _packed: Callable[[Any], bytes] = _joined
else:
    _packed = hiredis.pack_command


class TooFewReplicas(exceptions.ConnectionError):
    """The master has written it, but too few replicas have acknowledged the write in time.

    Arguments:
        problem: How many.
        replies: What the scripts have answered.
    """

    def __init__(self, problem: str, replies: list[Any]) -> None:
        super().__init__(problem)
        self.replies = replies


class Connections:
    """Connections to one server, kept while they are idle.

    Whoever takes a connection has it alone, and it comes back only after all its replies were read: none that was
    broken off is used again. It is taken and kept by one step of a deque, so a signal may raise anywhere.

    Arguments:
        pool: Class and arguments of the connections.
        address: Where that is, fit for logs: never with credentials.
        reconnected: Called when there is a connection again after one was lost.
    """

    publish: str = "PUBLISH"
    _subscribe = "SUBSCRIBE"
    pool: ConnectionPool
    address: str

    def __init__(self, pool: ConnectionPool, address: str, reconnected: Callable[[], None]) -> None:
        self.pool, self.address = pool, address
        self._reconnected = reconnected
        self._begin()

    def _begin(self) -> None:
        self._idle: deque[Any] = deque()
        self._listening: WeakSet[Any] = WeakSet()
        self._has_lost_one = False
        self._sure_until = 0.0
        self._pid = getpid()

    def ask(self, key: str, commands: Sequence[Command], timeout: float) -> list[Any]:  # noqa: ARG002 (of a cluster)
        """A reply to each of *commands*, which are sent in one go, all of them about *key*. A refusal is a reply.

        Raises:
            RedisError: Not all of it was answered within *timeout* seconds. It may have been done all the same.
        """
        until = clock() + timeout
        try:
            # After a fork the sockets are the parent's.
            connection = self._idle.pop() if self._pid == getpid() else None
        except IndexError:
            connection = None
        if connection is None:
            began = clock()
            connection = self._open(until)
            # From far away, where opening takes long, the first answer may as well.
            until = max(until, 2 * clock() - began)
        try:
            connection.send_packed_command([b"".join(map(_packed, commands))], check_health=False)
            replies = []
            for _ in commands:
                left = until - clock()
                if left < REPLY_TIMEOUT and not connection.can_read(timeout=max(0.0, left)):
                    raise exceptions.TimeoutError("no reply in time")
                try:
                    replies.append(connection.read_response())
                except exceptions.ResponseError as error:
                    if is_elsewhere(error):
                        raise
                    replies.append(error)
        except BaseException as error:
            # A reply may still be under way: the next caller would read it as the answer to another question.
            connection.disconnect()
            self._lose(error)
            raise
        self._idle.append(connection)
        return replies

    def form_of(self, script: Script) -> Script:
        return script

    def run(self, script: Script, calls: Sequence[Call], timeout: float, replicas: int = 0) -> list[Any]:
        """Run a script for each call, all in one go, sending its text only if the server does not know it.

        WAIT counts the replicas that have the writes of its own connection, and of no other one. So it is sent with the
        script, which costs no round trip. And a script that is repeated has to write again: acquire.lua and renew.lua
        do.

        Raises:
            TooFewReplicas: It has run, but fewer than *replicas* have what it has written.
        """
        until = clock() + timeout
        plain = [(str(len(keys)), *keys, *arguments) for keys, arguments in calls]
        script = self.form_of(script)
        commands: list[Command] = [("EVALSHA", script.digest, *each) for each in plain]
        if replicas:
            commands.append(wait_for(replicas, timeout))
        replies = self.ask(calls[0][0][0], commands, timeout)
        unknown = [number for number, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
        if unknown:
            # After a restart, a failover or SCRIPT FLUSH. The first call loads it for the others.
            commands[unknown[0]] = ("EVAL", script.text, *plain[unknown[0]])
            replies = self.ask(calls[0][0][0], commands, until - clock())
        return replicated(replies, replicas) if replicas else replies

    def make_sure(self, key: str, timeout: float) -> None:
        """Ask the server whether it is a master, unless it was asked just now.

        A conflict writes nothing, so a former master could report one from its old data.

        Raises:
            RedisError: It is not, or does not answer.
        """
        if clock() >= self._sure_until:
            # No lock has such a field: a master does nothing, and any other server says what it is.
            self.ask(key, [("HDEL", key, "")], timeout)
            self._sure_until = clock() + _SURE_FOR

    def listen(self, channel: str, timeout: float) -> Any:
        """A connection that hears *channel*; the caller disconnects it."""
        until = clock() + timeout
        connection = self._open(until)
        try:
            connection.send_packed_command([_packed((self._subscribe, channel))], check_health=False)
            if not connection.can_read(timeout=max(0.0, until - clock())):
                raise exceptions.TimeoutError("no reply in time")
            connection.read_response()
            self._listening.add(connection)
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def to_masters(self, timeout: float) -> Sequence["Connections"]:  # noqa: ARG002 (of a cluster)
        return [self]

    def warn_if_ttl_too_short(self, ttls: Iterable[float]) -> None:
        """Log once if leases of so many seconds do not outlast a failover of the store."""

    def close(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().disconnect()

    def leave(self) -> None:
        """Another server is the right one from now on: close what is idle, and have the waiters listen there."""
        self.close()
        for connection in list(self._listening):
            # The waiter closes it: a close here would free the number of the socket under its feet. With the method of
            # TLS, it would get encrypted bytes.
            with suppress(OSError, AttributeError, TypeError):
                socket.socket.shutdown(connection._sock, socket.SHUT_RDWR)  # noqa: SLF001 (there is no other way)

    def _open(self, until: float) -> Any:
        if self._pid != getpid():
            self._begin()
        connection = self._connected(max(_SHORTEST_TIMEOUT, min(REPLY_TIMEOUT, until - clock())))
        if self._has_lost_one:
            self._has_lost_one = False
            self._reconnected()
        return connection

    def _connected(self, timeout: float) -> Any:
        arguments = self.pool.connection_kwargs
        connection = self.pool.connection_class(**{**arguments, "socket_connect_timeout": timeout})
        try:
            connection.connect()
        except exceptions.RedisError as error:
            connection.disconnect()
            self._lose(error)
            raise
        except BaseException as error:
            connection.disconnect()
            is_provided = "credential_provider" in arguments and isinstance(error, Exception)
            if is_provided or isinstance(error, TypeError | ValueError):
                raise not_connected(error, is_provided=is_provided) from error
            raise
        return connection

    def _lose(self, error: BaseException) -> None:
        if isinstance(error, exceptions.RedisError):
            # What has ended this connection has most likely ended the others, too.
            self._has_lost_one = True
            if is_elsewhere(error):
                self.leave()
            else:
                self.close()


def wait_for(replicas: int, timeout: float) -> Command:
    """The command to send behind a script, if there are so many seconds in all."""
    # Never 0, which means for ever.
    return "WAIT", str(replicas), str(max(1, round(1000 * min(timeout / 2, _LONGEST_WAIT))))


def replicated(replies: list[Any], replicas: int) -> list[Any]:
    """The replies without that of WAIT, which is the last.

    Raises:
        TooFewReplicas: Fewer than *replicas* have what was written.
    """
    *others, acknowledged = replies
    if isinstance(acknowledged, exceptions.RedisError):
        raise acknowledged
    if acknowledged < replicas:
        problem = f"acknowledged by {acknowledged} of its replicas, not by singleton_lock_replicas={replicas}"
        raise TooFewReplicas(problem, others)
    return others


class RetryLoop:
    """Asks a server again and again, until it answers or the time for it is over.

    Arguments:
        address: The server's address, for errors.
        arguments: Arguments of the connections to it.

    Attributes:
        has_answered: It is what its URL says, whatever comes.
        is_away: One of many callers has asked in vain for as long as any may, and nobody has had an answer since.
    """

    def __init__(self, address: str, arguments: Mapping[str, Any]) -> None:
        is_provided = arguments.get("credential_provider") is not None
        self._address = address
        self._user = PROVIDED if is_provided else arguments.get("username") or "default"
        self._signs_in = is_provided or bool(arguments.get("password"))
        self.has_answered = False
        self.is_away = False

    def persist(self, ask: Callable[[float], Any], bound: float, *, is_one_of_many: bool = False) -> tuple[Any, float]:
        """Ask until there is an answer; no try begins later than after *bound* seconds.

        Arguments:
            ask: Asks once, within so many seconds.
            bound: The seconds in all.
            is_one_of_many: Many callers ask this, each in a slot of a pool. So once one of them has asked in vain for
                the longest time that any may take, they ask once, until the server answers one of them.

        Returns:
            The answer, and the time at which the request it belongs to was sent.

        Raises:
            StoreError: No answer.
        """
        give_up_at, pause, problem = clock() + bound, _FIRST_PAUSE, None
        while True:
            sent_at = clock()
            try:
                answer = ask(give_up_at - sent_at)
            except exceptions.RedisError as error:
                # If less time was left than a reply may take, silence says nothing.
                is_cut_short = give_up_at - sent_at < REPLY_TIMEOUT and isinstance(error, exceptions.TimeoutError)
                problem = problem if problem is not None and is_cut_short else error
                passes = self.may_pass(error)
                if not passes or clock() + pause >= give_up_at or (is_one_of_many and self.is_away):
                    self.is_away |= is_one_of_many and passes and bound > ACQUIRE_BOUND - 2 * REPLY_TIMEOUT
                    raise self.unanswered(problem) from error
            else:
                self.is_away, self.has_answered = False, True
                return answer, sent_at
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def may_pass(self, error: exceptions.RedisError) -> bool:
        """The next try may work. A client whose token has expired signs in again, on a new connection."""
        return is_passing(error) or (self._signs_in and "Authentication required" in str(error))

    def unanswered(self, error: exceptions.RedisError) -> StoreError:
        problem, advice = problem_of(error), advice_about(error, self._user)
        if advice is not None:
            return StoreRefused(self._address, problem, advice)
        if not self.has_answered and _HANGS_UP.search(problem):
            problem += _WITHOUT_TLS if self._address.startswith("rediss") else _WITH_TLS
        return StoreError(self._address, problem)


def pool_of(url: str, options: Mapping[str, Any], address: str) -> ConnectionPool:
    """A pool for *url*; only the class and the arguments of its connections are used.

    Raises:
        ConfigurationError: redis-py does not know the URL or an option; the error names *address*.
    """
    try:
        check_parts(url)
        pool = ConnectionPool.from_url(url, **{**options, **OURS})
        settle(pool)
    except (TypeError, exceptions.RedisError) as error:
        raise ConfigurationError(f"singleton_lock_url: {address} cannot be used: {error}") from error
    except ValueError:
        raise unreadable() from None
    return pool


def settle(pool: ConnectionPool) -> None:
    """Make the arguments of *pool* ours, and refuse those with which redis-py would fail as it connects.

    Raises:
        TypeError: There is no such option, or it has a value that can never work; the value is not quoted.
    """
    arguments = pool.connection_kwargs
    # In from_url the URL goes before the arguments.
    arguments.update(OURS)
    _settle_provider(arguments)
    database = arguments.get("db") or 0
    if isinstance(database, bool) or not isinstance(database, int | str) or not _DATABASE.fullmatch(str(database)):
        raise TypeError("db in singleton_lock_client_options, or redis_db, has to be the number of a database")
    # As text, because no signal may interrupt a packer in C at a number.
    arguments["db"] = str(database) if int(database) else 0
    if issubclass(pool.connection_class, SSLConnection):
        # Without one, OpenSSL would ask for it on the terminal, and wait.
        arguments["ssl_password"] = arguments.get("ssl_password") or ""
    pool.connection_class(**arguments)


def _settle_provider(arguments: dict[str, Any]) -> None:
    """Make a credential provider of its dotted path, as Celery does; it stands for user and password."""
    provider = arguments.get("credential_provider")
    if isinstance(provider, str):
        try:
            provider = arguments["credential_provider"] = resolve_name(provider)()
        except Exception as error:
            # Do not quote the text: there may be a password in it.
            raise TypeError(
                "credential_provider cannot be made of the text that was given: give a redis.CredentialProvider, or "
                f"the dotted path of a class that takes no arguments ({type(error).__name__})"
            ) from error
    if provider is None:
        arguments.pop("credential_provider", None)
        return
    if not hasattr(provider, "get_credentials"):
        raise TypeError(
            "credential_provider in singleton_lock_client_options has to be a redis.CredentialProvider, or the dotted "
            "path of one"
        )
    for stood_for in ("username", "password"):
        arguments.pop(stood_for, None)


def hosts_of(url: str, scheme: str, port: int, one: str, example: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Host and port of each part of *url*, between semicolons, and what else they say; the first to say it counts.

    Arguments:
        url: In one part or several.
        scheme: How each begins, or the first.
        port: Of a part that names none.
        one: What a part names.
        example: A right URL.

    Raises:
        ConfigurationError: It cannot be read; no error shows a password.
    """
    cannot = ConfigurationError(
        f"singleton_lock_url cannot be read: give {example}, with semicolons between the hosts, the database as a "
        "number, and user:password@, if any, before the first host, with any other character in them percent-encoded"
    )
    hosts, said = list[tuple[str, int]](), dict[str, Any]()
    for part in filter(None, map(str.strip, url.split(";"))):
        begins, _, rest = part.rpartition("://")
        if begins not in ("", scheme):
            raise ConfigurationError(
                f"singleton_lock_url: a part of it begins with {begins}://, where each names {one}: give {example}"
            )
        try:
            check_parts(f"redis://{rest}")
            arguments = parse_url(f"redis://{rest}")
        except ValueError:
            raise cannot from None
        host = arguments.pop("host", None)
        if not host:
            raise ConfigurationError(f"singleton_lock_url: a part of it names no host: give {example}")
        if "," in host:
            raise cannot
        hosts.append((host, arguments.pop("port", port)))
        said = {**arguments, **said}
    if not hosts:
        raise ConfigurationError(f"singleton_lock_url: a part of it names no host: give {example}")
    return list(dict.fromkeys(hosts)), said


def where(node: tuple[str, int]) -> str:
    host, port = node
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_parts(url: str) -> None:
    """Refuse what redis-py passes over: it takes database 12 for /1/2, and 0 for what is no number.

    Raises:
        ValueError: *url* cannot be read.
    """
    parts = urlsplit(url)
    is_in_path = parts.scheme != "unix" and "db" not in parse_qs(parts.query)
    if parts.fragment or (is_in_path and not _DATABASE.fullmatch(unquote(parts.path).strip("/"))):
        raise ValueError("it has a fragment, or a database that is no number")


def unreadable() -> ConfigurationError:
    """The advice about a URL; not Python's message, which would show a password that was not escaped."""
    return ConfigurationError(
        "singleton_lock_url cannot be read: give redis://user:password@host:port/database, "
        "the database as a number, with any other character in user and password percent-encoded"
    )
