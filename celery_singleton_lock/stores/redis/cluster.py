"""Locks in a cluster, each at the server that has its slot."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import redis.cluster
from redis import Connection, ConnectionPool, SSLConnection, exceptions
from redis.crc import key_slot

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.redis import Input, packed
from celery_singleton_lock.stores.redis.answers import NotUsable, Part, none_of
from celery_singleton_lock.stores.redis.connection import Address, Connections, hosts_of, settled, where
from celery_singleton_lock.stores.redis.encoding import Script

_SLOTS = 16384
_PORT = 6379
_MOST_REDIRECTS = 5
_PATIENCE = 0.5  # seconds for each server that is asked for the owners of slots
_PAUSE = 0.25  # seconds between two requests for the owners
# Before redis-py 6.0, only this parser raises `MovedError` and `AskError`.
_PARSER = {"parser_class": redis.cluster.ClusterParser} if hasattr(redis.cluster, "ClusterParser") else {}


class NodeConnections(Connections):
    is_sharded = True
    publish = "SPUBLISH"
    subscribe = "SSUBSCRIBE"
    unsubscribe = "SUNSUBSCRIBE"
    is_doubted = False  # its slots may have moved, so ask for the owners again

    def close(self) -> None:
        super().close()
        self.is_doubted = True


class Cluster(NodeConnections):
    """Sends each request to the server that has its key.

    The table of owners is replaced as a whole, because a signal handler may raise anywhere.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        scheme = url.partition("://")[0]
        rest = dict(options)
        example = f"{scheme}://host:port;host:port"
        self._seeds, said = hosts_of(url, scheme, _PORT, example)
        address = f"{scheme}://{';'.join(map(where, self._seeds))}"
        for database in (said.pop("db", 0), rest.pop("db", 0)):
            if str(database or 0) != "0":
                raise ConfigurationError(
                    f"singleton_lock_url: {address} cannot be used with database {database}: a cluster has database 0 "
                    "alone, so let the URL end without one; give singleton_lock_prefix to keep apps apart"
                )
        self._remap = rest.pop("address_remap", None) or (lambda address: address)
        if not callable(self._remap):
            raise ConfigurationError(
                f"address_remap={self._remap!r} is not allowed: give a function that takes (host, port) as the cluster "
                "reports it and returns (host, port) as this process reaches it"
            )
        kind = SSLConnection if scheme.startswith("rediss") else Connection
        super().__init__(settled(partial(ConnectionPool, kind), {**said, **rest, **_PARSER}, address), address)

    def _begin(self) -> None:
        self._nodes: dict[Address, NodeConnections] = {}
        self._order = list(self._seeds)
        self._owners: list[Address | None] = []
        self._learned_at = float("-inf")

    def call(self, key: str, commands: Sequence[bytes], until: float) -> list[Any]:
        node = self.owner_of(key, until)
        asks = False
        for _ in range(_MOST_REDIRECTS):
            sent = [each for command in commands for each in (packed("ASKING"), command)] if asks else commands
            try:
                replies = self.at(node).call(key, sent, until)
            except exceptions.AskError as redirect:
                # A `MovedError` is an `AskError`, too.
                asks = not isinstance(redirect, exceptions.MovedError)
                if not asks:
                    # Other slots of this server may have moved, too.
                    self.at(node).is_doubted = True
                # An empty host means the server that answers.
                node = self._reached(redirect.host or node[0], redirect.port)
            else:
                return replies[1::2] if asks else replies
        raise NotUsable(f"the servers of the cluster do not agree on who has {key}")

    def run(self, script: Script, inputs: Sequence[Input], until: float, replicas: int = 0) -> list[Any]:
        replies: dict[int, Any] = {}
        groups: dict[Address, list[int]] = {}
        for number, (key, _) in enumerate(inputs):
            groups.setdefault(self.owner_of(key, until), []).append(number)
        for node, group in groups.items():
            own = [inputs[number] for number in group]
            try:
                answers = self.at(node).run(script, own, until, replicas)
            except exceptions.AskError:
                # Some slots have moved, or are moving. Find their keys by halving the list.
                middle = len(own) // 2
                if middle:
                    halves = own[:middle], own[middle:]
                    answers = [each for half in halves for each in self.run(script, half, until, replicas)]
                else:
                    answers = super().run(script, own, until, replicas)
            replies.update(zip(group, answers, strict=True))
        return [replies[number] for number in range(len(inputs))]

    def part_of(self, key: str) -> Part:
        node = self._known_owner(key)
        return self.part if node is None else self.at(node).part

    def at_owner_of(self, key: str, until: float) -> Connections:
        return self.at(self.owner_of(key, until))

    def to_masters(self, bound: float) -> Sequence[Connections]:
        self.part.persist(self._learn, bound)
        return [self.at(node) for node in _masters_in(self._owners)]

    def close_spare(self) -> None:
        for each in list(self._nodes.values()):
            each.close_spare()

    def close(self) -> None:
        for each in list(self._nodes.values()):
            each.close()

    def at(self, node: Address) -> NodeConnections:
        found = self._nodes.get(node)
        if found is None:
            host, port = node
            arguments = {**self.pool.connection_kwargs, "host": host, "port": port}
            pool = ConnectionPool(self.pool.connection_class, **arguments)
            found = self._nodes.setdefault(node, NodeConnections(pool, where(node), f"{self.address} ({where(node)})"))
        return found

    def _known_owner(self, key: str) -> Address | None:
        return self._owners[key_slot(key.encode())] if self._owners else None

    def owner_of(self, key: str, until: float) -> Address:
        node = self._known_owner(key)
        if node is None or (self.at(node).is_doubted and clock() >= self._learned_at + _PAUSE):
            try:
                self._learn(until)
            except exceptions.RedisError:
                # Try the last known owner, whose error says more.
                if node is None:
                    raise
            node = self._known_owner(key)
        if node is None:
            holes = sum(owner is None for owner in self._owners)
            raise NotUsable(
                f"no server of the cluster has slot {key_slot(key.encode())} and {holes - 1} others: bring back the "
                "server that had them, or assign them to another one (redis-cli --cluster fix)"
            )
        return node

    def _learn(self, until: float) -> None:
        """Learn the owners of all slots from the first server that answers."""
        self._learned_at = clock()
        answers: dict[str, exceptions.RedisError] = {}
        for node in dict.fromkeys([*self._order, *self._seeds]):
            try:
                (rows,) = self.at(node).call("", [packed("CLUSTER", "SLOTS")], min(until, clock() + _PATIENCE))
            except exceptions.RedisError as error:
                answers[where(node)] = error
                continue
            if rows:
                break
            answers[where(node)] = NotUsable("it knows of no server that has slots")
        else:
            raise none_of("no server of the cluster says who has which slot", answers)
        owners: list[Address | None] = [None] * _SLOTS
        known = set[Address]()
        for start, end, *servers in rows:
            nodes = [self._reached(node[0] if host in (None, "", "?") else host, port) for host, port, *_ in servers]
            owners[start : end + 1] = [nodes[0]] * (end + 1 - start)
            known.update(nodes)
        self._order = sorted(known, key=lambda each: (self.at(each).is_doubted, each))
        for each in list(self._nodes.values()):
            each.is_doubted = False
        before = self._owners
        self._owners = owners
        for gone in set(_masters_in(before)).difference(_masters_in(owners)):
            self.tell_of_move(gone, owners[before.index(gone)])
            self.at(gone).close()

    def _reached(self, host: str, port: int) -> Address:
        try:
            reached, at_port = self._remap((host, int(port)))
        except Exception as error:
            problem = f"address_remap has failed for ({host!r}, {port}): {type(error).__name__}: {error}"
            raise NotUsable(problem, "let address_remap return (host, port) for each server of the cluster") from error
        return reached, at_port


def _masters_in(owners: Sequence[Address | None]) -> list[Address]:
    return sorted({node for node in owners if node is not None})
