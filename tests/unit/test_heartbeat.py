"""The heartbeat: what it renews, what it tells, and what it survives."""

import ctypes
import logging
import os
import re
import select
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from celery_singleton_lock import Lease, LockLost, SingletonLockError, StoreError
from celery_singleton_lock.leases import lease as lease_module
from celery_singleton_lock.leases import leftovers as leftovers_module
from celery_singleton_lock.leases import one_thread as one_thread_module
from celery_singleton_lock.leases.heartbeat import Heartbeat
from celery_singleton_lock.leases.lease import new_token
from celery_singleton_lock.leases.leftovers import Leftovers
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.leases.teller import scribe
from celery_singleton_lock.stores.base import RELEASE_BOUND, LockStore, Waiter, clock
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Ending, Grant, Look
from tests.waiting import until

LONG = 300.0
"""A ttl whose renewal is far away from any test's end."""


class Store(LockStore):
    """A store in this process that grants every claim and answers renewals and releases as it is told."""

    address = "store://here"

    def __init__(self, heart: Heartbeat) -> None:
        self.heart = heart
        self.renewals: list[tuple[float, list[str]]] = []
        self.releases: list[str] = []
        self.counts = Counter[str]()
        self.on_renew: Callable[[str], Answer] = lambda token: Answer.DONE
        self.on_release: Callable[[str], Answer] = lambda token: Answer.DONE

    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        return [claim.ttl for claim in claims]

    def twin(self) -> LockStore:
        return self

    def acquire(self, claim: Claim) -> Grant | Conflict:
        return Grant(place=1, fence=1, took_over=False, since=time.time(), sent_at=clock())

    def waiter(self, claim: Claim) -> Waiter:
        raise NotImplementedError

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:
        tokens = [claim.token for claim in claims]
        self.renewals.append((clock(), tokens))
        return [self.on_renew(token) for token in tokens]

    def release(
        self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND, ending: Ending | None = None
    ) -> Answer:
        self.releases.append(claim.token)
        return self.on_release(claim.token)

    def count(self, key: str, process: str, number: int, sums: Mapping[str, int], timeout: float) -> None:
        self.counts.update(sums)

    def look(self, key: str) -> Look:
        return Look((), None, 0, 0)

    def renewals_of(self, lease: Lease) -> list[float]:
        return [at for at, tokens in self.renewals if lease.token in tokens]


def unanswered(token: str) -> Answer:
    raise StoreError("store://here", "no reply")


def broken(token: str) -> Answer:
    raise RuntimeError("a defect of the store's client")


def twice(mishap: Callable[[str], Answer]) -> Callable[[str], Answer]:
    """Two mishaps, and all is well again."""
    left = [mishap, mishap]

    def answer(token: str) -> Answer:
        return left.pop()(token) if left else Answer.DONE

    return answer


class Told:
    """Remembers which leases were reported lost, and fails if it should."""

    def __init__(self, failing: bool = False) -> None:
        self.leases: list[Lease] = []
        self.at: list[float] = []
        self._failing = failing

    def __call__(self, lease: Lease) -> None:
        self.at.append(clock())
        self.leases.append(lease)
        if self._failing:
            raise RuntimeError("a defect of the one who wanted to know")


@pytest.fixture
def store(heart: Heartbeat) -> Store:
    return Store(heart)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def heart() -> Iterator[Heartbeat]:
    """A heartbeat of this test's own, which all its leases use."""
    heart = Heartbeat()
    yield heart
    with heart._lock:
        heart._pulses.clear()


@pytest.fixture(autouse=True)
def leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leftovers]:
    """What this test's leases leave behind."""
    monkeypatch.setattr(leftovers_module, "_PAUSE", 0.1)
    leftovers = Leftovers()
    monkeypatch.setattr(lease_module, "leftovers", leftovers)
    yield leftovers
    leftovers._left.clear()


def acquired(store: Store, ttl: float, on_lost: Callable[[Lease], None] | None = None) -> Lease:
    lease = Lease(store, Claim("key", new_token(), ttl), on_lost=on_lost, heartbeat=store.heart)
    assert lease.acquire() is None
    return lease


def thread_of(heart: Heartbeat, store: Store) -> threading.Thread:
    """The one that renews for *store*."""
    ident = heart._pulses[store]._thread._ident
    return until(lambda: next((one for one in threading.enumerate() if one.ident == ident), None), "it runs")


def runs(leftovers: Leftovers) -> bool:
    return leftovers._thread.runs


def after_more_beats(store: Store, number: int = 4) -> None:
    """Wait until the heartbeat has come round so often; what it would have done by then, it has done."""
    witnesses = [acquired(store, ttl=0.3)]

    def renewals() -> int:
        if witnesses[-1].lost:  # on a busy machine
            witnesses.append(acquired(store, ttl=0.3))
        return sum(len(store.renewals_of(witness)) for witness in witnesses)

    until(lambda: renewals() >= number, "a witness is renewed")
    witnesses[-1].release()


# Renewed.


def test_a_lease_is_renewed_for_as_long_as_it_is_held(heart: Heartbeat, store: Store, told: Told) -> None:
    lease = acquired(store, ttl=3.0, on_lost=told)
    ends = lease._renewal.deadline

    until(lambda: clock() > ends + 3, "a ttl has passed twice")

    assert lease.held
    assert lease.remaining() > 0
    assert len(store.renewals_of(lease)) >= 3
    assert told.leases == []


def test_a_renewal_comes_early_enough_for_two_more_tries(heart: Heartbeat, store: Store) -> None:
    lease = acquired(store, ttl=LONG)

    sent_at = lease._renewal.deadline - LONG * 0.99

    assert lease._renewal.next_renewal - sent_at == pytest.approx(LONG / 3, abs=1)


def test_the_deadline_counts_from_when_the_renewal_was_sent(heart: Heartbeat, store: Store) -> None:
    answer_now = threading.Event()
    store.on_renew = lambda token: Answer.DONE if answer_now.wait(20) else Answer.GONE
    lease = acquired(store, ttl=2.0)
    (sent_at,) = until(lambda: store.renewals_of(lease), "a renewal is sent")

    until(lambda: clock() > sent_at + 0.3, "the answer takes its time")
    before = lease._renewal.deadline
    answer_now.set()
    until(lambda: lease._renewal.deadline > before, "the renewal is answered")

    assert lease._renewal.deadline < sent_at + 2.0


def test_the_local_deadline_lies_before_the_stores(heart: Heartbeat, store: Store) -> None:
    lease = acquired(store, ttl=LONG)

    asked_before = clock()

    assert lease._renewal.deadline < asked_before + LONG
    assert lease._renewal.deadline > asked_before + LONG * 0.9


def test_leases_that_are_due_together_are_renewed_in_one_call(heart: Heartbeat, store: Store) -> None:
    leases = [acquired(store, ttl=1.0) for _ in range(20)]

    until(lambda: all(store.renewals_of(lease) for lease in leases), "all are renewed")

    assert len(store.renewals) < len(leases)
    assert max(len(tokens) for _, tokens in store.renewals) > 1


# Unsure.


def test_an_unanswered_renewal_is_tried_again_sooner(heart: Heartbeat, store: Store) -> None:
    planned: list[float] = []

    def refuse_once(token: str) -> Answer:
        planned.append(lease._renewal.next_renewal)
        return Answer.DONE if len(planned) > 1 else unanswered(token)

    lease = acquired(store, ttl=1.8)
    store.on_renew = refuse_once
    until(lambda: len(planned) > 1, "the renewal is tried again")

    first_try = store.renewals_of(lease)[0]
    assert planned[1] < first_try + 1.8 / 3


def test_one_unanswered_renewal_does_not_lose_a_lease(heart: Heartbeat, store: Store, told: Told) -> None:
    store.on_renew = twice(unanswered)
    lease = acquired(store, ttl=3.0, on_lost=told)
    ends = lease._renewal.deadline

    until(lambda: clock() > ends, "the first deadline has passed")

    assert lease.held
    assert lease.remaining() > 0
    assert told.leases == []


def test_a_store_that_does_not_answer_loses_a_lease_at_its_deadline_and_not_before(
    heart: Heartbeat, store: Store, told: Told
) -> None:
    store.on_renew = unanswered
    lease = acquired(store, ttl=3.0, on_lost=told)
    ends = lease._renewal.deadline

    until(lambda: told.leases, "it is told")

    assert lease.lost_reason == "unreachable"
    assert told.at[0] >= ends
    assert len(store.renewals_of(lease)) >= 3


def test_an_unanswered_renewal_leaves_the_deadline_where_it_was(heart: Heartbeat, store: Store) -> None:
    store.on_renew = unanswered
    lease = acquired(store, ttl=1.5)
    ends = lease._renewal.deadline

    until(lambda: len(store.renewals_of(lease)) >= 2, "it is tried twice")

    assert lease._renewal.deadline == ends


def test_the_timeout_of_a_renewal_ends_no_later_than_the_lease(
    heart: Heartbeat, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, float]] = []

    def renew(claims: Sequence[Claim], timeout: float) -> list[Answer]:
        asked.append((clock() + timeout, timeout))
        raise StoreError("store://here", "no reply")

    monkeypatch.setattr(store, "renew", renew)
    lease = acquired(store, ttl=1.0)
    until(lambda: lease.lost, "it is lost")

    assert all(ends < lease._renewal.deadline + 0.5 for ends, _ in asked)
    assert all(0 < timeout <= 1 for _, timeout in asked)


# Lost.


@pytest.mark.parametrize(("answer", "reason"), [(Answer.TAKEN, "taken"), (Answer.GONE, "expired")])
def test_a_lease_that_is_not_ours_any_more_is_lost_at_once(
    heart: Heartbeat, store: Store, told: Told, answer: Answer, reason: str
) -> None:
    store.on_renew = lambda token: answer
    lease = acquired(store, ttl=1.5, on_lost=told)

    until(lambda: told.leases, "it is told")

    assert told.leases == [lease]
    assert told.at[0] < lease._renewal.deadline
    assert (lease.lost, lease.lost_reason, lease.held, lease.remaining()) == (True, reason, False, 0.0)
    with pytest.raises(LockLost) as lost:
        lease.check()
    assert lost.value.args == ("key", reason)


@pytest.mark.parametrize("answer", [Answer.TAKEN, Answer.GONE])
def test_a_loss_is_told_exactly_once(heart: Heartbeat, store: Store, told: Told, answer: Answer) -> None:
    store.on_renew = store.on_release = lambda token: answer
    lease = acquired(store, ttl=0.3, on_lost=told)
    until(lambda: told.leases, "it is told")

    lease.release()
    store.on_renew = lambda token: Answer.DONE
    after_more_beats(store)

    assert told.leases == [lease]


def test_a_lost_lease_is_not_renewed_again(heart: Heartbeat, store: Store, told: Told) -> None:
    store.on_renew = lambda token: Answer.GONE
    lease = acquired(store, ttl=0.3, on_lost=told)
    until(lambda: told.leases, "it is told")

    store.on_renew = lambda token: Answer.DONE
    after_more_beats(store)

    assert len(store.renewals_of(lease)) == 1


@pytest.mark.parametrize(("answer", "reason"), [(Answer.TAKEN, "taken"), (Answer.GONE, "expired")])
def test_a_loss_that_only_the_release_finds_out_is_told_as_well(
    heart: Heartbeat, store: Store, told: Told, answer: Answer, reason: str
) -> None:
    store.on_release = lambda token: answer
    lease = acquired(store, ttl=LONG, on_lost=told)

    released = lease.release()

    assert released is answer
    assert told.leases == [lease]
    assert lease.lost_reason == reason


def test_one_lost_lease_does_not_disturb_the_others(heart: Heartbeat, store: Store, told: Told) -> None:
    lost, kept = acquired(store, ttl=0.6, on_lost=told), acquired(store, ttl=0.6, on_lost=told)
    store.on_renew = lambda token: Answer.TAKEN if token == lost.token else Answer.DONE
    until(lambda: lost.lost, "one is lost")

    after_more_beats(store)

    assert told.leases == [lost]
    assert kept.held


# Forgotten.


def test_forgetting_waits_for_a_renewal_that_is_under_way(heart: Heartbeat, store: Store) -> None:
    under_way, answer_now = threading.Event(), threading.Event()

    def hold_up(token: str) -> Answer:
        under_way.set()
        answer_now.wait(20)
        return Answer.DONE

    store.on_renew = hold_up
    lease = acquired(store, ttl=0.9)
    assert under_way.wait(20)
    forgetting = threading.Thread(target=heart.forget, args=(lease._renewal,))
    forgetting.start()

    until(lambda: lease._renewal not in heart.watched(), "it is being forgotten")
    waits = forgetting.is_alive()
    answer_now.set()
    forgetting.join(20)

    assert waits
    assert not forgetting.is_alive()


def test_a_forgotten_lease_is_never_renewed_again(heart: Heartbeat, store: Store) -> None:
    leases = [acquired(store, ttl=0.3) for _ in range(30)]
    until(lambda: len(store.renewals) >= 3, "renewals are going on")

    renewals = []
    for lease in leases:
        heart.forget(lease._renewal)
        renewals.append(len(store.renewals_of(lease)))
    after_more_beats(store)

    assert [len(store.renewals_of(lease)) for lease in leases] == renewals


def test_a_released_lease_is_told_to_the_store_once_and_then_left_alone(
    heart: Heartbeat, store: Store, told: Told
) -> None:
    lease = acquired(store, ttl=0.3, on_lost=told)

    answer = lease.release()
    after_more_beats(store)

    assert answer is Answer.DONE
    assert store.releases.count(lease.token) == 1
    assert store.renewals_of(lease) == []
    assert told.leases == []


def test_a_second_release_is_an_error_that_the_store_does_not_see(heart: Heartbeat, store: Store) -> None:
    lease = acquired(store, ttl=LONG)
    lease.release()

    with pytest.raises(SingletonLockError, match="released already"):
        lease.release()

    assert store.releases == [lease.token]


def test_forgetting_a_lease_that_was_never_watched_returns_at_once(heart: Heartbeat, store: Store) -> None:
    heart.forget(Renewal(store, Claim("key", new_token(), 1.0)))

    assert heart._pulses == {}


# Released later.


def test_an_unanswered_release_is_repeated_until_it_is_answered(store: Store, leftovers: Leftovers, told: Told) -> None:
    store.on_release = twice(unanswered)
    lease = acquired(store, ttl=LONG, on_lost=told)

    released = lease.release()
    until(lambda: not runs(leftovers), "there is nothing left")

    assert released is None
    assert store.releases.count(lease.token) == 3
    assert store.renewals_of(lease) == []
    assert told.leases == []


def test_an_unanswered_release_is_given_up_when_the_store_must_have_freed_the_key(
    store: Store, leftovers: Leftovers
) -> None:
    store.on_release = unanswered
    lease = acquired(store, ttl=0.6)
    frees_itself_at = clock() + 0.6

    lease.release()
    until(lambda: not runs(leftovers), "it is given up")

    assert clock() >= frees_itself_at
    assert store.releases.count(lease.token) >= 2


def test_a_store_that_breaks_does_not_end_the_releases_of_others(store: Store, leftovers: Leftovers) -> None:
    lease, other = acquired(store, ttl=LONG), acquired(store, ttl=LONG)
    store.on_release = unanswered
    lease.release()
    other.release()

    store.on_release = twice(broken)
    until(lambda: not runs(leftovers), "there is nothing left")

    assert {lease.token, other.token} <= set(store.releases[-2:])


def test_leftovers_need_no_thread_where_there_are_none(store: Store, leftovers: Leftovers) -> None:
    acquired(store, ttl=LONG).release()

    assert not runs(leftovers)


def test_an_acquire_without_an_answer_is_released_all_the_same(
    store: Store, heart: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "acquire", lambda claim: unanswered(claim.token))
    lease = Lease(store, Claim("key", new_token(), LONG), heartbeat=heart)
    with pytest.raises(StoreError):
        lease.acquire()

    lease.release()

    until(lambda: store.releases == [lease.token], "it is released")
    assert not lease.granted


def test_a_lease_that_was_refused_has_nothing_to_give_back(
    heart: Heartbeat, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "acquire", lambda claim: Conflict(claim.key, ()))
    lease = Lease(store, Claim("key", new_token(), LONG), heartbeat=heart)

    conflict = lease.acquire()

    assert isinstance(conflict, Conflict)
    assert not lease.unreleased
    with pytest.raises(SingletonLockError):
        lease.release()
    assert store.releases == []


def test_releases_that_nobody_answers_do_not_delay_the_news_of_a_loss(
    store: Store, leftovers: Leftovers, told: Told
) -> None:
    hold_up = threading.Event()

    def slowly(token: str) -> Answer:
        hold_up.wait(0.5)
        return unanswered(token)

    lost_releases = [acquired(store, ttl=LONG) for _ in range(16)]
    store.on_release = unanswered
    for lease in lost_releases:
        lease.release()
    store.on_release = slowly
    store.on_renew = unanswered
    lease = acquired(store, ttl=1.5, on_lost=told)

    until(lambda: told.leases, "it is told")
    hold_up.set()

    assert told.at[0] < lease._renewal.deadline + 2.0


# Survived.


def test_a_failing_callback_does_not_end_the_heartbeat(heart: Heartbeat, store: Store) -> None:
    told = Told(failing=True)
    kept = acquired(store, ttl=LONG)
    store.on_renew = lambda token: Answer.GONE
    lease = acquired(store, ttl=0.3, on_lost=told)
    until(lambda: lease.lost, "it is lost")
    thread = thread_of(heart, store)

    store.on_renew = lambda token: Answer.DONE
    after_more_beats(store)

    assert kept.held
    assert thread_of(heart, store) is thread


def test_a_failing_callback_does_not_keep_the_news_from_the_others(heart: Heartbeat, store: Store) -> None:
    told = Told(failing=True)
    under_way, both_are_due = threading.Event(), threading.Event()

    def hold_up(token: str) -> Answer:
        under_way.set()
        both_are_due.wait(20)
        return Answer.DONE if token == first.token else Answer.GONE

    store.on_renew = hold_up
    first = acquired(store, ttl=0.6)
    assert under_way.wait(20)
    leases = {acquired(store, ttl=0.3, on_lost=told), acquired(store, ttl=0.3, on_lost=told)}
    until(lambda: all(lease.remaining() == 0 for lease in leases), "both leases have ended")
    both_are_due.set()

    until(lambda: set(told.leases) == leases, "both are told", timeout=5)
    assert all(lease.lost for lease in leases)


def test_a_store_that_breaks_does_not_end_the_heartbeat(heart: Heartbeat, store: Store, told: Told) -> None:
    store.on_renew = twice(broken)
    lease = acquired(store, ttl=3.0, on_lost=told)
    ends = lease._renewal.deadline

    until(lambda: clock() > ends, "the first deadline has passed")

    assert lease.held
    assert lease.remaining() > 0
    assert told.leases == []


def test_a_store_that_breaks_is_not_asked_without_a_pause(
    heart: Heartbeat, store: Store, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "celery_singleton_lock")
    store.on_renew = broken
    lease = acquired(store, ttl=3.0, on_lost=told)

    until(lambda: told.leases, "it is told")

    assert lease.lost_reason == "unreachable"
    assert 1 < len(store.renewals_of(lease)) < 50


def test_stores_that_do_not_answer_cost_the_leases_of_another_nothing(heart: Heartbeat, store: Store) -> None:
    def wait_in_vain(claims: Sequence[Claim], timeout: float) -> list[Answer]:
        time.sleep(timeout)
        raise StoreError("store://silent", "no reply")

    # One after the other, they would take longer than the ttl of the one that is kept.
    silent = [Store(heart) for _ in range(6)]
    for one in silent:
        one.renew = wait_in_vain  # type: ignore[method-assign]
    cut_off = [acquired(one, ttl=6.0) for one in silent]
    kept = acquired(store, ttl=3.0)

    gaps = []
    until(lambda: gaps.append(kept.remaining() == 0) or all(lease.lost for lease in cut_off), "they are lost")

    assert not any(gaps)
    assert [lease.lost_reason for lease in cut_off] == ["unreachable"] * 6


class SlowHandler(logging.Handler):
    """One that takes its time for the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[str] = []
        self.has_written_one = False

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())
        if len(self.records) == 1:
            time.sleep(4)
            self.has_written_one = True


@pytest.mark.parametrize(
    ("mishap", "event"),
    [(unanswered, "lock.unsure"), (broken, "lock.unsure"), (lambda token: Answer.GONE, "lock.lost")],
    ids=["unanswered", "broken", "lost"],
)
def test_a_handler_of_the_log_that_takes_its_time_starves_no_renewal(
    heart: Heartbeat, store: Store, mishap: Callable[[str], Answer], event: str
) -> None:
    log, slow = logging.getLogger("celery_singleton_lock"), SlowHandler()
    until(lambda: not scribe._thread.runs, "all is written of what another test has lost")
    log.addHandler(slow)
    try:
        kept = acquired(store, ttl=3.0)
        mishaps = twice(mishap)
        store.on_renew = lambda token: Answer.DONE if token == kept.token else mishaps(token)
        unlucky = [acquired(store, ttl=3.0) for _ in range(2)]
        gaps: list[bool] = []
        until(lambda: gaps.append(kept.remaining() == 0) or slow.has_written_one, "it is told")
        until(lambda: not scribe._thread.runs, "all is written")
    finally:
        log.removeHandler(slow)

    assert not any(gaps)
    # A machine that stands still for a moment is told of as well.
    records = [record for record in slow.records if not record.startswith("lock.late")]
    assert records
    assert all(event in record for record in records)
    assert not kept.lost
    assert all(lease.lost == (event == "lock.lost") for lease in unlucky)
    for lease in (kept, *unlucky):
        heart.forget(lease._renewal)


def test_a_beat_that_comes_after_the_deadline_asks_before_it_gives_the_lease_up(
    heart: Heartbeat, store: Store, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    under_way, overdue = threading.Event(), threading.Event()

    def hold_up(token: str) -> Answer:
        under_way.set()
        overdue.wait(20)
        return Answer.DONE

    store.on_renew = hold_up
    other = acquired(store, ttl=0.6)
    assert under_way.wait(20)
    lease = acquired(store, ttl=0.3, on_lost=told)
    until(lambda: lease.remaining() == 0, "its deadline has passed")
    overdue.set()

    until(lambda: lease.remaining() > 0, "it is renewed all the same", timeout=5)
    assert other.held
    assert (lease.lost, told.leases) == (False, [])


def test_a_beat_that_comes_late_says_how_late_and_what_to_raise(
    heart: Heartbeat, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    began = clock()
    lease = acquired(store, ttl=0.6)
    # Nothing else in this interpreter runs meanwhile, as with a body in C.
    ctypes.PyDLL(None).sleep(1)

    late = until(
        lambda: re.search(rf"lock.late key={lease.key} task_id=None late=([\d.]+) ttl=0.6", caplog.text),
        "the log says so",
    )
    assert late is not None
    assert 0.8 <= float(late[1]) < clock() - began
    assert "raise lock_ttl" in caplog.text


def test_a_beat_that_is_late_for_very_many_leases_writes_a_few_lines(
    heart: Heartbeat, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    leases = [acquired(store, ttl=0.6) for _ in range(100)]
    ctypes.PyDLL(None).sleep(1)

    until(lambda: "leases=100: " in caplog.text and not scribe._thread.runs, "the log says so")

    assert caplog.text.count("leases=100: ") <= 10 * (len(store.renewals) + 1)
    for lease in leases:
        heart.forget(lease._renewal)


def test_a_store_that_does_not_answer_for_very_many_leases_costs_a_few_lines(
    heart: Heartbeat, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.on_renew = unanswered
    leases = [acquired(store, ttl=2.0) for _ in range(100)]

    until(lambda: "leases=100: " in caplog.text and not scribe._thread.runs, "the log says so")

    assert caplog.text.count("lock.unsure") <= 10 * len(store.renewals)
    for lease in leases:
        heart.forget(lease._renewal)


def test_very_many_leases_are_renewed_in_a_few_beats(heart: Heartbeat, store: Store) -> None:
    leases, since = [], clock()
    for _ in range(120):
        leases.append(acquired(store, ttl=3.0))
        time.sleep(0.01)
    # What the first renewals of them find, which were taken one after the other.
    until(lambda: len({token for _, tokens in store.renewals for token in tokens}) == 120, "each was renewed")
    first = len(store.renewals)
    began = clock()

    until(lambda: clock() - began > 2, "two more renewals are over")

    # Four in a third of the ttl, which is a second; on a busy machine all of this takes longer.
    assert first <= 4 * (began - since) + 4
    assert len(store.renewals) - first <= 4 * (clock() - began) + 4
    for lease in leases:
        assert lease.held
        heart.forget(lease._renewal)


@pytest.mark.parametrize(("answer", "reason"), [(Answer.REPLACED, "replaced"), (Answer.BROKEN, "broken")])
def test_a_lease_that_has_to_make_way_is_told_once_and_renewed_until_it_is_released(
    heart: Heartbeat, store: Store, told: Told, answer: Answer, reason: str
) -> None:
    store.on_renew = lambda token: answer
    lease = acquired(store, ttl=0.3, on_lost=told)
    until(lambda: len(store.renewals_of(lease)) > 3, "it is renewed again and again")

    assert (told.leases, lease.lost_reason) == ([lease], reason)
    with pytest.raises(LockLost, match=reason):
        lease.check()
    assert lease.release() is Answer.DONE
    assert lease._renewal not in heart.watched()


def test_a_lease_that_makes_way_and_then_is_broken_ends_for_that_and_is_told_once(
    heart: Heartbeat, store: Store, told: Told
) -> None:
    store.on_renew = lambda token: Answer.REPLACED
    lease = acquired(store, ttl=0.3, on_lost=told)
    until(lambda: lease.lost_reason == "replaced", "it makes way")

    store.on_renew = lambda token: Answer.BROKEN

    until(lambda: lease.lost_reason == "broken", "it is broken")
    assert told.leases == [lease]
    assert lease.keeps_others_out


def test_a_callback_may_release_the_lease_it_hears_of(heart: Heartbeat, store: Store) -> None:
    done = threading.Event()
    store.on_renew = lambda token: Answer.TAKEN

    def release(lease: Lease) -> None:
        lease.release()
        done.set()

    lease = acquired(store, ttl=0.3, on_lost=release)

    assert done.wait(20)
    assert not lease.unreleased


# One thread, that sleeps.


def test_a_short_lease_does_not_wake_the_sleeping_thread(
    heart: Heartbeat, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = acquired(store, ttl=LONG)
    pulse, rung = heart._pulses[store], []
    until(lambda: pulse._wakes_at == held._renewal.next_renewal, "the thread sleeps")
    monkeypatch.setattr(pulse, "_ring", lambda: rung.append(clock()))

    for _ in range(50):
        acquired(store, ttl=LONG).release()

    assert rung == []
    assert store.renewals == []


def test_a_lease_with_an_earlier_renewal_does_wake_it(heart: Heartbeat, store: Store) -> None:
    held = acquired(store, ttl=LONG)

    lease = acquired(store, ttl=0.6)

    until(lambda: store.renewals_of(lease), "it is renewed")
    assert not lease.lost
    assert held.held


def test_leases_that_come_one_after_another_share_a_thread(heart: Heartbeat, store: Store) -> None:
    heart.forget(acquired(store, ttl=30)._renewal)
    pulse = heart._pulses[store]
    thread = pulse._thread._ident
    # Twice, so that it has come to its end once.
    for _ in range(2):
        pulse._ring()
        until(pulse._alarm.locked, "it looks, and finds nothing")

    lease = acquired(store, ttl=30)

    assert heart._pulses == {store: pulse}
    assert pulse._thread._ident == thread
    heart.forget(lease._renewal)


def test_a_thread_that_wakes_up_for_nothing_ends(heart: Heartbeat, store: Store) -> None:
    acquired(store, ttl=0.6).release()
    pulse = heart._pulses[store]
    assert pulse._thread.runs

    until(lambda: not pulse._thread.runs, "it has ended")
    assert heart._pulses == {}
    assert store.renewals == []


def test_one_thread_is_enough_for_any_number_of_leases(
    heart: Heartbeat, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    live = one_thread_module.OneThread._live

    def starts(thread: one_thread_module.OneThread) -> Iterator[None]:
        started.append(thread)
        return live(thread)

    monkeypatch.setattr(one_thread_module.OneThread, "_live", starts)

    leases = [acquired(store, ttl=0.9) for _ in range(100)]
    until(lambda: all(store.renewals_of(lease) for lease in leases), "all are renewed")

    assert started == [heart._pulses[store]._thread]


def test_the_thread_keeps_no_process_alive(heart: Heartbeat, store: Store) -> None:
    lease = acquired(store, ttl=LONG)

    assert thread_of(heart, store).daemon
    assert lease.held


def test_no_thread_runs_where_no_lease_was_taken(heart: Heartbeat) -> None:
    assert heart._pulses == {}


# Forked.


def in_a_child(body: Callable[[], Any]) -> str:
    """What *body* returns in a forked child, as text."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Later Pythons advise against what prefork pools do all the time.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, repr(body()).encode())
        except BaseException as error:  # noqa: BLE001 - the parent has to hear of it
            os.write(writing, f"the child failed: {error!r}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    answered, _, _ = select.select([reading], [], [], 20)
    text = os.read(reading, 10_000).decode() if answered else "the child said nothing"
    os.close(reading)
    if not answered:
        os.kill(pid, 9)
    os.waitpid(pid, 0)
    return text


def test_a_forked_child_does_not_have_its_parents_lease(heart: Heartbeat, store: Store) -> None:
    lease = acquired(store, ttl=LONG)

    seen = in_a_child(lambda: (lease.held, lease.remaining(), heart.watched(), heart._pulses))

    assert seen == repr((False, 0.0, [], {}))
    assert lease.held


def test_a_forked_child_does_not_release_its_parents_lease(heart: Heartbeat, store: Store) -> None:
    lease = acquired(store, ttl=LONG)

    def release() -> tuple[bool, str, list[str]]:
        with pytest.raises(SingletonLockError) as refused:
            lease.release()
        return lease.unreleased, str(refused.value), store.releases

    seen = in_a_child(release)

    assert f"it belongs to the process {os.getpid()}" in seen
    assert seen.startswith("(False, ")
    assert seen.endswith("[])")
    assert lease.release() is Answer.DONE


def test_a_forked_child_does_not_renew_its_parents_lease(heart: Heartbeat, store: Store) -> None:
    lease = acquired(store, ttl=0.6)

    def other_renewals() -> bool:
        store.renewals.clear()
        after_more_beats(store)
        return bool(store.renewals_of(lease))

    assert in_a_child(other_renewals) == repr(False)


def test_a_forked_child_keeps_its_own_leases_alive(heart: Heartbeat, store: Store) -> None:
    acquired(store, ttl=LONG)

    def renewals_in_the_child() -> bool:
        lease = acquired(store, ttl=0.6)
        return bool(until(lambda: store.renewals_of(lease), "it is renewed", timeout=10)) and lease.held

    assert in_a_child(renewals_in_the_child) == repr(True)


def test_a_child_that_is_forked_during_a_beat_is_not_held_up_by_it(heart: Heartbeat, store: Store) -> None:
    under_way, answer_now = threading.Event(), threading.Event()

    def hold_up(token: str) -> Answer:
        under_way.set()
        answer_now.wait(20)
        return Answer.DONE

    store.on_renew = hold_up
    lease = acquired(store, ttl=0.9)
    assert under_way.wait(20)

    with heart._lock:
        seen = in_a_child(lambda: acquired(Store(heart), ttl=LONG).release())
    answer_now.set()

    assert seen == repr(Answer.DONE)
    assert lease.granted


def test_a_lease_is_released_only_once_a_renewal_under_way_has_ended(heart: Heartbeat, store: Store) -> None:
    under_way, may_end = threading.Event(), threading.Event()

    def hold_up(token: str) -> Answer:
        under_way.set()
        may_end.wait(20)
        return Answer.DONE

    store.on_renew = hold_up
    lease = acquired(store, ttl=1.5)
    assert under_way.wait(20)
    releasing = threading.Thread(target=lease.release)

    releasing.start()
    releasing.join(0.3)
    released_meanwhile = list(store.releases)
    may_end.set()
    releasing.join(20)

    assert released_meanwhile == []
    assert store.releases == [lease.token]
    assert lease._renewal not in heart.watched()
