"""Which server of a cluster has which slot."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from redis import exceptions
from redis.crc import key_slot

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.redis.aside import aside
from celery_singleton_lock.stores.redis.cluster_url import Membership, Node
from celery_singleton_lock.stores.redis.opening import REPLY_TIMEOUT, hear, opened, pool_of
from celery_singleton_lock.stores.redis.refusals import NoMaster, problem_of, what_to_set

SLOTS = 16384
# Seconds for each server, and from one question to the next.
_PATIENCE = 0.25
_PAUSE = 0.25
_NOT_KNOWN = (None, "", "?")
_NO_CLUSTER = "cluster support disabled"

Owners = list[Node | None]
Change = tuple[Node, Node]


def slot_of(key: str) -> int:
    """The slot of *key*; it depends on what is between the first braces, if there are any."""
    return int(key_slot(key.encode()))


class SlotMap:
    """Which server has which slot, as far as this process has heard; a source of connections to any of them.

    Nothing is locked: what is known is replaced as a whole, so a signal may raise anywhere.

    Arguments:
        membership: What the URL says.
        changed: Called when slots have moved, with pairs of servers, each the old and the new one, and with the
            servers that have no slots any more.

    Attributes:
        address: Where the cluster is, fit for logs.
        pool: Class and arguments of the connections.
        masters: The servers that have slots.

    Raises:
        ConfigurationError: The URL or an option is not one that redis-py knows.
    """

    may_move = False

    def __init__(self, membership: Membership, changed: Callable[[set[Change], frozenset[Node]], None]) -> None:
        self.address = membership.address
        self.pool = pool_of(membership.url, membership.options, membership.address)
        self.masters: frozenset[Node] = frozenset()
        self._seeds = membership.nodes
        self._remap = membership.remap
        self._changed = changed
        self._owners: Owners = []
        # The order of questions. A server that has answered goes behind those that may know more, and before silent
        # ones.
        self._order: list[Node] = list(membership.nodes)
        self._silent: set[Node] = set()
        self._doubted: set[Node] = set()
        self._patience = _PATIENCE
        self._asked_at = self._asks_until = float("-inf")

    def open(self, timeout: float) -> Any:
        """A connection to the first that lets us, within *timeout* seconds."""
        give_up_at = clock() + timeout
        for number, node in enumerate(self._order):
            left = give_up_at - clock()
            try:
                return self.open_to(node, left / (len(self._order) - number))
            except exceptions.RedisError:
                if number == len(self._order) - 1:
                    raise
        raise exceptions.ConnectionError("there is no server")

    def open_to(self, node: Node, timeout: float) -> Any:
        """A connection to one of them, within *timeout* seconds."""
        return opened(self.pool, timeout, host=node.host, port=node.port)

    def look_again(self) -> None:
        """Nothing to do: each server says itself which slots it has no more."""

    def weigh(self, ttls: Iterable[float]) -> None:
        """Nothing to do: only administrators may read after how long a server is taken for dead."""

    def known_owner(self, key: str) -> Node | None:
        """The server that has *key*, as far as that is known."""
        return self._owners[slot_of(key)] if self._owners else None

    def owner_of(self, key: str, timeout: float) -> Node:
        """The server that has *key*; ask the cluster if that is not known, or in doubt.

        Raises:
            RedisError: Nobody says so within *timeout* seconds.
        """
        owner = self.known_owner(key)
        if owner is not None and owner not in self._doubted:
            return owner
        if not self._owners or clock() >= self._asked_at + _PAUSE:
            try:
                self._ask(timeout)
            except exceptions.RedisError:
                # The server that was right the last time may still be right, and its answer tells more.
                if owner is None:
                    raise
            owner = self.known_owner(key)
        if owner is None:
            raise self._hole(slot_of(key))
        return owner

    def ask_for_masters(self, timeout: float) -> list[Node]:
        """All servers that have slots, asked for anew."""
        self._ask(timeout)
        return sorted(self.masters)

    def told(self, error: exceptions.AskError, by: Node) -> Node:
        """The server that an answer has named; an empty host means the server that has answered."""
        return self._reached(error.host or by.host, error.port)

    def moved(self, error: exceptions.MovedError, by: Node) -> Node:
        """Note that one slot has another server from now on, and ask in the background for the others."""
        owner = self.told(error, by)
        if self._owners and self._owners[error.slot_id] != owner:
            owners = self._owners.copy()
            owners[error.slot_id] = owner
            self._take(owners, self.masters | {owner})
            self.ask_ahead()
        return owner

    def ask_ahead(self) -> None:
        """Ask in the background, soon, unless that is under way."""
        if clock() >= self._asks_until:
            # A time, because a signal may raise before the thread has begun.
            self._asks_until = clock() + _PAUSE + REPLY_TIMEOUT
            aside(self._ask_soon)

    def doubt(self, node: Node) -> None:
        """It did not answer, so another one may have its slots by now."""
        self._doubted.add(node)

    def _ask_soon(self) -> None:
        time.sleep(max(0.0, self._asked_at + _PAUSE - clock()))
        self._asks_until = float("-inf")
        # A caller that needs the map asks again.
        with suppress(exceptions.RedisError):
            self._ask(REPLY_TIMEOUT)

    def _ask(self, timeout: float) -> None:
        """Ask one server after the other, until one knows.

        Raises:
            RedisError: None does.
        """
        self._asked_at = began = clock()
        give_up_at = began + timeout
        errors: dict[Node, exceptions.RedisError] = {}
        for node in self._candidates():
            left = min(self._patience, give_up_at - clock())
            if left <= 0:
                break
            asked_at = clock()
            try:
                owners, masters, replicas = self._known_by(node, left)
            except exceptions.RedisError as error:
                errors[node] = error
                continue
            self._silent = (self._silent | errors.keys()) - {node}
            known = masters | replicas
            self._order = [*sorted(known - self._silent - {node}), node, *sorted(known & self._silent)]
            self._doubted = set()
            self._patience = min(REPLY_TIMEOUT, max(_PATIENCE, 2 * (clock() - asked_at)))
            self._take(owners, masters)
            return
        self._order = [*(node for node in self._order if node not in errors), *errors]
        self._patience = min(REPLY_TIMEOUT, 2 * self._patience)
        raise self._why_nobody_knows(errors)

    def _candidates(self) -> list[Node]:
        # The servers of the URL as well, because all others that were known may be gone.
        return list(dict.fromkeys([*self._order, *self._seeds]))

    def _known_by(self, node: Node, timeout: float) -> tuple[Owners, frozenset[Node], frozenset[Node]]:
        give_up_at = clock() + timeout
        connection = self.open_to(node, timeout)
        try:
            connection.send_command("CLUSTER", "SLOTS", check_health=False)
            hear(connection, give_up_at - clock())
            rows = connection.read_response()
        finally:
            connection.disconnect()
        if not rows:
            raise NoMaster("it knows of no server that has slots")
        owners: Owners = [None] * SLOTS
        masters, replicas = set(), set()
        for first, last, *servers in rows:
            owner, *others = (self._told_by(node, server) for server in servers)
            owners[first : last + 1] = [owner] * (last + 1 - first)
            masters.add(owner)
            replicas.update(others)
        return owners, frozenset(masters), frozenset(replicas)

    def _told_by(self, node: Node, told: Any) -> Node:
        host, port, *_ = told
        return self._reached(node.host if host in _NOT_KNOWN else host, port)

    def _reached(self, host: str, port: int) -> Node:
        try:
            return Node(*self._remap((host, int(port))))
        except Exception as error:
            problem = f"address_remap has failed for ({host!r}, {port}): {type(error).__name__}: {error}"
            raise NoMaster(problem, "let address_remap return (host, port) for each server of the cluster") from error

    def _take(self, owners: Owners, masters: frozenset[Node]) -> None:
        before, gone = self._owners, self.masters - masters
        self._owners, self.masters = owners, masters
        changes = {(old, new) for old, new in zip(before, owners, strict=False) if old != new and old and new}
        if changes or gone:
            self._changed(changes, gone)

    def _hole(self, slot: int) -> NoMaster:
        holes = [number for number, owner in enumerate(self._owners) if owner is None]
        others = f" and {len(holes) - 1} others" if len(holes) > 1 else ""
        return NoMaster(
            f"no server of the cluster has slot {slot}{others}: bring back the server that had it, or give it to "
            "another one (redis-cli --cluster fix)"
        )

    def _why_nobody_knows(self, errors: dict[Node, exceptions.RedisError]) -> NoMaster:
        problems = dict.fromkeys(self._candidates(), "it was not asked in time")
        problems |= {node: problem_of(error).partition(": ")[2] for node, error in errors.items()}
        told = "; ".join(f"{node}: {why}" for node, why in problems.items())
        advice = [each for error in errors.values() if (each := _advice_about(error)) is not None]
        # A refusal by one of several may be the fault of that one.
        never = advice and len(advice) == len(problems)
        problem = f"no server of the cluster says who has which slot ({told})"
        return NoMaster(problem, advice[0] if never else None, errors=errors.values())


def _advice_about(error: exceptions.RedisError) -> str | None:
    """The setting to change; None if the error may pass without a change."""
    if _NO_CLUSTER in str(error):
        return "it is in no cluster: let singleton_lock_url begin with redis://, or rediss:// with TLS"
    return what_to_set(error)
