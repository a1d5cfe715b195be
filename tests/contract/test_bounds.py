"""A store that does not answer: every call ends in time, and none does harm."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from celery_singleton_lock import BackendError, Lease
from celery_singleton_lock.backends.base import Backend, clock
from celery_singleton_lock.backends.records import Answer, Claim, Conflict, Grant
from celery_singleton_lock.backends.redis import RedisBackend
from tests.proxy import Proxy
from tests.servers import Server, free_port, running

KEY = "singleton:v1:{shop.tasks.sync:00}"
MINE = Claim(KEY, "a", 30.0)

SLACK = 0.7
"""Seconds by which a busy machine may exceed a bound."""


@pytest.fixture
def proxy(valkey: Server) -> Iterator[Proxy]:
    with Proxy(valkey.port) as proxy:
        yield proxy


@pytest.fixture
def backend(proxy: Proxy) -> Iterator[RedisBackend]:
    """A backend behind the proxy, with its connections open and its scripts known."""
    backend = RedisBackend(proxy.url, {})
    other = Claim("singleton:v1:{other:00}", "a", 30.0)
    backend.acquire(other)
    backend.renew([other], 1.0)
    backend.release(other, 1)
    yield backend
    backend.close()


@pytest.fixture
def direct(valkey: Server) -> Iterator[RedisBackend]:
    """A backend that sees what really happened."""
    backend = RedisBackend(valkey.url, {})
    yield backend
    backend.close()


# Stores that do not answer.


def refused_port(cleanup: ExitStack) -> RedisBackend:
    return RedisBackend(f"redis://127.0.0.1:{free_port()}/0", {})


def mute_listener(cleanup: ExitStack) -> RedisBackend:
    listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
    return RedisBackend(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", {})


def full_backlog(cleanup: ExitStack) -> RedisBackend:
    """A port whose connections are neither accepted nor refused."""
    listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(4):
        filler = cleanup.enter_context(socket.socket())
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
    return RedisBackend(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", {})


def stopped_server(cleanup: ExitStack) -> RedisBackend:
    server = cleanup.enter_context(running("valkey"))
    backend = RedisBackend(server.url, {})
    backend.acquire(MINE)
    backend.renew([MINE], 1.0)
    os.kill(server.pid, signal.SIGSTOP)
    return backend


def black_hole(cleanup: ExitStack) -> RedisBackend:
    """A server that was there a moment ago, behind a network that is not any more."""
    server = cleanup.enter_context(running("valkey"))
    proxy = cleanup.enter_context(Proxy(server.port))
    backend = RedisBackend(proxy.url, {})
    backend.acquire(MINE)
    backend.renew([MINE], 1.0)
    proxy.black_hole()
    return backend


def slow_server(cleanup: ExitStack) -> RedisBackend:
    """A server whose every reply, also those before the first command, takes most of a second."""
    server = cleanup.enter_context(running("valkey"))
    proxy = cleanup.enter_context(Proxy(server.port))
    proxy.delay(0.9)
    return RedisBackend(f"redis://default:secret@127.0.0.1:{proxy.port}/1", {"client_name": "shop"})


SILENT = [refused_port, mute_listener, full_backlog, stopped_server, black_hole]


def asked(backend: Backend) -> Grant | float:
    """What a waiter is answered."""
    with backend.waiter(MINE) as waiter:
        return waiter.ask()


CALLS: dict[str, tuple[Callable[[Backend], Any], float]] = {
    "acquire": (lambda backend: backend.acquire(MINE), 5.0),
    "ask": (asked, 5.0),
    "release": (lambda backend: backend.release(MINE, 1), 2.0),
    "release in one try": (lambda backend: backend.release(MINE, 1, bound=0.0), 1.0),
    "renew": (lambda backend: backend.renew([MINE], 1.0), 1.0),
    "renew many": (lambda backend: backend.renew([MINE] * 300, 1.0), 1.0),
    "holders": (lambda backend: backend.holders(KEY), 5.0),
}
"""Calls and the seconds within which each ends, whatever the store does."""


def outcome_of(ask: Callable[[Backend], Any], backend: Backend) -> tuple[bool, float]:
    """Whether *ask* is answered, and how long that takes."""
    started = clock()
    try:
        ask(backend)
    except BackendError:
        return False, clock() - started
    return True, clock() - started


def outcomes(backend: Backend) -> dict[str, tuple[bool, float]]:
    """The outcomes of all calls, made at the same time."""
    with ThreadPoolExecutor(len(CALLS)) as pool:
        futures = {name: pool.submit(outcome_of, ask, backend) for name, (ask, _) in CALLS.items()}
        return {name: future.result() for name, future in futures.items()}


def too_slow(ends: dict[str, tuple[bool, float]]) -> dict[str, float]:
    return {name: seconds for name, (_, seconds) in ends.items() if seconds > CALLS[name][1] + SLACK}


Ends = dict[str, dict[str, tuple[bool, float]]]


@pytest.fixture(scope="module")
def ends_of() -> Ends:
    """The outcomes of all calls to all these stores; all at the same time, because each takes its time."""
    with ExitStack() as cleanup, ThreadPoolExecutor(len(SILENT) + 1) as pool:
        futures = {store.__name__: pool.submit(outcomes, store(cleanup)) for store in [*SILENT, slow_server]}
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("store", SILENT)
def test_every_call_to_a_silent_store_fails_within_its_bound(
    store: Callable[[ExitStack], Backend], ends_of: Ends
) -> None:
    ends = ends_of[store.__name__]

    assert not any(answered for answered, _ in ends.values())
    assert too_slow(ends) == {}


@pytest.mark.parametrize("store", [mute_listener, full_backlog, black_hole])
def test_a_renewal_in_a_hurry_does_not_wait_longer_than_it_may(store: Callable[[ExitStack], Backend]) -> None:
    with ExitStack() as cleanup:
        backend = store(cleanup)

        answered, seconds = outcome_of(lambda backend: backend.renew([MINE], 0.1), backend)

    assert not answered
    assert seconds < 0.1 + SLACK


def test_an_acquire_does_not_give_up_at_the_first_failure(ends_of: Ends) -> None:
    _, seconds = ends_of["refused_port"]["acquire"]

    assert seconds > 1.0


def test_every_call_to_a_slow_store_ends_within_its_bound(ends_of: Ends) -> None:
    assert too_slow(ends_of["slow_server"]) == {}


@pytest.mark.parametrize("connected", [True, False])
def test_a_store_that_takes_less_than_a_second_for_an_answer_is_understood(
    proxy: Proxy, backend: RedisBackend, connected: bool
) -> None:
    backend = backend if connected else RedisBackend(proxy.url, {})
    proxy.delay(0.4)

    answer = backend.acquire(MINE)

    assert isinstance(answer, Grant)


def test_a_late_answer_is_not_taken_for_the_answer_to_the_next_question(
    proxy: Proxy, backend: RedisBackend, direct: RedisBackend
) -> None:
    direct.acquire(Claim(KEY, "holder", 30.0))
    proxy.delay(0.6)
    with pytest.raises(BackendError):
        backend.release(Claim("singleton:v1:{other:00}", "a", 30.0), 1, bound=0.2)

    proxy.forward()

    assert isinstance(backend.acquire(MINE), Conflict)


def test_a_late_answer_to_a_renewal_is_not_taken_for_the_answer_to_the_next(
    proxy: Proxy, backend: RedisBackend, direct: RedisBackend
) -> None:
    direct.acquire(MINE)
    proxy.delay(0.5)
    with pytest.raises(BackendError):
        backend.renew([MINE], 0.1)

    proxy.forward()

    assert backend.renew([Claim(KEY, "stranger", 30.0)], 1.0) == [Answer.TAKEN]


class TimeIsUp(BaseException):
    """As a time limit would raise it, from a signal's handler."""


def test_an_answer_that_an_interrupted_call_has_not_read_is_not_taken_for_the_next(
    proxy: Proxy, backend: RedisBackend, direct: RedisBackend
) -> None:
    def strike(*_: object) -> None:
        raise TimeIsUp

    direct.acquire(Claim(KEY, "holder", 30.0))
    proxy.delay(0.8)
    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeIsUp):
            backend.release(Claim("singleton:v1:{other:00}", "a", 30.0), 1)
    finally:
        signal.signal(signal.SIGALRM, before)

    proxy.forward()

    assert isinstance(backend.acquire(MINE), Conflict)


# Stores that come back.


def test_an_acquire_outlasts_a_short_outage(proxy: Proxy, backend: RedisBackend) -> None:
    proxy.reset()
    threading.Timer(0.5, proxy.forward).start()

    answer = backend.acquire(MINE)

    assert isinstance(answer, Grant)


VERBS: dict[str, Callable[[Backend], Any]] = {
    "acquire": lambda backend: backend.acquire(MINE),
    "ask": asked,
    "renew": lambda backend: backend.renew([MINE], 1.0),
    "release": lambda backend: backend.release(MINE, 1),
    "holders": lambda backend: backend.holders(KEY),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_connection_that_was_closed_while_idle_costs_no_answer(
    proxy: Proxy, backend: RedisBackend, verb: Callable[[Backend], Any]
) -> None:
    backend.acquire(MINE)

    proxy.cut()

    assert verb(backend)


# Lost replies.


def test_a_grant_whose_reply_was_lost_is_recognised_as_our_own(
    proxy: Proxy, backend: RedisBackend, direct: RedisBackend
) -> None:
    lost = proxy.lose_reply(to=b"EVALSHA")

    answer = backend.acquire(MINE)

    assert lost.is_set()
    assert isinstance(answer, Grant)
    (holder,) = direct.holders(KEY)
    assert (holder.token, holder.fence) == ("a", answer.fence)


def test_a_repeated_grant_counts_from_the_request_that_was_answered(proxy: Proxy, backend: RedisBackend) -> None:
    lost = proxy.lose_reply(to=b"EVALSHA")
    lost_at: list[float] = []
    watch = threading.Thread(target=lambda: lost.wait(20) and lost_at.append(clock()))
    watch.start()

    answer = backend.acquire(MINE)

    watch.join()
    assert isinstance(answer, Grant)
    assert answer.sent_at > lost_at[0]


def test_a_lost_reply_to_a_release_leaves_nothing_behind(
    proxy: Proxy, backend: RedisBackend, direct: RedisBackend
) -> None:
    backend.acquire(MINE)
    lost = proxy.lose_reply(to=b"EVALSHA")

    outcome_of(lambda backend: backend.release(MINE, 1), backend)

    assert lost.is_set()
    assert direct.holders(KEY) == []


def test_a_lease_whose_release_was_done_but_not_heard_of_was_not_lost(proxy: Proxy, backend: RedisBackend) -> None:
    told: list[Lease] = []
    lease = Lease(backend, KEY, ttl=30.0, on_lost=told.append)
    lease.acquire()
    proxy.lose_reply(to=b"EVALSHA")

    lease.release()

    assert told == []
    assert not lease.lost


def test_a_lost_reply_to_a_renewal_leaves_the_lock_renewed_and_ours(
    proxy: Proxy, backend: RedisBackend, direct: RedisBackend
) -> None:
    backend.acquire(Claim(KEY, "a", 5.0))
    proxy.lose_reply(to=b"EVALSHA")

    with pytest.raises(BackendError):
        backend.renew([MINE], 0.5)

    assert direct.holders(KEY)[0].expires_in > 5
    assert backend.renew([MINE], 1.0) == [Answer.DONE]


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
    backend = RedisBackend(url.format(port=valkey.port), {})
    before = connections_so_far(admin)

    with pytest.raises(BackendError, match="Authentication") as refused:
        backend.acquire(MINE)

    assert connections_so_far(admin) == before + 1
    assert "wr0ng-secret" not in str(refused.value) + repr(refused.value)


def test_a_missing_password_fails_at_the_first_try(valkey: Server, admin: Any, password: str) -> None:
    backend = RedisBackend(valkey.url, {})
    before = connections_so_far(admin)

    with pytest.raises(BackendError, match="uthenticat"):
        backend.acquire(MINE)

    assert connections_so_far(admin) == before + 1


def test_the_right_password_is_let_in(valkey: Server, password: str) -> None:
    backend = RedisBackend(f"redis://:{password}@127.0.0.1:{valkey.port}/0", {})

    answer = backend.acquire(MINE)

    assert isinstance(answer, Grant)
    backend.close()
