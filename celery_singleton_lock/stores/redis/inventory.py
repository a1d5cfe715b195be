"""Seeing and breaking the locks of others, in Redis or Valkey."""

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from celery_singleton_lock.stores.base import RELEASE_BOUND
from celery_singleton_lock.stores.inventory import Asked, Inventory, LeftMark, MarkState, Survey
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.asking import Asking
from celery_singleton_lock.stores.redis.hash import holders_in
from celery_singleton_lock.stores.redis.wire import Script, Wire

SURVEY = Script("survey", "clock", "places", "marks", "queue", "described")
BREAK = Script("break", "clock", "places", "marks", "described", "idle")

# About 0.1 ms of the server's time, so nobody else has to wait for it.
_KEYS_PER_STEP = "250"
_VALUES_PER_MARK = 4
_OUR_KEY = re.compile(r"[^{}]*\{[^{}]*\}")
_OF_PATTERNS = re.compile(r"([*?\[\]^\\-])")


class RedisInventory(Inventory):
    """What a store in Redis does for those who look after it."""

    _asking: Asking
    _wire: Wire

    def keys(self, start: str) -> Iterator[str]:
        """Walk by SCAN; no index of locks is kept."""
        pattern, cursor, seen = _OF_PATTERNS.sub(r"\\\1", start) + "*}", "0", set[str]()
        while True:
            command = "SCAN", cursor, "MATCH", pattern, "COUNT", _KEYS_PER_STEP
            cursor, found = self._persist(lambda timeout, command=command: self._wire.call(*command, timeout=timeout))
            for key in found:
                if key not in seen and _OUR_KEY.fullmatch(key):
                    seen.add(key)
                    yield key
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
        command = "HGET", claim.key, f"broken:{claim.token}"
        by: str | None = self._persist(lambda timeout: self._wire.call(*command, timeout=timeout))
        return by

    def _persist(self, ask: Any) -> Any:
        return self._asking.persist(ask, RELEASE_BOUND)[0]

    @abstractmethod
    def _wake_the_rest(self, claim: Claim, bound: float) -> None: ...


def _survey_in(key: str, reply: Any) -> Survey:
    now, fence, waiters, values, rows = reply
    starts = range(0, len(values), _VALUES_PER_MARK)
    marks = [_mark_in(now, *values[start : start + _VALUES_PER_MARK]) for start in starts]
    return Survey(key, now, int(fence) if fence else None, tuple(holders_in(key, now, rows)), tuple(marks), waiters)


def _mark_in(now: int, word: str, until: str, task_id: str, task_name: str) -> LeftMark:
    (state,) = [state for state in get_args(MarkState) if state == word]
    return LeftMark(state, task_id, (int(until) - now) / 1_000_000, task_name or None)
