"""A store without answers, or whose answers are late, lost or torn: every call ends in time, and none does harm."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Conflict, Done, Ending, Grant, Renewal
from celery_singleton_lock.stores.redis.listener import DEAF, LISTENING
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import Waiter
from tests.contract.chapters.hearing import hearing
from tests.proxy import Proxy
from tests.servers import SERVERS, Server, free_port, running
from tests.waiting import Watch, until

KEY = "singleton:v3:{shop.tasks.sync:00}"
MINE = Claim(KEY, "a", 30.0)
OF_A_TASK = Claim(KEY, "b", 30.0, task_id="1", hostname="celery@host", pid=1, published=1, message=1, may_be_copy=True)
ENDING = Ending("ended", 60.0, is_due=True)

SLACK = 4.0


@pytest.mark.parametrize("kind", SERVERS)
def test_the_dead_of_a_long_line_are_passed_in_short_steps(kind: str) -> None:
    dead = 1_500
    with running(kind) as server, closing(Store(server.url, {})) as store, server.client() as client:
        store.acquire(MINE)
        for number in range(dead):
            who: dict[str, Any] = {"task_id": str(number), "published": number + 1}
            store.acquire(Claim(KEY, f"of-{number}", 30.0, **who, turn_for=600.0))
        died_at = clock()
        until(lambda: clock() > died_at + 2.5, "no message of theirs can be on its way")
        client.config_resetstat()

        store.release(MINE, 1)

        # The server counts what its scripts have done.
        stats = client.info("commandstats")
        steps, told = stats["cmdstat_evalsha"]["calls"], stats["cmdstat_publish"]["calls"]
        assert dead <= told <= dead + 5 * steps
        assert told / steps <= 250


def refused_port(cleanup: ExitStack) -> Store:
    return Store(f"redis://127.0.0.1:{free_port()}/0", {})


def mute_listener(cleanup: ExitStack) -> Store:
    listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
    return Store(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", {})


def full_backlog(cleanup: ExitStack) -> Store:
    """A port whose connections are neither accepted nor refused."""
    listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(4):
        filler = cleanup.enter_context(socket.socket())
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
    return Store(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", {})


def stopped_server(cleanup: ExitStack) -> Store:
    server = cleanup.enter_context(running("valkey"))
    store = Store(server.url, {})
    store.acquire(MINE)
    store.renew([MINE], 1.0)
    os.kill(server.pid, signal.SIGSTOP)
    return store


def black_hole(cleanup: ExitStack) -> Store:
    """A server that was there a moment ago, behind a network that is not any more."""
    server = cleanup.enter_context(running("valkey"))
    proxy = cleanup.enter_context(Proxy(server.port))
    store = Store(proxy.url, {})
    store.acquire(MINE)
    store.renew([MINE], 1.0)
    proxy.black_hole()
    return store


def slow_server(cleanup: ExitStack) -> Store:
    server = cleanup.enter_context(running("valkey"))
    proxy = cleanup.enter_context(Proxy(server.port))
    proxy.delay(0.9)
    return Store(proxy.url, {})


SILENT = [refused_port, mute_listener, full_backlog, stopped_server, black_hole]


def asked(store: Store) -> Grant | Conflict | Done | float:
    with Waiter(store, MINE) as waiter:
        return waiter.ask()


CALLS: dict[str, tuple[Callable[[Store], Any], float]] = {
    "acquire": (lambda store: store.acquire(MINE), 5.0),
    "acquire for a task": (lambda store: store.acquire(OF_A_TASK), 5.0),
    "ask": (asked, 5.0),
    "release": (lambda store: store.release(MINE, 1), 2.0),
    "release for a task": (lambda store: store.release(OF_A_TASK, 1, ending=ENDING), 2.0),
    "release in one try": (lambda store: store.release(MINE, 1, bound=0.0), 1.0),
    "renew": (lambda store: store.renew([MINE], 1.0), 1.0),
    "renew many": (lambda store: store.renew([MINE] * 300, 1.0), 1.0),
    "holders": (lambda store: store.holders(KEY), 2.0),
    "call": (lambda store: store.call("TIME"), 2.0),
    "mark_queued": (lambda store: store.mark_queued(KEY, "a", 60.0, limit=1, cooldown=0.0), 2.0),
    "unmark": (lambda store: store.unmark(KEY, "a"), 2.0),
    "mark_done": (lambda store: store.mark_done(KEY, "done:a:0", 0, "stored", 60.0), 2.0),
}


class Outcome(NamedTuple):
    is_answered: bool
    seconds: float
    """Without those in which the machine stood still."""
    by_the_clock: float


Ends = dict[str, Outcome]


def outcome_of(ask: Callable[[Store], Any], store: Store) -> Outcome:
    began, is_answered = clock(), True
    with Watch() as watch:
        try:
            ask(store)
        except StoreError:
            is_answered = False
    return Outcome(is_answered, watch.seconds, clock() - began)


def outcomes(store: Store) -> Ends:
    with ThreadPoolExecutor(len(CALLS)) as pool:
        futures = {name: pool.submit(outcome_of, ask, store) for name, (ask, _) in CALLS.items()}
        return {name: future.result() for name, future in futures.items()}


def too_slow(ends: Ends) -> dict[str, float]:
    return {name: end.seconds for name, end in ends.items() if end.seconds > CALLS[name][1] + SLACK}


@pytest.fixture(scope="module")
def ends_of() -> dict[str, Ends]:
    """The outcomes of all calls to all these stores; all at the same time, because each takes its time."""
    with ExitStack() as cleanup, ThreadPoolExecutor(len(SILENT) + 1) as pool:
        futures = {opened.__name__: pool.submit(outcomes, opened(cleanup)) for opened in [*SILENT, slow_server]}
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("store", SILENT)
def test_every_call_to_a_silent_store_fails_within_its_bound(
    store: Callable[[ExitStack], Store], ends_of: dict[str, Ends]
) -> None:
    ends = ends_of[store.__name__]

    assert not any(end.is_answered for end in ends.values())
    assert too_slow(ends) == {}


def test_an_acquire_goes_on_nearly_to_its_bound(ends_of: dict[str, Ends]) -> None:
    assert ends_of["refused_port"]["acquire"].by_the_clock > 4.5


@pytest.mark.parametrize("opened", [mute_listener, full_backlog, black_hole])
def test_a_renewal_in_a_hurry_does_not_wait_longer_than_it_may(opened: Callable[[ExitStack], Store]) -> None:
    with ExitStack() as cleanup:
        store = opened(cleanup)

        ends = [outcome_of(lambda store: store.renew([MINE], 0.1), store) for _ in range(3)]

    assert not any(end.is_answered for end in ends)
    # A busy machine makes one or two of them longer.
    assert min(end.seconds for end in ends) < 0.8


def test_every_call_to_a_slow_store_ends_within_its_bound(ends_of: dict[str, Ends]) -> None:
    assert too_slow(ends_of["slow_server"]) == {}


@pytest.mark.prove
def test_a_listener_notices_a_server_that_hangs_and_listens_again_when_it_goes_on() -> None:
    with running("valkey") as server, hearing(Store(server.url, {})) as told:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            until(lambda: DEAF in told, "it is told", timeout=60)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        until(lambda: told[-1] == LISTENING, "it listens again", timeout=30)


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
    direct.acquire(Claim(KEY, "holder", 30.0, task_id="the-holder", label="ä"))
    proxy.crumble()

    answer = store.acquire(MINE)

    assert isinstance(answer, Conflict)
    assert (answer.first.task_id, answer.first.label) == ("the-holder", "ä")


def test_the_half_of_a_reply_is_not_taken_for_a_part_of_the_next(proxy: Proxy, store: Store, direct: Store) -> None:
    direct.acquire(Claim(KEY, "holder", 30.0, task_id="the-holder"))
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
