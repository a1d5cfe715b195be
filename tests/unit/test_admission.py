"""What becomes of a message: a table of the policy, what the message finds, how it comes, and how it ends.

Each row is one delivery, traced as a worker does it, against a store in memory whose clock stands still.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from billiard.exceptions import WorkerLostError
from celery import Celery, chain, group, states
from celery.app import trace
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from kombu import Exchange, Queue
from kombu.common import Broadcast
from kombu.exceptions import ContentDisallowed, OperationalError

from celery_singleton_lock import (
    CallRevoked,
    ConfigurationError,
    LockHeld,
    SingletonTask,
    StoreError,
    settings,
    signals,
)
from celery_singleton_lock.leases.current import running_under
from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.leases.leftovers import leftovers
from celery_singleton_lock.runs import message, waiting
from celery_singleton_lock.runs.arguments import pack
from celery_singleton_lock.runs.message import DELIVERY, HEADER, Delivery, Notes, marker_of
from celery_singleton_lock.runs.results import tell_handed_on
from celery_singleton_lock.runs.revoked import Revoked
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Claim, Facts
from tests.tracing import tracer_of
from tests.waiting import until

ALL = ("skip", "raise", "reschedule", "wait", "join", "rerun", "replace")
COMES_AGAIN = ("reschedule", "join", "rerun", "replace")
MODES = ("until_executing", "until_executed", "until_and_while_executing")

ME = "me"
NOW = float(int(time.time()))
"""Where the store's clock stands."""


def micro(seconds: float) -> int:
    """A moment so many seconds ago, as it is written on messages."""
    return round((NOW - seconds) * 1_000_000)


OLDER, MINE, NEWER = micro(60), micro(10), micro(5)
"""When calls were published: the one that is delivered, and others."""


# The world of a row.


class Steered(MemoryStore):
    """A store whose clock, silences and interludes a row chooses.

    Attributes:
        time: What its clock shows.
        silent: Requests that get no answer.
        deaf: They do not work either.
        meanwhile: What happens while a waiter sleeps, in turn.
    """

    def __init__(self) -> None:
        super().__init__(now=lambda: self.time)
        self.time = NOW
        self.silent: set[str] = set()
        self.deaf = True
        self.meanwhile: list[Callable[[], Any]] = []

    def listen(self, seen: int, seconds: float) -> None:
        """Let something happen at once, instead of waiting for it."""
        if self.meanwhile:
            self.meanwhile.pop(0)()
        elif seconds > 1:
            raise AssertionError("it waits for ever")

    def _unanswered(self, name: str, ask: Callable[[], Any]) -> Any:
        if name not in self.silent:
            return ask()
        if not self.deaf:
            ask()
        raise StoreError("memory://", "no answer")

    def acquire(self, claim: Claim) -> Any:
        return self._unanswered("acquire", lambda: super(Steered, self).acquire(claim))

    def succeed(self, *asked: Any) -> Any:
        return self._unanswered("succeed", lambda: super(Steered, self).succeed(*asked))

    def look(self, key: str) -> Any:
        return self._unanswered("look", lambda: super(Steered, self).look(key))

    def queue(self, claim: Claim) -> Any:
        return self._unanswered("queue", lambda: super(Steered, self).queue(claim))

    def remains(self, key: str) -> set[str]:
        """All that is left of a lock, in words."""
        left = {f"done {name.rsplit(':')[-2]}" for name in self._markers._known}
        lock = self._locks.get(key)
        if lock is None:
            return left
        for place in lock.alive(self.time):
            left.add(f"{'kept' if place.on_hold else 'held'} {place.claim.facts.task_id}")
            left |= {f"asked to make way {place.claim.facts.task_id}"} if place.makes_way else set()
        for word, mark in (
            ("next", lock.successor),
            ("queued", lock.queued),
            ("joined", lock.joined),
            ("quiet", lock.quiet),
        ):
            left |= {f"{word} {mark.task_id}"} if mark else set()
        left |= {f"overtaken {task_id}" for task_id in lock.overtaken}
        left |= {f"crowd {task_id}" for task_id in lock.crowd}
        left |= {f"turn {turn.claim.facts.task_id}" for turn in lock.queue}
        return left | {"merged" for _ in lock.merged}


@dataclass
class Sent:
    """A message that would have been sent."""

    args: Any
    options: dict[str, Any]

    @property
    def notes(self) -> dict[str, Any]:
        """What we wrote on it, without what every message bears."""
        written = self.options["headers"][HEADER]
        return {name: value for name, value in written.items() if name not in ("key", "published", "task_id", "marked")}


@dataclass
class World:
    """The task, its store, and what has happened."""

    task: Any
    store: Steered
    key: str
    broker_is_down: bool = False
    ran: list[tuple[tuple[Any, ...], bool]] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def app() -> Iterator[Celery]:
    app = Celery("table", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_queues = [Queue("celery"), Queue("other", Exchange("other"), "o"), Broadcast("everybody")]
    app.finalize()
    yield app
    app.close()


@pytest.fixture(autouse=True)
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every delay be as long as it may be."""
    monkeypatch.setattr(random, "uniform", lambda _, high: high)


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every question be answered, or not, at once."""
    monkeypatch.setattr(Run, "age", 0.0)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a message that cannot be published fail at once."""
    monkeypatch.setattr(message, "_PATIENCE", 0)


@pytest.fixture
def world_of(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """Make the world for a task with these options."""
    connected: list[Any] = []

    def make(its_body: Callable[..., Any] | None = None, **options: Any) -> World:
        def body(_: Any, number: int = 1) -> str:
            world.ran.append(((number,), task.lock.held))
            return "ran"

        def send(_: str, args: Any = None, __: Any = None, **options: Any) -> Any:
            if world.broker_is_down:
                raise OperationalError("the broker is down")
            world.sent.append(Sent(args, options))
            return app.AsyncResult(options["task_id"])

        def hear(outcome: str = "", **_: Any) -> None:
            world.told.append(outcome)

        def hear_of_silence(outcome: str, error: StoreError, **_: Any) -> None:
            assert error.problem.startswith("no answer")
            world.told.append(f"unanswered, {outcome}")

        app.tasks.pop("task", None)
        task = app.task(base=SingletonTask, bind=True, name="task", **{"lock_key": (), **options})(its_body or body)
        world = World(task, Steered(), task.lock_key_for())
        monkeypatch.setitem(settings._stores, app, world.store)
        monkeypatch.setattr(app, "send_task", send)
        app.backend.client.cache.clear()
        signals.lock_conflict.connect(hear, sender=task)
        signals.lock_unanswered.connect(hear_of_silence, sender=task)
        connected.append((hear, hear_of_silence, task))
        return world

    yield make
    for hear, hear_of_silence, task in connected:
        signals.lock_conflict.disconnect(hear, sender=task)
        signals.lock_unanswered.disconnect(hear_of_silence, sender=task)


FENCE = micro(0)
"""Of a run that has just begun, the first one of its key."""


# What the message finds.

Scene = Callable[[World], Any]


def free(_: World) -> None:
    """Nobody has the key."""


def held_by(by: str = "the-holder", published: int = OLDER, attempt: int = 0, ends_in: float = 30) -> Scene:
    """A run has it, or, without a task id, a `Lock`."""

    def scene(world: World) -> Claim:
        claim = Claim(world.key, f"token of {by}", ends_in, 100, Facts(by, attempt=attempt, published=published))
        world.store.acquire(claim)
        return claim

    return scene


held = held_by()
held_by_a_lock = held_by("", published=0)
held_by_itself = held_by(ME, published=MINE)


def held_by_an_item(world: World) -> None:
    """An item of a map has it, under the id of its map."""
    world.store.acquire(Claim(world.key, "token of the item", 30, facts=Facts("the-map", task_name="celery.starmap")))


def refuses(*_: Any) -> None:
    raise ValueError("not today")


def held_by_one_without_results(world: World) -> None:
    """A run of another task of the same lock_name has it, which ignores its results."""
    world.task.app.task(name="keeps no results", ignore_result=True)(refuses)
    world.store.acquire(Claim(world.key, "token", 30, facts=Facts("the-holder", task_name="keeps no results")))


def kept_by(by: str, attempt: int = 0) -> Scene:
    """Its last run is over, but its cool-down is not."""

    def scene(world: World) -> None:
        claim = Claim(world.key, "kept", 30, facts=Facts(by, attempt=attempt), min_hold=60)
        world.store.acquire(claim)
        world.store.release(claim, 1)

    return scene


def queued(by: str) -> Scene:
    """A call was published that is unique in the queue."""
    return lambda world: world.store.mark_queued(world.key, by, 3600, limit=0, quiet=0)


def quiet_for(by: str) -> Scene:
    """The same, and no other call of the key is to be published for an hour."""
    return lambda world: world.store.mark_queued(world.key, by, 3600, limit=0, quiet=3600)


def next_is(by: str, published: int = OLDER, task_name: str = "task", policy: Any = "rerun") -> Scene:
    """A call has asked to run next."""

    def scene(world: World) -> None:
        claim = Claim(world.key, f"token of {by}", 30, facts=Facts(by, published=published))
        assert world.store.succeed(claim, policy, task_name, "", 3600) == (1, None)

    return scene


def cancelled_for(by: str, holder: str = "the-holder") -> Scene:
    """The holder has heard that it is to make way."""

    def scene(world: World) -> None:
        claim = Claim(world.key, f"token of {by}", 30, facts=Facts(by, published=OLDER), asked=True)
        assert world.store.succeed(claim, "replace", "task", "", 3600) == (1, None)
        world.store.renew([Claim(world.key, f"token of {holder}", 30)], 1.0)

    return scene


def merged(number: int, published: int = NEWER) -> Scene:
    """A call has left its arguments to the one that runs next."""

    def scene(world: World) -> None:
        run = Run.__new__(Run)
        run.task, run.request, run.args, run.kwargs = world.task, world.task.request, [number], {}
        claim = Claim(world.key, "left", 30, facts=Facts("the-merged", published=published))
        assert world.store.succeed(claim, "rerun", "task", pack(run), 3600) == (0, ANY)

    return scene


def merged_in_pickle(world: World) -> None:
    """A call has left its arguments in a serialiser that this worker does not accept."""
    left = '["application/x-python-serialize", "binary", "gASVCAAAAAAAAABdlF2UfZRlLg=="]'
    claim = Claim(world.key, "left", 30, facts=Facts("the-merged", published=NEWER))
    assert world.store.succeed(claim, "rerun", "task", left, 3600) == (0, ANY)


def carried_by_a_dead(by: str) -> Scene:
    """The run that has taken merged arguments is dead."""

    def scene(world: World) -> None:
        held(world)
        next_is(by)(world)
        merged(2)(world)
        gone(world)
        carrier = Claim(world.key, "carrier", 30, facts=Facts(by, published=MINE), merges="task", asked=True)
        assert world.store.acquire(carrier).arguments
        later_by(31)(world)

    return scene


def waits(by: str) -> Scene:
    """Another run waits in place."""
    return lambda world: world.store.queue(Claim(world.key, f"turn of {by}", 30, facts=Facts(by)))


def done(outcome: Any, attempt: int = 0) -> Scene:
    """A run of this message has left word of its end."""

    def scene(world: World) -> None:
        marker = marker_of(world.key, ME, Notes(published=MINE))
        world.store.mark_done(marker, attempt, outcome, 60)

    return scene


def crowd(size: int) -> Scene:
    """Many come again and again."""

    def scene(world: World) -> None:
        for number in range(size):
            world.store.acquire(Claim(world.key, f"{number}", 30, facts=Facts(f"{number}"), crowds=True))

    return scene


def of_the_crowd(world: World) -> None:
    """This one does, too."""
    world.store._locks[world.key].crowd.add(ME)


def overtaken_by(by: str) -> Scene:
    """This one was next, until a newer call came."""

    def scene(world: World) -> None:
        next_is(ME, MINE, policy="replace")(world)
        next_is(by, NEWER, policy="replace")(world)

    return scene


def silent(*requests: str, deaf: bool = True) -> Scene:
    """The store gives no answer to these requests."""

    def scene(world: World) -> None:
        world.store.silent, world.store.deaf = set(requests), deaf

    return scene


def broker_down(world: World) -> None:
    """Nothing can be published."""
    world.broker_is_down = True


def released_meanwhile(world: World) -> None:
    """The holder ends while others wait."""
    claim = Claim(world.key, "token of the-holder", 30)
    world.store.meanwhile.append(lambda: world.store.release(claim, None))


def gone(world: World) -> None:
    """The holder has ended since."""
    world.store.release(Claim(world.key, "token of the-holder", 30), None)


def meanwhile(scene: Scene) -> Scene:
    """This happens while others wait."""
    return lambda world: world.store.meanwhile.append(lambda: scene(world))


def leaves_the_queue(by: str) -> Scene:
    """A waiter gives up while others wait."""
    claim = Claim("", f"turn of {by}", 30)
    return lambda world: world.store.meanwhile.append(lambda: world.store.release(replace(claim, key=world.key), None))


def later_by(seconds: float) -> Scene:
    """So much time has passed since."""

    def scene(world: World) -> None:
        world.store.time += seconds

    return scene


def running(world: World) -> None:
    """The holder has stored that it runs."""
    world.task.backend.store_result("the-holder", None, states.STARTED)


def ended(state: str, result: Any = None, task_id: str = "the-holder") -> Scene:
    """The run of another call has stored its end."""
    return lambda world: world.task.backend.store_result(task_id, result, state)


def handed_on(world: World, fence: int = FENCE) -> None:
    """The holder has ended by `replace()` or `retry()`."""
    run = Run.__new__(Run)
    run.task, run.request, run.can_come_again = world.task, Context(id="the-holder"), True
    run.task_id = "the-holder"
    run.options, run.lease = world.task.lock_options, SimpleNamespace(fence=fence)
    tell_handed_on(run)


# How the message comes.

IN_A_CHORD = {"task": "task", "args": (), "kwargs": {}, "options": {"task_id": "the-body"}, "chord_size": 2}


@dataclass(frozen=True)
class Event:
    """A delivery: by default the first one, of a message as `apply_async` sends it."""

    notes: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    is_noted: bool = True
    is_eager: bool = False
    is_item: bool = False


def delivered(**info: Any) -> dict[str, Any]:
    return {"delivery_info": {"exchange": "", "routing_key": "celery", "priority": None, "redelivered": False, **info}}


def again(tries: int = 1, **notes: Any) -> Event:
    """It was refused before, and comes again."""
    return Event(notes={"tries": tries, "since": micro(1), "crowds": True, **notes})


def tried_for(seconds: float, **notes: Any) -> Event:
    """The store gave it no answer for so long."""
    return Event(notes={"tries": 1, "unanswered": round(seconds * 1_000_000), **notes})


first = Event()
by_send_task = Event(is_noted=False)
redelivery = Event(request=delivered(redelivered=True))
with_eta = Event(request={"eta": "2026-01-01T00:00:00+00:00"})
retried = Event(request={"retries": 1})
died = Event(notes={"died": True}, request={"retries": 1})
replaced = Event(request={"replaced_task_nesting": 1})
continuing = Event(notes={"continues": FENCE})
eager = Event(is_eager=True)
item = Event(is_item=True)
broadcast = Event(request=delivered(exchange="everybody", routing_key=""))
broadcast_retry = Event(request={"retries": 1, **broadcast.request})
in_a_chord = Event(request={"chord": IN_A_CHORD})
in_a_chord_copy = Event(request={"chord": IN_A_CHORD, **redelivery.request})
parked_before = Event(notes={"tries": 1, "is_copy": True})


def again_as(event: Event, tries: int, **notes: Any) -> Event:
    """The same, of a message that is more than that."""
    return replace(event, notes=again(tries, **notes).notes)


DELIVERIES = {
    "for the first time": first,
    "by send_task": by_send_task,
    "again": again(3),
    "for a retry": retried,
    "for a replacement": replaced,
    "as a step of a replacement": continuing,
    "once more": redelivery,
    "with an ETA": with_eta,
    "as an eager call": eager,
    "as an item of a map": item,
    "as a broadcast": broadcast,
    "parked before": parked_before,
}
COPIES = {
    "once more": (redelivery, 0.25),
    "with an ETA": (with_eta, 0.25),
    "parked before": (parked_before, 0.5),
    "for a retry": (retried, 0.05),
    "for a replacement": (replaced, 0.05),
}


def deliver(world: World, event: Event) -> tuple[str, Any]:
    """Trace the delivery.

    Returns:
        How it ended, and with what result or error.
    """
    # Its publisher has noted a mark that it has made.
    mark = {"marked": True} if f"queued {ME}" in world.store.remains(world.key) else {}
    headers = {HEADER: {"key": world.key, "published": MINE, **mark, **event.notes}} if event.is_noted else None
    if event.is_eager:
        result = world.task.apply(task_id=ME, headers=headers, throw=False)
        return result.state, result.result
    task, args = world.task, [1]
    if event.is_item:
        task, args, headers = world.task.app.tasks["celery.map"], [world.task.s(), [1]], None
    request = {"id": ME, "task": task.name, "retries": 0, "headers": headers, **delivered(), **event.request}
    outcome = tracer_of(task)(ME, args, {}, request)
    result = outcome.retval if outcome.info is None else outcome.info.retval
    stored = task.app.AsyncResult(ME).state
    if outcome.info is not None and outcome.info.state in (states.IGNORED, states.REJECTED) and stored == "PENDING":
        return {"IGNORED": "without a trace"}.get(outcome.info.state, outcome.info.state), result
    return stored, result[0] if event.is_item and isinstance(result, list) else result


# How it ends.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a row expects.

    Attributes:
        ends: The state that is stored, or in eager mode returned.
        result: What it ends with; for an error, its type.
        says: A text in the error.
        ran: The arguments the body ran with, and whether its lease was held.
        after: The delay of the message that was sent; None if there is none.
        notes: What was written on it.
        told: What `lock_conflict` and `lock_unanswered` said.
        leaves: What is in the store afterwards and was not before.
        takes: What was there and is not any more.
    """

    ends: str
    result: Any = None
    says: str = ""
    ran: tuple[tuple[Any, ...], bool] | None = None
    after: float | None = None
    notes: Mapping[str, Any] | None = None
    told: tuple[str, ...] = ()
    leaves: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()


def _left(leaves: tuple[str, ...] = (), takes: tuple[str, ...] = ()) -> dict[str, frozenset[str]]:
    return {"leaves": frozenset(leaves), "takes": frozenset(takes)}


def runs(number: int = 1, *, locked: bool = True, told: str = "", **left: Any) -> Outcome:
    return Outcome(ends="SUCCESS", result="ran", ran=((number,), locked), told=(told,) if told else (), **_left(**left))


def returns(value: Any, told: str = "skipped", **left: Any) -> Outcome:
    """It ends without its body, with this result."""
    return Outcome(ends="SUCCESS", result=value, told=(told,) if told else (), **_left(**left))


def revoked(names: str = "the-holder", told: str = "skipped", **left: Any) -> Outcome:
    return Outcome(ends="REVOKED", result=Revoked, says=names, told=(told,) if told else (), **_left(**left))


def eagerly_revoked(names: str = "the-holder", **left: Any) -> Outcome:
    return Outcome(ends="REVOKED", result=CallRevoked, says=names, told=("skipped",), **_left(**left))


def raises(error: Any = LockHeld, says: str = "the-holder", told: str = "raised", **left: Any) -> Outcome:
    return Outcome(ends="FAILURE", result=error, says=says, told=(told,) if told else (), **_left(**left))


def comes_again(after: float, notes: Mapping[str, Any], told: str = "rescheduled", **left: Any) -> Outcome:
    told_of = (told,) if told else ()
    return Outcome(ends="RETRY", result=Retry, after=after, notes=notes, told=told_of, **_left(**left))


def parked(after: float, notes: Mapping[str, Any], **left: Any) -> Outcome:
    return Outcome(
        ends="without a trace", result=Ignore, says="another run of this very", after=after, notes=notes,
        told=("parked",), **_left(**left),
    )  # fmt: skip


def dropped(**left: Any) -> Outcome:
    return Outcome(ends="without a trace", result=Ignore, says="ended already", told=("dropped",), **_left(**left))


# The table.


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    policy: str
    finds: tuple[Scene, ...]
    event: Event
    outcome: Outcome
    options: Mapping[str, Any]


def row(name: str, policy: str, finds: Any, event: Event, outcome: Outcome, **options: Any) -> Row:
    scenes = finds if isinstance(finds, tuple) else (finds,)
    return Row(f"{policy}: {name}", policy, scenes, event, outcome, options)


def fresh(**notes: Any) -> dict[str, Any]:
    """The notes of a message that comes again for the first time, because another run had the key."""
    return {"tries": 1, "since": micro(0), "crowds": True, **notes}


def later(tries: int, **notes: Any) -> dict[str, Any]:
    """The notes of one that has come again before."""
    return {"tries": tries, "since": micro(1), "crowds": True, **notes}


def joins() -> dict[str, Any]:
    """The notes of one that has joined the holder."""
    return {"tries": 1, "crowds": True, "joins": "the-holder", "joins_fence": FENCE}


def parked_notes(event: Event) -> dict[str, Any]:
    """The notes of one that waits for its own run."""
    is_copy = event in (redelivery, with_eta, parked_before)
    return {"tries": event.notes.get("tries", 0) + 1, **({"is_copy": True} if is_copy else {})}


SKIPPED, RAISED, AGAIN, UNLOCKED = (
    f"unanswered, {outcome}" for outcome in ("skipped", "raised", "rescheduled", "unlocked")
)
IN_THE_CROWD: dict[str, Any] = {"leaves": (f"crowd {ME}",)}


def unheard(after: float, **notes: Any) -> Outcome:
    """It comes again, because the store gave no answer, and remembers for how long it has tried."""
    tries, tried = notes.pop("tries", 1), notes.pop("tried", 0)
    return comes_again(after, {"tries": tries, "unanswered": round((tried + after) * 1_000_000), **notes}, told=AGAIN)


# Where there was a second delivery there may be a third.
MARKED: dict[str, Any] = {"leaves": (f"done {ME}",)}
MARKED_AS = {"once more": MARKED, "parked before": MARKED}

FREE = [
    row(f"a free key lets in a call that comes {how}", policy, free, event, runs(**MARKED_AS.get(how, {})))
    for policy in ALL
    for how, event in DELIVERIES.items()
]  # fmt: skip

# Another run has the key.

HELD = [
    row("a call whose key is held ends as REVOKED", "skip", held, first, revoked()),
    row("a call whose key a Lock holds ends as REVOKED", "skip", held_by_a_lock, first, revoked("None")),
    row("in the header of a chord it returns None", "skip", held, in_a_chord, returns(None)),
    row("with lock_skip_result it returns that", "skip", held, first, returns("no"), lock_skip_result="no"),
    row("lock_skip_result may be None", "skip", held, first, returns(None), lock_skip_result=None),
    row("with lock_skip_result a chord gets that as well", "skip", held, in_a_chord, returns("no"),
        lock_skip_result="no"),
    row("an eager call ends as REVOKED", "skip", held, eager, eagerly_revoked()),
    row("an eager call returns lock_skip_result", "skip", held, eager, returns("no"), lock_skip_result="no"),
    row("an item of a map is None", "skip", held, item, returns(None)),
    row("an item of a map is lock_skip_result", "skip", held, item, returns("no"), lock_skip_result="no"),
    row("a retry that meets another run is skipped", "skip", held, retried, revoked()),
    row("a redelivery whose own run has died is skipped", "skip", held, redelivery, revoked()),
    row("a broadcast call is skipped", "skip", held, broadcast, revoked()),
    row("a call with an ETA is skipped", "skip", held, with_eta, revoked()),
    row("a call by send_task is skipped", "skip", held, by_send_task, revoked()),
    row("a waiter that goes before it is named", "skip", (held, waits("the-waiter")), first, revoked()),
    row("a call whose key is held fails", "raise", held, first, raises()),
    row("a call whose key a Lock holds fails", "raise", held_by_a_lock, first, raises(says="None")),
    row("an eager call fails", "raise", held, eager, raises()),
    row("an item of a map fails the map", "raise", held, item, raises()),
    row("a broadcast call fails", "raise", held, broadcast, raises()),
    row("in the header of a chord it fails", "raise", held, in_a_chord, raises()),
    row("a retry that meets another run fails", "raise", held, retried, raises()),
    *(row(f"an eager call fails, for it cannot come again ({name})", policy, finds, eager, raises(says=says))
        for policy in COMES_AGAIN for name, finds, says in [("a run has the key", held, "the-holder"),
        ("a Lock has the key", held_by_a_lock, "None")]),
    *(row(f"{what} waits in place, for it cannot come again", policy, (held, released_meanwhile), event,
        runs(takes=("held the-holder",))) for policy in (*COMES_AGAIN, "wait") for what,
        event in [("an item of a map", item), ("a broadcast call", broadcast), ("a broadcast retry",
        broadcast_retry)] if policy != "wait" or event is not broadcast_retry),
    *(row(f"{what} gives up after lock_wait_timeout", policy, held, event, raises(), lock_wait_timeout=0.001)
        for policy in (*COMES_AGAIN, "wait") for what, event in [("an item of a map", item), ("a broadcast call",
        broadcast)]),
]  # fmt: skip

RESCHEDULED = [
    row("the first time it comes again within a quarter of a second", "reschedule", held, first, comes_again(0.25,
        fresh(), **IN_THE_CROWD)),
    row("a Lock has the key", "reschedule", held_by_a_lock, first, comes_again(0.25, fresh(), **IN_THE_CROWD)),
    row("a call by send_task comes again under a key", "reschedule", held, by_send_task,
        comes_again(0.25, fresh(is_bare=True), **IN_THE_CROWD)),
    row("the second time it waits twice as long", "reschedule", held, again(1), comes_again(0.5, later(2))),
    row("the third time it waits four times as long", "reschedule", held, again(2), comes_again(1, later(3))),
    row("under light load it never waits more than two seconds", "reschedule", held, again(3), comes_again(2,
        later(4))),
    row("nor after a thousand times", "reschedule", held, again(1000), comes_again(2, later(1001))),
    row("nor longer than a third of the ttl", "reschedule", held, again(9), comes_again(1, later(10)), lock_ttl=3),
    row("it comes as soon as the holder's lease can end", "reschedule", held_by(ends_in=0.125), again(9),
        comes_again(0.125, later(10))),
    row("but not at once", "reschedule", held_by(ends_in=0.001), again(9), comes_again(0.05, later(10))),
    row("in a crowd of 200 it comes after four seconds", "reschedule", (held, crowd(199)), first, comes_again(4,
        fresh(), **IN_THE_CROWD)),
    row("in a crowd of 2000 it comes after a third of the ttl", "reschedule", (held, crowd(1999)), first,
        comes_again(10, fresh(), **IN_THE_CROWD)),
    row("one of a crowd is not counted twice", "reschedule", (held, crowd(99), of_the_crowd), again(9), comes_again(2,
        later(10))),
    row("a retry waits for another run", "reschedule", held, retried, comes_again(0.25, fresh(), **IN_THE_CROWD)),
    row("a redelivery whose own run has died remembers that it is one", "reschedule", held, redelivery,
        comes_again(0.25, fresh(is_copy=True), **IN_THE_CROWD)),
    row("a call with an ETA may be delivered twice", "reschedule", held, with_eta, comes_again(0.25,
        fresh(is_copy=True), **IN_THE_CROWD)),
    row("within lock_wait_timeout it comes again", "reschedule", held, again(2), comes_again(1, later(3)),
        lock_wait_timeout=1.5),
    row("beyond lock_wait_timeout it fails", "reschedule", (held, of_the_crowd), again(2),
        raises(takes=(f"crowd {ME}",)), lock_wait_timeout=1),
    row("without any patience it fails at once and leaves nothing", "reschedule", held,
        first, raises(), lock_wait_timeout=0),
    row("once its key is free it runs and leaves the crowd", "reschedule", (held, of_the_crowd, gone), again(9),
        runs(takes=(f"crowd {ME}",))),
    row("a message that cannot be published is delivered again", "reschedule", (held, broker_down), first,
        Outcome(ends="RETRY", result=Reject, told=("rescheduled",), **_left(leaves=(f"crowd {ME}",))),
        acks_late=True),
    row("a message that is lost for good leaves nothing", "reschedule", (held,
        broker_down), first, raises(OperationalError, "the broker is down", told="rescheduled")),
]  # fmt: skip

WAITING = [
    row("it is served when the holder ends", "wait", (held, released_meanwhile), first,
        runs(takes=("held the-holder",))),
    row("it gives up after lock_wait_timeout and leaves no turn", "wait", held, first, raises(),
        lock_wait_timeout=0.001),
    row("without any patience it fails at once", "wait", held, first, raises(), lock_wait_timeout=0),
    row("a Lock has the key", "wait", held_by_a_lock, first, raises(says="None"), lock_wait_timeout=0),
    row("it waits behind another waiter", "wait", (held, waits("the-waiter"), released_meanwhile,
        leaves_the_queue("the-waiter")), first, runs(takes=("held the-holder", "turn the-waiter"))),
    row("an eager call waits", "wait", (held, released_meanwhile), eager, runs(takes=("held the-holder",))),
    row("an eager call gives up", "wait", held, eager, raises(), lock_wait_timeout=0),
    row("a retry waits for another run", "wait", (held, released_meanwhile), retried,
        runs(takes=("held the-holder",))),
    row("a redelivery waits for another run", "wait", (held, released_meanwhile), redelivery,
        runs(takes=("held the-holder",), **MARKED)),
    row("in the header of a chord it gives up with an error", "wait", held, in_a_chord, raises(),
        lock_wait_timeout=0),
    row("a queued call keeps nobody out who occupies a slot", "wait", queued("the-queued"), first, runs(),
        lock_mode="until_executed"),
    row("it waits until a cool-down is over", "wait", (kept_by("the-holder"), meanwhile(later_by(61))), first,
        runs(takes=("kept the-holder",))),
    row("it takes over from a holder that has died", "wait", (held, meanwhile(later_by(31))), first,
        runs(takes=("held the-holder",))),
    row("a copy that waits is parked once its own run has the key", "wait",
        (held, meanwhile(gone), meanwhile(held_by_itself), waits("the-waiter")), redelivery,
        parked(0.25, parked_notes(redelivery), leaves=(f"held {ME}",), takes=("held the-holder",))),
    row("a copy that waits is dropped once its own run has ended", "wait", (held, meanwhile(done("stored"))),
        redelivery, dropped(leaves=(f"done {ME}",))),
    row("nor does a successor of another task", "wait", next_is("the-next", task_name="other"), first, runs()),
]  # fmt: skip

JOINED = [
    row("the first time it comes again within a second", "join", held, first, comes_again(1, joins(), told="joined",
        **IN_THE_CROWD)),
    row("the tenth time within a second as well", "join", (held, running), again(9, joins="the-holder"),
        comes_again(1, {**later(10), "joins": "the-holder", "joins_fence": FENCE}, told="joined")),
    row("a Lock has no result to wait for", "join", held_by_a_lock, first, comes_again(1, {"tries": 1,
        "crowds": True}, told="joined", **IN_THE_CROWD)),
    row("a retry joins another run", "join", held, retried, comes_again(1, joins(), told="joined", **IN_THE_CROWD)),
    row("a call that is queued is joined as well", "join", queued("the-queued"), first, comes_again(1, {**joins(),
        "joins": "the-queued"}, told="joined", **IN_THE_CROWD), lock_mode="until_executed"),
    row("a crowd of 500 comes after five seconds", "join", (held, crowd(499)), first, comes_again(5, joins(),
        told="joined", **IN_THE_CROWD)),
    row("it ends with the holder's result", "join", ended("SUCCESS", 42), again(1, joins="the-holder"), returns(42,
        told="")),
    row("it ends with the holder's result and leaves the crowd", "join", (held, of_the_crowd, gone,
        ended("SUCCESS", 42)), again(1, joins="the-holder"),
        returns(42, told="", takes=(f"crowd {ME}",))),
    row("it ends with the holder's error", "join", ended("FAILURE", ValueError("broken")), again(1,
        joins="the-holder"), raises(ValueError, "broken", told="")),
    row("it ends with the holder's LockHeld", "join", ended("FAILURE", LockHeld("k", "x", 1.0)), again(1,
        joins="the-holder"), raises(LockHeld, "task_id=x", told="")),
    row("it ends with the holder's StoreError",
        "join", ended("FAILURE", StoreError("redis://", "down")), again(1, joins="the-holder"), raises(StoreError,
        "down", told="")),
    row("it is revoked as the holder is, and names it", "join", ended("REVOKED", TaskRevokedError("away")), again(1,
        joins="the-holder"), revoked(told="")),
    row("in the header of a chord a revoked holder gives it None", "join", ended("REVOKED", TaskRevokedError("away")),
        again_as(in_a_chord, 1, joins="the-holder"), returns(None, told="")),
    *(row(f"it waits for what the holder was handed on to, {what}", "join", (handed_on, *finds), again(1,
        joins="the-holder", joins_fence=FENCE, free_since=micro(60)), comes_again(1, {**later(2),
        "joins": "the-holder", "joins_fence": FENCE, "free_since": micro(60)}, told="joined")) for what, finds in
        [("whatever it is", ()), ("its retry", (ended("RETRY", ValueError()),)),
        ("also once the last of it has started", (running,))]),
    row("but not for ever", "join", handed_on, again(1, joins="the-holder", joins_fence=FENCE,
        free_since=micro(7200)), runs()),
    row("it ends with the result of what the holder was handed on to", "join", (handed_on,
        ended("SUCCESS", 42)), again(1, joins="the-holder", joins_fence=FENCE), returns(42, told="")),
    *(row(f"a holder that {what} has died, so the call runs", "join", finds, again(1, joins="the-holder",
        joins_fence=fence, free_since=micro(60)), runs()) for what, finds, fence in [
        ("goes on after an earlier run", (handed_on, ended("RETRY", ValueError())), FENCE + 1),
        ("had come again", ended("RETRY", ValueError()), FENCE), ("was joined by an older version", handed_on, 0)]),
    row("a holder whose task id was used before has no result yet", "join", (held, ended("FAILURE", ValueError("old"))),
        again(1, joins="the-holder"), comes_again(1, {**later(2), "joins": "the-holder", "joins_fence": FENCE},
        told="joined")),
    *(row("a step of what replaces the holder waits for its end", policy, held, continuing, parked(0.05,
        {"tries": 1, "continues": FENCE, **({"crowds": True} if policy in COMES_AGAIN else {})},
        **(IN_THE_CROWD if policy in COMES_AGAIN else {}))) for policy in ALL),
    row("a step of what replaces a run meets another one", "skip", held_by("another"), replace(continuing,
        notes={"continues": FENCE - 1}), revoked("another")),
    row("a step of what replaces a run replaces no other", "replace", held_by("another"), replace(continuing,
        notes={"continues": FENCE - 1}), comes_again(0.25, fresh(continues=FENCE - 1), **IN_THE_CROWD)),
    row("a holder whose cool-down goes on has ended", "join", (kept_by("the-holder"), ended("SUCCESS", 42)), again(1,
        joins="the-holder"), returns(42, told="")),
    *(row(f"{what} has no result to wait for", "join", finds, first, comes_again(1, {"tries": 1, "crowds": True},
        told="joined", **IN_THE_CROWD)) for what, finds in [("an item of a map", held_by_an_item),
        ("an item whose turn it is", (held, waits("the-map"), gone)),
        ("a task that ignores its results", held_by_one_without_results)]),
    row("a result that is not stored yet is waited for", "join", free, again(1, joins="the-holder"), comes_again(1,
        {**later(2), "joins": "the-holder", "free_since": micro(0)}, told="joined")),
    row("for seconds by the store's clock, whatever that of its host shows", "join", later_by(-3600), again(1,
        joins="the-holder", free_since=micro(3601)), comes_again(1, {**later(2), "joins": "the-holder",
        "free_since": micro(3601)}, told="joined")),
    row("a holder without a result has died, so the call runs", "join", free, again(1, joins="the-holder",
        free_since=micro(60)), runs()),
    row("a holder whose worker was lost has died, so the call runs", "join", ended("FAILURE", WorkerLostError()),
        again(1, joins="the-holder"), runs()),
    row("when the holder has died it joins the next one", "join", held_by("the-other"), again(1, joins="the-holder",
        free_since=micro(60)), comes_again(1, {"tries": 2, "since": micro(1), "crowds": True, "joins": "the-other",
        "joins_fence": FENCE}, told="joined")),
    row("a copy that has joined takes no lock while it looks for the result", "join", free,
        again_as(redelivery, 1, joins="the-holder"), comes_again(1, {"tries": 2, "is_copy": True,
        "joins": "the-holder", "since": micro(1), "crowds": True, "free_since": micro(0)}, told="joined")),
    row("and takes the result though others have the lock", "join", (held_by("another"), ended("SUCCESS", 42)),
        again_as(redelivery, 1, joins="the-holder"), returns(42, told="")),
    row("a queued call that joins keeps its mark, for publishers alone", "join", (held, queued(ME)), first,
        comes_again(1, joins(), told="joined", leaves=(f"crowd {ME}", f"joined {ME}"), takes=(f"queued {ME}",)),
        lock_mode="until_and_while_executing"),
    row("a copy of a run that lives takes nobody's result", "join", (held_by_itself, ended("SUCCESS", 42)),
        again_as(redelivery, 1, joins="the-holder"), parked(0.5, {"tries": 2, "is_copy": True, "joins": "the-holder",
        "since": micro(1), "crowds": True})),
    row("a copy of a run that has ended takes nobody's result", "join", (done("stored"), ended("SUCCESS", 42)),
        again_as(redelivery, 1, joins="the-holder"), dropped()),
]  # fmt: skip

NEXT: dict[str, Any] = {"leaves": (f"crowd {ME}", f"next {ME}")}

RERUN = [
    row("the first duplicate is to run next", "rerun", held, first, comes_again(0.25, fresh(asked=True), **NEXT)),
    row("by send_task as well", "rerun", held, by_send_task,
        comes_again(0.25, fresh(asked=True, is_bare=True), **NEXT)),
    row("a Lock has the key", "rerun", held_by_a_lock, first, comes_again(0.25, fresh(asked=True), **NEXT)),
    row("it stays the next one", "rerun", (held, next_is(ME)), again(1, asked=True), comes_again(0.5, later(2,
        asked=True))),
    row("a newer duplicate leaves it its arguments", "rerun", (held, next_is("the-next",
        OLDER)), first, revoked("the-next", "merged", leaves=("merged",))),
    row("a newer one that comes again leaves it its arguments", "rerun", (held, next_is("the-next", OLDER)), again(1),
        revoked("the-next", "merged", leaves=("merged",))),
    row("an older one that comes again leaves it nothing", "rerun", (held, next_is("the-next", NEWER)), again(1),
        revoked("the-next", "merged")),
    row("newer arguments are not replaced by those of one that comes again", "rerun", (held, next_is("the-next",
        OLDER), merged(2, NEWER)), again(1), revoked("the-next", "merged")),
    row("in the header of a chord one that is merged later is None", "rerun", (held, next_is("the-next", OLDER)),
        again_as(in_a_chord, 1), returns(None, "merged", leaves=("merged",))),
    row("one that is merged later returns lock_skip_result", "rerun", (held, next_is("the-next", OLDER)), again(1),
        returns("no", "merged", leaves=("merged",)), lock_skip_result="no"),
    row("one that is merged later leaves no mark and no crowd", "rerun", (held, next_is("the-next", NEWER),
        queued(ME), of_the_crowd), again(1), revoked("the-next", "merged", takes=(f"queued {ME}", f"crowd {ME}")),
        lock_mode="until_and_while_executing"),
    row("an older duplicate leaves it nothing", "rerun", (held, next_is("the-next",
        NEWER)), first, revoked("the-next", "merged")),
    row("newer arguments are not replaced by older ones", "rerun", (held,
        next_is("the-next", OLDER), merged(2, NEWER)), first, revoked("the-next", "merged")),
    row("in the header of a chord a merged call is None", "rerun", (held,
        next_is("the-next", OLDER)), in_a_chord, returns(None, "merged", leaves=("merged",))),
    row("a merged call returns lock_skip_result", "rerun", (held, next_is("the-next",
        OLDER)), first, returns("no", "merged", leaves=("merged",)), lock_skip_result="no"),
    row("beside a successor of another task it comes again", "rerun", (held, next_is("the-next", task_name="other")),
        first, comes_again(0.25, fresh(), **IN_THE_CROWD)),
    row("a free key that is promised to another task keeps it out", "rerun", next_is("the-next", task_name="other"),
        first, comes_again(0.25, fresh(), **IN_THE_CROWD)),
    row("a retry is merged into nothing and waits", "rerun", (held, next_is("the-next", OLDER)), retried,
        comes_again(0.25, fresh(), **IN_THE_CROWD)),
    row("a retry does not run next", "rerun", held, retried, comes_again(0.25, fresh(), **IN_THE_CROWD)),
    row("a replacement does not run next", "rerun", held, replaced, comes_again(0.25, fresh(), **IN_THE_CROWD)),
    row("the next one runs with the newest arguments", "rerun", (held, next_is(ME), of_the_crowd, merged(2), gone),
        again(1, asked=True), runs(2, takes=("merged", f"next {ME}", f"crowd {ME}"))),
    row("the next one runs with its own if they are newer", "rerun", (held, next_is(ME, micro(30)), merged(2,
        micro(20)), gone), again(1, asked=True), runs(takes=("merged", f"next {ME}"))),
    row("one that was given up still carries the newest arguments", "rerun", (held, next_is(ME), merged(2), gone,
        later_by(31)), again(1, asked=True), runs(2, takes=("merged", f"next {ME}"))),
    row("a retry takes no merged arguments", "rerun", (held, next_is("the-next"), merged(2), gone, later_by(31)),
        retried, runs()),
    row("a second delivery of a run that died with merged arguments has them again", "rerun", carried_by_a_dead(ME),
        redelivery, runs(2, takes=("merged",), **MARKED)),
    row("so has a retry of a run that died", "rerun", carried_by_a_dead(ME), died, runs(2, takes=("merged",))),
    row("and another call, if that comes first", "rerun", carried_by_a_dead("the-dead"), first,
        runs(2, takes=("merged",))),
    row("one that was given up finds that a newer run has carried them", "rerun", held_by(published=NEWER), again(1,
        asked=True), revoked(told="merged")),
    row("beyond lock_wait_timeout the next one fails and leaves nothing", "rerun", (held, next_is(ME), of_the_crowd),
        again(2, asked=True), raises(takes=(f"next {ME}", f"crowd {ME}")), lock_wait_timeout=1),
    row("but not if calls were merged into it", "rerun", (held, next_is(ME), merged(2), of_the_crowd), again(2,
        asked=True), comes_again(1, later(3, asked=True)), lock_wait_timeout=1),
    row("without any patience it fails at once and leaves nothing", "rerun", held, first,
        raises(), lock_wait_timeout=0),
    *(row("one that has asked before a deploy runs with the newest arguments", policy, (held, next_is(ME), merged(2),
          gone), again(1, asked=True), runs(2, takes=("merged", f"next {ME}")))
      for policy in ALL if policy != "rerun"),
    *(row("one that has asked before a deploy stays the next one", policy, (held, next_is(ME), merged(2)),
          again(1, asked=True), comes_again(0.5, later(2, asked=True)))
      for policy in ALL if policy not in ("rerun", "replace")),
    *(row("merged arguments of a dead successor go to the next run", policy, (held, next_is("the-next"), merged(2),
          gone, later_by(31)), first, runs(2, takes=("merged",)))
      for policy in ALL if policy != "rerun"),
    row("one that cannot read what others left fails, and leaves it for the next run", "rerun", (held, next_is(ME),
        merged_in_pickle, gone), again(1, asked=True), raises(ContentDisallowed, "pickle", told="",
        takes=(f"next {ME}",))),
    row("an item of a map keeps its own arguments", "rerun", (held, next_is("the-next"), merged(2), gone, later_by(31)),
        item, Outcome(ends="SUCCESS", result="ran", ran=((1,), True))),
    row("one to which others were left does not give up after a deploy", "replace", (held, next_is(ME), merged(2),
        of_the_crowd), again(2, asked=True), comes_again(1, later(3, asked=True),
        leaves=("asked to make way the-holder",)), lock_wait_timeout=1),
    row("a message that is lost for good is not the next one", "rerun", (held, broker_down), first,
        raises(OperationalError, "the broker is down", told="rescheduled")),
    row("a merged call leaves no queued mark", "rerun", (held, next_is("the-next", NEWER),
        queued(ME)), first, revoked("the-next", "merged", takes=(f"queued {ME}",)),
        lock_mode="until_and_while_executing"),
]  # fmt: skip

REPLACE = [
    row("the first time it is to run next and asks nobody to end", "replace", held, first, comes_again(0.25,
        fresh(asked=True), **NEXT)),
    row("by send_task as well", "replace", held, by_send_task,
        comes_again(0.25, fresh(asked=True, is_bare=True), **NEXT)),
    row("once its message is safe the holder is asked to end", "replace", (held, next_is(ME, MINE, policy="replace")),
        again(1, asked=True), comes_again(0.5, later(2, asked=True), leaves=("asked to make way the-holder",))),
    row("a Lock is asked as well", "replace", (held_by_a_lock, next_is(ME, MINE, policy="replace")), again(1,
        asked=True), comes_again(0.5, later(2, asked=True), leaves=("asked to make way ",))),
    row("a newer call takes the place of an older successor", "replace", (held, next_is("the-next", OLDER,
        policy="replace")), first, comes_again(0.25, fresh(asked=True), leaves=(f"crowd {ME}", f"next {ME}",
        "overtaken the-next"), takes=("next the-next",))),
    row("an older call ends for a newer successor", "replace", (held, next_is("the-next",
        NEWER, policy="replace")), first, revoked("the-next", "merged")),
    row("an older call ends for a newer holder", "replace", held_by(published=NEWER),
        first, revoked(told="merged")),
    row("one that comes again ends for a newer successor", "replace", (held, next_is("the-next", NEWER,
        policy="replace")), again(1), revoked("the-next", "merged")),
    row("one that comes again ends for a newer holder", "replace", held_by(published=NEWER), again(1),
        revoked(told="merged")),
    row("one that was overtaken ends when it comes again", "replace", (held, overtaken_by("the-newer")), again(1,
        asked=True), revoked("the-newer", "merged", takes=(f"overtaken {ME}",))),
    row("one that was overtaken ends though the key is free", "replace", overtaken_by("the-newer"), again(1,
        asked=True), revoked("the-newer", "merged", takes=(f"overtaken {ME}",))),
    row("in the header of a chord an overtaken call is None", "replace",
        held_by(published=NEWER), in_a_chord, returns(None, "merged")),
    row("a retry replaces nobody", "replace", held, retried, comes_again(0.25, fresh(), **IN_THE_CROWD)),
    row("a replacement replaces nobody", "replace", held, replaced, comes_again(0.25, fresh(), **IN_THE_CROWD)),
    row("a retry waits for a newer successor", "replace", next_is("the-next", NEWER, policy="replace"), retried,
        comes_again(0.25, fresh(), **IN_THE_CROWD)),
    row("a retry that comes again still replaces nobody", "replace", held, again_as(retried, 1), comes_again(0.5,
        later(2))),
    row("the next one runs once the key is free", "replace", (held, next_is(ME, policy="replace"), of_the_crowd,
        gone), again(1, asked=True), runs(takes=(f"next {ME}", f"crowd {ME}"))),
    row("beyond lock_wait_timeout it fails and leaves nothing", "replace",
            (held, next_is(ME, policy="replace"), of_the_crowd), again(2, asked=True),
            raises(takes=(f"next {ME}", f"crowd {ME}")), lock_wait_timeout=1),
    row("but not if a run was cancelled for it", "replace", (held, next_is(ME, policy="replace"), cancelled_for(ME)),
        again(2, asked=True), comes_again(1, later(3, asked=True)), lock_wait_timeout=1),
    row("a Lock that was told to make way may stay beyond that", "replace", (held_by_a_lock, next_is(ME,
        policy="replace"), cancelled_for(ME, "")), again(2, asked=True), raises(says="held", takes=(f"next {ME}",
        "asked to make way ")), lock_wait_timeout=1),
    row("so may a run that was only warned", "replace", (held, next_is(ME, policy="replace"), cancelled_for(ME)),
        again(2, asked=True), raises(takes=(f"next {ME}", "asked to make way the-holder")), lock_wait_timeout=1,
        lock_on_lost="warn"),
    row("without any patience it fails at once and leaves nothing", "replace", held, first,
        raises(), lock_wait_timeout=0),
    row("a message that is lost for good is not the next one", "replace", (held, broker_down),
        first, raises(OperationalError, "the broker is down", told="rescheduled")),
]  # fmt: skip

# Its own run has the key, or has ended.
OWN = [
    *(row(f"a message that comes {how} waits for its own run without a trace", policy, held_by_itself, event,
          parked(after, parked_notes(event)))
      for policy in ALL for how, (event, after) in COPIES.items()),
    *(row(f"a message that comes {how} takes no second place", policy, held_by_itself, event,
          parked(after, parked_notes(event)), lock_limit=2)
      for policy in ALL for how, (event, after) in COPIES.items()),
    *(row("a message that is published twice waits for its own run without a trace", policy, held_by_itself, first,
          parked(0.25, {"tries": 1, "is_copy": True}))
      for policy in ("skip", "raise", "wait")),
    *(row("a message that is published twice waits for its own run without a trace", policy,
          held_by_itself, first, parked(0.25, {"tries": 1, "is_copy": True, "crowds": True}, leaves=(f"crowd {ME}",)))
      for policy in COMES_AGAIN),
    row("a copy takes no turn in the queue of a full lock", "wait", (held_by_itself, held), redelivery,
        parked(0.25, parked_notes(redelivery)), lock_limit=2),
    row("a copy is no successor", "rerun", (held_by_itself, next_is("the-next", NEWER)), redelivery, parked(0.25,
        parked_notes(redelivery))),
    row("a copy overtakes nobody", "replace", (next_is("the-next", OLDER, policy="replace"), held_by_itself),
        redelivery, parked(0.25, parked_notes(redelivery))),
    row("a copy in the header of a chord gives no part", "skip", held_by_itself, in_a_chord_copy, parked(0.25,
        parked_notes(redelivery))),
    row("a copy ends with no lock_skip_result", "skip", held_by_itself, redelivery, parked(0.25,
        parked_notes(redelivery)), lock_skip_result="no"),
    *(row("in every mode a copy waits", "skip", held_by_itself, redelivery, parked(0.25, parked_notes(redelivery)),
        lock_mode=mode) for mode in ("until_executing",)),
    row("a sibling of a broadcast is no copy", "skip", held_by_itself, broadcast, revoked(ME)),
    row("a sibling of a broadcast is no copy", "raise", held_by_itself, broadcast, raises(says=ME)),
    *(row("a sibling of a broadcast waits in place", policy, held_by_itself, broadcast, raises(says=ME),
        lock_wait_timeout=0.001) for policy in (*COMES_AGAIN, "wait")),
    row("a retry of a broadcast waits in place for the run that it continues", "skip", held_by_itself, broadcast_retry,
        raises(says=ME), lock_wait_timeout=0.001),
    row("an item of the same map is no copy", "skip", held_by_itself, item, returns(None)),
    row("an eager copy of a run of a worker fails",
        "raise", held_by_itself, eager, raises(says=ME)),
    *(row("a copy of a run that has ended is dropped", policy, done("stored"), redelivery, dropped())
        for policy in ALL),
    *(row("a copy of a run that has ended is dropped beside another", policy, (done("stored"), held), redelivery,
        dropped()) for policy in ALL),
    *(row("a copy of a run that has retried is dropped", policy, done("retried"), redelivery, dropped())
        for policy in ("skip", "join")),
    row("a copy is not dropped before the result is stored", "skip", done("ended"), redelivery,
        parked(ANY, parked_notes(redelivery))),
    row("a copy of a run that has retried leaves the mark to the retry", "skip", (done("retried"), queued(ME)),
        redelivery, dropped(), lock_mode="until_executed"),
    row("a copy waits until the result is stored", "skip", done("ended"), redelivery, parked(0.25,
        parked_notes(redelivery))),
    row("a copy runs if the result is never stored", "skip", (done("ended"), later_by(6)), redelivery, runs()),
    row("the retry of a run that has ended runs", "skip", done("retried"), retried, runs()),
    row("a second delivery of that retry is dropped", "skip", done("stored", attempt=1), retried, dropped()),
    row("a call that is delivered for the first time asks for no marker", "skip", done("stored"), first, runs()),
    row("a later delivery of a marker's time is over", "skip", (done("stored"), later_by(61)), redelivery, runs()),
    row("a copy waits for the end of its own cool-down", "skip", kept_by(ME), redelivery,
        parked(0.25, parked_notes(redelivery)), lock_min_hold=60),
    row("a copy of a run that has died runs", "skip", (held_by_itself, later_by(31)), redelivery, runs(**MARKED)),
    row("a copy that was parked long ago waits no more than two seconds", "skip", held_by_itself,
        Event(notes={"tries": 20, "is_copy": True}), parked(2, {"tries": 21, "is_copy": True})),
]  # fmt: skip

# Marks of publishing.
QUEUED = [
    *(row(f"{mode}: its own mark ends when it runs", "skip", queued(ME), first, runs(locked=mode != "until_executing",
        takes=(f"queued {ME}",)), lock_mode=mode) for mode in MODES),
    *(row(f"{mode}: what keeps the key quiet stays", "skip", quiet_for(ME), first,
        runs(locked=mode != "until_executing", takes=(f"queued {ME}",)), lock_mode=mode) for mode in MODES),
    *(row(f"{mode}: a call beside one that is queued is skipped", "skip", queued("the-queued"), first,
        revoked("the-queued"), lock_mode=mode) for mode in MODES[1:]),
    row("until_executing: as many run as there are", "skip", (queued("the-queued"), held), first, runs(locked=False),
        lock_mode="until_executing"),
    row("a queued call means nothing to another mode", "skip", queued("the-queued"), first, runs()),
    row("a call that was queued in another mode is queued no longer", "skip", (held, queued(ME)), first,
        revoked(takes=(f"queued {ME}",))),
    row("before_start that raises leaves no mark of another mode", "skip", queued(ME), first, raises(ValueError,
        "not today", told="", takes=(f"queued {ME}",)), before_start=refuses),
    row("a skipped call is queued no longer", "skip", (held, quiet_for(ME)), first, revoked(takes=(f"queued {ME}",
        f"quiet {ME}")), lock_mode="until_and_while_executing"),
    row("a failed call is queued no longer", "raise", (held, quiet_for(ME)), first, raises(takes=(f"queued {ME}",
        f"quiet {ME}")), lock_mode="until_and_while_executing"),
    row("who gives up waiting is queued no longer", "wait", (held, queued(ME)), first,
        raises(takes=(f"queued {ME}",)), lock_mode="until_and_while_executing", lock_wait_timeout=0),
    row("who gives up coming is queued no longer", "reschedule", (held, queued(ME)), again(1),
        raises(takes=(f"queued {ME}",)), lock_mode="until_and_while_executing", lock_wait_timeout=1),
    row("who comes again stays queued", "reschedule", (held, queued(ME)), first, comes_again(0.25, fresh(),
        **IN_THE_CROWD), lock_mode="until_and_while_executing"),
    row("who ends with the holder's result is queued no longer", "join", (queued(ME), ended("SUCCESS", 42)), again(1,
        joins="the-holder"), returns(42, told="", takes=(f"queued {ME}",)), lock_mode="until_and_while_executing"),
    row("who is overtaken is queued no longer", "replace", (held_by(published=NEWER),
        queued(ME)), first, revoked(told="merged", takes=(f"queued {ME}",)), lock_mode="until_and_while_executing"),
    row("a call that is lost for good is queued no longer", "reschedule", (held,
        queued(ME), broker_down), first, raises(OperationalError, "the broker is down", told="rescheduled",
        takes=(f"queued {ME}",)), lock_mode="until_and_while_executing"),
    row("a copy leaves the mark to its run", "skip", (held_by_itself, queued(ME)), redelivery, parked(0.25,
        parked_notes(redelivery)), lock_mode="until_and_while_executing"),
    row("a retry is not kept out by a queued call", "skip", queued("the-queued"), retried, runs(),
        lock_mode="until_and_while_executing"),
    row("a queued call keeps a second place free for no one", "skip", queued("the-queued"), first, runs(),
        lock_mode="until_and_while_executing", lock_limit=2),
    row("an unlocked run ends its mark", "skip", (queued(ME), silent("acquire")), first,
        runs(locked=False, told=UNLOCKED, leaves=(f"done {ME}",), takes=(f"queued {ME}",)),
        lock_mode="until_executed", lock_on_store_error="run"),
    row("a retry that was dropped because its run was replaced is queued no longer", "replace",
        (queued(ME), done("stored", attempt=1)), retried, dropped(takes=(f"queued {ME}",)),
        lock_mode="until_executed"),
    row("until_executing runs beside another", "skip", held, first, runs(locked=False), lock_mode="until_executing"),
    *(row("until_executing runs beside another", policy, (held, held_by("another")), first, runs(locked=False),
        lock_mode="until_executing") for policy in ALL if policy != "skip"),
    row("a header that only looks like ours is refused", "skip", free, Event(notes={"unknown": 1}),
        raises(ConfigurationError, "is not ours", told="")),
    row("a call that is refused where it waits to come again stays queued", "rerun", (held, queued(ME)), first,
        comes_again(0.25, fresh(asked=True), **NEXT), lock_mode="until_and_while_executing"),
    *(row("a call that is queued ends for a newer one that is next", policy, (queued(ME), next_is("the-next", NEWER,
          policy=policy)), again(1), revoked("the-next", "merged", takes=(f"queued {ME}",)),
          lock_mode="until_and_while_executing") for policy in ("rerun", "replace")),
    row("a call that is queued goes before an older one that is next", "replace", (queued(ME), next_is("the-next",
        OLDER, policy="replace")), first, runs(takes=(f"queued {ME}",)), lock_mode="until_and_while_executing"),
    *(row("a call that is queued was there before one of another task that is next", policy, (queued(ME),
          next_is("the-next", NEWER, task_name="other")), again(1), runs(takes=(f"queued {ME}",)),
          lock_mode="until_and_while_executing") for policy in ("reschedule", "rerun")),
    row("a call beside one that is queued is to run next", "rerun", queued("the-queued"), first,
        comes_again(0.25, fresh(asked=True), **NEXT), lock_mode="until_and_while_executing"),
    row("before_start that raises leaves no mark", "skip", queued(ME), first, raises(ValueError, "not today", told="",
        takes=(f"queued {ME}",)), lock_mode="until_executed", before_start=refuses),
    row("before_start that raises leaves no successor", "rerun", (held, next_is(ME), of_the_crowd),
        again(1, asked=True), raises(ValueError, "not today", told="", takes=(f"next {ME}", f"crowd {ME}")),
        before_start=refuses),
]  # fmt: skip

# Several places, and places that are kept.
PLACES = [
    *(row("with a second place free it runs", policy, held, first, runs(), lock_limit=2) for policy in ALL),
    row("with both places taken it is skipped", "skip", (held, held_by("another")), first, revoked(), lock_limit=2),
    row("with both places taken it comes again", "reschedule", (held, held_by("another")), first, comes_again(0.25,
        fresh(), **IN_THE_CROWD), lock_limit=2),
    row("a greater limit lets it in", "skip", (held, held_by("another")), first, runs(), lock_limit=3),
    row("a lower limit keeps it out", "skip", (held, held_by("another")), first, revoked()),
    row("the oldest holder is asked to end", "replace", (held, held_by("another"), next_is(ME, MINE,
        policy="replace")), again(1, asked=True), comes_again(0.5, later(2, asked=True),
        leaves=("asked to make way the-holder",)), lock_limit=2),
    row("a successor takes one of two free places only", "skip", next_is("the-next"), first, runs(), lock_limit=2),
    row("a cool-down keeps it out and names who was there", "skip", kept_by("the-holder"), first, revoked(),
        lock_min_hold=60),
    row("a cool-down keeps it out", "raise", kept_by("the-holder"), first, raises(), lock_min_hold=60),
    row("after a cool-down it comes again", "reschedule", kept_by("the-holder"), first, comes_again(0.25, fresh(),
        **IN_THE_CROWD), lock_min_hold=60),
    row("it keeps the key for its own cool-down", "skip", free, first, runs(leaves=(f"kept {ME}",)),
        lock_min_hold=60),
    row("its own cool-down does not keep its retry out", "skip", kept_by(ME), retried, runs(), lock_min_hold=60),
    row("another's cool-down does keep a retry out", "skip", kept_by("the-holder"), retried, revoked(),
        lock_min_hold=60),
    row("the key that is promised to another call is not taken", "skip", next_is("the-next"), first,
        revoked("the-next")),
    row("the key that is promised to another call is not taken", "raise", next_is("the-next"), first,
        raises(says="the-next")),
    row("a waiter goes before who comes", "skip", waits("the-waiter"), first, revoked("the-waiter")),
    row("a waiter goes before who comes again", "reschedule", waits("the-waiter"), first, comes_again(0.25, fresh(),
        **IN_THE_CROWD)),
    row("a holder that has died keeps nobody out", "skip", (held, later_by(31)), first, runs()),
]  # fmt: skip

# The store gives no answer.
SILENT = [
    *(row("without an answer it comes again", policy, silent("acquire"), first, unheard(0.25)) for policy in ALL),
    row("without an answer it comes again and remembers", "skip", silent("acquire"), again(3), unheard(0.25,
        **later(4))),
    row("without an answer it waits as long again as it has tried", "skip", silent("acquire"), tried_for(20),
        unheard(20, tries=2, tried=20)),
    row("without an answer it asks once in a minute", "skip", silent("acquire"), tried_for(7200), unheard(60, tries=2,
        tried=7200), lock_ttl=3),
    *(row("without an answer it tries for as long as lock_wait_timeout", policy, silent("acquire"), tried_for(20),
        unheard(10, tries=2, tried=20), lock_wait_timeout=30) for policy in ALL),
    *(row("without an answer it fails after lock_wait_timeout", policy, silent("acquire"), tried_for(30),
        raises(StoreError, "no answer; tried for 30.0 s, and lock_wait_timeout is 30 s", told=RAISED),
        lock_wait_timeout=30) for policy in ALL),
    row("without an answer a successor to which others were left has no bound", "rerun", (held, next_is(ME), merged(2),
        gone, silent("acquire")), tried_for(30, asked=True), unheard(30, tries=2, tried=30, asked=True),
        lock_wait_timeout=30),
    row("once there is an answer it forgets that there was none", "reschedule", held, tried_for(20),
        comes_again(0.5, later(2, since=micro(0)), **IN_THE_CROWD)),
    row("without an answer a copy remembers that it is one", "skip", silent("acquire"), redelivery, unheard(0.25,
        is_copy=True)),
    *(row("without an answer it fails", policy, silent("acquire"), first, raises(StoreError, "no answer", told=RAISED),
        lock_on_store_error="raise") for policy in ("skip", "wait", "join")),
    *(row("without an answer it runs without a lock", policy, silent("acquire"), first, runs(locked=False,
        told=UNLOCKED, leaves=(f"done {ME}",)), lock_on_store_error="run") for policy in ALL),
    *(row("without an answer it is skipped", policy, silent("acquire"), first, revoked("no answer", told=SKIPPED),
        lock_on_store_error="skip") for policy in ("skip", "reschedule")),
    row("without an answer it returns lock_skip_result", "skip", silent("acquire"), first, returns("no", told=SKIPPED),
        lock_on_store_error="skip", lock_skip_result="no"),
    *(row(f"without an answer {what} fails, for it cannot come again", "skip", silent("acquire"), event,
        raises(StoreError, "no answer", told=RAISED)) for what, event in [("an eager call", eager), ("an item", item),
        ("a broadcast call", broadcast)]),
    row("a grant whose answer is lost is given back", "skip", silent("acquire", deaf=False), first, unheard(0.25)),
    row("a grant whose answer is lost is given back after a run without a lock", "skip", silent("acquire",
        deaf=False), first, runs(locked=False, told=UNLOCKED), lock_on_store_error="run"),
    row("a grant whose answer is lost is given back after a failure", "skip", silent("acquire", deaf=False), first,
        raises(StoreError, "no answer", told=RAISED), lock_on_store_error="raise"),
    row("a turn whose answer is lost is given back", "wait", (held, silent("queue", deaf=False)), first,
        unheard(0.25, since=micro(0))),
    row("a turn whose answer is lost is given back after a failure", "wait", (held, silent("queue", deaf=False)),
        first, raises(StoreError, "no answer", told=RAISED), lock_on_store_error="raise"),
    row("a successor that runs without a lock is next no longer", "rerun",
        (held, next_is(ME), of_the_crowd, gone, silent("acquire")), again(1, asked=True),
        runs(locked=False, told=UNLOCKED, leaves=(f"done {ME}",), takes=(f"next {ME}", f"crowd {ME}")),
        lock_on_store_error="run"),
    row("a successor to which others were left is not skipped", "rerun",
            (held, next_is(ME), merged(2), of_the_crowd, gone, silent("acquire")), again(1, asked=True),
            unheard(0.25, **later(2, asked=True)), lock_on_store_error="skip"),
    row("a successor that is not sure to be one fails and leaves nothing", "rerun", (held,
        silent("succeed", deaf=False)), first, raises(StoreError, "no answer", told=RAISED),
        lock_on_store_error="raise"),
    row("a successor that is not sure to be one is skipped and leaves nothing", "replace", (held,
        silent("succeed", deaf=False)), first, revoked("no answer", told=SKIPPED), lock_on_store_error="skip"),
    row("who cannot ask for the holder comes again", "join", (ended("PENDING"), silent("look")), again(1,
        joins="the-holder"), unheard(0.25, **later(2, joins="the-holder"))),
]  # fmt: skip

ROWS = [*FREE, *HELD, *RESCHEDULED, *WAITING, *JOINED, *RERUN, *REPLACE, *OWN, *QUEUED, *PLACES, *SILENT]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in ROWS])
def test_what_becomes_of_a_message(case: Row, world_of: Callable[..., World]) -> None:
    world = world_of(lock_on_conflict=case.policy, **case.options)
    for scene in case.finds:
        scene(world)
    before = world.store.remains(world.key)

    ends, result = deliver(world, case.event)

    settle()
    expected, left = case.outcome, world.store.remains(world.key)
    assert (ends, outcome_of(result)) == (expected.ends, expected.result)
    assert expected.says in str(result)
    assert world.ran == ([expected.ran] if expected.ran else [])
    assert [sent.options["countdown"] for sent in world.sent] == ([expected.after] if expected.after else [])
    assert [sent.notes for sent in world.sent] == ([expected.notes] if expected.notes is not None else [])
    assert tuple(world.told) == expected.told
    for sent in world.sent:
        assert_it_is_the_same_message(world, case.event, sent)
        assert Notes.of(sent.options["headers"]).marked == (f"queued {ME}" in before)
    assert (left - before, before - left) == (expected.leaves, expected.takes)


@pytest.mark.parametrize(
    ("policy", "finds", "event", "reason", "holder"),
    [
        ("skip", (held,), first, "skipped", "the-holder"),
        ("skip", (held_by_a_lock,), first, "skipped", None),
        ("rerun", (held, next_is("the-next", OLDER)), first, "merged", "the-next"),
        ("replace", (held, next_is("the-next", NEWER)), first, "merged", "the-next"),
        ("join", (ended("REVOKED", TaskRevokedError("away")),), again(1, joins="the-holder"), "joined", "the-holder"),
        ("skip", (silent("acquire"),), first, "unanswered", None),
    ],
)
def test_a_call_that_ends_as_revoked_says_why_for_programs(
    world_of: Callable[..., World], policy: str, finds: Sequence[Scene], event: Event, reason: str, holder: str | None
) -> None:
    world = world_of(lock_on_conflict=policy, lock_on_store_error="skip")
    for scene in finds:
        scene(world)

    deliver(world, event)

    error = world.task.AsyncResult(ME).result
    assert isinstance(error, CallRevoked)
    assert (error.key, error.holder_task_id, error.reason) == (world.key, holder, reason)


def assert_it_is_the_same_message(world: World, event: Event, sent: Sent) -> None:
    notes, attempt = Notes.of(sent.options["headers"]), event.request.get("retries", 0)
    assert (notes.key, tuple(sent.args), sent.options["task_id"]) == (world.key, (1,), ME)
    assert (sent.options["retries"], sent.options["queue"]) == (attempt, "celery")
    assert notes.published == MINE or not event.is_noted


def settle() -> None:
    """Wait for what is given back in the background."""
    until(lambda: not leftovers._thread.runs, "nothing is left to give back")


def outcome_of(result: Any) -> Any:
    return type(result) if isinstance(result, Exception) else result


@pytest.mark.parametrize("policy", ["reschedule", "rerun", "replace"])
def test_a_call_that_comes_again_stays_queued_for_as_long_as_it_comes(
    world_of: Callable[..., World], policy: Any
) -> None:
    world = world_of(lock_on_conflict=policy, lock_mode="until_and_while_executing", lock_queue_ttl=60)
    held_by(ends_in=3600)(world)
    world.store.mark_queued(world.key, ME, 60, limit=0, quiet=0)

    for tries in range(1, 4):
        world.store.time += 25
        deliver(world, again(tries))

    in_the_way = world.store.mark_queued(world.key, "another", 60, limit=0, quiet=0)
    assert in_the_way is not None
    assert in_the_way.task_id == ME


def test_the_rows_bear_names_of_their_own() -> None:
    names = [case.name for case in ROWS]

    assert len(names) == len(set(names))


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_of_a_retry_and_a_successor_one_runs(world_of: Callable[..., World], policy: Any) -> None:
    world = world_of(lock_on_conflict=policy, lock_mode="until_executed")
    # The run has published its retry and ended; while it ran another message came, as one of a canvas.
    queued(ME)(world)
    next_is("the-next", NEWER, policy=policy)(world)

    for tries in range(1, 20):
        world.store.time += 2
        deliver(world, again_as(retried, tries))
        deliver(world, again_as(Event(request={"id": "the-next"}), tries, asked=True))

    assert world.ran


@pytest.mark.parametrize("ignored", [False, True])
def test_when_a_call_is_skipped_the_rest_of_its_chain_ends(world_of: Callable[..., World], ignored: bool) -> None:
    world = world_of(ignore_result=ignored)
    held(world)
    steps = [world.task.si().set(task_id=f"step {number}") for number in range(4)]
    later = [group(steps[2], steps[3]), chain(steps[0], steps[1])]
    request = {"chain": [json.loads(json.dumps(dict(step))) for step in later]}

    deliver(world, Event(request=request))

    assert {world.task.AsyncResult(f"step {number}").state for number in range(4)} == {"REVOKED"}
    assert world.sent == []


@pytest.mark.parametrize("policy", ALL[1:])
def test_an_eager_call_inside_a_run_of_the_same_key_does_not_wait_for_its_end(
    world_of: Callable[..., World], policy: str
) -> None:
    world = world_of(lock_on_conflict=policy)
    lease = Lease(world.store, held(world))

    with running_under(lease):
        assert deliver(world, eager)[0] == "FAILURE"
    assert world.sent == []


def test_the_delay_is_drawn_from_its_upper_half(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, _: low)
    world = world_of(lock_on_conflict="reschedule")
    held(world)

    deliver(world, again(2))

    assert [sent.options["countdown"] for sent in world.sent] == [0.5]


@pytest.mark.skipif(not hasattr(trace, "get_actual_ignore_result"), reason="before 5.7 Celery stores it again")
@pytest.mark.parametrize("policy", ["reschedule", "join", "rerun", "replace"])
def test_that_it_comes_again_is_not_stored_over_the_end_of_the_delivery_to_come(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    world = world_of(lock_on_conflict=policy)
    held(world)

    def end_elsewhere(*_: Any, **__: Any) -> Any:
        assert world.task.AsyncResult(ME).state == states.RETRY
        world.task.backend.mark_as_revoked(ME, "ended elsewhere")

    monkeypatch.setattr(world.task.app, "send_task", end_elsewhere)

    assert deliver(world, first)[0] == states.REVOKED


@pytest.mark.skipif(not hasattr(trace, "get_actual_ignore_result"), reason="before 5.7 Celery stores it again")
@pytest.mark.parametrize("by", ["retry", "autoretry_for"])
def test_a_retry_of_the_body_is_not_stored_over_an_end_that_comes_at_once(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    # As for one that has expired by then, or was revoked: a worker throws it away as it comes.
    def body(task: Any, number: int = 1) -> None:
        try:
            raise KeyError("not yet")
        except KeyError as error:
            if by == "retry":
                raise task.retry(exc=error) from error
            raise

    world = world_of(body, autoretry_for=(KeyError,) if by == "autoretry_for" else ())

    def end_elsewhere(*_: Any, **__: Any) -> Any:
        stored = world.task.AsyncResult(ME)
        assert (stored.state, type(stored.result)) == (states.RETRY, KeyError)
        assert 'raise KeyError("not yet")' in stored.traceback
        world.task.backend.mark_as_revoked(ME, "ended elsewhere")

    monkeypatch.setattr(world.task.app, "send_task", end_elsewhere)

    assert deliver(world, first)[0] == states.REVOKED


def test_a_body_that_goes_on_after_its_retry_ends_as_it_does(world_of: Callable[..., World]) -> None:
    def body(task: Any, number: int = 1) -> str:
        task.retry(throw=False)
        return "went on"

    world = world_of(body)

    assert deliver(world, first)[0] == states.SUCCESS
    assert world.task.AsyncResult(ME).result == "went on"


def test_it_comes_again_though_its_state_cannot_be_stored(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(lock_on_conflict="reschedule")
    held(world)
    store, answers = world.task.backend.store_result, iter([OSError("the backend is down")])

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        for error in answers:
            raise error
        return store(*args, **kwargs)

    monkeypatch.setattr(world.task.backend, "store_result", fail_once)

    assert deliver(world, first)[0] == states.RETRY
    assert len(world.sent) == 1


def test_a_body_that_came_without_notes_hands_none_on(world_of: Callable[..., World]) -> None:
    handed_on = {}

    def body(task: Any, number: int = 1) -> None:
        handed_on.update(task.request.headers)

    world = world_of(body)
    request = {"id": ME, "task": "task", "retries": 0, **delivered(), "mine": "its own"}

    tracer_of(world.task)(ME, [1], {}, request)

    assert handed_on["mine"] == "its own"
    assert Notes.of(handed_on, "another call") == Notes()
    assert Notes.of(handed_on, ME).published


def test_an_item_of_a_map_that_asks_for_a_retry_holds_nothing(world_of: Callable[..., World]) -> None:
    def body(task: Any, number: int = 1) -> None:
        raise task.retry(countdown=1)

    world = world_of(body)

    assert deliver(world, item)[0] == states.RETRY
    assert world.store.remains(world.key) == set()


@pytest.mark.parametrize("finds", [(), (held,)], ids=["free", "held"])
def test_a_call_that_bears_the_headers_of_another_has_the_key_of_its_arguments(
    world_of: Callable[..., World], finds: Sequence[Scene]
) -> None:
    # As of a `send_task(..., headers=self.request.headers)` in the body of another task.
    world = world_of()
    for scene in finds:
        scene(world)
    handed_on = {HEADER: {"key": "singleton:v2:{another:00}", "published": 77, "task_id": "another"}}
    request = {"id": ME, "task": "task", "retries": 0, **delivered(), **handed_on}

    tracer_of(world.task)(ME, [1], {}, request)

    assert len(world.ran) == (0 if finds else 1)


def test_a_body_sees_no_header_that_was_not_published(world_of: Callable[..., World]) -> None:
    seen = {}

    def body(task: Any, number: int = 1) -> None:
        seen.update(task.request.headers)

    world = world_of(body)
    published = {HEADER: {"key": world.key, "published": MINE, "task_id": ME}, "mine": "its own"}
    request = {"id": ME, "task": "task", "retries": 0, **delivered(), **published, DELIVERY: tuple(Delivery("token"))}

    tracer_of(world.task)(ME, [1], {}, request)

    assert seen == published


def test_a_call_whose_results_are_ignored_comes_again_without_a_result(world_of: Callable[..., World]) -> None:
    world = world_of(lock_on_conflict="reschedule", ignore_result=True)
    held(world)

    assert deliver(world, first)[0] == states.PENDING
    assert len(world.sent) == 1


def test_a_conflict_is_told_in_the_log_and_as_an_event_where_the_worker_sends_them(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")
    world, events = world_of(), []
    monkeypatch.setattr(world.task, "send_event", lambda *event, **facts: events.append((*event, facts)))
    held(world)

    deliver(world, first)
    deliver(world, Event(request={DELIVERY: Delivery(sends_events=True)}))

    facts = {"key": world.key, "holder": "the-holder", "outcome": "skipped"}
    assert events == [
        ("lock-conflict", facts),
        ("task-revoked", {"terminated": False, "signum": None, "expired": False}),
    ]
    assert f"lock.conflict key={world.key} task_id={ME} holder=the-holder" in caplog.text


# Waiting in place under a time limit.


@pytest.fixture
def enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool ends what takes longer than its limit."""
    monkeypatch.setattr(waiting, "current_process", lambda: SimpleNamespace(daemon=True))


def limited(event: Event, limit: float = 0.004) -> Event:
    """The same, with a time limit."""
    return replace(event, request={**event.request, "timelimit": (limit, None)})


@pytest.mark.usefixtures("enforced")
@pytest.mark.parametrize(
    ("event", "options", "notes"),
    [
        (first, {}, {"tries": 1, "since": micro(0)}),
        (first, {"lock_wait_timeout": 30}, {"tries": 1, "since": micro(0)}),
        (first, {"lock_mode": "until_and_while_executing"}, {"tries": 1, "since": micro(0)}),
        (retried, {}, {"tries": 1, "since": micro(0)}),
        (redelivery, {}, {"tries": 1, "since": micro(0), "is_copy": True}),
        (Event(notes={"tries": 3, "since": micro(20)}), {"lock_wait_timeout": 30}, {"tries": 4, "since": micro(20)}),
    ],
)
def test_a_waiter_that_has_used_its_share_of_the_limit_leaves_its_turn_and_comes_again(
    world_of: Callable[..., World], event: Event, options: Any, notes: Any
) -> None:
    world = world_of(lock_on_conflict="wait", **options)
    held(world)
    queued(ME)(world)
    before = world.store.remains(world.key)

    ends, _ = deliver(world, limited(event))

    assert (ends, world.told, world.ran) == (states.RETRY, ["rescheduled"], [])
    assert [sent.notes for sent in world.sent] == [notes]
    assert world.sent[0].options["time_limit"] == 0.004
    assert world.store.remains(world.key) == before


@pytest.mark.usefixtures("enforced")
def test_the_turn_is_left_before_the_message_comes_again(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, left = world_of(lock_on_conflict="wait"), []
    held(world)
    monkeypatch.setattr(world.task.app, "send_task", lambda *_, **__: left.append(world.store.remains(world.key)))

    deliver(world, limited(first))

    assert left == [{"held the-holder"}]


@pytest.mark.usefixtures("enforced")
@pytest.mark.parametrize("event", [broadcast, item])
@pytest.mark.parametrize("policy", ["wait", *COMES_AGAIN])
def test_one_that_cannot_come_again_gives_up_once_it_has_used_its_share(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch, policy: str, event: Event
) -> None:
    # The item has none of its own.
    monkeypatch.setattr(waiting, "_of_the_worker", (0.004, None))
    world = world_of(lock_on_conflict=policy)
    held(world)

    assert deliver(world, event)[0] == states.FAILURE
    assert world.sent == []


@pytest.mark.usefixtures("enforced")
def test_the_items_of_a_map_share_what_it_may_wait(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "age", 3.0)
    monkeypatch.setattr(waiting, "_of_the_worker", (40.0, None))
    world, longest, wait = world_of(lock_on_conflict="wait", lock_key=("number",)), [], Lease.wait

    def note(lease: Lease, conflict: Any, timeout: float) -> Any:
        longest.append(timeout)
        return wait(lease, conflict, timeout)

    monkeypatch.setattr(Lease, "wait", note)
    for number in (1, 2):
        claim = Claim(world.task.lock_key_for(number), "the-holder's", 30, facts=Facts("the-holder"))
        world.store.acquire(claim)
        world.store.meanwhile.append(partial(world.store.release, claim, None))
    items, request = world.task.app.tasks["celery.map"], {"id": ME, "retries": 0, **delivered()}

    tracer_of(items)(ME, [world.task.s(), [1, 2]], {}, request)

    assert [args for args, _ in world.ran] == [(1,), (2,)]
    assert longest == [7, 4]


@pytest.mark.usefixtures("enforced")
def test_lock_wait_timeout_goes_on_while_a_waiter_comes_again(world_of: Callable[..., World]) -> None:
    world = world_of(lock_on_conflict="wait", lock_wait_timeout=30)
    held(world)

    ends, error = deliver(world, limited(Event(notes={"tries": 9, "since": micro(29.9)})))

    assert (ends, type(error), world.sent) == (states.FAILURE, LockHeld, [])
    assert world.store.remains(world.key) == {"held the-holder"}


def test_waiting_is_told_in_the_log_and_by_events(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")
    world, events, leases = world_of(lock_on_conflict="wait"), [], []
    monkeypatch.setattr(world.task, "send_event", lambda *event, **facts: events.append((*event, facts)))
    signals.lock_acquired.connect(lambda lease, **_: leases.append(lease.waited), sender=world.task, weak=False)
    for scene in (held, meanwhile(later_by(2)), released_meanwhile):
        scene(world)

    deliver(world, Event(request={DELIVERY: Delivery(sends_events=True)}))

    assert events == [
        ("lock-waiting", {"key": world.key, "holder": "the-holder"}),
        ("lock-acquired", {"key": world.key, "waited": 2.0}),
    ]
    assert leases == [2.0]
    assert f"lock.waiting key={world.key} task_id={ME} holder=the-holder" in caplog.messages
    (granted,) = [line for line in caplog.messages if line.startswith("lock.acquired ")]
    assert f" task_id={ME} " in granted
    assert granted.endswith(" waited=2.0")


def test_how_long_a_call_has_waited_is_counted_from_its_first_refusal(world_of: Callable[..., World]) -> None:
    world, leases = world_of(lock_on_conflict="reschedule"), []
    signals.lock_acquired.connect(lambda lease, **_: leases.append(lease.waited), sender=world.task, weak=False)

    deliver(world, first)
    deliver(world, again(3))

    assert leases == [0.0, 1.0]


# What else is told.


def test_an_event_that_cannot_be_sent_changes_nothing(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OperationalError("the broker is down")

    world = world_of()
    monkeypatch.setattr(world.task, "send_event", fail)
    held(world)

    assert deliver(world, Event(request={DELIVERY: Delivery(sends_events=True)}))[0] == "REVOKED"


def test_the_lease_bears_the_token_that_the_main_process_has_made(world_of: Callable[..., World]) -> None:
    tokens = []
    world = world_of(before_start=lambda *_: None)
    signals.lock_acquired.connect(lambda lease, **_: tokens.append(lease.token), sender=world.task, weak=False)

    deliver(world, Event(request={DELIVERY: Delivery("made in main")}))

    assert tokens == ["made in main"]


def test_what_the_holder_is_and_does_is_told_to_those_who_ask(world_of: Callable[..., World]) -> None:
    holders: list[Any] = []
    world = world_of(lock_name="shared")
    signals.lock_acquired.connect(
        lambda lease, **_: holders.extend(world.store.holders(lease.key)), sender=world.task, weak=False
    )

    deliver(world, Event(request={"retries": 2, "hostname": "worker@here"}))

    (holder,) = holders
    assert (holder.task_id, holder.task_name, holder.hostname) == (ME, "task", "worker@here")
    assert (holder.attempt, holder.pid) == (2, os.getpid())


@pytest.mark.parametrize(
    ("wanted", "event", "outcome"),
    [
        ("run", first, "unlocked"),
        ("skip", first, "skipped"),
        ("skip", again(1, asked=True), "rescheduled"),
        ("raise", first, "raised"),
        ("reschedule", first, "rescheduled"),
        ("reschedule", item, "raised"),
    ],
)
def test_what_becomes_of_a_call_without_an_answer_is_told_in_the_log(
    world_of: Callable[..., World], caplog: pytest.LogCaptureFixture, wanted: str, event: Event, outcome: str
) -> None:
    world = world_of(lock_on_conflict="rerun", lock_on_store_error=wanted)
    silent("acquire", "queue")(world)

    deliver(world, event)

    (line,) = [each for each in caplog.messages if each.startswith("lock.unanswered ")]
    assert line.startswith(f"lock.unanswered key={world.key} task_id={ME} outcome={outcome}: ")


def test_a_call_without_an_answer_is_not_delivered_twice_while_it_waits(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message, "visibility_timeout", lambda _: 40.0)
    world = world_of()
    silent("acquire")(world)

    deliver(world, tried_for(7200))

    assert [sent.options["countdown"] for sent in world.sent] == [10]


def test_what_a_question_without_an_answer_has_taken_counts(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before the question it may have waited in its place, for a store that was there.
    monkeypatch.setattr(Run, "age", 100.0)
    world = world_of()
    silent("acquire")(world)

    deliver(world, first)

    assert [sent.notes for sent in world.sent] == [{"tries": 1, "unanswered": 10_000_000}]


def test_a_store_that_stays_away_is_told_once_by_each_call(
    world_of: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")
    world = world_of(lock_wait_timeout=30)
    silent("acquire")(world)

    for event in (first, tried_for(5), tried_for(15), tried_for(30)):
        deliver(world, event)

    levels = [record.levelname for record in caplog.records if record.getMessage().startswith("lock.unanswered ")]
    assert levels == ["WARNING", "INFO", "INFO", "WARNING"]
