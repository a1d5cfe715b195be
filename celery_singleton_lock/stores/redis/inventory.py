"""Seeing and breaking the locks of others, in Redis or Valkey."""

import re
import statistics
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from celery_singleton_lock.stores.base import RELEASE_BOUND, clock
from celery_singleton_lock.stores.inventory import Asked, Echo, Inventory, LeftMark, MarkState, Survey
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.asking import Asking
from celery_singleton_lock.stores.redis.hash import holders_in, microseconds
from celery_singleton_lock.stores.redis.wire import Script, Wire

SURVEY = Script("survey", "clock", "places", "marks", "queue", "described")
BREAK = Script("break", "clock", "places", "marks", "described", "idle")

# About 0.1 ms of the server's time, so nobody else has to wait for it.
_KEYS_PER_STEP = "250"
_VALUES_PER_MARK = 5
_ECHOES = 5
_NEVER = -1
_OUR_KEY = re.compile(r"[^{}]*\{[^{}]*\}")
_OF_PATTERNS = re.compile(r"([*?\[\]^\\-])")


class RedisInventory(Inventory):
    """What a store in Redis does for those who look after it."""

    _asking: Asking
    _wire: Wire

    def keys(self, start: str) -> Iterator[str]:
        """Walk by SCAN; no index of locks is kept."""
        for found in self._walk(start, "*}"):
            yield from (key for key in found if _OUR_KEY.fullmatch(key))

    def echo(self, bound: float) -> Echo:
        """Ask for TIME, on a connection that is open."""
        self._call("TIME", bound=bound)
        echoes = [self._echo(bound) for _ in range(_ECHOES)]
        # The quickest says most about the clock.
        return Echo(statistics.median(each.round_trip for each in echoes), min(echoes, key=_round_trip).ahead)

    def _echo(self, bound: float) -> Echo:
        sent_at = clock()
        answer = self._call("TIME", bound=bound)
        round_trip, here = clock() - sent_at, time.time()
        return Echo(round_trip, microseconds(answer) / 1_000_000 - (here - round_trip / 2))

    def about_server(self, bound: float) -> Mapping[str, str]:
        """Read INFO, of which no right to CONFIG is a part."""
        lines = (line.partition(":") for line in self._call("INFO", bound=bound).splitlines())
        return {name: value for name, _, value in lines if value}

    def without_expiry(self, start: str) -> Iterator[str]:
        """Ask for the PTTL of all, by and by."""
        for found in self._walk(start, "*"):
            commands = [("PTTL", key) for key in found]
            left = self._persist(lambda timeout, commands=commands: self._wire.call_many(commands, timeout))
            yield from (key for key, each in zip(found, left, strict=True) if each == _NEVER)

    def _walk(self, start: str, rest: str) -> Iterator[list[str]]:
        """Those keys, in small steps, each once."""
        pattern, cursor, seen = _OF_PATTERNS.sub(r"\\\1", start) + rest, "0", set[str]()
        while True:
            cursor, found = self._call("SCAN", cursor, "MATCH", pattern, "COUNT", _KEYS_PER_STEP)
            fresh = [key for key in dict.fromkeys(found) if key not in seen]
            seen.update(fresh)
            if fresh:
                yield fresh
            if cursor == "0":
                return

    def survey(self, keys: Sequence[str]) -> list[Survey]:
        """Run survey.lua for each, in one round trip."""
        if not keys:
            return []
        calls = [([key], ()) for key in keys]
        replies = self._persist(lambda timeout: self._wire.run_many(SURVEY, calls, timeout))
        return [_survey_in(key, reply) for key, reply in zip(keys, replies, strict=True)]

    def break_lock(self, key: str, token: str | None, by: str, *, force: bool) -> Asked:
        """Run break.lua, then have those woken whose turn has come."""
        arguments = token or "", by, "force" if force else ""
        now, dropped, rows = self._persist(lambda timeout: self._wire.run(BREAK, [key], arguments, timeout))
        # A token that nobody has.
        self._wake_the_rest(Claim(key, "~", 0.0), RELEASE_BOUND)
        return Asked(tuple(holders_in(key, now, rows)), tuple(dropped))

    def broken_by(self, claim: Claim) -> str | None:
        """Read its field."""
        by: str | None = self._call("HGET", claim.key, f"broken:{claim.token}")
        return by

    def _call(self, *command: str, bound: float = RELEASE_BOUND) -> Any:
        return self._persist(lambda timeout: self._wire.call(*command, timeout=timeout), bound)

    def _persist(self, ask: Any, bound: float = RELEASE_BOUND) -> Any:
        return self._asking.persist(ask, bound)[0]

    @abstractmethod
    def _wake_the_rest(self, claim: Claim, bound: float) -> None: ...


def _round_trip(echo: Echo) -> float:
    return echo.round_trip


def _survey_in(key: str, reply: Any) -> Survey:
    now, fence, waiters, values, rows = reply
    starts = range(0, len(values), _VALUES_PER_MARK)
    marks = [_mark_in(now, *values[start : start + _VALUES_PER_MARK]) for start in starts]
    return Survey(key, now, int(fence) if fence else None, tuple(holders_in(key, now, rows)), tuple(marks), waiters)


def _mark_in(now: int, word: str, until: str, task_id: str, task_name: str, label: str) -> LeftMark:
    (state,) = [state for state in get_args(MarkState) if state == word]
    return LeftMark(state, task_id, (int(until) - now) / 1_000_000, task_name or None, label or None)
