"""Replies that are late, lost or a refusal: none is taken for another, and none does harm."""

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_singleton_lock import Lease, Lock, StoreError, signals
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Grant
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.contract.test_bounds import KEY, MINE, asked, outcome_of
from tests.proxy import Proxy
from tests.servers import Server


@pytest.fixture
def proxy(valkey: Server) -> Iterator[Proxy]:
    with Proxy(valkey.port) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: Proxy) -> Iterator[RedisStore]:
    """A store behind the proxy, with its connections open and its scripts known."""
    store = RedisStore(proxy.url, {})
    other = Claim("singleton:v3:{other:00}", "a", 30.0)
    store.acquire(other)
    store.renew([other], 1.0)
    store.release(other, 1)
    yield store
    store.close()


@pytest.fixture
def direct(valkey: Server) -> Iterator[RedisStore]:
    """A store that sees what really happened."""
    store = RedisStore(valkey.url, {})
    yield store
    store.close()


# Late replies.


@pytest.mark.parametrize("connected", [True, False])
def test_a_store_that_takes_less_than_a_second_for_an_answer_is_understood(
    proxy: Proxy, store: RedisStore, connected: bool
) -> None:
    store = store if connected else RedisStore(proxy.url, {})
    proxy.delay(0.4)

    answer = store.acquire(MINE)

    assert isinstance(answer, Grant)


def test_a_late_answer_is_not_taken_for_the_answer_to_the_next_question(
    proxy: Proxy, store: RedisStore, direct: RedisStore
) -> None:
    direct.acquire(Claim(KEY, "holder", 30.0))
    proxy.delay(0.6)
    with pytest.raises(StoreError):
        store.release(Claim("singleton:v3:{other:00}", "a", 30.0), 1, bound=0.2)

    proxy.forward()

    assert isinstance(store.acquire(MINE), Conflict)


def test_a_late_answer_to_a_renewal_is_not_taken_for_the_answer_to_the_next(
    proxy: Proxy, store: RedisStore, direct: RedisStore
) -> None:
    direct.acquire(MINE)
    proxy.delay(0.5)
    with pytest.raises(StoreError):
        store.renew([MINE], 0.1)

    proxy.forward()

    assert store.renew([Claim(KEY, "stranger", 30.0)], 1.0) == [Answer.TAKEN]


class TimeIsUp(BaseException):
    """As a time limit would raise it, from a signal's handler."""


def test_an_answer_that_an_interrupted_call_has_not_read_is_not_taken_for_the_next(
    proxy: Proxy, store: RedisStore, direct: RedisStore
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


# Stores that come back.


def test_an_acquire_outlasts_a_short_outage(proxy: Proxy, store: RedisStore) -> None:
    proxy.reset()
    threading.Timer(0.5, proxy.forward).start()

    answer = store.acquire(MINE)

    assert isinstance(answer, Grant)


VERBS: dict[str, Callable[[Store], Any]] = {
    "acquire": lambda store: store.acquire(MINE),
    "ask": asked,
    "renew": lambda store: store.renew([MINE], 1.0),
    "release": lambda store: store.release(MINE, 1),
    "holders": lambda store: store.holders(KEY),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_connection_that_was_closed_while_idle_costs_no_answer(
    proxy: Proxy, store: RedisStore, verb: Callable[[Store], Any]
) -> None:
    store.acquire(MINE)

    proxy.cut()

    assert verb(store)


# Lost replies.


def test_a_grant_whose_reply_was_lost_is_recognised_as_our_own(
    proxy: Proxy, store: RedisStore, direct: RedisStore
) -> None:
    lost = proxy.lose_reply(to=b"EVALSHA")

    answer = store.acquire(MINE)

    assert lost.is_set()
    assert isinstance(answer, Grant)
    (holder,) = direct.holders(KEY)
    assert (holder.token, holder.fence) == ("a", answer.fence)


def test_a_repeated_grant_counts_from_the_request_that_was_answered(proxy: Proxy, store: RedisStore) -> None:
    lost = proxy.lose_reply(to=b"EVALSHA")
    lost_at: list[float] = []
    watch = threading.Thread(target=lambda: lost.wait(20) and lost_at.append(clock()))
    watch.start()

    answer = store.acquire(MINE)

    watch.join()
    assert isinstance(answer, Grant)
    assert answer.sent_at > lost_at[0]


def test_a_lost_reply_to_a_release_leaves_nothing_behind(proxy: Proxy, store: RedisStore, direct: RedisStore) -> None:
    store.acquire(MINE)
    lost = proxy.lose_reply(to=b"EVALSHA")

    outcome_of(lambda store: store.release(MINE, 1), store)

    assert lost.is_set()
    assert direct.holders(KEY) == []


def test_a_lease_whose_release_was_done_but_not_heard_of_was_not_lost(proxy: Proxy) -> None:
    told: list[Lease] = []

    def is_told(lease: Lease, **_: Any) -> None:
        told.append(lease)

    signals.lock_lost.connect(is_told)
    lease = Lock("stock", url=proxy.url).acquire()
    assert lease is not None
    lost = proxy.lose_reply(to=b"EVALSHA")

    lease.release()

    assert lost.is_set()
    assert not lease.lost
    signals.lock_lost.disconnect(is_told)
    assert told == []


def test_a_lost_reply_to_a_renewal_leaves_the_lock_renewed_and_ours(
    proxy: Proxy, store: RedisStore, direct: RedisStore
) -> None:
    store.acquire(Claim(KEY, "a", 5.0))
    proxy.lose_reply(to=b"EVALSHA")

    with pytest.raises(StoreError):
        store.renew([MINE], 0.5)

    assert direct.holders(KEY)[0].expires_in > 5
    assert store.renew([MINE], 1.0) == [Answer.DONE]


# Servers that say no.


@pytest.fixture
def admin(valkey: Server) -> Iterator[Any]:
    """A client that stays connected when the server begins to want a password."""
    with valkey.client() as client:
        yield client


@pytest.fixture
def password(admin: Any) -> Iterator[str]:
    """The server wants one from now on."""
    admin.config_set("requirepass", "right-secret")
    yield "right-secret"
    admin.config_set("requirepass", "")


def connections_so_far(admin: Any) -> int:
    return int(admin.info("stats")["total_connections_received"])


@pytest.mark.parametrize("url", ["redis://:wr0ng-secret@127.0.0.1:{port}/0", "redis://u:wr0ng-secret@127.0.0.1:{port}"])
def test_a_wrong_password_fails_at_the_first_try_and_is_not_told(
    valkey: Server, admin: Any, password: str, url: str
) -> None:
    store = RedisStore(url.format(port=valkey.port), {})
    before = connections_so_far(admin)

    with pytest.raises(StoreError, match="Authentication") as refused:
        store.acquire(MINE)

    assert connections_so_far(admin) == before + 1
    assert "wr0ng-secret" not in str(refused.value) + repr(refused.value)


def test_a_missing_password_fails_at_the_first_try(valkey: Server, admin: Any, password: str) -> None:
    store = RedisStore(valkey.url, {})
    before = connections_so_far(admin)

    with pytest.raises(StoreError, match="uthenticat"):
        store.acquire(MINE)

    assert connections_so_far(admin) == before + 1


def test_the_right_password_is_let_in(valkey: Server, password: str) -> None:
    store = RedisStore(f"redis://:{password}@127.0.0.1:{valkey.port}/0", {})

    answer = store.acquire(MINE)

    assert isinstance(answer, Grant)
    store.close()
