"""A signal that raises, such as a time limit's, may strike between any two instructions of ours: nothing gets stuck."""

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import celery_singleton_lock
from celery_singleton_lock import Lease, Lock, StoreError
from celery_singleton_lock.leases import lease as lease_module
from celery_singleton_lock.leases.heartbeat import Heartbeat
from celery_singleton_lock.leases.leftovers import Leftovers
from celery_singleton_lock.stores.base import RELEASE_BOUND, clock
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer, Claim, Ending
from tests.strikes import Strike, StruckError, is_begun_too_late, nothing_pending
from tests.waiting import until

# One that strikes in a finalizer vanishes there, and Python complains.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PACKAGE = Path(celery_singleton_lock.__file__).parent
OURS = frozenset(map(str, [*PACKAGE.glob("leases/*.py"), *PACKAGE.glob("stores/memory/*.py"), PACKAGE / "lock.py"]))
OURS_AND_PYTHONS = OURS | {threading.__file__, contextlib.__file__}

STRIDE = 5
"""Of all moments, every so many-eth is tried; which, a new chance decides each time."""


class Watched(MemoryStore):
    """A store that tells who was renewed, and may refuse to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed: set[str] = set()
        self.answers = True

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:
        self.renewed |= {claim.token for claim in claims}
        return super().renew(claims, timeout)

    def release(
        self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND, ending: Ending | None = None
    ) -> Answer:
        if not self.answers:
            raise StoreError("memory://", "no reply")
        return super().release(claim, place, bound, ending)

    def knows(self, key: str) -> bool:
        """Somebody holds it or waits for it."""
        return key in self._locks


@pytest.fixture
def store() -> Watched:
    return Watched()


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    """A heartbeat and leftovers of this test's own, in place of the process's."""
    return fresh_heart(monkeypatch)


def fresh_heart(monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    heart = Heartbeat()
    monkeypatch.setattr(lease_module, "own_heartbeat", heart)
    monkeypatch.setattr(lease_module, "leftovers", Leftovers())
    return heart


@pytest.fixture(autouse=True)
def ready() -> None:
    nothing_pending()


def lock_in(store: Watched) -> Lock:
    lock = Lock("stock", url="memory://interrupted", ttl=60)
    lock._store = store
    return lock


KEY = Lock("stock", url="memory://interrupted").key


def takes_it(store: Watched) -> None:
    with lock_in(store):
        pass


def is_refused(store: Watched) -> None:
    assert lock_in(store).acquire(blocking=False) is None


def gives_up_its_turn(store: Watched) -> None:
    assert lock_in(store).acquire(timeout=0.01) is None


def gets_no_answer(store: Watched) -> None:
    takes_it(store)


@contextlib.contextmanager
def prepared(store: Watched, body: Callable[[Watched], None]) -> Iterator[None]:
    """The store is as the body expects it inside, and nobody else's concern after."""
    other = Claim(KEY, "another", 60.0)
    store.answers = body is not gets_no_answer
    if body in (is_refused, gives_up_its_turn):
        store.acquire(other)
    yield
    store.answers = True
    store.release(other, 1)


def struck(body: Callable[[Watched], None], store: Watched, moment: float, files: frozenset[str]) -> tuple[str, int]:
    """Where it struck, and how many moments came before."""
    strike = Strike(moment, files, "by a signal")
    strike.during(lambda: body(store))
    return strike.where, strike.seen


def is_well(heart: Heartbeat, store: Watched) -> bool:
    """A fresh lease is renewed and released, in a thread that would get stuck if something were."""
    done = threading.Event()

    def live() -> None:
        lease = Lease(store, Claim("fresh", f"fresh-{clock()}", 0.09), heartbeat=heart)
        assert lease.acquire() is None
        until(lambda: lease.token in store.renewed, "it is renewed", timeout=3)
        lease.release()
        lease_module.leftovers.add(NothingLeft())
        done.set()

    threading.Thread(target=live, daemon=True).start()
    return done.wait(5)


def is_free_soon(store: Watched) -> bool:
    """Nobody holds the lock or waits for it; what was broken off may be done again in the background."""
    give_up_at = clock() + 2
    while store.knows(KEY) and clock() < give_up_at:
        time.sleep(0.001)
    return not store.knows(KEY)


class NothingLeft:
    key, task_id, ttl, store = "fresh", None, 1.0, MemoryStore()

    def release_again(self) -> bool:
        return True


@pytest.mark.parametrize("body", [takes_it, is_refused, gives_up_its_turn, gets_no_answer])
@pytest.mark.parametrize("files", [OURS, OURS_AND_PYTHONS], ids=["in our code", "or below it"])
@pytest.mark.parametrize("is_first", [True, False], ids=["the first lease", "a later one"])
def test_no_moment_is_a_bad_one(
    body: Callable[[Watched], None],
    files: frozenset[str],
    is_first: bool,
    heart: Heartbeat,
    store: Watched,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with prepared(store, body):
        _, total = struck(body, store, float("inf"), files)
    assert total > 20

    for moment in range(random.randrange(STRIDE), total, STRIDE):
        store.clear()
        if is_first:
            heart = fresh_heart(monkeypatch)
        with prepared(store, body):
            where, _ = struck(body, store, moment, files)

        assert heart.watched() == [], f"a lease that nobody is in is renewed; struck in {where}"
        assert is_well(heart, store), f"something is stuck; struck in {where}"
        if not is_begun_too_late(where) and body is not gets_no_answer:
            assert is_free_soon(store), f"the lock is still taken; struck in {where}"


def test_a_lock_that_is_kept_holds_nothing_once_its_block_is_broken_off(heart: Heartbeat, store: Watched) -> None:
    lock = lock_in(store)

    def takes_the_same(store: Watched) -> None:
        with lock:
            pass

    _, total = struck(takes_the_same, store, float("inf"), OURS)
    assert total > 20

    for moment in range(total):
        where, _ = struck(takes_the_same, store, moment, OURS)
        assert heart.watched() == [], f"a lease that nobody is in is renewed; struck in {where}"
        if not is_begun_too_late(where):
            assert lock._mine().blocks == [], f"it is held; struck in {where}"
            assert lock._mine().latest is None
            assert is_free_soon(store), f"the lock is still taken; struck in {where}"
        lock._mine().leases.clear()
        lock._mine().blocks.clear()
        store.clear()


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Has a signal raise once, in so many seconds."""
    is_set = False

    def strike(number: int, frame: Any) -> None:
        nonlocal is_set
        if is_set:
            is_set = False
            raise StruckError

    def ring_in(seconds: float) -> None:
        nonlocal is_set
        is_set = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, strike)
    yield ring_in
    is_set = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signals_at_random_moments_leave_the_heartbeat_well(
    heart: Heartbeat, store: Watched, alarm: Callable[[float], None]
) -> None:
    for _ in range(3_000):
        try:
            alarm(random.uniform(1e-5, 3e-4))
            # Not for ever: a signal that strikes in a finalizer vanishes there.
            for _ in range(50):
                takes_it(store)
        except StruckError:
            store.clear()

    assert heart.watched() == []
    assert is_well(heart, store)
