"""A small world, played out: a run, a call that waits in its process, two in the broker, and one that comes later."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.records import Claim, Conflict, Grant
from tests.turn import LEADS_TO

KEY = "{key}"
TTL, LASTS = 1000.0, 3000.0
SHORT = 6.0
"""The turn of one message ends, and the message comes later."""
ON_ITS_WAY, TIME_TO_COME = 2.0, 3.0
NAMES = {"w": "WAITING", "c": "WOKEN", "o": "COMING", "u": "UNHEARD"}


@dataclass
class Call:
    """One call, and where it is; `asks` is the request of its run, `looks` that of its worker."""

    claim: Claim
    listens: bool = False
    refused_at: float = -1.0
    called_at: float = -1.0
    left_at: float = -ON_ITS_WAY
    turn_ends: float = float("inf")
    holds: bool = False
    is_over: bool = False

    @property
    def name(self) -> str:
        return self.claim.task_id

    def has_turn(self, now: float) -> bool:
        return self.refused_at >= 0 and now < self.turn_ends and not (self.holds or self.is_over)

    def is_there(self, now: float) -> bool:
        """Nobody may be granted the lock before it, if it was refused first."""
        if not self.has_turn(now):
            return False
        if self.called_at >= 0:
            return now - self.called_at < TIME_TO_COME
        return self.listens or (not self.claim.waits_here and now - self.left_at < ON_ITS_WAY)


@dataclass
class World:
    store: MemoryStore
    calls: list[Call] = field(default_factory=list)
    now: float = 0.0
    seen: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store.call("FLUSHALL")
        self.start = 1_800_000_000.0
        self.store._server.time = self.time  # type: ignore[method-assign]
        self.wire = self.store.servers.listen(f"{KEY}:nobody", clock() + 5.0)
        for name in ("run", "waits", "one", "two", "later"):
            lasts = SHORT if name == "one" else LASTS
            claim = Claim(KEY, f"of-{name}", TTL, task_id=name, turn_for=lasts, waits_here=name == "waits")
            self.calls.append(Call(claim))
        self.ask(self.calls[0])
        for each in self.calls[1:-1]:
            self.ask(each)

    def time(self) -> float:
        self.now += 1e-5
        return self.start + self.now

    def close(self) -> None:
        self.wire.disconnect()

    # What may happen now.

    def events(self) -> list[Callable[[], None]]:
        happen: list[Callable[[], None]] = [lambda: self.pass_time(2.13), lambda: self.pass_time(3.17)]
        for call in self.calls:
            if call.holds:
                happen.append(lambda call=call: self.release(call))  # type: ignore[misc]
            elif not call.is_over:
                happen.append(lambda call=call: self.ask(call))  # type: ignore[misc]
                happen.append(lambda call=call: (self.leave if call.listens else self.listen)(call))  # type: ignore[misc]
        return happen

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def listen(self, call: Call) -> None:
        """A worker has its message, or its process has a connection again; it looks, or asks, at once."""
        self._say("SUBSCRIBE", call)
        # From now on it is not on its way any more: if it is cut off, it is away.
        call.listens, call.left_at = True, -ON_ITS_WAY
        if call.claim.waits_here:
            self.ask(call)
        else:
            self._look(call)
        # A look may wake others.
        self._hear()

    def _look(self, call: Call) -> None:
        """Its worker knows its key, so a newcomer has a turn before its run has asked."""
        answer = self.store.look(call.claim)
        # A message that was called may be delivered again, and then waits again.
        call.called_at = -1.0
        if isinstance(answer, Conflict):
            assert self._in_line() or any(each.holds for each in self.calls), f"{call.name} waits for nobody"
            call.refused_at, call.claim = self.now, replace(call.claim, rank=answer.rank)
            call.turn_ends = float("inf")
        elif answer.comes:
            self._comes(call)

    def leave(self, call: Call) -> None:
        self._say("UNSUBSCRIBE", call)
        call.listens = False

    def ask(self, call: Call) -> None:
        if call.listens and not call.claim.waits_here:
            self.leave(call)
        there = [each for each in self._in_line() if each is not call and each.is_there(self.now)]
        before = [each.name for each in there if call.refused_at < 0 or each.refused_at < call.refused_at]
        answer = self.store.acquire(call.claim)
        call.called_at = -1.0
        if isinstance(answer, Grant):
            assert not [each for each in self.calls if each.holds], "one at a time"
            assert before == [], f"{call.name} passes those that are there"
            call.holds = True
        else:
            assert isinstance(answer, Conflict)
            is_held = any(each.holds for each in self.calls)
            # A newcomer waits for one that is away, too: for a moment.
            is_kept_out = call.refused_at < 0 and self._in_line()
            assert before or is_held or is_kept_out, f"{call.name} waits for one that is not there"
            call.refused_at = self.now if call.refused_at < 0 else call.refused_at
            call.left_at, call.turn_ends = self.now, float("inf")
            call.claim = replace(call.claim, rank=answer.rank)
        self._hear()

    def release(self, call: Call) -> None:
        self.store.release(call.claim, None)
        call.holds, call.is_over = False, True
        if call.listens:
            self.leave(call)
        self._hear()

    def _say(self, word: str, call: Call) -> None:
        self.wire.send_command(word, call.claim.channel)
        replies = [self.wire.read_response()]
        while replies[-1][0] == "message":
            replies.append(self.wire.read_response())
        self._heard(replies[:-1])

    def _hear(self) -> None:
        replies = []
        while self.wire.can_read(timeout=0):
            replies.append(self.wire.read_response())
        self._heard(replies)

    def _heard(self, replies: list[Any]) -> None:
        for _, channel, text in replies:
            for call in self.calls:
                if call.claim.channel == channel and text == "free" and call.listens:
                    self._comes(call)

    def _comes(self, call: Call) -> None:
        """It was called. A message is on its way to the pool from now on; a process goes on to listen."""
        call.called_at = self.now
        if not call.claim.waits_here:
            self.leave(call)

    # What has to hold.

    def _in_line(self) -> list[Call]:
        return sorted((each for each in self.calls if each.has_turn(self.now)), key=lambda each: each.refused_at)

    def check(self) -> None:
        (state,) = self.store.survey([KEY])
        in_line = self._in_line()
        assert [turn.task_id for turn in state.turns] == [each.name for each in in_line], "ranks are kept"
        for call, turn in zip(in_line, state.turns, strict=True):
            call.turn_ends = self.now + turn.expires_in
        assert [each.task_id for each in state.holders] == [each.name for each in self.calls if each.holds]
        written = {
            value.rpartition("\x1f")[2]: NAMES[value.split(" ")[1][0]]
            for name, value in self.store.fields(KEY).items()
            if name[0] == "q" and name[1:].isdigit()
        }
        for name in written.keys() | self.seen.keys():
            before, after = self.seen.get(name), written.get(name, "SERVED")
            # An event may be two steps: a message comes, and is refused.
            assert before is None or after in {before, *LEADS_TO[before]}, (name, before, after)
        self.seen = written

    def serve_all(self) -> None:
        self.pass_time(TIME_TO_COME + 0.1)
        for call in self.calls:
            if not (call.holds or call.is_over or call.has_turn(self.now)):
                self.ask(call)
        for _ in range(4 * len(self.calls)):
            for call in self._in_line():
                if not call.listens:
                    self.listen(call)
            holders = [each for each in self.calls if each.holds]
            if holders:
                self.release(holders[0])
            called = [each for each in self._in_line() if each.called_at >= 0]
            for call in called or self._in_line()[:1]:
                self.ask(call)
            if all(each.is_over for each in self.calls):
                return
        raise AssertionError(f"{[each.name for each in self._in_line()]} starve")


def play(choose: Callable[[int], int], length: int) -> None:
    world = World(MemoryStore())
    try:
        world.check()
        for _ in range(length):
            events = world.events()
            events[choose(len(events))]()
            world.check()
        world.serve_all()
        assert world.store.fields(KEY) == {}, "nothing is left"
    finally:
        world.close()


def play_all(length: int, first: Sequence[int] = ()) -> None:
    for schedule in product(range(12), repeat=length - len(first)):
        steps = iter((*first, *schedule))
        play(lambda number, steps=steps: next(steps) % number, length)  # type: ignore[misc]


def play_some(count: int, length: int) -> None:
    for seed in range(count):
        chance = random.Random(seed)
        try:
            play(chance.randrange, length)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize(("count", "length"), [(60, 14), pytest.param(2000, 25, marks=pytest.mark.nightly)])
def test_whatever_comes_ranks_are_kept_one_runs_at_a_time_and_nobody_starves(count: int, length: int) -> None:
    play_some(count, length)


def test_the_same_in_each_order_of_two_events() -> None:
    play_all(2)


# A minute each.
@pytest.mark.nightly
@pytest.mark.parametrize("first", range(12))
def test_the_same_in_each_order_of_four_events(first: int) -> None:
    play_all(4, [first])


def test_a_turn_leads_nowhere_once_it_is_served_or_gone() -> None:
    assert LEADS_TO.keys() == {"COMING", "WAITING", "WOKEN", "UNHEARD"}
