"""Locks in a cluster: each lock at the server that has its slot."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import redis.cluster
from redis import Connection, ConnectionPool, SSLConnection, exceptions
from redis.crc import key_slot

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Answer, Claim
from celery_singleton_lock.stores.redis.connection import (
    OURS,
    Call,
    Command,
    Connections,
    RetryLoop,
    hosts_of,
    settle,
    where,
)
from celery_singleton_lock.stores.redis.encoding import RENEW, Script, milliseconds
from celery_singleton_lock.stores.redis.errors import NotUsable, accepted, is_elsewhere, none_of
from celery_singleton_lock.stores.redis.inventory import with_tag
from celery_singleton_lock.stores.redis.store import ANSWERS, ServerClock, Store

logger = logging.getLogger("celery_singleton_lock")

_SLOTS = 16384
_PORT = 6379
# A slot moves to one server at a time, so after more redirects the servers of the cluster do not agree.
_MOST_REDIRECTS = 5
# Seconds for each server that is asked who has which slot, and until it is asked for again.
_PATIENCE, _PAUSE = 0.5, 0.25
# Before 6.0, redis-py makes MOVED and ASK of an answer only with this.
_PARSER = {"parser_class": redis.cluster.ClusterParser} if hasattr(redis.cluster, "ClusterParser") else {}
# Enough tries to find a key for each master, unless one has almost no slots.
_TRIES_PER_MASTER = 30

Node = tuple[str, int]


class NodeConnections(Connections):
    """Connections to one server of a cluster. A script there counts only the listeners at this server."""

    publish, _subscribe = "SPUBLISH", "SSUBSCRIBE"

    def form_of(self, script: Script) -> Script:
        return script.sharded


class Cluster(NodeConnections):
    """Requests about a key go to the server that has it; one that is silent concerns no other.

    What is known is replaced as a whole, so a signal may raise anywhere.

    Arguments:
        url: Some of the servers, between semicolons.
        options: Arguments for redis-py's connections, and `address_remap`, as redis-py has it for clusters.
        reconnected: Called when there is a connection again after one was lost.
        changed: Called when slots have moved, with pairs of servers, each the old and the new one, and with the
            servers that have no slots any more.

    Raises:
        ConfigurationError: The URL or an option is not one that redis-py knows.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        reconnected: Callable[[], None],
        changed: Callable[[set[tuple[Node, Node]], set[Node]], None],
    ) -> None:
        scheme, rest = url.partition("://")[0], dict(options)
        example = f"{scheme}://host:port;host:port"
        self._seeds, said = hosts_of(url, scheme, _PORT, "a server of one cluster", example)
        rest = {**said, **rest}
        address = f"{scheme}://{';'.join(map(where, self._seeds))}"
        _refuse_database(rest.pop("db", 0), said.get("db"), address)
        self._remap, self._changed = _checked(rest.pop("address_remap", None)), changed
        try:
            kind = SSLConnection if scheme.startswith("rediss") else Connection
            pool = ConnectionPool(kind, **{**rest, **_PARSER, **OURS})
            settle(pool)
        except (TypeError, exceptions.RedisError) as error:
            raise ConfigurationError(f"singleton_lock_url: {address} cannot be used: {error}") from error
        super().__init__(pool, address, reconnected)

    def _begin(self) -> None:
        self._nodes: dict[Node, NodeConnections] = {}
        self._order = list(self._seeds)
        self._owners: list[Node | None] = []
        self._doubted: set[Node] = set()
        self._learned_at = float("-inf")

    def ask(self, key: str, commands: Sequence[Command], timeout: float) -> list[Any]:
        """The same, at the server that has *key*, wherever its slot or the key itself has moved."""
        until = clock() + timeout
        node, asks = self.owner_of(key, timeout), False
        for _ in range(_MOST_REDIRECTS):
            sent = [each for command in commands for each in (("ASKING",), command)] if asks else commands
            try:
                replies = self.at(node).ask(key, sent, until - clock())[1 if asks else 0 :: 2 if asks else 1]
            except exceptions.RedisError as error:
                self._doubt(node, error)
                raise
            redirect = next((reply for reply in replies if isinstance(reply, exceptions.AskError)), None)
            if redirect is None:
                return replies
            asks = not isinstance(redirect, exceptions.MovedError)
            # An empty host means the server that has answered.
            node = self._reached(redirect.host or node[0], redirect.port)
            if not asks:
                self._note(redirect.slot_id, node, until)
        raise NotUsable(f"the servers of the cluster do not agree on who has {key}")

    def run(self, script: Script, calls: Sequence[Call], timeout: float, replicas: int = 0) -> list[Any]:
        """The same, in one round trip to each server that it concerns.

        If a server does not answer, the error is a reply of each of its calls, because others have answered.
        """
        if len(calls) == 1:
            return super().run(script, calls, timeout, replicas)
        until = clock() + timeout
        replies: list[Any] = [None] * len(calls)
        groups: dict[Node, list[int]] = {}
        for number, (keys, _) in enumerate(calls):
            try:
                groups.setdefault(self.owner_of(keys[0], until - clock()), []).append(number)
            except exceptions.RedisError as error:
                replies[number] = error
        # Those that were silent the last time are asked last; each leaves time for the next ones.
        for done, node in enumerate(sorted(groups, key=self._doubted.__contains__)):
            group, left = groups[node], (until - clock()) / (len(groups) - done)
            answers = self._run_at(node, script, [calls[number] for number in group], left, replicas)
            for number, answer in zip(group, answers, strict=True):
                replies[number] = answer
        for number, answer in enumerate(replies):
            if isinstance(answer, exceptions.AskError):
                # Those whose keys have moved follow them, one by one.
                try:
                    (replies[number],) = super().run(script, [calls[number]], until - clock(), replicas)
                except exceptions.RedisError as error:
                    replies[number] = error
        return replies

    def _run_at(
        self, node: Node, script: Script, calls: Sequence[Call], timeout: float, replicas: int
    ) -> Sequence[Any]:
        try:
            return self.at(node).run(script, calls, timeout, replicas)
        except exceptions.RedisError as error:
            self._doubt(node, error)
            return [error] * len(calls)

    def make_sure(self, key: str, timeout: float) -> None:
        """Nothing to do: a server of a cluster that is no longer the master has already said so."""

    def listen(self, channel: str, timeout: float) -> Any:
        """A connection to the server that has the key of *channel*, which hears it there."""
        until = clock() + timeout
        node = self.owner_of(channel, timeout)
        try:
            try:
                return self.at(node).listen(channel, until - clock())
            except exceptions.MovedError as error:
                node = self._reached(error.host or node[0], error.port)
                self._note(error.slot_id, node, until)
                return self.at(node).listen(channel, until - clock())
        except exceptions.RedisError as error:
            self._doubt(node, error)
            raise

    def to_masters(self, timeout: float) -> Sequence[Connections]:
        self._learn(timeout)
        return [self.at(node) for node in self.masters]

    def close(self) -> None:
        for each in list(self._nodes.values()):
            each.close()

    @property
    def masters(self) -> list[Node]:
        return sorted({node for node in self._owners if node is not None})

    def at(self, node: Node) -> NodeConnections:
        found = self._nodes.get(node)
        if found is None:
            host, port = node
            arguments = {**self.pool.connection_kwargs, "host": host, "port": port}
            pool = ConnectionPool(self.pool.connection_class, **arguments)
            found = self._nodes.setdefault(node, NodeConnections(pool, where(node), self._reconnected))
        return found

    def known_owner(self, key: str) -> Node | None:
        """The server that has *key*, as far as that is known."""
        return self._owners[key_slot(key.encode())] if self._owners else None

    def owner_of(self, key: str, timeout: float) -> Node:
        """The server that has *key*; ask the cluster if that is not known, or in doubt.

        Raises:
            RedisError: Nobody says so within *timeout* seconds.
        """
        node = self.known_owner(key)
        if node is None or (node in self._doubted and clock() >= self._learned_at + _PAUSE):
            try:
                self._learn(timeout)
            except exceptions.RedisError:
                # The one that was right the last time may still be right, and its answer tells more.
                if node is None:
                    raise
            node = self.known_owner(key)
        if node is None:
            holes = sum(owner is None for owner in self._owners)
            raise NotUsable(
                f"no server of the cluster has slot {key_slot(key.encode())} and {holes - 1} others: bring back the "
                "server that had them, or assign them to another one (redis-cli --cluster fix)"
            )
        return node

    def _doubt(self, node: Node, error: exceptions.RedisError) -> None:
        """It did not answer, so another one may have its slots by now."""
        is_away = isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError) or is_elsewhere(error)
        if is_away and not isinstance(error, exceptions.TryAgainError):
            self._doubted.add(node)

    def _note(self, slot: int, node: Node, until: float) -> None:
        """One slot has another server from now on; others may have moved as well."""
        if clock() >= self._learned_at + _PAUSE:
            with suppress(exceptions.RedisError):
                self._learn(until - clock(), node)
        if self._owners and self._owners[slot] != node:
            owners = self._owners.copy()
            owners[slot] = node
            self._take(owners)

    def _learn(self, timeout: float, *first: Node) -> None:
        """Ask one server after the other who has which slot, until one knows; those that are silent, last.

        Raises:
            RedisError: None does.
        """
        self._learned_at = began = clock()
        answers: dict[str, exceptions.RedisError | str] = {}
        for node in dict.fromkeys([*first, *self._order, *self._seeds]):
            left = min(_PATIENCE, began + timeout - clock())
            try:
                (rows,) = accepted(self.at(node).ask("", [("CLUSTER", "SLOTS")], left)) if left > 0 else ([],)
            except exceptions.RedisError as error:
                answers[where(node)] = error
                continue
            if rows:
                break
            answers[where(node)] = "it knows of no server that has slots" if left > 0 else "it was not asked in time"
        else:
            raise none_of("no server of the cluster says who has which slot", answers)
        owners: list[Node | None] = [None] * _SLOTS
        known = set[Node]()
        for start, end, *servers in rows:
            nodes = [self._reached(node[0] if host in (None, "", "?") else host, port) for host, port, *_ in servers]
            owners[start : end + 1] = [nodes[0]] * (end + 1 - start)
            known.update(nodes)
        self._order = sorted(known, key=lambda each: (where(each) in answers or each in self._doubted, each))
        self._doubted = set()
        self._take(owners)

    def _take(self, owners: list[Node | None]) -> None:
        before, masters = self._owners, set(self.masters)
        self._owners = owners
        gone = masters - set(self.masters)
        changes = {(old, new) for old, new in zip(before, owners, strict=False) if old != new and old and new}
        if changes or gone:
            self._changed(changes, gone)
        for node in gone:
            if (left := self._nodes.pop(node, None)) is not None:
                left.leave()

    def _reached(self, host: str, port: int) -> Node:
        try:
            reached_host, reached_port = self._remap((host, int(port)))
        except Exception as error:
            problem = f"address_remap has failed for ({host!r}, {port}): {type(error).__name__}: {error}"
            raise NotUsable(problem, "let address_remap return (host, port) for each server of the cluster") from error
        return reached_host, reached_port


class ClusterStore(Store):
    """Locks in a cluster of Redis or Valkey.

    Arguments:
        url: `redis+cluster://` or `rediss+cluster://`, with some of the servers between semicolons.
        options: Further arguments for redis-py's connections, and `address_remap`, as redis-py has it for clusters.
        replicas: How many replicas of a master must have a grant or a renewal before it counts.

    Raises:
        ConfigurationError: The URL or an option cannot be used.
    """

    has_parts = True
    _servers: Cluster

    def _connect(self, url: str, options: Mapping[str, Any]) -> Cluster:
        self._parts: dict[Node, tuple[RetryLoop, ServerClock]] = {}
        return Cluster(url, options, self._reconnected, self._slots_moved)

    def self_test(self, key: str, bound: float, ttls: Iterable[float] = ()) -> None:  # noqa: ARG002 (only administrators may read after how long a server is taken for dead)
        """Try each server that has slots, because the rights of a user can differ between them."""
        give_up_at = clock() + bound
        masters, _ = self._loop.persist(self._servers.to_masters, bound)
        keys: dict[Node | None, str] = {}
        for number in range(_TRIES_PER_MASTER * len(masters)):
            another = with_tag(key, number)
            keys.setdefault(self._servers.known_owner(another), another)
        for another in keys.values():
            self._loop.persist(partial(self._self_test, another), give_up_at - clock())

    def _other_commands(self, key: str) -> list[Command]:  # noqa: ARG002 (it is used only while slots move)
        # Then it is too late to find out that this right is missing.
        return [("ASKING",)]

    def part_of(self, key: str) -> Any:
        """The server that has *key*; before one is known, the cluster."""
        node = self._servers.known_owner(key)
        return self if node is None else self._part(node)

    def renew(self, claims: Sequence[Claim], timeout: float) -> Sequence[Answer | StoreError]:
        """Run renew.lua for each claim, those of one server in one go; a server that is silent concerns no other."""
        calls = {number: ([claim.key], [milliseconds(claim.ttl), claim.token]) for number, claim in enumerate(claims)}
        answers: dict[int, Answer | StoreError] = {}

        def ask(left: float) -> None:
            sent_at, pending = clock(), list(calls)
            replies = self._servers.run(RENEW, list(calls.values()), left, self._replicas) if calls else []
            for number, reply in zip(pending, replies, strict=True):
                if not isinstance(reply, exceptions.RedisError):
                    del calls[number]
                    answers[number] = ANSWERS[reply[0]]
                    self._of(claims[number].key)[1].compare(reply[-1], sent_at)
            accepted(replies)

        try:
            self._loop.persist(ask, timeout)
        except StoreError as error:
            if not answers:
                raise
            answers |= dict.fromkeys(calls, error)
        return [answers[number] for number in range(len(claims))]

    def _of(self, key: str) -> tuple[RetryLoop, ServerClock]:
        node = self._servers.known_owner(key)
        return (self._loop, self._clock) if node is None else self._part(node)

    def _part(self, node: Node) -> tuple[RetryLoop, ServerClock]:
        """The data about one server, which answers, or is silent, by itself, and has a clock of its own."""
        part = self._parts.get(node)
        if part is None:
            loop = RetryLoop(f"{self.address} ({where(node)})", self._servers.pool.connection_kwargs)
            part = self._parts.setdefault(node, (loop, ServerClock(self._stepped)))
        return part

    def _slots_moved(self, changes: set[tuple[Node, Node]], gone: set[Node]) -> None:
        # If slots have moved, the locks have moved along with them.
        for before, after in sorted({before: after for before, after in changes if before in gone}.items()):
            event = "lock.moved store=%s master=%s before=%s: all leases are renewed at the new master"
            logger.warning(event, self.address, where(after), where(before))
        if gone:
            self._reconnected()


def _refuse_database(database: Any, in_the_url: Any, address: str) -> None:
    for wrong in (in_the_url, database):
        if str(wrong or 0) != "0":
            raise ConfigurationError(
                f"singleton_lock_url: {address} cannot be used with database {wrong}: a cluster has database 0 alone, "
                "so let the URL end without one; give singleton_lock_prefix to keep apps apart"
            )


def _checked(remap: Any) -> Callable[[Node], Node]:
    if remap is not None and not callable(remap):
        raise ConfigurationError(
            f"address_remap={remap!r} is not allowed: give a function that takes (host, port) as the cluster reports "
            "it and returns (host, port) as this process reaches it"
        )
    return remap or (lambda address: address)
