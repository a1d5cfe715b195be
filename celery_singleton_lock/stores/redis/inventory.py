"""Seeing and breaking the locks of others, in Redis or Valkey."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from redis import exceptions

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.base import RELEASE_BOUND, clock, lock_name_of
from celery_singleton_lock.stores.records import Claim, Holder, LeftMark, LockState
from celery_singleton_lock.stores.redis.connection import Command, Connections, RetryLoop
from celery_singleton_lock.stores.redis.encoding import (
    ACQUIRE,
    BREAK,
    RELEASE,
    SURVEY,
    arguments_of,
    holders_in,
    microseconds,
    milliseconds,
)
from celery_singleton_lock.stores.redis.errors import accepted, advice_about

# A fraction of a millisecond of the server's time, so nobody else has to wait long for it.
_KEYS_PER_STEP = "250"
# Seconds after which the rest of a broken-off trial expires.
_TRIAL_TTL = 1.0
# So many slots are looked at that one server of a cluster does not have all of them by luck.
_OTHER_SLOTS = 20
# Seconds for which counts are kept if nobody adds to them.
_COUNTS_ARE_KEPT = 30 * 24 * 3600.0
# Another program may have a key of such a name.
_OUR_KEY = re.compile(r"[^{}]*\{[^{}]*\}")
_NUMBER = re.compile(r"-?[0-9]+")
# Errors of a script that say something about the key, and not about us.
_UNREADABLE = re.compile(r"WRONGTYPE|user_script")
_FOREIGN = "another program's key, or a damaged one: "
_OF_PATTERNS = re.compile(r"([*?\[\]^\\-])")


class RedisInventory:
    """What operators, checks and metrics ask a store in Redis.

    Each question raises `StoreError` if it is not answered in time.
    """

    _loop: RetryLoop
    _servers: Connections
    _replicas: int
    _ask: Callable[..., Any]

    def keys(self, start: str) -> Iterator[str]:
        """Each key like that of a lock that begins with *start*, once; found in small steps, so it may miss a new one.

        Of several servers, all are asked before the error of one is raised.
        """
        pattern, seen, problem = _OF_PATTERNS.sub(r"\\\1", start) + "*}", set[str](), None
        steps = "MATCH", pattern, "COUNT", _KEYS_PER_STEP
        for server in self._persist(self._servers.to_masters):
            cursor, is_first = "0", True
            try:
                while is_first or cursor != "0":
                    cursor, found = self._call("SCAN", cursor, *steps, servers=server)
                    is_first = False
                    fresh = {key for key in found if _OUR_KEY.fullmatch(key)} - seen
                    seen |= fresh
                    yield from fresh
            except StoreError as error:
                # The address of a cluster has those of several servers.
                where = "" if server.address in error.problem else f" ({server.address})"
                problem = problem or type(error)(f"{error.store}{where}", *error.args[1:])
        if problem is not None:
            raise problem

    def latency(self, bound: float) -> tuple[float, float]:
        """Seconds until an answer, and seconds by which the store's clock is ahead of this machine's.

        Of several servers, the worst answers count.
        """
        found = []
        for server in self._persist(self._servers.to_masters, bound):
            # The first one opens a connection.
            self._call("TIME", bound=bound, servers=server)
            sent_at = clock()
            answer = self._call("TIME", bound=bound, servers=server)
            round_trip, here = clock() - sent_at, time.time()
            found.append((round_trip, microseconds(answer) / 1_000_000 - (here - round_trip / 2)))
        return max(round_trip for round_trip, _ in found), max((ahead for _, ahead in found), key=abs)

    def about_servers(self, bound: float) -> dict[str, dict[str, str]]:
        """Each server's own report about itself, by its address."""
        said = {}
        for server in self._persist(self._servers.to_masters, bound):
            lines = self._call("INFO", bound=bound, servers=server).splitlines()
            said[server.address] = dict(line.split(":", 1) for line in lines if ":" in line)
        return said

    def survey(self, keys: Sequence[str], *, tolerant: bool = False) -> list[LockState]:
        """Look at each of the keys, and change nothing.

        If *tolerant*, an error of the server about one key is its `problem`, and hides no other.
        """
        states = dict[str, LockState]()
        for key in keys if tolerant else ():
            if not key.isascii() and (name := _printable(key)) != key:
                states[key] = LockState(name, problem="its name is not UTF-8")
        calls = [([key], ()) for key in keys if key not in states]
        if calls:
            replies = self._persist(lambda timeout: _surveys_in(self._servers.run(SURVEY, calls, timeout), tolerant))
            for ([key], _), reply in zip(calls, replies, strict=True):
                states[key] = _state_in(key, reply)
        return [states[key] for key in keys]

    def holders(self, key: str) -> list[Holder]:
        """All holders of *key*, cool-downs too; the lease that ends first comes first."""
        return list(self.survey([key])[0].places)

    def break_lock(
        self, key: str, tokens: Iterable[str], by: str, *, marks: bool = False, force: bool = False
    ) -> tuple[list[Holder], list[str]]:
        """Ask the holders with these tokens to end; they hear of it, and of who asked, at their next renewal.

        With *marks*, cool-downs and marks end; *force* frees the places now, though bodies may go on in them. Returns
        those who were asked, or whose places were freed, and the marks that were in force and are gone.
        """
        words = f"{'marks' if marks else ''} {'force' if force else ''}"
        now, dropped, rows = self._ask(BREAK, key, (by, words, *tokens))
        # It is done even if nobody can be woken. The token is one that nobody has.
        with suppress(StoreError):
            self._ask(RELEASE, key, ("~", "0", "0 0"))
        return holders_in(key, now, rows), dropped

    def count(self, key: str, sums: Mapping[str, int], timeout: float) -> None:
        """Add to the fields of a hash of counts; twice if an answer is lost."""
        first, *others = [("HINCRBY", key, field, str(amount)) for field, amount in sums.items()]
        # Second, so that a connection that breaks leaves no hash without an expiry.
        commands = [first, ("PEXPIRE", key, milliseconds(_COUNTS_ARE_KEPT)), *others]
        self._persist(lambda left: accepted(self._servers.ask(key, commands, left)), timeout)

    def counted(self, key: str) -> dict[str, int]:
        """All numbers, by field."""
        fields = self._call("HGETALL", key)
        pairs = zip(fields[::2], fields[1::2], strict=True)
        # Another program may have written others.
        return {field: int(value) for field, value in pairs if _NUMBER.fullmatch(value)}

    def broken_by(self, claim: Claim) -> str | None:
        """The person that has asked this holder to end, if there is one."""
        by: str | None = self._call("HGET", claim.key, f"broken:{claim.token}")
        return by

    def now(self) -> int:
        """The time on the store's clock, in microseconds since the epoch."""
        return microseconds(self._call("TIME"))

    def self_test(self, key: str, bound: float, ttls: Iterable[float] = ()) -> None:
        """Acquire *key*, which nobody else may use, wake a waiter for it by a release, and leave nothing.

        Log if leases that last *ttls* would not outlast what the store may need to come back.
        """
        self._loop.persist(partial(self._self_test, key), bound)
        self._servers.warn_if_ttl_too_short(ttls)

    def _self_test(self, key: str, timeout: float) -> None:
        give_up_at = clock() + timeout
        holder, waiter = Claim(key, "holder", _TRIAL_TTL), Claim(key, "waiter", _TRIAL_TTL)
        asks = [([key], arguments_of(holder)), ([key], arguments_of(waiter, waits=True))]
        releases = [([key], (each.token, "0", "0 0")) for each in (holder, waiter)]
        subscription = self._servers.listen(f"{key}:{waiter.token}", timeout)
        try:
            accepted(self._servers.ask(key, self._commands_on(key), give_up_at - clock()))
            accepted(self._servers.run(ACQUIRE, asks, give_up_at - clock(), self._replicas))
            accepted(self._servers.run(RELEASE, releases, give_up_at - clock()))
            if not subscription.can_read(timeout=max(0.0, give_up_at - clock())):
                raise exceptions.TimeoutError("the waiter was not woken in time")
        finally:
            subscription.disconnect()

    def _commands_on(self, key: str) -> list[Command]:
        """Each command that scripts and clients need, by itself: an error of a script does not name a missing right."""
        commands = ["DEL", "HSET a 0", "PEXPIRE 1000", "HSETNX b 0", "HINCRBY a 1", "HGET a", "HMGET a", "HEXISTS a"]
        commands += ["HGETALL", "HRANDFIELD 1", "HLEN", "EXISTS", "HDEL a b"]
        named = [(name, key, *arguments) for name, *arguments in map(str.split, commands)]
        others = [("TIME",), ("EVAL", "return 1", "0"), (self._servers.publish, f"{key}:nobody", "")]
        return [*others, *named, *self._other_commands(key)]

    def _other_commands(self, key: str) -> list[Command]:
        # A server that answers for all of these keys is not one of several in a cluster.
        return [("HLEN", with_tag(key, number)) for number in range(_OTHER_SLOTS)]

    def _call(self, *command: str, bound: float = RELEASE_BOUND, servers: Connections | None = None) -> Any:
        """The reply to a command about the key that follows its name."""
        key = command[1] if len(command) > 1 else ""
        return self._persist(lambda left: accepted((servers or self._servers).ask(key, [command], left))[0], bound)

    def _persist(self, ask: Callable[[float], Any], bound: float = RELEASE_BOUND) -> Any:
        return self._loop.persist(ask, bound)[0]


def with_tag(key: str, number: int) -> str:
    """A key beside *key*, with a hash tag of its own, so it is in another slot."""
    return f"{key.removesuffix('}')}:{number}}}"


def _printable(key: str) -> str:
    """*key* with an escape for each byte that is no UTF-8."""
    return key.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _surveys_in(replies: list[Any], tolerant: bool) -> list[Any]:
    """The replies, among which may be errors about single keys."""
    for reply in replies if tolerant else accepted(replies):
        if isinstance(reply, exceptions.RedisError):
            text, advice = str(reply), advice_about(reply)
            if not _UNREADABLE.search(text) or (advice is not None and "WRONGTYPE" not in text):
                raise reply
    return replies


def _state_in(key: str, reply: Any) -> LockState:
    if isinstance(reply, exceptions.RedisError):
        return LockState(key, problem=_FOREIGN + str(reply).partition(" script:")[0])
    try:
        # Bytes that are no UTF-8 would come this far.
        json.dumps(reply, ensure_ascii=False).encode()
        return _survey_in(key, *reply)
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        return LockState(key, problem=f"{_FOREIGN}{type(error).__name__}: {error}")


def _survey_in(
    key: str, now: int, fence: str, waiters: int, marks: Any, rows: Any, queue: Any, asked: Any, foreign: str
) -> LockState:
    def seconds(until: str) -> float:
        return (int(until) - now) / 1_000_000

    holders = tuple(holders_in(key, now, rows))
    # The name of a successor's task is not stored if it is the name of the lock.
    names = {"next": lock_name_of(key)}
    left = tuple(
        LeftMark(state, task_id, seconds(until), name or names.get(state), label or None, int(due_for) / 1000)
        for state, until, task_id, name, label, due_for in marks
    )
    turns = tuple(LeftMark("waiting", task_id, seconds(until), token=token) for until, task_id, token in queue)
    by = {holder.token: name for holder, name in zip(holders, asked, strict=True) if name}
    problem = _FOREIGN + foreign if foreign else None
    return LockState(key, now, int(fence) if fence else None, holders, left, waiters, turns, by, problem)
