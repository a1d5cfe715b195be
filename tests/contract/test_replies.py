"""Replies that are late, lost or a refusal: none is taken for another, and none does harm."""

import signal
import threading
from collections.abc import Iterator

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores.records import Claim, Conflict, Facts, Grant, Renewal
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.test_bounds import CALLS, KEY, MINE, outcome_of
from tests.proxy import Proxy
from tests.servers import Server


@pytest.fixture
def store(proxy: Proxy) -> Iterator[Store]:
    store = Store(proxy.url, {})
    other = Claim("singleton:v3:{other:00}", "a", 30.0)
    store.acquire(other)
    store.renew([other], 1.0)
    store.release(other, 1)
    yield store
    store.close()


@pytest.fixture
def direct(valkey: Server) -> Iterator[Store]:
    store = Store(valkey.url, {})
    yield store
    store.close()


@pytest.mark.parametrize("connected", [True, False])
def test_a_store_that_takes_less_than_a_second_for_an_answer_is_understood(
    proxy: Proxy, store: Store, connected: bool
) -> None:
    store = store if connected else Store(proxy.url, {})
    proxy.delay(0.4)

    answer = store.acquire(MINE)

    assert isinstance(answer, Grant)


def test_a_late_answer_is_not_taken_for_the_answer_to_the_next_question(
    proxy: Proxy, store: Store, direct: Store
) -> None:
    direct.acquire(Claim(KEY, "holder", 30.0))
    proxy.delay(0.6)
    with pytest.raises(StoreError):
        store.release(Claim("singleton:v3:{other:00}", "a", 30.0), 1, bound=0.2)

    proxy.forward()

    assert isinstance(store.acquire(MINE), Conflict)


class TimeIsUp(BaseException):
    """As a time limit would raise it, from a signal's handler."""


# The alarm is the test's own.
@pytest.mark.timeout(method="thread")
def test_an_answer_that_an_interrupted_call_has_not_read_is_not_taken_for_the_next(
    proxy: Proxy, store: Store, direct: Store
) -> None:
    def strike(*_: object) -> None:
        raise TimeIsUp

    direct.acquire(Claim(KEY, "holder", 30.0))
    proxy.delay(0.8)
    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeIsUp):
            store.release(Claim("singleton:v3:{other:00}", "a", 30.0), 1)
    finally:
        signal.signal(signal.SIGALRM, before)

    proxy.forward()

    assert isinstance(store.acquire(MINE), Conflict)


def test_a_reply_that_comes_byte_by_byte_is_read_whole(proxy: Proxy, store: Store, direct: Store) -> None:
    direct.acquire(Claim(KEY, "holder", 30.0, facts=Facts("the-holder", label="ä")))
    proxy.crumble()

    answer = store.acquire(MINE)

    assert isinstance(answer, Conflict)
    assert (answer.first.task_id, answer.first.label) == ("the-holder", "ä")


def test_the_half_of_a_reply_is_not_taken_for_a_part_of_the_next(proxy: Proxy, store: Store, direct: Store) -> None:
    direct.acquire(Claim(KEY, "holder", 30.0, facts=Facts("the-holder")))
    torn = proxy.tear_reply(to=b"EVALSHA")

    answer = store.acquire(MINE)

    assert torn.is_set()
    assert isinstance(answer, Conflict)
    assert answer.first.task_id == "the-holder"
    proxy.forward()
    assert store.time(KEY) is not None


def test_an_acquire_outlasts_a_short_outage(proxy: Proxy, store: Store) -> None:
    proxy.reset()
    threading.Timer(0.5, proxy.forward).start()

    answer = store.acquire(MINE)

    assert isinstance(answer, Grant)


@pytest.mark.parametrize("verb", ["acquire", "ask", "renew", "release", "holders"])
def test_a_connection_that_was_closed_while_idle_costs_no_answer(proxy: Proxy, store: Store, verb: str) -> None:
    ask, _ = CALLS[verb]
    store.acquire(MINE)

    proxy.cut()

    assert ask(store)


def test_a_grant_whose_reply_was_lost_is_recognised_as_our_own(proxy: Proxy, store: Store, direct: Store) -> None:
    lost = proxy.lose_reply(to=b"EVALSHA")

    answer = store.acquire(MINE)

    assert lost.is_set()
    assert isinstance(answer, Grant)
    (holder,) = direct.holders(KEY)
    assert (holder.token, holder.fence) == ("a", answer.fence)


def test_a_lost_reply_to_a_release_leaves_nothing_behind(proxy: Proxy, store: Store, direct: Store) -> None:
    store.acquire(MINE)
    lost = proxy.lose_reply(to=b"EVALSHA")

    outcome_of(lambda store: store.release(MINE, 1), store)

    assert lost.is_set()
    assert direct.holders(KEY) == []


def test_a_lost_reply_to_a_renewal_leaves_the_lock_renewed_and_ours(proxy: Proxy, store: Store, direct: Store) -> None:
    store.acquire(Claim(KEY, "a", 5.0))
    proxy.lose_reply(to=b"EVALSHA")

    with pytest.raises(StoreError):
        store.renew([MINE], 0.5)

    assert direct.holders(KEY)[0].expires_in > 5
    assert store.renew([MINE], 1.0) == [Renewal.RENEWED]
