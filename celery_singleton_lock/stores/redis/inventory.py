"""Seeing and breaking the locks of others, in Redis or Valkey."""

import re
import statistics
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.base import RELEASE_BOUND, clock, lock_name_of
from celery_singleton_lock.stores.counts import KEPT
from celery_singleton_lock.stores.inventory import Asked, Echo, Inventory, LeftMark, MarkState, Survey
from celery_singleton_lock.stores.records import Claim, Holder
from celery_singleton_lock.stores.redis.connection import Connections, RetryLoop
from celery_singleton_lock.stores.redis.encoding import Script, holders_in, microseconds, milliseconds
from celery_singleton_lock.stores.redis.errors import accepted

SURVEY = Script("survey")
BREAK = Script("break")

# A fraction of a millisecond of the server's time, so nobody else has to wait long for it.
_KEYS_PER_STEP = "250"
_VALUES_PER_MARK = 5
_ECHOES = 5
_NEVER = -1
_OUR_KEY = re.compile(r"[^{}]*\{[^{}]*\}")
_OF_PATTERNS = re.compile(r"([*?\[\]^\\-])")


class RedisInventory(Inventory):
    """The requests of operators to a store in Redis."""

    _loop: RetryLoop
    _servers: Connections

    def keys(self, start: str) -> Iterator[str]:
        """Walk by SCAN; no index of locks is kept."""
        # Another program may have a key of this name, and must not hide the others.
        for _, found in self._walk(start, "*}", "TYPE", "hash"):
            yield from (key for key in found if _OUR_KEY.fullmatch(key))

    def echo(self, bound: float) -> Echo:
        """Ask for TIME, on a connection that is open."""
        echoes = [self._echo(server, bound) for server in self._persist(self._servers.to_masters, bound)]
        # Of several servers, the worst answer counts.
        return Echo(max(map(_round_trip, echoes)), max((each.ahead for each in echoes), key=abs))

    def _echo(self, server: Connections, bound: float) -> Echo:
        self._call("TIME", bound=bound, servers=server)
        echoes = [self._one_echo(server, bound) for _ in range(_ECHOES)]
        # The quickest says most about the clock.
        return Echo(statistics.median(map(_round_trip, echoes)), min(echoes, key=_round_trip).ahead)

    def _one_echo(self, server: Connections, bound: float) -> Echo:
        sent_at = clock()
        answer = self._call("TIME", bound=bound, servers=server)
        round_trip, here = clock() - sent_at, time.time()
        return Echo(round_trip, microseconds(answer) / 1_000_000 - (here - round_trip / 2))

    def about_servers(self, bound: float) -> Mapping[str, Mapping[str, str]]:
        """Read INFO, because it needs no right to CONFIG."""
        return {server.address: self._about(server, bound) for server in self._persist(self._servers.to_masters, bound)}

    def _about(self, server: Connections, bound: float) -> Mapping[str, str]:
        lines = (line.partition(":") for line in self._call("INFO", bound=bound, servers=server).splitlines())
        return {name: value for name, _, value in lines if value}

    def without_expiry(self, start: str) -> Iterator[str]:
        """Ask for the PTTL of all, in small steps."""
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
                problem = problem or _told_of(server, error)
        if problem is not None:
            raise problem

    def _walk_at(self, server: Connections, start: str, rest: str, *only: str) -> Iterator[list[str]]:
        pattern, cursor = _OF_PATTERNS.sub(r"\\\1", start) + rest, "0"
        while True:
            cursor, found = self._call("SCAN", cursor, "MATCH", pattern, "COUNT", _KEYS_PER_STEP, *only, servers=server)
            yield found
            if cursor == "0":
                return

    def survey(self, keys: Sequence[str], task_id: str = "") -> list[Survey]:
        """Run survey.lua for each, in one round trip."""
        if not keys:
            return []
        calls = [([key], (task_id,)) for key in keys]
        replies = self._persist(lambda timeout: accepted(self._servers.run(SURVEY, calls, timeout)))
        return [_survey_in(key, reply) for key, reply in zip(keys, replies, strict=True)]

    def holders(self, key: str) -> list[Holder]:
        """All holders of *key*; the lease that ends first comes first."""
        (survey,) = self.survey([key])
        return list(survey.holders)

    def break_lock(self, key: str, token: str | None, by: str, *, force: bool) -> Asked:
        """Run break.lua, then wake the waiters whose turn has come."""
        arguments = token or "", by, "force" if force else ""
        now, dropped, rows = self._ask(BREAK, key, arguments)
        # A token that nobody has.
        self._wake_the_rest(Claim(key, "~", 0.0), RELEASE_BOUND)
        return Asked(tuple(holders_in(key, now, rows)), tuple(dropped))

    def count(self, key: str, sums: Mapping[str, int], timeout: float) -> None:
        """Increment each field, in one round trip."""
        first, *others = [("HINCRBY", key, field, str(amount)) for field, amount in sums.items()]
        # Second, so that a connection that breaks leaves no hash without an expiry.
        commands = [first, ("PEXPIRE", key, milliseconds(KEPT)), *others]
        self._persist(lambda left: accepted(self._servers.ask(key, commands, left)), timeout)

    def counted(self, key: str) -> dict[str, int]:
        """Read the hash."""
        fields = self._call("HGETALL", key)
        pairs = zip(fields[::2], fields[1::2], strict=True)
        return {field: int(value) for field, value in pairs}

    def broken_by(self, claim: Claim) -> str | None:
        """Read its field."""
        by: str | None = self._call("HGET", claim.key, f"broken:{claim.token}")
        return by

    def _call(self, *command: str, bound: float = RELEASE_BOUND, servers: Connections | None = None) -> Any:
        """The reply to a command about the key that follows its name."""
        key = command[1] if len(command) > 1 else ""
        return self._persist(lambda left: accepted((servers or self._servers).ask(key, [command], left))[0], bound)

    def _persist(self, ask: Any, bound: float = RELEASE_BOUND) -> Any:
        return self._loop.persist(ask, bound)[0]

    @abstractmethod
    def _ask(self, script: Script, key: str, arguments: Sequence[str], bound: float = RELEASE_BOUND) -> Any: ...

    @abstractmethod
    def _wake_the_rest(self, claim: Claim, bound: float) -> None: ...


def _told_of(server: Connections, error: StoreError) -> StoreError:
    """The error, with the name of the server that it is about."""
    # The address of a cluster has those of several servers.
    if server.address in error.problem:
        return error
    store, *rest = error.args
    return type(error)(f"{store} ({server.address})", *rest)


def _round_trip(echo: Echo) -> float:
    return echo.round_trip


def _survey_in(key: str, reply: Any) -> Survey:
    now, fence, waiters, values, rows, turn, asked = reply
    starts = range(0, len(values), _VALUES_PER_MARK)
    marks = [_mark_in(key, now, *values[start : start + _VALUES_PER_MARK]) for start in starts]
    holders = tuple(holders_in(key, now, rows))
    left = (int(turn) - now) / 1_000_000 if turn else None
    by = {holder.token: name for holder, name in zip(holders, asked, strict=True) if name}
    return Survey(key, now, int(fence) if fence else None, holders, tuple(marks), waiters, left, by)


def _mark_in(key: str, now: int, word: str, until: str, task_id: str, task_name: str, label: str) -> LeftMark:
    (state,) = [state for state in get_args(MarkState) if state == word]
    if state == "next":
        # The name is not stored if it is the name of the lock.
        task_name = task_name or lock_name_of(key)
    return LeftMark(state, task_id, (int(until) - now) / 1_000_000, task_name or None, label or None)
