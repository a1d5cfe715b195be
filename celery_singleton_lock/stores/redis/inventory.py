"""Listing, testing and breaking locks, for operators."""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from redis import exceptions

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Holder, Renewal
from celery_singleton_lock.stores.redis import encoding, packed
from celery_singleton_lock.stores.redis.answers import NotUsable
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.store import RELEASE_BOUND, Store

_KEYS_PER_STEP = "250"  # one SCAN blocks the server for less than a millisecond
_TRIAL_TTL = 1.0
# The self-test looks through so many keys for one key of each master. It may miss a master with very few slots.
_TRIAL_KEYS = 200
_OTHER_SLOTS = 20  # keys; a server of a cluster rarely has the slots of all these keys
TRIAL = "trial-"  # begins the digest of a self-test's key, which is never listed
_OUR_KEY = re.compile(rf"[^{{}}]*\{{(?![^{{}}]*:{TRIAL}[^:{{}}]*\}})[^{{}}]*\}}")
_NUMBER = re.compile(r"-?[0-9]+")
_OF_PATTERNS = re.compile(r"([*?\[\]^\\-])")


class Inventory:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._servers = store.servers

    def keys(self, start: str) -> Iterator[str]:
        """A server's error is raised after the keys of the others."""
        pattern = _OF_PATTERNS.sub(r"\\\1", start) + "*}"
        seen = set[str]()
        problem = None
        for server in self._servers.to_masters(RELEASE_BOUND):
            cursor = None
            try:
                while cursor != "0":
                    cursor, found = _call(server, "SCAN", cursor or "0", "MATCH", pattern, "COUNT", _KEYS_PER_STEP)
                    fresh = {key for key in found if _OUR_KEY.fullmatch(key)} - seen
                    seen |= fresh
                    yield from fresh
            except StoreError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def latency(self, bound: float) -> tuple[float, float]:
        """The longest round trip, and the largest offset of a server's clock, positive if ahead, in seconds."""
        found = []
        for server in self._servers.to_masters(bound):
            # Not measured, because the first request also opens the connection.
            _call(server, "TIME", bound=bound)
            sent_at = clock()
            answer = _call(server, "TIME", bound=bound)
            round_trip = clock() - sent_at
            here = time.time()
            found.append((round_trip, encoding.microseconds(answer) / 1_000_000 - (here - round_trip / 2)))
        round_trips, ahead = zip(*found, strict=True)
        return max(round_trips), max(ahead, key=abs)

    def about_servers(self, bound: float) -> dict[str, dict[str, str]]:
        said = {}
        for server in self._servers.to_masters(bound):
            lines = _call(server, "INFO", bound=bound).splitlines()
            said[server.address] = dict(line.split(":", 1) for line in lines if ":" in line)
        return said

    def databases(self, bound: float) -> set[tuple[str, int]]:
        number = int(self._servers.pool.connection_kwargs.get("db") or 0)
        return {(report["run_id"], number) for report in self.about_servers(bound).values()}

    def break_lock(
        self, key: str, tokens: Iterable[str], by: str, *, marks: bool = False, force: bool = False
    ) -> tuple[Sequence[Holder], list[str]]:
        """Ask the holders with these *tokens* to stop at their next renewal.

        *marks* also ends marks and cool-downs. *force* frees the places at once, although bodies may still run. Returns
        the holders that were found, and the marks that have ended.
        """
        words = f"{'marks' if marks else ''} {'force' if force else ''}"
        now, dropped, rows = self._store.run(encoding.rare_script("break"), key, by, words, *tokens)
        # The lock is broken even if waking fails.
        with suppress(StoreError):
            self._store.wake_next(key)
        return encoding.holders_in(key, now, rows), dropped

    def counted(self, key: str) -> dict[str, int]:
        return {field: int(value) for field, value in self._store.fields(key).items() if _NUMBER.fullmatch(value)}

    def self_test(self, key: str, bound: float) -> None:
        """Try a lock at each master. Nobody else may use *key*."""
        self._servers.part.persist(partial(self._test_masters, key), bound)

    def _test_masters(self, key: str, until: float) -> None:
        masters = set(self._servers.to_masters(until - clock()))
        for like_it in (key, *_keys_like(key, _TRIAL_KEYS)):
            master = self._servers.at_owner_of(like_it, until)
            if master in masters:
                masters.remove(master)
                self._self_test(like_it, until)

    def _self_test(self, key: str, until: float) -> None:
        # The second key is in another slot, so a cluster behind a plain URL refuses to renew both together.
        holders = [Claim(each, "holder", _TRIAL_TTL) for each in (key, *_keys_like(key, 1))]
        waiter = Claim(key, "waiter", _TRIAL_TTL, turn_for=_TRIAL_TTL, waits_here=True)
        acquires = [(each.key, encoding.packed_acquire(each)) for each in (*holders, waiter)]
        releases = [(each.key, encoding.packed_release(each, None, None)) for each in (*holders, waiter)]
        subscription = self._servers.at_owner_of(key, until).listen(waiter.channel, until)
        try:
            # Use `part_of` the key, so that an error names the server of the key.
            tried = partial(self._servers.call, key, self._commands_on(key))
            self._store.servers.part_of(key).persist(tried, until - clock())
            self._servers.run(encoding.ACQUIRE, acquires, until, self._store.replicas)
            _, renewed = self._store.renew_once(holders, until)
            if {answer for *answers, _ in renewed for answer in answers} != {Renewal.RENEWED}:
                raise NotUsable("a lease of the trial was gone before it could be renewed")
            self._servers.run(encoding.RELEASE, releases, until)
            if not subscription.can_read(timeout=max(0.0, until - clock())):
                raise exceptions.TimeoutError("the waiter was not woken in time")
        finally:
            subscription.disconnect()

    def _commands_on(self, key: str) -> list[bytes]:
        """All commands that scripts and clients use, sent without a script.

        Otherwise an error could be the script's, which does not name the missing right.
        """
        commands = ["DEL", "HSET a 0", "PEXPIRE 1000 NX", "HSETNX b 0", "HINCRBY a 1", "HGET a", "HMGET a", "HEXISTS a"]
        commands += ["HGETALL", "HRANDFIELD 1", "HLEN", "EXISTS", "HDEL a b"]
        named = [packed(name, key, *arguments) for name, *arguments in map(str.split, commands)]
        nobody = f"{key}:nobody"
        named += [packed("TIME"), packed("EVAL", "return 1", "0")]
        named += [packed(self._servers.publish, nobody, ""), packed(self._servers.unsubscribe, nobody)]
        if self._store.servers.is_sharded:
            # A missing right for ASKING would show only while slots move.
            return [*named, packed("ASKING")]
        # A server of a cluster, behind a plain URL, refuses some of these keys.
        return [*named, *(packed("HLEN", each) for each in _keys_like(key, _OTHER_SLOTS))]


def _call(server: Connections, *command: str, bound: float = RELEASE_BOUND) -> Any:
    return server.part.persist(lambda until: server.call("", [packed(*command)], until)[0], bound)[0]


def _keys_like(key: str, many: int) -> Iterator[str]:
    return (f"{key.removesuffix('}')}{number}}}" for number in range(many))
