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

from celery_singleton_lock.stores.memory.lock import PATIENCE
from celery_singleton_lock.stores.records import Claim, Ending, Facts, Grant, Succession
from tests.model.stores import NOISE, Model, Real, asked, same, seen
from tests.servers import SERVERS, running

KEYS = ("singleton:v2:{first:0}", "singleton:v2:{second:0}")
CONTENDERS = range(6)
WHO = st.integers(0, 59)
MOSTLY = st.sampled_from((True, True, True, True, False))
EXAMPLES = 120
FACTS = (
    Facts(),
    Facts("a-task", hostname="here", pid=12),
    Facts("a task", "app.add", attempt=2),
    Facts("a-task", attempt=1),
    Facts("another"),
    Facts("a-task", attempt=1),
)
TASK_IDS = ("a-task", "a task", "another")
TASK_NAMES = ("app.add", "app.sub")
KEPT = 1930.0
FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "may_be_copy": st.booleans(),
        "heeds_queued": st.booleans(),
        "asked": st.booleans(),
        "succeeds": st.sampled_from(("rerun", "replace")),
        "merges": st.sampled_from(TASK_NAMES),
        "crowds": st.booleans(),
        "joins": st.booleans(),
        "returns": st.booleans(),
    },
)


@dataclass
class Contender:
    """Somebody who wants a lock; the place as far as it has been told."""

    claim: Claim
    place: int | None = None
    arrived: int = 0


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
        self.contenders = [Contender(self.claim(KEYS[number == 0], 1000.0, facts=number)) for number in CONTENDERS]
        for real in self.reals:
            real.forget_everything()

    def claim(self, key: str, ttl: float, min_hold: float = 0.0, facts: int = 0, more: int = 0) -> Claim:
        self.tokens += 1
        # Published at some time of the model's, no two at the same; the stores are told it by their own clocks.
        published = self.model.time - 10.0 + self.tokens % 7 + 0.003 * self.tokens
        mine = replace(FACTS[facts], published=1000 * round(published * 1000))
        marker = f"{key}:done:{mine.task_id}"
        return Claim(key, f"token-{self.tokens}", ttl, self.limits[key] + more, mine, min_hold, marker)

    @rule(who=WHO, heard=MOSTLY, flags=FLAGS)
    def acquires(self, who: int, heard: bool, flags: dict[str, Any]) -> None:
        self.asks(self.contenders[who % 6], heard, lambda store, claim: store.acquire(claim), flags)

    @rule(
        who=WHO,
        policy=st.sampled_from(("rerun", "replace")),
        has_asked=st.booleans(),
        tells=st.booleans(),
        task_name=st.sampled_from((*TASK_NAMES, *TASK_NAMES[:1] * 3)),
        memory=st.sampled_from((41.0, 1730.0)),
    )
    def asks_to_succeed(
        self, who: int, policy: Succession, has_asked: bool, tells: bool, task_name: str, memory: float
    ) -> None:
        contender = self.contenders[who % 6]
        if contender.claim.facts.task_id:
            claim = replace(contender.claim, asked=has_asked)
            arguments = f"of {claim.token}" if tells else ""
            self.everywhere(lambda store: store.succeed(self.told(store, claim), policy, task_name, arguments, memory))
            self.asks(contender, True, lambda store, claim: store.acquire(claim), {"asked": True})

    @rule(who=WHO, policy=st.sampled_from(("rerun", "replace")), has_asked=st.booleans())
    def asks_to_succeed_as_well(self, who: int, policy: Succession, has_asked: bool) -> None:
        self.asks_to_succeed(who, policy, has_asked, True, TASK_NAMES[0], 1730.0)

    @precondition(lambda self: any(lock.merged for lock in self.model._locks.values()))
    @rule(who=WHO, is_known=MOSTLY, is_older=MOSTLY, leave=st.booleans())
    def takes_what_was_merged(self, who: int, is_known: bool, is_older: bool, leave: bool) -> None:
        key = next(key for key, lock in self.model._locks.items() if lock.merged)
        if leave:
            for contender in self.contenders:
                if contender.claim.key == key:
                    self.release(contender.claim, None)
                    self.hang_up(contender.claim)
            self.pass_time(2 * PATIENCE)
        mine = self.contenders[who % 6] = Contender(self.claim(key, 1000.0, facts=who % len(FACTS)))
        mine.claim.facts.published -= 10**12 if is_older else 0
        mine.claim.facts.published *= is_known
        self.asks(mine, True, lambda store, claim: store.acquire(claim), {"merges": TASK_NAMES[0], "asked": True})

    def told(self, store: Any, claim: Claim) -> Claim:
        """The claim with its time of publication as this store's clock has it."""
        if store is self.model or not claim.facts.published:
            return claim
        age = 1000 * round(self.model.time * 1000 - claim.facts.published / 1000)
        return replace(claim, facts=replace(claim.facts, published=store.clock.microseconds() - age))

    @rule(who=WHO, heard=MOSTLY)
    def queues(self, who: int, heard: bool) -> None:
        self.asks(self.contenders[who % 6], heard, lambda store, claim: store.queue(claim), {})

    @rule(who=WHO, heard=MOSTLY, flags=FLAGS)
    def queues_as_well(self, who: int, heard: bool, flags: dict[str, Any]) -> None:
        self.asks(self.contenders[who % 6], heard, lambda store, claim: store.queue(claim), flags)

    @rule(
        who=WHO,
        key=st.sampled_from((KEYS[0], KEYS[0], KEYS[0], KEYS[1])),
        ttl=st.sampled_from((1000.0, 1370.0, 2190.0)),
        min_hold=st.sampled_from((0.0, 0.0, 510.0, 1700.0)),
        facts=st.integers(0, len(FACTS) - 1),
        more=st.sampled_from((0, 0, 0, 1)),
        politely=st.booleans(),
    )
    def leaves_and_comes_back_as_somebody_else(
        self, who: int, key: str, ttl: float, min_hold: float, facts: int, more: int, politely: bool
    ) -> None:
        if politely:
            self.release(self.contenders[who % 6].claim, None)
        self.hang_up(self.contenders[who % 6].claim)
        self.former.append(self.contenders[who % 6].claim)
        self.contenders[who % 6] = Contender(self.claim(key, ttl, min_hold, facts, more))
        self.queues(who, True)

    @precondition(lambda self: self.involved())
    @rule(whose=st.lists(WHO, min_size=1, max_size=3))
    def renew(self, whose: list[int]) -> None:
        claims = [self.one_of_those_involved(who).claim for who in whose]
        self.everywhere(lambda store: store.renew(claims, 1.0))

    @precondition(lambda self: self.involved())
    @rule(
        who=WHO,
        sure=st.booleans(),
        ending=st.sampled_from(
            (None, *(Ending(word, KEPT, due) for word in ("ended", "stored", "retried") for due in (True, False)))
        ),
    )
    def releases(self, who: int, sure: bool, ending: Ending | None) -> None:
        contender = self.one_of_those_involved(who)
        self.release(contender.claim, contender.place if sure else None, ending)
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
        limit=st.integers(0, 3),
    )
    def marks_queued(self, key: str, task_id: str, seconds: float, quiet: float, limit: int) -> None:
        self.everywhere(lambda store: store.mark_queued(key, task_id, seconds, limit=limit, quiet=quiet))

    @rule(
        key=st.sampled_from(KEYS),
        task_id=st.sampled_from(TASK_IDS),
        words=st.fixed_dictionaries(
            {"quiet": st.booleans(), "returns": st.booleans()}
            | {"unless": st.sampled_from(((), ("merged",), ("heard",), ("merged", "heard")))}
        ),
    )
    def unmarks(self, key: str, task_id: str, words: dict[str, bool]) -> None:
        self.everywhere(lambda store: store.unmark(key, task_id, **words))

    @precondition(lambda self: self.involved())
    @rule(key=st.sampled_from(KEYS), who=WHO, is_one=MOSTLY, force=st.booleans())
    def is_broken(self, key: str, who: int, is_one: bool, force: bool) -> None:
        token = None
        if is_one:
            claim = self.one_of_those_involved(who).claim
            key, token = claim.key, claim.token
        self.everywhere(lambda store: asked(store.break_lock(key, token, "alice", force=force)))
        for token in self.model.woken:
            assert not self.in_time or all(real.was_woken(token) for real in self.reals), f"{token} was not woken"

    @rule(key=st.sampled_from(KEYS))
    def is_looked_at(self, key: str) -> None:
        self.everywhere(lambda store: seen(store.survey([key])[0]))

    @rule(
        key=st.sampled_from(KEYS),
        task_id=st.sampled_from(TASK_IDS),
        attempt=st.integers(0, 2),
        outcome=st.sampled_from(("ended", "stored", "retried")),
    )
    def marks_done(self, key: str, task_id: str, attempt: int, outcome: str) -> None:
        self.everywhere(lambda store: store.mark_done(f"{key}:done:{task_id}", attempt, outcome, KEPT))

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

    def asks(self, contender: Contender, heard: bool, ask: Callable[[Any, Claim], Any], flags: dict[str, Any]) -> None:
        claim = replace(contender.claim, **flags)
        # What has no task id has come by no message.
        claim.may_be_copy = claim.may_be_copy and bool(claim.facts.task_id)
        living, free = self.model.living_turns(claim.key), claim.limit - len(self.model.holders(claim.key))
        has_a_place = claim.token in self.model.tokens(claim.key, of_turns=False)
        answers = self.everywhere(lambda store: ask(store, self.told(store, claim)))
        if isinstance(answers[0], Grant):
            before = [other for other in self.contenders if other.claim.token in living and other is not contender]
            came_before = [other for other in before if not contender.arrived or other.arrived < contender.arrived]
            # Its own cool-down is in nobody's way but others'.
            assert has_a_place or claim.may_be_copy or len(came_before) < free, f"{claim.token} came before its turn"
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
            successor = self.model.successor(key)
            for real in self.reals:
                if self.in_time:
                    with self.at_this_moment(real):
                        held_there, left = tuple(real.store.holders(key)), real.client.pttl(key)
                        assert real.store.successor(key) == successor
                if not self.in_time:
                    return
                assert same(held_there, tuple(held)), f"{key} is held by {held_there}, in the model by {held}"
                assert left != -1, f"{key} has no expiry"
                assert (left == -2) == (expiry is None), f"{key} expires in {left} ms, in the model in {expiry} s"
                assert expiry is None or same(left / 1000, expiry)

    def everywhere(self, ask: Callable[[Any], Any]) -> list[Any]:
        """What the servers answer, which is what the model answers."""
        expected, answers = ask(self.model), []
        for real in self.reals:
            if self.in_time:
                with self.at_this_moment(real):
                    answers.append(ask(real))
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

    def release(self, claim: Claim, place: int | None, ending: Ending | None = None) -> None:
        self.everywhere(lambda store: store.release(claim, place, ending=ending))
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
