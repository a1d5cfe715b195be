"""Listens to the channels of a store, on one connection to each of its servers."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from redis import exceptions

from celery_singleton_lock.log import log
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.redis import packed
from celery_singleton_lock.stores.redis.answers import advice_about, is_passing, problem_of
from celery_singleton_lock.stores.threads import LINGERS, DaemonThread, original, patched_by

if TYPE_CHECKING:
    from celery_singleton_lock.stores.redis.connection import Connections

LISTENING = "(listening)"
DEAF = "(deaf)"
"""Callbacks hear these, too. `LISTENING`: subscribed from now on. `DEAF`: messages may be missed until `LISTENING`."""

_ANSWERS_WITHIN = 5.0  # seconds
_ASK_EVERY = 15.0  # seconds of silence before the server is probed
_FOUND_WITHIN = 2.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 4.0
_AFTER_A_BUG = 1.0
_POLLIN = 1
_NEVER = float("inf")


class _Wire:
    def __init__(self, server: "Connections") -> None:
        self.server = server
        self.connection: Any = None
        self.asked = deque[tuple[str, str]]()  # expected replies in order, each a word and a channel
        self.heard_at = 0.0
        self.retry_at = _NEVER
        self.pause = _FIRST_PAUSE

    @property
    def due(self) -> float:
        if self.connection is None:
            return self.retry_at
        return min(self.retry_at, self.heard_at + (_ANSWERS_WITHIN if self.asked else _ASK_EVERY))

    def try_later(self) -> None:
        if self.retry_at == _NEVER:
            self.retry_at = clock() + self.pause
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.disconnect()
        self.connection = None
        self.asked.clear()

    def send(self, commands: Sequence[tuple[str, str]]) -> None:
        if not self.asked:
            self.heard_at = clock()
        self.asked += [(word.lower(), channel) for word, channel in commands]
        self.connection.send_packed_command([b"".join([packed(*command) for command in commands])], check_health=False)


class Listener(DaemonThread):
    """The thread that hears the channels of one store.

    A signal handler may raise anywhere, so callers change `_heard`, `_changed` and `_untold` in single steps.
    """

    is_native = True

    def __init__(self, servers: "Connections") -> None:
        self._heard: dict[str, Callable[[str], None]] = {}
        self._servers = servers
        self._changed = deque[str]()
        self._wires: dict[Connections, _Wire] = {}
        self._wire_of: dict[str, _Wire] = {}
        self._deaf: dict[str, None] = {}  # channels without a subscription
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self.is_refused: bool = False  # this user may not subscribe
        # If two threads start, the second waits for the first to end.
        self._alone = original("_thread", "allocate_lock")()
        self._untold = deque[Callable[[], None]]()

    def add(self, channel: str, heard: Callable[[str], None]) -> None:
        """Call *heard* with each message, and with `LISTENING` and `DEAF`. The same word may come more than once.

        *heard* runs in a real thread, even among greenlets, and must not block. At `LISTENING`, earlier messages may
        have been missed, so the waiter must ask the store.
        """
        self._heard[channel] = heard
        self._change(channel)

    def remove(self, channel: str, *, at_once: bool = True) -> None:
        """Stop calling *heard*, which may still be running.

        *at_once* wakes the thread to unsubscribe, and that thread competes with the caller for the GIL. Without
        *at_once*, the thread unsubscribes later, which is enough if no message can come.
        """
        if self._heard.pop(channel, None) is not None:
            if at_once:
                self._change(channel)
            else:
                self._changed.append(channel)

    def _change(self, channel: str) -> None:
        self._changed.append(channel)
        self.ensure()
        with suppress(BlockingIOError):
            original("os", "write")(self._pipe[1], b"!")
        with suppress(IndexError):
            while self._untold:
                self._untold.popleft()()

    def _has_work(self) -> bool:
        return bool(self._heard)

    def _log(self, line: Callable[[], None]) -> None:
        if patched_by() is None:
            line()
        else:
            # The log's locks belong to greenlets, so this real thread must not take them.
            self._untold.append(line)

    def _report(self, error: Exception) -> None:
        self._log(partial(log.error, "lock.bug", "the thread goes on", where="listener", exc_info=error))

    def _step(self) -> bool:
        with self._alone:
            try:
                return self._listen()
            except Exception as error:  # noqa: BLE001 (whatever is broken, the thread goes on; the log tells)
                self._report(error)
                self._hang_up()
                self._changed.extend(list(self._heard))
                original("time", "sleep")(_AFTER_A_BUG)
                return True

    def _listen(self) -> bool:
        """False if no channel is left."""
        changed = dict.fromkeys([self._changed.popleft() for _ in range(len(self._changed))])
        for wire, commands in self._commands(changed).items():
            with self._losing(wire):
                wire.send(commands)
        if not self._wait(self._pipe[0]) and not self._heard:
            self._hang_up()
            return False
        for wire in list(self._wires.values()):
            with self._losing(wire):
                # Read first, otherwise a reply that came while this process was paused would count as missing.
                self._read(wire)
                self._look_after(wire)
        return True

    def _wait(self, pipe: int) -> bool:
        poll = original("select", "poll")()
        now = clock()
        poll.register(pipe, _POLLIN)
        due = [now + LINGERS]
        for wire in self._wires.values():
            due += [wire.due, now + wire.server.looks_every]
            if wire.connection is not None and wire.server.looks_every == _NEVER:
                poll.register(wire.connection._sock, _POLLIN)  # noqa: SLF001 (redis-py has no public way)
        ready = poll.poll(max(0, ceil(1000 * (min(due) - now))))
        if any(readable == pipe for readable, _ in ready):
            original("os", "read")(pipe, 4096)
        return bool(ready)

    def _commands(self, channels: Iterable[str]) -> dict[_Wire, list[tuple[str, str]]]:
        commands: dict[_Wire, list[tuple[str, str]]] = {}
        for channel in channels:
            wire = self._wire_of.pop(channel, None)
            if channel not in self._heard:
                self._deaf.pop(channel, None)
                if wire is not None:
                    commands.setdefault(wire, []).append((wire.server.unsubscribe, channel))
            elif wire := wire or self._wire_to(channel):
                self._wire_of[channel] = wire
                commands.setdefault(wire, []).append((wire.server.subscribe, channel))
            else:
                self._deafen(channel)
        return commands

    def _wire_to(self, channel: str) -> _Wire | None:
        wire = self._wire_at(self._servers)
        try:
            # Do not ask a silent cluster for owners before `retry_at`, otherwise each channel would wait for a timeout.
            if wire.connection is not None or wire.retry_at == _NEVER:
                wire = self._wire_at(self._servers.at_owner_of(channel, clock() + _FOUND_WITHIN))
            if wire.connection is None and wire.retry_at == _NEVER:
                wire.connection = wire.server.open(clock() + _FOUND_WITHIN)
        except exceptions.RedisError:
            wire.try_later()
        return wire if wire.connection is not None else None

    def _wire_at(self, server: "Connections") -> _Wire:
        return self._wires.get(server) or self._wires.setdefault(server, _Wire(server))

    def _read(self, wire: _Wire) -> None:
        while (connection := wire.connection) is not None and connection.can_read(timeout=0):
            wire.heard_at = clock()
            try:
                reply = connection.read_response()
            except exceptions.ResponseError as error:
                word, channel = wire.asked.popleft() if wire.asked else ("", "")
                if word != wire.server.subscribe.lower():
                    # Raise, so that the connection is closed. Otherwise the subscription would outlive the refused
                    # UNSUBSCRIBE.
                    raise
                self._refused(wire, channel, error)
                continue
            word, channel, text = reply
            if is_expected := bool(wire.asked) and wire.asked[0] == (word, channel):
                wire.asked.popleft()
            is_ours = self._wire_of.get(channel) is wire
            if word.endswith("message"):
                self._tell(channel, text)
            elif word == wire.server.subscribe.lower() and is_ours:
                wire.pause = _FIRST_PAUSE
                self._deaf.pop(channel, None)
                self._tell(channel, LISTENING)
            elif word == "sunsubscribe" and is_ours and not is_expected:
                # The slot of the channel has moved to another server.
                self._seek_again(wire, [channel])

    def _refused(self, wire: _Wire, channel: str, error: exceptions.ResponseError) -> None:
        if isinstance(error, exceptions.AskError) or is_passing(error):
            self._seek_again(wire, [channel])
            return
        self._wire_of.pop(channel, None)
        if not self.is_refused:
            self.is_refused = True
            advice = advice_about(error, self._servers.part.user)
            words = "%s; waiting calls poll instead%s", problem_of(error), f": {advice}" if advice else ""
            self._log(partial(log.warning, "lock.not_subscribed", *words, store=self._servers.address))
        self._tell(channel, DEAF)

    def _seek_again(self, wire: _Wire, channels: Iterable[str]) -> None:
        # `close` also makes the cluster look up the owner again.
        wire.server.close()
        wire.try_later()
        for channel in channels:
            self._wire_of.pop(channel, None)
            self._deafen(channel)

    def _look_after(self, wire: _Wire) -> None:
        now = clock()
        if wire.retry_at <= now:
            wire.retry_at = _NEVER
            self._changed.extend(list(self._deaf))
        if wire.connection is not None and wire.due <= now:
            if wire.asked:
                raise exceptions.TimeoutError("no reply in time")
            # Probe with SUBSCRIBE, because PING would be one more right that the user needs.
            channel = next((channel for channel, at in self._wire_of.items() if at is wire), None)
            if channel is None:
                wire.hang_up()
            else:
                wire.send([(wire.server.subscribe, channel)])

    @contextmanager
    def _losing(self, wire: _Wire) -> Iterator[None]:
        try:
            yield
        except exceptions.RedisError:
            wire.hang_up()
            self._seek_again(wire, [channel for channel, at in self._wire_of.items() if at is wire])

    def _hang_up(self) -> None:
        for wire in self._wires.values():
            wire.hang_up()
        self._wires.clear()
        self._wire_of.clear()

    def _deafen(self, channel: str) -> None:
        if channel not in self._deaf:
            self._deaf[channel] = None
            self._tell(channel, DEAF)

    def _tell(self, channel: str, what: str) -> None:
        try:
            if (heard := self._heard.get(channel)) is not None:
                heard(what)
        except Exception as error:  # noqa: BLE001 (no other channel is harmed)
            self._report(error)
