"""The scripts, on real servers, answer as the model in memory does, whatever is asked and in whatever order.

Time stands still, in the model and for the locks on the servers (`ageing.py`),
except where it is advanced, and never to a moment that is near a deadline.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.stores.base import RELEASE_BOUND
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Grant, Holder, Succession
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.redis.waiter import RedisWaiter
from tests.model.ageing import StandingClock
from tests.servers import SERVERS, Server, running
from tests.waiting import until

KEYS = ("singleton:v1:{first:0}", "singleton:v1:{second:0}")
CONTENDERS = range(6)
WHO = st.integers(0, 59)
MOSTLY = st.sampled_from((True, True, True, True, False))
EXAMPLES = 120
# Deadlines are further away than this. An example in which a request took half of it says nothing, and is left out.
NOISE = 0.4
FACTS: tuple[dict[str, str], ...] = (
    {},
    {"task_id": "a-task", "hostname": "here", "pid": "12"},
    {"task_id": "a task", "task_name": "app.add", "attempt": "2"},
)
TASK_IDS = ("a-task", "a task", "another")


class Model(MemoryStore):
    """The model, and what it leaves out: a release passes over the waiters that do not listen."""

    def __init__(self) -> None:
        self.time = 2_000_000_000.0
        self.listening: set[str] = set()
        self.woken: list[str] = []
        super().__init__(now=lambda: self.time)

    def queue(self, claim: Claim) -> Grant | float:
        self.listening.add(claim.token)
        return super().queue(claim)

    def hang_up(self, claim: Claim) -> None:
        self.listening.discard(claim.token)

    def release(self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND) -> Answer:
        has_a_place = claim.token in self.tokens(claim.key, of_turns=False)
        answer = super().release(claim, place, bound)
        self.woken = []
        lock = self._lock(claim.key)
        if lock is not None:
            free, queue, lock.queue = len(lock.free_places(self._now())), lock.queue, []
            # A place that is free later: whoever is first has to hear when.
            free += has_a_place and f"~{claim.token}" in self.tokens(claim.key)
            free -= lock.successor is not None
            for turn in queue:
                if free <= 0 or turn.claim.token in self.listening:
                    lock.queue.append(turn)
                    self.woken += [turn.claim.token] if free > 0 else []
                    free -= 1
            if not lock.places and not lock.queue and lock.successor is None and not lock.marks(self._now()):
                del self._locks[claim.key]
        return answer

    def expires_in(self, key: str) -> float | None:
        """Seconds until the lock is gone, or None if there is none."""
        lock = self._lock(key)
        return lock.expiry - self._now() if lock else None

    def living_turns(self, key: str) -> list[str]:
        lock = self._lock(key)
        return [turn.claim.token for turn in lock.queue if turn.deadline > self._now()] if lock else []

    def tokens(self, key: str, *, of_turns: bool = True) -> list[str]:
        """Of those who have a place or a turn, expired or not."""
        lock = self._lock(key)
        turns = lock.queue if lock and of_turns else []
        return [each.claim.token for each in (*lock.places.values(), *turns)] if lock else []

    def moments(self) -> list[float]:
        """In how many seconds something happens by itself."""
        now, found = self._now(), []
        for lock in self._locks.values():
            found += [lock.expiry, *(turn.deadline for turn in lock.queue)]
            found += [mark.deadline for mark in (lock.successor, lock.queued, lock.quiet) if mark]
            for place in lock.places.values():
                found += [place.deadline, place.since + place.claim.min_hold]
        return [moment - now for moment in found]


class Real:
    """A server, asked in the same way as the model."""

    def __init__(self, server: Server) -> None:
        self.store = RedisStore(server.url, {})
        self.client = server.client()
        self.clock = StandingClock(self.client)
        self.acquire, self.renew, self.release = self.store.acquire, self.store.renew, self.store.release
        self.publish, self.withdraw = self.store.publish, self.store.withdraw
        self.waiters: dict[str, RedisWaiter] = {}
        self.fences: dict[str, int] = {}

    def queue(self, claim: Claim) -> Grant | float:
        if claim.token not in self.waiters:
            self.waiters[claim.token] = self.store.waiter(claim)
        waiter = self.waiters[claim.token]
        # On a busy machine a waiter may be deaf at first, and the release then passes it over.
        until(lambda: waiter._listen() or waiter._ears, "the waiter listens")
        return waiter.ask()

    def hang_up(self, claim: Claim) -> None:
        waiter = self.waiters.pop(claim.token, None)
        if waiter is not None and waiter._ears is not None:
            # Without the answer to this, the server might not know yet that nobody listens.
            waiter._ears.send_command("UNSUBSCRIBE")
            while waiter._ears.read_response()[0] != "unsubscribe":
                pass
            waiter.__exit__()

    def was_woken(self, token: str) -> bool:
        ears = self.waiters[token]._ears
        return bool(ears.can_read(timeout=1.0) and ears.read_response())

    def forget_everything(self) -> None:
        self.client.flushall()
        self.fences.clear()

    def close(self) -> None:
        self.store.close()
        self.client.close()


@dataclass
class Contender:
    """Somebody who wants a lock; the place as far as it has been told."""

    claim: Claim
    place: int | None = None
    arrived: int = 0
    asked_at: int = 0


class Scripts(RuleBasedStateMachine):
    """Six contenders for two locks, in the model and on two servers."""

    reals: tuple[Real, ...]
    completed = 0

    @initialize(limits=st.tuples(st.integers(1, 3), st.integers(1, 3)))
    def begin(self, limits: tuple[int, int]) -> None:
        self.limits = dict(zip(KEYS, limits, strict=True))
        self.model = Model()
        self.in_time = True
        self.tokens = self.arrivals = 0
        self.former: list[Claim] = []
        self.contenders = [Contender(self.claim(KEYS[number == 0], 1000.0)) for number in CONTENDERS]
        for real in self.reals:
            real.forget_everything()

    def claim(
        self,
        key: str,
        ttl: float,
        min_hold: float = 0.0,
        facts: int = 0,
        disagrees: bool = False,
        queued: bool = False,
    ) -> Claim:
        self.tokens += 1
        limit = self.limits[key] + (1 if disagrees else 0)
        return Claim(key, f"token-{self.tokens}", ttl, limit, FACTS[facts], min_hold, queued=queued)

    @rule(who=WHO, heard=MOSTLY)
    def acquires(self, who: int, heard: bool) -> None:
        self.asks(self.contenders[who % 6], heard, lambda store, claim: store.acquire(claim))

    @rule(who=WHO, heard=MOSTLY, policy=st.sampled_from(("rerun", "replace")))
    def asks_to_succeed(self, who: int, heard: bool, policy: str) -> None:
        contender = self.contenders[who % 6]
        if "task_id" in contender.claim.facts:
            wish = Succession(policy, "" if contender.asked_at else f"of {contender.claim.token}", contender.asked_at)
            contender.claim = replace(contender.claim, succession=wish)
            self.pass_time(2 * NOISE)
            self.asks(contender, heard, lambda store, claim: store.acquire(self.asked_before(store, claim)))
            self.pass_time(2 * NOISE)
            contender.asked_at = contender.asked_at or int(self.model.time * 1_000_000)
            contender.claim = replace(contender.claim, succession=None)

    def asked_before(self, store: Any, claim: Claim) -> Claim:
        """The claim with the moment at which it first asked as this store's clock tells it."""
        wish = claim.succession
        if wish is None or not wish.asked_at or store is self.model:
            return claim
        age = int(self.model.time * 1_000_000) - wish.asked_at
        return replace(claim, succession=replace(wish, asked_at=store.clock.microseconds() - age))

    @rule(who=WHO, heard=MOSTLY)
    def queues(self, who: int, heard: bool) -> None:
        self.asks(self.contenders[who % 6], heard, lambda store, claim: store.queue(claim))

    @rule(who=WHO, heard=MOSTLY)
    def queues_as_well(self, who: int, heard: bool) -> None:
        self.asks(self.contenders[who % 6], heard, lambda store, claim: store.queue(claim))

    @rule(
        who=WHO,
        key=st.sampled_from((KEYS[0], KEYS[0], KEYS[0], KEYS[1])),
        ttl=st.sampled_from((1000.0, 1370.0, 2190.0)),
        min_hold=st.sampled_from((0.0, 0.0, 510.0, 1700.0)),
        facts=st.integers(0, len(FACTS) - 1),
        agrees=MOSTLY,
        politely=st.booleans(),
        queued=st.booleans(),
    )
    def leaves_and_comes_back_as_somebody_else(
        self, who: int, key: str, ttl: float, min_hold: float, facts: int, agrees: bool, politely: bool, queued: bool
    ) -> None:
        if politely:
            self.release(self.contenders[who % 6].claim, None)
        self.hang_up(self.contenders[who % 6].claim)
        self.former.append(self.contenders[who % 6].claim)
        self.contenders[who % 6] = Contender(self.claim(key, ttl, min_hold, facts, not agrees, queued))
        self.queues(who, True)

    @precondition(lambda self: self.involved())
    @rule(whose=st.lists(WHO, min_size=1, max_size=3))
    def renew(self, whose: list[int]) -> None:
        claims = [self.one_of_those_involved(who).claim for who in whose]
        self.everywhere(lambda store: store.renew(claims, 1.0))

    @precondition(lambda self: self.involved())
    @rule(who=WHO, sure=st.booleans())
    def releases(self, who: int, sure: bool) -> None:
        contender = self.one_of_those_involved(who)
        self.release(contender.claim, contender.place if sure else None)
        self.hang_up(contender.claim)
        contender.place = None
        if contender.claim.min_hold:
            # The place is kept by a name that is made of the token, so there must not be a second one.
            self.contenders[self.contenders.index(contender)] = Contender(self.claim(contender.claim.key, 1000.0))

    @rule(
        key=st.sampled_from(KEYS),
        task_id=st.sampled_from(TASK_IDS),
        seconds=st.sampled_from((930.0, 2510.0)),
        quiet=st.sampled_from((0.0, 0.0, 1610.0)),
        counts_running=st.booleans(),
    )
    def publishes(self, key: str, task_id: str, seconds: float, quiet: float, counts_running: bool) -> None:
        self.everywhere(lambda store: store.publish(key, task_id, seconds, counts_running=counts_running, quiet=quiet))

    @rule(key=st.sampled_from(KEYS), task_id=st.sampled_from(TASK_IDS), afresh=st.booleans())
    def withdraws(self, key: str, task_id: str, afresh: bool) -> None:
        self.everywhere(lambda store: store.withdraw(key, task_id, afresh=afresh))

    @precondition(lambda self: self.involved() and self.former)
    @rule(which=st.integers(0, 20), releases=st.booleans())
    def somebody_long_gone_is_heard_of(self, which: int, releases: bool) -> None:
        claim = self.former[which % len(self.former)]
        if releases:
            self.release(claim, None)
        else:
            self.everywhere(lambda store: store.renew([claim], 1.0))

    @precondition(lambda self: self.model.listening)
    @rule(who=WHO)
    def dies_waiting(self, who: int) -> None:
        waiting = [contender for contender in self.contenders if contender.claim.token in self.model.listening]
        if waiting:
            self.hang_up(waiting[who % len(waiting)].claim)

    @precondition(lambda self: self.involved())
    @rule(which=st.integers(0, 3), late=st.sampled_from((-20.0, 0.7, 0.7)))
    def time_passes_until_about_a_deadline(self, which: int, late: float) -> None:
        moments = sorted(moment for moment in self.model.moments() if moment + late > 0)
        if moments:
            self.pass_time(moments[min(which, len(moments) - 1)] + late)

    @precondition(lambda self: self.involved())
    @rule(seconds=st.sampled_from((110.0, 490.0)))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    def asks(self, contender: Contender, heard: bool, ask: Callable[[Any, Claim], Any]) -> None:
        claim = contender.claim
        living, free = self.model.living_turns(claim.key), claim.limit - len(self.model.holders(claim.key))
        has_a_place = claim.token in self.model.tokens(claim.key, of_turns=False)
        answers = self.everywhere(lambda store: ask(store, claim))
        if isinstance(answers[0], Grant):
            before = [other for other in self.contenders if other.claim.token in living and other is not contender]
            came_before = [other for other in before if not contender.arrived or other.arrived < contender.arrived]
            assert has_a_place or len(came_before) < free, f"{claim.token} was granted before its turn"
            self.granted(claim, answers)
            contender.arrived = 0
            if heard:
                self.hang_up(claim)
            contender.place = answers[0].place if heard or contender.place == answers[0].place else None
        elif claim.token not in living and claim.token in self.model.living_turns(claim.key):
            self.arrivals += 1
            contender.arrived = self.arrivals

    def involved(self) -> list[Contender]:
        """Those who have a place or a turn."""
        tokens = {token for key in KEYS for token in self.model.tokens(key)}
        return [contender for contender in self.contenders if contender.claim.token in tokens]

    def one_of_those_involved(self, who: int) -> Contender:
        """Mostly so; to ask about others has to do nothing."""
        among = self.involved() * 4 + self.contenders
        return among[who % len(among)]

    @invariant()
    def the_stores_tell_the_same(self) -> None:
        for key in KEYS:
            held, expiry = self.model.holders(key), self.model.expires_in(key)
            assert len(held) <= self.limits[key] + 1
            for real in self.reals:
                if self.in_time:
                    with self.at_this_moment(real):
                        held_there, left = tuple(real.store.holders(key)), real.client.pttl(key)
                if not self.in_time:
                    return
                assert same(held_there, tuple(held)), f"{key} is held by {held_there}, in the model by {held}"
                assert left != -1, f"{key} has no expiry"
                assert (left == -2) == (expiry is None), f"{key} expires in {left} ms, in the model in {expiry} s"
                assert expiry is None or same(left / 1000, expiry)

    def everywhere(self, ask: Callable[[Any], Any]) -> list[Any]:
        """What the servers answer, which is what the model answers."""
        expected, answers = answered(ask, self.model), []
        for real in self.reals:
            if self.in_time:
                with self.at_this_moment(real):
                    answers.append(answered(ask, real))
            if self.in_time:
                assert same(answers[-1], expected), f"{real.store.address}: {answers[-1]} is not {expected}"
        self.pass_time(NOISE / 4)
        return answers if self.in_time else [expected] * len(self.reals)

    @contextmanager
    def at_this_moment(self, real: Real) -> Iterator[None]:
        """Ask at the model's time; of an example in which this took too long nothing more is compared."""
        began = time.monotonic()
        real.clock.advance()
        yield
        self.in_time &= time.monotonic() - began <= NOISE / 2

    def granted(self, claim: Claim, grants: list[Grant]) -> None:
        """Each grant has a greater fence than the one before, and a repeated one its own."""
        for real, grant in zip(self.reals, grants, strict=True):
            if self.in_time and real.fences.get(claim.token) != grant.fence:
                assert grant.fence > real.fences.get(claim.key, 0)
                real.fences[claim.key] = real.fences[claim.token] = grant.fence

    def release(self, claim: Claim, place: int | None) -> None:
        self.everywhere(lambda store: store.release(claim, place))
        for token in self.model.woken:
            assert not self.in_time or all(real.was_woken(token) for real in self.reals), f"{token} was not woken"

    def hang_up(self, claim: Claim) -> None:
        for store in (self.model, *self.reals):
            store.hang_up(claim)

    def pass_time(self, seconds: float) -> None:
        moments = self.model.moments()
        while any(abs(moment - seconds) < NOISE for moment in moments):
            seconds += NOISE / 4
        for real in self.reals:
            real.clock.advance(seconds)
        self.model.time += seconds

    def teardown(self) -> None:
        Scripts.completed += getattr(self, "in_time", False)
        for contender in getattr(self, "contenders", ()):
            self.hang_up(contender.claim)


def answered(ask: Callable[[Any], Any], store: Any) -> Any:
    try:
        return ask(store)
    except ConfigurationError:
        return "held under another limit"


def same(answer: Any, expected: Any) -> bool:
    """The answers mean the same; each store has its own fences, and clocks are read one after the other."""
    if isinstance(expected, float):
        return isinstance(answer, float) and abs(answer - expected) < NOISE
    if isinstance(expected, Grant):
        return isinstance(answer, Grant) and told(answer) == told(expected)
    if isinstance(expected, Conflict):
        alike = isinstance(answer, Conflict) and answer.successor == expected.successor
        return alike and same(answer.holders, expected.holders)
    if isinstance(expected, Holder):
        return isinstance(answer, Holder) and same((answer,), (expected,))
    if isinstance(expected, tuple):
        # Where two end at the same moment, either may come first; waiters have an order of their own.
        waiters = [holder.token for holder in expected if not holder.fence]
        pairs = list(zip(*(sorted(holders, key=lambda h: h.token) for holders in (answer, expected)), strict=False))
        alike = all(described(one) == described(two) and same(one.expires_in, two.expires_in) for one, two in pairs)
        return alike and len(answer) == len(expected) and waiters in ([], [holder.token for holder in answer])
    return bool(answer == expected)


def told(grant: Grant) -> tuple[Any, ...]:
    return grant.place, grant.took_over, grant.arguments


def described(holder: Holder) -> tuple[Any, ...]:
    return holder.token, holder.task_id, holder.task_name, holder.hostname, holder.pid, holder.attempt


@pytest.fixture(scope="module")
def reals() -> Iterator[tuple[Real, ...]]:
    with ExitStack() as stack:
        both = tuple(Real(stack.enter_context(running(kind))) for kind in SERVERS)
        yield both
        for real in both:
            real.close()


def test_the_scripts_answer_as_the_model_does(reals: tuple[Real, ...]) -> None:
    Scripts.reals = reals
    Scripts.completed = 0
    enough = settings(
        max_examples=EXAMPLES,
        stateful_step_count=40,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Scripts, settings=enough)
    assert Scripts.completed >= EXAMPLES / 2
