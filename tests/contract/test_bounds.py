"""A store that does not answer: every call ends in time, and none does harm."""

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Conflict, Done, Ending, Facts, Grant
from celery_singleton_lock.stores.redis.listener import DEAF, LISTENING
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import Waiter
from tests.contract.chapters.hearing import hearing
from tests.proxy import Proxy
from tests.servers import SERVERS, free_port, running
from tests.waiting import Watch, until

KEY = "singleton:v3:{shop.tasks.sync:00}"
MINE = Claim(KEY, "a", 30.0)
OF_A_TASK = Claim(
    KEY, "b", 30.0, facts=Facts(task_id="1", hostname="celery@host", pid=1, published=1), message=1, may_be_copy=True
)
ENDING = Ending("ended", 60.0, is_due=True)

SLACK = 4.0


@pytest.mark.parametrize("kind", SERVERS)
def test_the_dead_of_a_long_line_are_passed_in_short_steps(kind: str) -> None:
    dead = 1_500
    with running(kind) as server, closing(Store(server.url, {})) as store, server.client() as client:
        store.acquire(MINE)
        for number in range(dead):
            facts = Facts(task_id=str(number), published=number + 1)
            store.acquire(Claim(KEY, f"of-{number}", 30.0, facts=facts, turn_for=600.0))
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
