"""Locks in a cluster: each lock at the server that has its slot."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from logging import getLogger
from typing import Any

from redis import exceptions

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Answer, Claim
from celery_singleton_lock.stores.redis.aside import aside
from celery_singleton_lock.stores.redis.asking import Asking
from celery_singleton_lock.stores.redis.clock import ServerClock
from celery_singleton_lock.stores.redis.cluster_url import Node, read
from celery_singleton_lock.stores.redis.cluster_wire import ClusterWire
from celery_singleton_lock.stores.redis.hash import holders_in, milliseconds
from celery_singleton_lock.stores.redis.inventory import SURVEY
from celery_singleton_lock.stores.redis.refusals import OVERWRITTEN, accepted
from celery_singleton_lock.stores.redis.slot_map import Change, SlotMap
from celery_singleton_lock.stores.redis.store import ANSWERS, RENEW, RedisStore
from celery_singleton_lock.stores.redis.trial import with_tag
from celery_singleton_lock.stores.redis.wire import Wire

logger = getLogger("celery_singleton_lock")

# Enough tries to find a key for each master, unless one has almost no slots.
_TRIES_PER_MASTER = 30


class Part:
    """The data about one server of a cluster, which answers, or is silent, by itself, and has a clock of its own."""

    def __init__(self, asking: Asking, seen: ServerClock) -> None:
        self.asking, self.clock = asking, seen


class ClusterStore(RedisStore):
    """Locks in a cluster of Redis or Valkey.

    Arguments:
        url: `redis+cluster://` or `rediss+cluster://`, with some of the servers between semicolons.
        options: Further arguments for redis-py's connections, and `address_remap`, as redis-py has it for clusters.
        replicas: How many replicas of a master must have a grant or a renewal before it counts.

    Raises:
        ConfigurationError: The URL or an option cannot be used.
    """

    has_parts = True
    _wire: ClusterWire
    _reserved: ClusterWire

    def _connect(self, url: str, options: Mapping[str, Any]) -> None:
        self._source = self._slots = SlotMap(read(url, options), self._changed)
        self._asking = Asking(self._slots.address, self._slots.pool.connection_kwargs)
        self._wire = ClusterWire(self._slots, self._reconnected)
        self._reserved = ClusterWire(self._slots, self._reconnected)
        self._parts: dict[Node, Part] = {}

    def try_out(self, key: str, bound: float, ttls: Iterable[float] = ()) -> None:
        """Try each server that has slots, because the rights of a user can differ between them."""
        give_up_at = clock() + bound
        masters, _ = self._asking.persist(self._slots.ask_for_masters, bound)
        keys: dict[Node | None, str] = {}
        for number in range(_TRIES_PER_MASTER * len(masters)):
            another = with_tag(key, number)
            keys.setdefault(self._slots.known_owner(another), another)
        for another in keys.values():
            super().try_out(another, give_up_at - clock(), ttls)
            # This right is needed only while slots move, and then it is too late to find out that it is missing.
            self._asking.persist(partial(self._wire.at, another, _may_ask), give_up_at - clock())

    def part_of(self, key: str) -> Any:
        """The server that has *key*; before one is known, the cluster."""
        node = self._slots.known_owner(key)
        return self if node is None else self._part(node)

    def renew(self, claims: Sequence[Claim], timeout: float) -> Sequence[Answer | StoreError]:
        """Run renew.lua for each claim, those of one server in one go; a server that is silent concerns no other."""
        calls = {number: ([claim.key], [milliseconds(claim.ttl), claim.token]) for number, claim in enumerate(claims)}
        answers: dict[int, Answer | StoreError] = {}

        def ask(left: float) -> None:
            sent_at, pending = clock(), list(calls)
            replies = self._reserved.run_each(RENEW, list(calls.values()), left, self._replicas)
            errors = [reply for reply in replies if isinstance(reply, exceptions.RedisError)]
            for number, reply in zip(pending, replies, strict=True):
                if not isinstance(reply, exceptions.RedisError):
                    del calls[number]
                    answers[number] = ANSWERS[reply[0]]
                    self._of(claims[number].key)[1].tells(reply[-1], sent_at)
            if errors:
                raise errors[0]

        try:
            self._asking.persist(ask, timeout)
        except StoreError as error:
            if not answers:
                raise
            answers |= dict.fromkeys(calls, error)
        return [answers[number] for number in range(len(claims))]

    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        """Run survey.lua for each, because the deadlines of a server count by its own clock."""
        calls = [([claim.key], ("",)) for claim in claims]
        ask = partial(self._reserved.run_each, SURVEY, calls)
        replies, _ = self._asking.persist(lambda left: accepted(ask(left), OVERWRITTEN), timeout)
        found = list[float | None]()
        for claim, reply in zip(claims, replies, strict=True):
            if isinstance(reply, Exception):
                found.append(None)
                continue
            now, rows = reply[0], reply[4]
            ends = [each.expires_in for each in holders_in(claim.key, now, rows) if each.token == claim.token]
            found.append(ends[0] if ends else None)
        return found

    def _of(self, key: str) -> tuple[Asking, ServerClock]:
        node = self._slots.known_owner(key)
        if node is None:
            return self._asking, self._clock
        part = self._part(node)
        return part.asking, part.clock

    def _part(self, node: Node) -> Part:
        known = self._parts.get(node)
        return known or self._parts.setdefault(node, self._new_part(node))

    def _new_part(self, node: Node) -> Part:
        asking = Asking(f"{self._slots.address} ({node})", self._slots.pool.connection_kwargs)
        return Part(asking, ServerClock(self._stepped))

    def _changed(self, changes: set[Change], gone: frozenset[Node]) -> None:
        """Other servers have slots from now on; the servers in *gone* have none any more."""
        for before, after in changes:
            self._part(after).clock.follow(self._part(before).clock)
        if not gone:
            # The locks have moved along with their slots.
            return
        heirs = {before: after for before, after in changes if before in gone}
        for before, after in sorted(heirs.items()):
            event = "lock.moved store=%s master=%s before=%s: all leases are renewed at the new master"
            aside(partial(logger.warning, event, self.address, after, before))
        for wire in (self._wire, self._reserved):
            wire.leave_all_but(self._slots.masters)
        self._reconnected()


def _may_ask(wire: Wire, timeout: float) -> None:
    wire.call("ASKING", timeout=timeout)
