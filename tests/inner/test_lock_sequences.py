"""`Lock` alone: whatever is done with it, in whatever order and by whom, it does what the model says.

The model is the store in memory at a moment at which time stands still (`stores.py`); what each thread and each
task of asyncio has acquired, and which blocks it is in, is kept here for each object. A forked process takes part
too, and signals that raise.
"""

import gc
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from types import FrameType
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as play

from celery_singleton_lock import Lease, Lock, SingletonLockError, signals
from celery_singleton_lock.lock import _With
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Claim, Grant
from tests.forks import in_a_fork
from tests.inner.callers import PATIENCE, Call, Here, Loop, Tasks, Thread
from tests.inner.model_stores import Model
from tests.waiting import until

EXAMPLES = 100
STEPS = 30
CALLERS = st.integers(0, 5)
# The thread of the test has to play on, and so has a loop that has more than one task.
THOSE_WHO_MAY_WAIT = st.integers(1, 3)
LOCKS = st.integers(0, 2)
# Those with one limit: who waits behind somebody with a smaller one may come first, which the model need not foresee.
ALIKE = st.integers(0, 1)
MOSTLY = st.sampled_from((True, True, False))
A_MOMENT = 0.02
# A loop has few threads, and one of them has to be free.
MOST_WAITING = 3
NAMES = (f"sequence-{number}" for number in count())


class StruckError(Exception):
    """What a time limit raises."""


@dataclass(eq=False)
class Held:
    """A lease as the model knows it.

    Attributes:
        takes: How often it has to be released.
    """

    lease: Lease
    claim: Claim
    takes: int = 1


@dataclass
class Mine:
    """What a thread, or a task, has taken through an object.

    Attributes:
        taken: The latest last.
        blocks: Those that it is in, the innermost last: what each holds, and how often that was taken by then.
    """

    taken: list[Held] = field(default_factory=list)
    blocks: list[tuple[Held, int]] = field(default_factory=list)

    @property
    def latest(self) -> Held | None:
        return next((held for held in reversed(self.taken) if held.takes), None)

    def enter(self) -> None:
        """Begin a block with what was taken just now."""
        held = self.latest
        assert held is not None
        self.blocks.append((held, held.takes))


@dataclass(eq=False)
class Waiting:
    """A caller that is in the queue."""

    who: int
    which: int
    call: Call
    claim: Claim
    enters: bool


class Sequences(RuleBasedStateMachine):
    """Six callers, and three objects of one lock: two of one limit, and one of another."""

    url: str
    client: Any
    played: Counter[str]

    @initialize(
        limit=st.integers(1, 3),
        another=st.integers(1, 3),
        reentrant=st.tuples(MOSTLY, MOSTLY, st.booleans()),
    )
    def begin(self, limit: int, another: int, reentrant: tuple[bool, bool, bool]) -> None:
        name = next(NAMES)
        self.limits, self.reentrant = (limit, limit, another), reentrant
        self.locks = [
            Lock(name, url=self.url, limit=each, reentrant=again)
            for each, again in zip(self.limits, reentrant, strict=True)
        ]
        self.store, self.key = self.locks[0]._store, self.locks[0].key
        self.callers = [Here(), Thread(), Thread(), Loop(), *Tasks(2).tasks]
        self.model = Model()
        self.tokens = count()
        self.belongings: dict[tuple[Any, int], Mine] = defaultdict(Mine)
        self.everything: list[Held] = []
        self.have_asked: list[tuple[int, int]] = []
        self.asked_before_a_fork = 0
        self.waiting: list[Waiting] = []
        self.is_over = False
        self.told: dict[str, list[str]] = {"acquired": [], "released": []}
        self.expected: dict[str, list[str]] = {"acquired": [], "released": []}
        signals.lock_acquired.connect(self.was_acquired, sender=Lock)
        signals.lock_released.connect(self.was_released, sender=Lock)

    @rule(who=CALLERS, which=LOCKS)
    def ask_once(self, who: int, which: int) -> None:
        if not self.is_busy(who):
            call = self.ask(who, which, lambda: self.locks[which].acquire(blocking=False))
            call.end()
            if not self.re_entered(call, which):
                claim = self.claim(which)
                self.was_answered(call, which, claim, self.model.acquire(claim))

    @rule(who=CALLERS, which=LOCKS)
    def wait_a_moment(self, who: int, which: int) -> None:
        """With a timeout; in vain if the lock is not free now."""
        if not self.is_busy(who):
            call = self.ask(who, which, lambda: self.locks[which].acquire(timeout=A_MOMENT))
            call.end()
            if not self.re_entered(call, which):
                claim = self.claim(which)
                self.was_answered(call, which, claim, self.ask_to_wait(claim))
                if call.end() is None:
                    self.model.release(claim, None)
                    self.serve()

    @rule(who=THOSE_WHO_MAY_WAIT, which=ALIKE, enters=st.booleans())
    def wait(self, who: int, which: int, enters: bool) -> None:
        """As long as it takes, by `acquire` or at the beginning of a `with`."""
        if not self.is_busy(who):
            take = self.locks[which].__enter__ if enters else self.locks[which].acquire
            call = self.ask(who, which, lambda: self.unless_it_is_over(take))
            if not self.re_entered(call, which):
                claim = self.claim(which)
                answer = self.ask_to_wait(claim)
                if not isinstance(answer, Grant):
                    self.has_to_wait(Waiting(who, which, call, claim, enters))
                    return
                self.was_answered(call, which, claim, answer)
            if enters:
                self.mine(call, which).enter()

    @rule(who=CALLERS, which=LOCKS)
    def enter_if_it_is_free(self, who: int, which: int) -> None:
        """The beginning of a `with`, also in a task that must not keep its loop."""
        if not self.is_busy(who) and self.is_free(which):
            call = self.ask(who, which, self.locks[which].__enter__)
            if not self.re_entered(call, which):
                claim = self.claim(which)
                self.was_answered(call, which, claim, self.model.acquire(claim))
            self.mine(call, which).enter()

    @rule(who=CALLERS, which=LOCKS)
    def release(self, who: int, which: int) -> None:
        """Give back what this thread or task acquired last; a wrong door says so."""
        if not self.is_busy(who):
            call = self.callers[who].begin(self.locks[which].release)
            held = self.mine(call, which).latest
            if held is None:
                self.was_refused(call, "is not held by this thread")
            else:
                call.end()
                self.gave_back(held, tells=True)

    @rule(who=CALLERS, which=LOCKS, fails=st.booleans())
    def leave(self, who: int, which: int, fails: bool) -> None:
        """The end of a `with`, also where none has begun; an error that ends it is never hidden."""
        if not self.is_busy(who):
            error = (StruckError, StruckError(), None) if fails else (None, None, None)
            call = self.callers[who].begin(lambda: self.locks[which].__exit__(*error))
            blocks = self.mine(call, which).blocks
            if not blocks and not fails:
                self.was_refused(call, "cannot be left here: it is not held by this thread")
                return
            assert call.end() is False
            if blocks:
                self.played["blocks"] += 1
                held, takes = blocks.pop()
                if held.takes >= takes:
                    self.gave_back(held, tells=True)

    @precondition(lambda self: self.have_asked)
    @rule(one=st.integers(0, 99), leaves=st.booleans(), fails=st.booleans())
    def come_back(self, one: int, leaves: bool, fails: bool) -> None:
        """Who has asked once gives back; drawn from all, it would seldom be one that has something."""
        who, which = self.have_asked[-1 - one % len(self.have_asked)]
        if leaves:
            self.leave(who, which, fails)
        else:
            self.release(who, which)

    @precondition(lambda self: self.everything)
    @rule(who=CALLERS, one=st.integers(0, 99))
    def release_a_lease(self, who: int, one: int) -> None:
        """In any thread, but as often as it was taken."""
        if not self.is_busy(who):
            held = self.everything[one % len(self.everything)]
            call = self.callers[who].begin(held.lease.release)
            if not held.takes:
                self.was_refused(call, "was released already")
            else:
                call.end()
                self.gave_back(held, tells=False)

    @rule(which=LOCKS)
    def fork(self, which: int) -> None:
        """The child has nothing, can free nothing, and competes like a stranger."""
        # Twice in a row, it would say the same. No precondition: those must not depend on which thread a loop takes.
        if self.asked_before_a_fork < len(self.have_asked):
            assert in_a_fork(lambda: self.as_a_child(which)) == str(self.is_free(which))
            self.asked_before_a_fork = len(self.have_asked)
            self.played["forks"] += 1

    @rule(which=LOCKS, lingers=st.booleans(), after=st.integers(1, 30))
    def be_struck(self, which: int, lingers: bool, after: int) -> None:
        """A signal raises in a `with`, or while it begins, waits or ends: nothing is left of it."""
        # Hypothesis has a callback there, and what is raised in a callback is ignored.
        gc.disable()
        with suppress(StruckError):
            # And again, for the same goes for a destructor, and one moment is spared.
            signal.setitimer(signal.ITIMER_REAL, after / 10_000, 1.0)
            with self.locks[which]:
                if lingers:
                    until(lambda: False, "a signal strikes")
            until(lambda: False, "a signal strikes")
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        self.played["strikes"] += 1

    @invariant()
    def the_store_says_the_same(self) -> None:
        held = [each for each in self.everything if each.takes]
        assert len(held) == len(self.model.holders(self.key)) <= max(self.limits)
        assert all(each.lease.held for each in held)
        assert all(each.lease.takes == each.takes for each in self.everything)
        fences = sorted(each.lease.fence for each in held)
        # Not at once after a signal: what it has broken off may be given back in the background.
        until(lambda: self.fences() == fences, "those and no others hold it", timeout=PATIENCE)
        until(lambda: self.turns() == len(self.waiting), "those and no others wait", timeout=PATIENCE)
        assert not any(waiting.call.has_ended for waiting in self.waiting)

    @invariant()
    def each_lease_is_told_once(self) -> None:
        for what, tokens in self.expected.items():
            assert set(tokens) <= set(self.told[what])
            assert len(set(self.told[what])) == len(self.told[what])

    def teardown(self) -> None:
        if hasattr(self, "callers"):
            try:
                self.give_everything_back()
            finally:
                self.end()

    def give_everything_back(self) -> None:
        while left := [held for held in self.everything if held.takes]:
            left[0].lease.release()
            self.gave_back(left[0], tells=False)
        assert not self.waiting
        until(self.is_gone, "nothing is left", timeout=PATIENCE)

    def end(self) -> None:
        self.is_over = True
        for held in self.everything:
            while held.lease.takes:
                held.lease.release()
        for caller in self.callers:
            caller.close()
        signals.lock_acquired.disconnect(self.was_acquired, sender=Lock)
        signals.lock_released.disconnect(self.was_released, sender=Lock)

    def ask(self, who: int, which: int, body: Callable[[], Any]) -> Call:
        self.have_asked.append((who, which))
        return self.callers[who].begin(body)

    def unless_it_is_over(self, take: Callable[[], Any]) -> Any:
        """Who has waited in an example that has failed keeps nobody else waiting."""
        lease = take()
        if self.is_over:
            lease.release()
        return lease

    def as_a_child(self, which: int) -> bool:
        lock = self.locks[which]
        assert not any(held.lease.held for held in self.everything)
        for held in self.everything:
            with pytest.raises(SingletonLockError, match="belongs to the process"):
                held.lease.release()
        for wrong in (lock.release, lambda: lock.__exit__(None, None, None)):
            with pytest.raises(SingletonLockError, match="not held by this thread"):
                wrong()
        if lock.acquire(blocking=False) is None:
            return False
        lock.release()
        return True

    def re_entered(self, call: Call, which: int) -> bool:
        """The caller had it already, so the store was not asked."""
        held = self.mine(call, which).latest
        if not self.reentrant[which] or held is None:
            return False
        assert call.end() is held.lease
        held.takes += 1
        self.played["re-entries"] += 1
        return True

    def has_to_wait(self, waiting: Waiting) -> None:
        self.waiting.append(waiting)
        until(lambda: self.turns() == len(self.waiting), "the turn is known", timeout=PATIENCE)
        self.played["waits"] += 1

    def ask_to_wait(self, claim: Claim) -> Any:
        answer = self.model.acquire(claim)
        return answer if isinstance(answer, Grant) else self.model.queue(claim)

    def was_answered(self, call: Call, which: int, claim: Claim, answer: Any) -> None:
        """As the model has answered; each lease has a greater fence than the one before."""
        lease = call.end()
        assert (lease is not None) == isinstance(answer, Grant)
        if lease is not None:
            assert lease.fence > max((held.lease.fence for held in self.everything), default=0)
            held = Held(lease, claim)
            self.mine(call, which).taken.append(held)
            self.everything.append(held)
            self.expected["acquired"].append(lease.token)

    def was_refused(self, call: Call, why: str) -> None:
        with pytest.raises(SingletonLockError, match=why):
            call.end()
        self.played["wrong doors"] += 1

    def gave_back(self, held: Held, *, tells: bool) -> None:
        """Once; the last time, the store hears of it."""
        held.takes -= 1
        if held.takes:
            return
        if tells:
            self.expected["released"].append(held.lease.token)
        self.model.release(held.claim, None)
        self.serve()

    def serve(self) -> None:
        """Those who wait, in the order of their arrival, as far as it is their turn now."""
        for waiting in list(self.waiting):
            answer = self.model.queue(waiting.claim)
            if isinstance(answer, Grant):
                self.waiting.remove(waiting)
                self.was_answered(waiting.call, waiting.which, waiting.claim, answer)
                if waiting.enters:
                    self.mine(waiting.call, waiting.which).enter()
                self.played["served"] += 1

    def is_free(self, which: int) -> bool:
        """Whoever asks now gets it."""
        claim = self.claim(which)
        answer = self.model.acquire(claim)
        self.model.release(claim, None)
        return isinstance(answer, Grant)

    def is_busy(self, who: int) -> bool:
        """A thread that waits does nothing else; a loop has some more."""
        own = [waiting for waiting in self.waiting if waiting.who == who]
        return len(own) >= (MOST_WAITING if isinstance(self.callers[who], Loop) else 1)

    def mine(self, call: Call, which: int) -> Mine:
        return self.belongings[call.owner, which]

    def claim(self, which: int) -> Claim:
        return Claim(self.key, f"{next(self.tokens)}", 30.0, self.limits[which])

    def fences(self) -> list[int]:
        return sorted(holder.fence for holder in self.store.holders(self.key) if holder.fence)

    def turns(self) -> int:
        """How many are in the queue."""
        if isinstance(self.store, MemoryStore):
            with self.store._guard:
                lock = self.store._lock(self.key)
                return len(lock.queue) if lock else 0
        return sum(1 for field in self.client.hkeys(self.key) if field[0] == "q" and field[1:].isdecimal())

    def is_gone(self) -> bool:
        if isinstance(self.store, MemoryStore):
            return self.key not in self.store._locks
        return not self.client.exists(self.key)

    def was_acquired(self, lease: Lease, **_: Any) -> None:
        self.told["acquired"].append(lease.token)

    def was_released(self, lease: Lease, **_: Any) -> None:
        self.told["released"].append(lease.token)


@pytest.fixture
def struck() -> Iterator[None]:
    """Here a timer raises."""

    def strike(_: int, frame: FrameType) -> None:
        # Before the first instruction of what has to release, no code of ours is in time: the ttl ends the lease
        # (test_interrupted.py).
        code = frame.f_code
        leaves = code is Lock.__exit__.__code__ and frame.f_lineno == code.co_firstlineno
        if not leaves and code is not _With.__call__.__code__:
            raise StruckError

    before = signal.signal(signal.SIGALRM, strike)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["memory", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    return "memory://sequences" if request.param == "memory" else str(request.getfixturevalue("valkey").url)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
# Of a connection that a signal has broken off, Python closes the socket.
@pytest.mark.filterwarnings("ignore:.*socket:pytest.PytestUnraisableExceptionWarning")
def test_whatever_is_done_with_a_lock_it_does_what_the_model_says(url: str, struck: None) -> None:
    Sequences.url, Sequences.played = url, Counter()
    Sequences.client = redis.Redis.from_url(url, decode_responses=True) if url.startswith("redis") else None
    enough = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        # Not shrunk: each try that fails takes as long as its patience.
        phases=(Phase.generate,),
        report_multiple_bugs=False,
    )

    play(Sequences, settings=enough)

    assert set(Sequences.played) == {"waits", "served", "re-entries", "blocks", "forks", "strikes", "wrong doors"}
    assert Sequences.client is None or not Sequences.client.keys()
