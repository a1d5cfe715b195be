"""Connections to all servers of a cluster; a request about a key goes to the server that has the key."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redis import exceptions

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.redis.cluster_url import Node
from celery_singleton_lock.stores.redis.opening import REPLY_TIMEOUT, shut
from celery_singleton_lock.stores.redis.refusals import NoMaster, is_elsewhere
from celery_singleton_lock.stores.redis.replicas import Replicas
from celery_singleton_lock.stores.redis.script import Script
from celery_singleton_lock.stores.redis.slot_map import SlotMap, slot_of
from celery_singleton_lock.stores.redis.wire import Wire

T = TypeVar("T")
Call = tuple[Sequence[str], Sequence[str]]

# A slot moves to one server at a time, so after more redirects the servers of the cluster do not agree.
_MOST_REDIRECTS = 5


class _OfOneNode:
    """The source of connections to one server of a cluster."""

    may_move = False

    def __init__(self, slots: SlotMap, node: Node) -> None:
        self._slots, self._node = slots, node
        self.address, self.pool = str(node), slots.pool
        self.look_again, self.weigh = slots.look_again, slots.weigh

    def open(self, timeout: float) -> Any:
        return self._slots.open_to(self._node, timeout)


class NodeWire(Wire):
    """Connections to one server of a cluster. A script there counts only the listeners at this server."""

    _verbs = "SSUBSCRIBE", "SUNSUBSCRIBE"

    def leave(self) -> None:
        """Close the idle connections, and have the waiters listen elsewhere."""
        self.close()
        for ear in list(self._listening):
            shut(ear)

    def _put_back_after(self, error: exceptions.ResponseError, connection: Any) -> None:
        if isinstance(error, exceptions.TryAgainError):
            # One of two keys has moved before the other; the connection is good.
            self._put_back(connection)
        else:
            super()._put_back_after(error, connection)

    def _drop_others(self, error: BaseException, idle_since: float) -> None:
        # One channel has moved to another server; the connection is good.
        if not isinstance(error, exceptions.AskError):
            super()._drop_others(error, idle_since)


class _Asking(Wire):
    """Requests to a server to which a key has moved before its slot has."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def call(self, *command: str, timeout: float = REPLY_TIMEOUT) -> Any:
        return self.call_many([command], timeout)[0]

    def call_many(self, commands: Sequence[Sequence[str]], timeout: float) -> list[Any]:
        asking = [each for command in commands for each in (("ASKING",), command)]
        return self._wire.call_many(asking, timeout)[1::2]


class ClusterWire(Wire):
    """Connections to the servers of a cluster.

    Each server has a wire of its own, so a silent server does not delay requests to the others. A request without a
    key goes to any server.

    Arguments:
        slots: Which server has which slot.
        reconnected: Called when there is a connection again after one was lost.
    """

    def __init__(self, slots: SlotMap, reconnected: Callable[[], None]) -> None:
        super().__init__(slots, reconnected)
        self._slots = slots
        self._wires: dict[Node, NodeWire] = {}
        self._silent: set[Node] = set()

    def call(self, *command: str, timeout: float = REPLY_TIMEOUT) -> Any:
        """Send a command about the key that follows its name, or one about none."""
        if len(command) == 1:
            return super().call(*command, timeout=timeout)
        return self.at(command[1], lambda wire, left: wire.call(*command, timeout=left), timeout)

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[str], timeout: float) -> Any:
        """Run a script where its keys are."""
        return self.at(keys[0], lambda wire, left: wire.run(script.sharded, keys, arguments, left), timeout)

    def run_many(self, script: Script, calls: Sequence[Call], timeout: float) -> list[Any]:
        """Run a script several times, in one round trip to each server that it concerns."""
        replies = self.run_each(script, calls, timeout)
        for reply in replies:
            if isinstance(reply, exceptions.RedisError):
                raise reply
        return replies

    def run_each(
        self, script: Script, calls: Sequence[Call], timeout: float, replicas: Replicas | None = None
    ) -> list[Any]:
        """The same, but if a server refuses or does not answer, the error is a reply, because others have answered.

        With *replicas*, the error that too few of them have a write is such a reply.
        """
        give_up_at = clock() + timeout
        replies: list[Any] = [None] * len(calls)
        groups: dict[Node, list[int]] = {}
        for number, (keys, _) in enumerate(calls):
            try:
                groups.setdefault(self._slots.owner_of(keys[0], give_up_at - clock()), []).append(number)
            except exceptions.RedisError as error:
                replies[number] = error
        # The servers that were silent the last time are asked last; each leaves time for the next ones.
        for done, node in enumerate(sorted(groups, key=self._silent.__contains__)):
            group, now = groups[node], clock()
            until = now + (give_up_at - now) / (len(groups) - done)
            answers = self._run_at(node, script, [calls[number] for number in group], until, replicas)
            for number, answer in zip(group, answers, strict=True):
                replies[number] = answer
        return replies

    def spelled(self, script: Script) -> Script:
        """As a server of a cluster has it."""
        return script.sharded

    def run_all(
        self, commands: Sequence[Sequence[str]], calls: Sequence[tuple[Script, str, Sequence[str]]], timeout: float
    ) -> None:
        """Send commands and scripts that are all about keys of one slot."""
        sharded = [(script.sharded, key, arguments) for script, key, arguments in calls]
        said = [("SPUBLISH", *rest) if verb == "PUBLISH" else (verb, *rest) for verb, *rest in commands]
        self.at(calls[0][1], lambda wire, left: wire.run_all(said, sharded, left), timeout)

    def make_sure(self, key: str, timeout: float) -> None:
        """Nothing to do: a server of a cluster that is no longer the master has already said so."""

    def subscribe(self, channel: str, timeout: float) -> Any:
        """A connection to the server that has the key of *channel*, which hears it there."""
        return self.at(channel, lambda wire, left: wire.subscribe(channel, left), timeout)

    def unsubscribe(self, connection: Any) -> None:
        """Keep *connection* for the next who waits for a key of its server."""
        wire = self._wires.get(Node(connection.host, connection.port))
        if wire is None:
            connection.disconnect()
        else:
            wire.unsubscribe(connection)

    def open_ahead(self) -> None:
        """Open connections for the next calls in the background."""
        if not self._slots.masters:
            self._slots.ask_ahead()
        for node in self._slots.masters:
            self._wire_to(node).open_ahead()

    def close(self) -> None:
        """Close the idle connections."""
        super().close()
        for wire in list(self._wires.values()):
            wire.close()

    def leave_all_but(self, masters: frozenset[Node]) -> None:
        """Leave servers that have no slots any more."""
        for node in list(self._wires):
            if node not in masters and (wire := self._wires.pop(node, None)) is not None:
                wire.leave()

    def to_masters(self, timeout: float) -> list[Wire]:
        """To each server that has slots."""
        return [self._wire_to(node) for node in self._slots.ask_for_masters(timeout)]

    def _wire_to(self, node: Node) -> NodeWire:
        wire = self._wires.get(node)
        return wire or self._wires.setdefault(node, NodeWire(_OfOneNode(self._slots, node), self._reconnected))

    def at(self, key: str, ask: Callable[[Wire, float], T], timeout: float) -> T:
        """The same, at the server to which *key* has moved."""
        give_up_at = clock() + timeout
        node = self._slots.owner_of(key, timeout)
        wire: Wire = self._wire_to(node)
        for _ in range(_MOST_REDIRECTS):
            try:
                answer = ask(wire, max(0.0, give_up_at - clock()))
            except exceptions.MovedError as error:
                node = self._slots.moved(error, node)
                wire = self._wire_to(node)
            except exceptions.AskError as error:
                node = self._slots.told(error, node)
                wire = _Asking(self._wire_to(node))
            except exceptions.RedisError as error:
                self._note(node, error)
                raise
            else:
                self._silent.discard(node)
                return answer
        raise NoMaster(f"the servers of the cluster do not agree on who has slot {slot_of(key)}")

    def _note(self, node: Node, error: exceptions.RedisError) -> None:
        is_away = isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError) or is_elsewhere(error)
        if is_away and not isinstance(error, exceptions.TryAgainError):
            self._silent.add(node)
            self._slots.doubt(node)

    def _run_at(
        self, node: Node, script: Script, calls: Sequence[Call], give_up_at: float, replicas: Replicas | None
    ) -> list[Any]:
        plain = [(str(len(keys)), *keys, *arguments) for keys, arguments in calls]
        known = [("EVALSHA", script.sharded.digest, *call) for call in plain]
        replies = self._at_once(node, known, give_up_at, replicas)
        unknown = [number for number, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
        if len(unknown) > 1:
            # After a restart or a failover, the first call loads the script for the others, which then take one round
            # trip as well.
            first, *others = unknown
            replies[first] = self._run_again(script, calls[first], give_up_at, replicas)
            loaded = self._at_once(node, [known[number] for number in others], give_up_at, replicas)
            for number, reply in zip(others, loaded, strict=True):
                replies[number] = reply
        for number, reply in enumerate(replies):
            # Calls whose keys have moved follow them, one by one.
            if isinstance(reply, exceptions.AskError | exceptions.NoScriptError):
                replies[number] = self._run_again(script, calls[number], give_up_at, replicas)
        return replies

    def _at_once(
        self, node: Node, commands: Sequence[Sequence[str]], give_up_at: float, replicas: Replicas | None
    ) -> list[Any]:
        left = give_up_at - clock()
        last = [] if replicas is None else [replicas.wait(left)]
        try:
            replies = self._wire_to(node).replies_to([*commands, *last], left)
        except exceptions.RedisError as error:
            self._note(node, error)
            return [error] * len(commands)
        refused = next((reply for reply in replies if isinstance(reply, exceptions.RedisError)), None)
        if refused is None:
            self._silent.discard(node)
        else:
            self._note(node, refused)
        return replies if replicas is None else replicas.checked(replies)

    def _run_again(self, script: Script, call: Call, give_up_at: float, replicas: Replicas | None) -> Any:
        left = give_up_at - clock()
        try:
            if replicas is None:
                return self.run(script, *call, left)
            reply, acknowledged = replicas.run(self, script, *call, left)
            replicas.check(acknowledged)
            return reply
        except exceptions.RedisError as error:
            return error
