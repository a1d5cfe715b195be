"""Seeing and breaking the locks of others, in Redis or Valkey."""

import re
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, get_args

from redis import exceptions

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.base import RELEASE_BOUND, clock, lock_name_of
from celery_singleton_lock.stores.inventory import KEPT, BreakResult, Latency, LeftMark, LockState, MarkState
from celery_singleton_lock.stores.records import Claim, Holder
from celery_singleton_lock.stores.redis.connection import (
    Command,
    Connections,
    RetryLoop,
    replicated,
    wait_for,
)
from celery_singleton_lock.stores.redis.encoding import (
    ACQUIRE,
    BREAK,
    RELEASE,
    SURVEY,
    Script,
    arguments_of,
    holders_in,
    microseconds,
    milliseconds,
)
from celery_singleton_lock.stores.redis.errors import accepted

# A fraction of a millisecond of the server's time, so nobody else has to wait long for it.
_KEYS_PER_STEP = "250"
_VALUES_PER_MARK = 5
_SAMPLES = 5
_NEVER = -1
# Seconds after which the rest of a broken-off trial expires.
_TRIAL_TTL = 1.0
# So many slots are looked at that one server of a cluster does not have all of them by luck.
_OTHER_SLOTS = 20
_OUR_KEY = re.compile(r"[^{}]*\{[^{}]*\}")
_OF_PATTERNS = re.compile(r"([*?\[\]^\\-])")


class RedisInventory(ABC):
    """What operators, checks and metrics ask a store in Redis."""

    _loop: RetryLoop
    _servers: Connections
    _replicas: int

    def keys(self, start: str) -> Iterator[str]:
        """Each lock key that begins with *start*, once; found in small steps, so it may miss what comes meanwhile.

        Raises:
            StoreError: A step was not answered in time. Of several servers, all others are asked before.
        """
        # Another program may have a key of this name, and must not hide the others.
        for _, found in self._walk(start, "*}", "TYPE", "hash"):
            yield from (key for key in found if _OUR_KEY.fullmatch(key))

    def latency(self, bound: float) -> Latency:
        """Ask a few times for the time; of several servers, the worst answers count.

        Raises:
            StoreError: One of them was not answered within *bound* seconds.
        """
        found = [self._latency_of(server, bound) for server in self._persist(self._servers.to_masters, bound)]
        # Of several servers, the worst answer counts.
        return Latency(max(map(_round_trip, found)), max((each.ahead for each in found), key=abs))

    def _latency_of(self, server: Connections, bound: float) -> Latency:
        self._call("TIME", bound=bound, servers=server)
        found = [self._one_latency(server, bound) for _ in range(_SAMPLES)]
        # The quickest says most about the clock.
        return Latency(statistics.median(map(_round_trip, found)), min(found, key=_round_trip).ahead)

    def _one_latency(self, server: Connections, bound: float) -> Latency:
        sent_at = clock()
        answer = self._call("TIME", bound=bound, servers=server)
        round_trip, here = clock() - sent_at, time.time()
        return Latency(round_trip, microseconds(answer) / 1_000_000 - (here - round_trip / 2))

    def about_servers(self, bound: float) -> Mapping[str, Mapping[str, str]]:
        """Each server's own report about itself, by its address; empty if there is no server.

        Raises:
            StoreError: No answer within *bound* seconds.
            ConfigurationError: It does not let us ask.
        """
        return {server.address: self._about(server, bound) for server in self._persist(self._servers.to_masters, bound)}

    def _about(self, server: Connections, bound: float) -> Mapping[str, str]:
        lines = (line.partition(":") for line in self._call("INFO", bound=bound, servers=server).splitlines())
        return {name: value for name, _, value in lines if value}

    def without_expiry(self, start: str) -> Iterator[str]:
        """Each key that begins with *start* and never ends by itself, which none of ours does.

        Raises:
            StoreError: A step was not answered in time.
            ConfigurationError: The store does not let us ask.
        """
        for server, found in self._walk(start, "*"):
            commands = [("PTTL", key) for key in found]
            left = accepted(self._persist(partial(server.ask, "", commands)))
            yield from (key for key, each in zip(found, left, strict=True) if each == _NEVER)

    def _walk(self, start: str, rest: str, *only: str) -> Iterator[tuple[Connections, list[str]]]:
        """The keys that begin so, in small steps, each once, with the connections to its server.

        Raises:
            StoreError: A server does not answer; only after the keys of all others.
        """
        seen, problem = set[str](), None
        for server in self._persist(self._servers.to_masters):
            try:
                for found in self._walk_at(server, start, rest, *only):
                    if fresh := [key for key in dict.fromkeys(found) if key not in seen]:
                        seen.update(fresh)
                        yield server, fresh
            except StoreError as error:
                problem = problem or _with_its_address(server, error)
        if problem is not None:
            raise problem

    def _walk_at(self, server: Connections, start: str, rest: str, *only: str) -> Iterator[list[str]]:
        pattern, cursor = _OF_PATTERNS.sub(r"\\\1", start) + rest, "0"
        while True:
            cursor, found = self._call("SCAN", cursor, "MATCH", pattern, "COUNT", _KEYS_PER_STEP, *only, servers=server)
            yield found
            if cursor == "0":
                return

    def survey(self, keys: Sequence[str]) -> list[LockState]:
        """Look at each of the keys, and change nothing."""
        if not keys:
            return []
        calls = [([key], ()) for key in keys]
        replies = self._persist(lambda timeout: accepted(self._servers.run(SURVEY, calls, timeout)))
        return [_survey_in(key, reply) for key, reply in zip(keys, replies, strict=True)]

    def holders(self, key: str) -> list[Holder]:
        """All holders of *key*; the lease that ends first comes first."""
        (survey,) = self.survey([key])
        return list(survey.holders)

    def break_lock(self, key: str, token: str | None, by: str, *, force: bool) -> BreakResult:
        """Ask holders to end; they hear of it at their next renewal.

        Arguments:
            key: The lock key.
            token: The token of one holder; None for all holders, and for cool-downs and marks, which end at once.
            by: The name of the person, for the result of the run.
            force: Free the places now, though bodies may go on in them.

        Raises:
            StoreError: No answer in time. It may be done all the same.
        """
        arguments = token or "", by, "force" if force else ""
        now, dropped, rows = self._ask(BREAK, key, arguments)
        # It is done even if nobody can be woken. The token is one that nobody has.
        with suppress(StoreError):
            self._ask(RELEASE, key, ("~", "0", "0 0"))
        return BreakResult(tuple(holders_in(key, now, rows)), tuple(dropped))

    def count(self, key: str, sums: Mapping[str, int], timeout: float) -> None:
        """Add numbers to those that are known.

        Arguments:
            key: The hash of counts.
            sums: By how much each field grows.
            timeout: Seconds, all tries together; they may be added twice if an answer is lost.

        Raises:
            StoreError: No answer in time. They may be added all the same.
        """
        first, *others = [("HINCRBY", key, field, str(amount)) for field, amount in sums.items()]
        # Second, so that a connection that breaks leaves no hash without an expiry.
        commands = [first, ("PEXPIRE", key, milliseconds(KEPT)), *others]
        self._persist(lambda left: accepted(self._servers.ask(key, commands, left)), timeout)

    def counted(self, key: str) -> dict[str, int]:
        """All numbers, by field."""
        fields = self._call("HGETALL", key)
        pairs = zip(fields[::2], fields[1::2], strict=True)
        return {field: int(value) for field, value in pairs}

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

        Raises:
            StoreError: Not all of it was answered within *bound* seconds.
            ConfigurationError: The store does not let us.
        """
        self._loop.persist(partial(self._self_test, key), bound)
        self._servers.warn_if_ttl_too_short(ttls)

    def _self_test(self, key: str, timeout: float) -> None:
        """Use each command, take a lock and queue for it, release it, and hear of that.

        All in one go, for a server that is far away.
        """
        give_up_at = clock() + timeout
        holder, waiter = Claim(key, "holder", _TRIAL_TTL), Claim(key, "waiter", _TRIAL_TTL)
        steps = [
            (ACQUIRE, arguments_of(holder)),
            (ACQUIRE, arguments_of(waiter, waits=True)),
            (RELEASE, (holder.token, "0", "1 0")),
            (RELEASE, (waiter.token, "0", "0 0")),
        ]
        calls = [(self._servers.form_of(script), ("1", key, *arguments)) for script, arguments in steps]
        commands = [*commands_on(key, self._servers.publish), *self._other_commands(key)]
        subscription = self._servers.listen(f"{key}:{waiter.token}", timeout)
        try:
            known = [("EVALSHA", script.digest, *rest) for script, rest in calls]
            replies = self._servers.ask(key, [*commands, *known], give_up_at - clock())
            if any(isinstance(reply, exceptions.NoScriptError) for reply in replies[-len(calls) :]):
                accepted(replies[: -len(calls)])
                texts = [("EVAL", script.text, *rest) for script, rest in calls]
                replies = self._servers.ask(key, texts, give_up_at - clock())
            accepted(replies)
            if not subscription.can_read(timeout=max(0.0, give_up_at - clock())):
                raise exceptions.TimeoutError("the waiter was not woken in time")
        finally:
            subscription.disconnect()
        if self._replicas:
            writing = [("HSET", key, "a", "0"), ("PEXPIRE", key, "1000"), wait_for(self._replicas, timeout)]
            replicated(self._servers.ask(key, writing, give_up_at - clock()), self._replicas)

    def _other_commands(self, key: str) -> list[Command]:
        # A server that answers for all of these keys is not one of several in a cluster.
        return [("HLEN", with_tag(key, number)) for number in range(_OTHER_SLOTS)]

    def _call(self, *command: str, bound: float = RELEASE_BOUND, servers: Connections | None = None) -> Any:
        """The reply to a command about the key that follows its name."""
        key = command[1] if len(command) > 1 else ""
        return self._persist(lambda left: accepted((servers or self._servers).ask(key, [command], left))[0], bound)

    def _persist(self, ask: Any, bound: float = RELEASE_BOUND) -> Any:
        return self._loop.persist(ask, bound)[0]

    @abstractmethod
    def _ask(self, script: Script, key: str, arguments: Sequence[str], bound: float = RELEASE_BOUND) -> Any: ...


def with_tag(key: str, number: int) -> str:
    """A key beside *key*, with a hash tag of its own, so it is in another slot."""
    return f"{key.removesuffix('}')}:{number}}}"


def commands_on(key: str, publish: str) -> list[tuple[str, ...]]:
    """Each command that our scripts and clients need, once, because a user may lack any right. They leave nothing."""
    writing = [("HSET", key, "a", "0"), ("PEXPIRE", key, "1000"), ("HSETNX", key, "b", "0"), ("HINCRBY", key, "a", "1")]
    reading = [("HGET", key, "a"), ("HMGET", key, "a"), ("HEXISTS", key, "a")]
    reading_all = [("HGETALL", key), ("HRANDFIELD", key, "1"), ("HLEN", key), ("EXISTS", key)]
    others = [("TIME",), ("EVAL", "return 1", "0"), (publish, f"{key}:nobody", "")]
    return [*others, ("DEL", key), *writing, *reading, *reading_all, ("HDEL", key, "a", "b")]


def _with_its_address(server: Connections, error: StoreError) -> StoreError:
    """The error, with the name of the server that it is about."""
    # The address of a cluster has those of several servers.
    if server.address in error.problem:
        return error
    store, *rest = error.args
    return type(error)(f"{store} ({server.address})", *rest)


def _round_trip(each: Latency) -> float:
    return each.round_trip


def _survey_in(key: str, reply: Any) -> LockState:
    now, fence, waiters, values, rows, queue, asked = reply
    starts = range(0, len(values), _VALUES_PER_MARK)
    marks = [_mark_in(key, now, *values[start : start + _VALUES_PER_MARK]) for start in starts]
    holders = tuple(holders_in(key, now, rows))
    turns = tuple((queue[at + 1], (int(queue[at]) - now) / 1_000_000) for at in range(0, len(queue), 2))
    by = {holder.token: name for holder, name in zip(holders, asked, strict=True) if name}
    return LockState(key, now, int(fence) if fence else None, holders, tuple(marks), waiters, turns, by)


def _mark_in(key: str, now: int, word: str, until: str, task_id: str, task_name: str, label: str) -> LeftMark:
    (state,) = [state for state in get_args(MarkState) if state == word]
    if state == "next":
        # The name is not stored if it is the name of the lock.
        task_name = task_name or lock_name_of(key)
    return LeftMark(state, task_id, (int(until) - now) / 1_000_000, task_name or None, label or None)
