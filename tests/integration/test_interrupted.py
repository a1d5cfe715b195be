"""R13 on whole runs: whatever we do, and wherever that is broken off, nothing gets stuck and nobody else is harmed.

`STRIKE_EVERYWHERE=1`, as `make prove` says, tries all moments; otherwise about sixty of each are.
"""

import _thread
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import redis
from celery import Celery, states, uuid

import celery_singleton_lock
from celery_singleton_lock import Lease, Lock, SingletonLockError, SingletonTask, settings
from celery_singleton_lock.leases import one_thread as one_thread_module
from celery_singleton_lock.leases import pulse as pulse_module
from celery_singleton_lock.leases import tally as tally_module
from celery_singleton_lock.leases.heartbeat import heartbeat
from celery_singleton_lock.leases.keepalive import Keepalive
from celery_singleton_lock.leases.leftovers import leftovers
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.leases.teller import scribe, teller
from celery_singleton_lock.request import SingletonRequest
from celery_singleton_lock.runs import run as run_module
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer, Claim, Facts, Grant
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.servers import Server
from tests.strikes import (
    HOWS,
    How,
    Strike,
    StruckError,
    is_begun_too_late,
    is_free,
    is_reached,
    moments,
    nothing_pending,
)
from tests.tracing import tracer_of

# What strikes in a finalizer vanishes there, and what was about to be used or put back is closed by its own.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

TRIES = 60
TTL = 30.0

OURS = frozenset(map(str, Path(celery_singleton_lock.__file__).parent.rglob("*.py")))
BELOW = frozenset(module.__file__ for module in (contextlib, threading, weakref))
REDIS_PYS = frozenset(map(str, Path(redis.__file__).parent.rglob("*.py")))


class WatchedMemory(MemoryStore):
    """Tells who was renewed."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed: set[str] = set()
        self.once_renewed: Callable[[], object] = lambda: None

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:
        answers = super().renew(claims, timeout)
        self.renewed |= {claim.token for claim in claims}
        self.once_renewed()
        return answers


class WatchedRedis(RedisStore):
    """Tells who was renewed."""

    def __init__(self, url: str) -> None:
        super().__init__(url, {})
        self.renewed: set[str] = set()
        self.once_renewed: Callable[[], object] = lambda: None

    def twin(self) -> "WatchedRedis":
        twin = WatchedRedis(self._url)
        twin.renewed = self.renewed
        return twin

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:
        answers = super().renew(claims, timeout)
        self.renewed |= {claim.token for claim in claims}
        self.once_renewed()
        return answers


class InMemory:
    """A store of this process, and what can be seen of it from outside."""

    def __init__(self) -> None:
        self.store = WatchedMemory()

    def begin_anew(self) -> None:
        self.store.clear()

    def is_taken(self, key: str) -> bool:
        return key in self.store._locks

    def somebody_waits(self) -> bool:
        return bool(self.store._bells)

    def guards(self) -> list[Any]:
        return [self.store._guard]

    def what_is_wrong(self) -> str | None:
        return None


class InRedis:
    """A store on a server, and what can be seen of it from outside."""

    def __init__(self, server: Server) -> None:
        self._server, self._client = server, server.client()
        self.store = WatchedRedis(server.url)

    def begin_anew(self) -> None:
        self._client.flushall()
        self.store.renewed.clear()

    def connect_anew(self) -> None:
        self.store.close()
        self.store = WatchedRedis(self._server.url)

    def is_taken(self, key: str) -> bool:
        return bool(self._client.exists(key))

    def somebody_waits(self) -> bool:
        return bool(self._client.pubsub_channels("*"))

    def guards(self) -> list[Any]:
        return []

    def what_is_wrong(self) -> str | None:
        """Each connection that is kept has to answer what it is asked next, and that alone."""
        for wire in (self.store._wire, self.store._reserved):
            for _ in range(len(wire._idle)):
                # Taken out, for what is given back in the background uses them too.
                connection, question = wire._idle.popleft()[0], uuid()
                connection.send_command("ECHO", question)
                if (answer := connection.read_response()) != question:
                    return f"a connection answers {answer!r} to another question"
                wire._put_back(connection)
        return None


World = InMemory | InRedis


@pytest.fixture(params=["memory", "valkey"])
def world(request: pytest.FixtureRequest) -> World:
    return InMemory() if request.param == "memory" else InRedis(request.getfixturevalue("valkey"))


@pytest.fixture
def app(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    app = Celery("interrupted", broker="memory://", backend="cache+memory://", set_as_current=False)
    monkeypatch.setitem(settings._stores, app, world.store)
    # Each struck run is a failure with a traceback, in which pytest would keep its lease.
    for name in ("celery.app.trace", "celery.utils.dispatch.signal"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    yield app
    app.close()


@pytest.fixture(autouse=True)
def threads_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a new thread runs, CPython takes it for the one that has started it, and raises in it what was sent."""

    def start(run: Callable[..., object], args: tuple[Any, ...]) -> int:
        runs = threading.Lock()
        runs.acquire()

        def begin() -> None:
            runs.release()
            run(*args)

        ident = _thread.start_new_thread(begin, ())
        runs.acquire()
        return ident

    threads = SimpleNamespace(start_new_thread=start, get_ident=threading.get_ident)
    monkeypatch.setattr(one_thread_module, "_thread", threads)


@pytest.fixture(autouse=True)
def no_thread_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands of turns would take as long."""
    monkeypatch.setattr(pulse_module, "_LINGERS", 0.0)
    monkeypatch.setattr(tally_module, "EVERY", 0.0)


@pytest.fixture(autouse=True)
def interrupts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What can interrupt a body; all that were made since a moment was tried."""
    made: list[Any] = []

    class Known(run_module.Interrupt):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(run_module, "Interrupt", Known)
    nothing_pending()
    return made


@dataclass
class Scene:
    """Something we do, told in parts: for whose key, what may be broken off, and what comes before it and after."""

    key: str
    body: Callable[[], object]
    prepared: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    wrong: Callable[[], str | None] = lambda: None
    after: Callable[[], object] = lambda: None


BYSTANDER = Claim("singleton:v2:{bystander:1}", "bystander", TTL)


def strike_all(world: World, scene: Scene, how: How, files: frozenset[str], interrupts: list[Any]) -> None:
    """Try the moments of a scene, one after the other."""
    total = played(world, scene, Strike(float("inf"), files, how)).seen
    assert total > 20
    tried = 0
    for moment in moments(total, TRIES):
        tried += 1
        strike = played(world, scene, Strike(moment, files, how))
        wrong = strike.wrong or what_is_wrong(world, scene, strike.where, interrupts)
        assert wrong is None, f"{wrong}; struck in {strike.where} ({moment} of {total})"
        interrupts.clear()
    print(f"{tried} of {total} moments tried")  # noqa: T201 (`make prove` shows it)


def played(world: World, scene: Scene, strike: Strike) -> Strike:
    """In a process that has done nothing yet, beside somebody else's lease."""
    for each in (heartbeat, leftovers, teller, scribe):
        each._start_over()
    world.begin_anew()
    assert isinstance(world.store.acquire(BYSTANDER), Grant)
    with scene.prepared():
        strike.during(scene.body)
        strike.wrong = scene.wrong()
    scene.after()
    return strike


def what_is_wrong(world: World, scene: Scene, where: str, interrupts: list[Any]) -> str | None:
    """What has become of all the rest, now that it was broken off."""
    guards = [
        heartbeat._lock,
        leftovers._lock,
        teller._lock,
        scribe._lock,
        heartbeat.tally._lock,
        heartbeat.tally._flushing,
        *world.guards(),
        *(each._guard for each in interrupts),
    ]
    if not all(is_free(guard) for guard in guards):
        return "a lock of ours is taken"
    if not is_reached(lambda: not heartbeat.watched()):
        return "a lease that nobody is in is renewed"
    if not is_well(world.store):
        return "a fresh lease is not renewed"
    if not is_begun_too_late(where) and not is_reached(lambda: not world.is_taken(scene.key)):
        return "the key is still taken"
    if world.store.release(BYSTANDER, 1) is not Answer.DONE:
        return "the lease of somebody else is gone"
    return world.what_is_wrong()


def is_well(store: Store) -> bool:
    """A fresh lease is renewed and released, in a thread that would get stuck if something were."""
    done = threading.Event()

    def live() -> None:
        lease = Lease(store, Claim("fresh", uuid(), TTL))
        assert lease.acquire() is None
        assert store.on_reconnect is not None
        store.on_reconnect()
        give_up_at = clock() + 3
        while lease.token not in store.renewed and clock() < give_up_at:
            time.sleep(0.0005)
        assert lease.token in store.renewed
        lease.release()
        done.set()

    threading.Thread(target=live, daemon=True).start()
    return done.wait(5)


@contextmanager
def held(world: World, key: str, **facts: Any) -> Iterator[None]:
    """By somebody else, all the time."""
    holder = Claim(key, "holder", TTL, facts=Facts(**facts))
    assert isinstance(world.store.acquire(holder), Grant)
    yield
    assert world.store.release(holder, 1) is Answer.DONE


@contextmanager
def held_until_somebody_waits(world: World, key: str) -> Iterator[None]:
    """By somebody else, who makes room for the first in the queue."""
    holder, is_over = Claim(key, "holder", TTL), threading.Event()
    assert isinstance(world.store.acquire(holder), Grant)

    def make_room() -> None:
        while not world.somebody_waits() and not is_over.is_set():
            time.sleep(0.0005)
        assert world.store.release(holder, 1) is Answer.DONE

    thread = threading.Thread(target=make_room)
    thread.start()
    yield
    is_over.set()
    thread.join()


# Lock.


def lock_in(world: World, **options: Any) -> Lock:
    lock = Lock("stock", url="memory://interrupted", ttl=TTL, **options)
    lock._store = world.store
    return lock


def a_block(world: World) -> Scene:
    lock = lock_in(world)

    def body() -> None:
        with lock:
            pass

    return Scene(lock.key, body)


def a_block_in_a_block(world: World) -> Scene:
    lock = lock_in(world, reentrant=True)

    def body() -> None:
        with lock, lock:
            pass

    return Scene(lock.key, body)


def again(release: Callable[[], object]) -> None:
    """By hand, it can be broken off before it has begun; then it is still to be done."""
    try:
        release()
    except StruckError:
        with contextlib.suppress(SingletonLockError):
            release()
        raise


def a_lease(world: World) -> Scene:
    lock = lock_in(world)

    def body() -> None:
        lease = lock.acquire()
        assert lease is not None
        try:
            lease.check()
        finally:
            again(lease.release)

    return Scene(lock.key, body)


def acquire_and_release(world: World) -> Scene:
    lock = lock_in(world)

    def body() -> None:
        lock.acquire()
        again(lock.release)

    return Scene(lock.key, body)


def a_block_that_waits(world: World) -> Scene:
    scene = a_block(world)
    return Scene(scene.key, scene.body, lambda: held_until_somebody_waits(world, scene.key))


def a_refusal(world: World) -> Scene:
    lock = lock_in(world)
    return Scene(lock.key, lambda: lock.acquire(blocking=False), lambda: held(world, lock.key))


def a_wait_that_is_given_up(world: World) -> Scene:
    lock = lock_in(world)
    return Scene(lock.key, lambda: lock.acquire(timeout=0.01), lambda: held(world, lock.key))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "what",
    [
        a_block,
        a_block_in_a_block,
        a_lease,
        acquire_and_release,
        a_block_that_waits,
        a_refusal,
        a_wait_that_is_given_up,
    ],
)
def test_a_lock(what: Callable[[World], Scene], how: How, world: World, interrupts: list[Any]) -> None:
    strike_all(world, what(world), how, OURS | BELOW, interrupts)


# A task.


def a_task(app: Celery, failures: int = 0, **options: Any) -> Scene:
    @app.task(bind=True, base=SingletonTask, name="import_catalogue", lock_key=(), **options)
    def import_catalogue(self: Any) -> int:
        if self.request.retries < failures:
            raise self.retry(countdown=0)
        return 7

    trace = tracer_of(import_catalogue)
    delivery = {
        "delivery_info": {"routing_key": "celery", "redelivered": False},
        "headers": {"lang": "py"},
        "retries": 0,
        "task": "import_catalogue",
    }

    def body() -> None:
        task_id = uuid()
        trace(task_id, (), {}, {"id": task_id, "args": (), "kwargs": {}, **delivery})

    return Scene(import_catalogue.lock_key_for(), body, after=partial(run_what_is_published, import_catalogue, trace))


def run_what_is_published(task: Any, trace: Callable[..., Any]) -> None:
    """Whatever was to come again comes now, and at once, unless its key stays taken."""
    with task.app.connection_for_read() as connection:
        queue, give_up_at = connection.SimpleQueue("celery"), clock() + 2
        while clock() < give_up_at and (message := queue.get(block=False) if queue.qsize() else None):
            message.ack()
            request = SingletonRequest(message, app=task.app, task=task, decoded=False)
            trace(request.id, request.args, request.kwargs, request.request_dict)
        queue.clear()


def a_run(world: World, app: Celery) -> Scene:
    return a_task(app)


def a_run_that_waits(world: World, app: Celery) -> Scene:
    scene = a_task(app, lock_on_conflict="wait")
    return Scene(scene.key, scene.body, lambda: held_until_somebody_waits(world, scene.key))


def a_run_that_is_skipped(world: World, app: Celery) -> Scene:
    scene = a_task(app)
    return Scene(scene.key, scene.body, lambda: held(world, scene.key))


def a_run_that_comes_again(world: World, app: Celery, policy: str) -> Scene:
    """Because its key is held by a run that has ended when it comes."""
    scene = a_task(app, lock_on_conflict=policy)

    @contextmanager
    def prepared() -> Iterator[None]:
        app.backend.store_result("the-holder", 7, states.SUCCESS)
        facts = {"task_id": "the-holder", "task_name": "import_catalogue", "hostname": "w@here"}
        with held(world, scene.key, **facts):
            yield

    return replace(scene, prepared=prepared)


def a_run_that_is_rescheduled(world: World, app: Celery) -> Scene:
    return a_run_that_comes_again(world, app, "reschedule")


def a_run_that_joins(world: World, app: Celery) -> Scene:
    return a_run_that_comes_again(world, app, "join")


def a_run_that_comes_next(world: World, app: Celery) -> Scene:
    return a_run_that_comes_again(world, app, "rerun")


def a_run_that_replaces(world: World, app: Celery) -> Scene:
    return a_run_that_comes_again(world, app, "replace")


def a_run_that_retries(world: World, app: Celery) -> Scene:
    return a_task(app, failures=1, lock_mode="until_executed")


def an_eager_run(world: World, app: Celery) -> Scene:
    scene = a_task(app)
    return replace(scene, body=app.tasks["import_catalogue"].apply)


def an_eager_run_that_is_skipped(world: World, app: Celery) -> Scene:
    scene = an_eager_run(world, app)
    return replace(scene, prepared=lambda: held(world, scene.key))


def a_call_that_is_queued(world: World, app: Celery) -> Scene:
    scene = a_task(app, lock_mode="until_executed")
    return replace(scene, body=app.tasks["import_catalogue"].delay)


# Celery says so where something is raised outside the body.
@pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "what",
    [
        a_run,
        a_run_that_waits,
        a_run_that_is_skipped,
        a_run_that_is_rescheduled,
        a_run_that_joins,
        a_run_that_comes_next,
        a_run_that_replaces,
        a_run_that_retries,
        an_eager_run,
        an_eager_run_that_is_skipped,
        a_call_that_is_queued,
    ],
)
def test_a_task(
    what: Callable[[World, Celery], Scene], how: How, world: World, app: Celery, interrupts: list[Any]
) -> None:
    strike_all(world, what(world, app), how, OURS | BELOW, interrupts)


# What renews.


def a_turn(world: World, ttl: float, turn: Callable[[Renewal], Callable[[], None]]) -> Scene:
    """It is struck in the thread that renews, and ends after it."""
    claim = Claim("singleton:v2:{due:1}", "due", 1.5)
    turns: list[Callable[[], None]] = []
    renewals: list[Renewal] = []

    @contextmanager
    def prepared() -> Iterator[None]:
        assert isinstance(world.store.acquire(claim), Grant)
        world.store.renewed.clear()
        renewals[:] = [Renewal(world.store, replace(claim, ttl=ttl))]
        renewals[0].renewed(clock())
        renewals[0].next_renewal = 0.0
        turns[:] = [turn(renewals[0])]
        yield
        renewals.clear()
        world.store.once_renewed = lambda: None
        world.store.release(claim, 1)

    def wrong() -> str | None:
        return None if is_reached(is_renewed) else "what was due is not renewed"

    def is_renewed() -> bool:
        (remaining,) = world.store.remaining([claim], 1.0)
        return claim.token in world.store.renewed or (remaining or 0.0) > claim.ttl

    def body() -> None:
        turns[0]()

    return Scene(claim.key, body, prepared, wrong)


def a_turn_of_the_heartbeat(world: World) -> Scene:
    def turn(renewal: Renewal) -> Callable[[], None]:
        # Then nobody wants it any more, so the thread ends.
        world.store.once_renewed = renewal.end
        pulse = heartbeat._pulse_of(world.store)
        pulse._watched[ref(renewal)] = None

        def live() -> None:
            pulse._thread._ident = threading.get_ident()
            next(life, None)

        life = pulse._thread._live()
        next(life)
        return live

    return a_turn(world, 1.5, turn)


def a_turn_of_the_keepalive(world: World) -> Scene:
    def turn(renewal: Renewal) -> Callable[[], None]:
        # One for the strike, one for the renewal.
        rounds = [renewal, renewal]

        def late() -> list[Renewal]:
            if not rounds:
                raise SystemExit
            return [rounds.pop()]

        keepalive = Keepalive(late)
        keepalive._pause = 0.001
        life = keepalive._live(world.store)
        next(life)
        return lambda: next(life, None)

    # Of such a long ttl it is late.
    return a_turn(world, TTL, turn)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("what", [a_turn_of_the_heartbeat, a_turn_of_the_keepalive])
def test_a_turn(what: Callable[[World], Scene], how: How, world: World, interrupts: list[Any]) -> None:
    strike_all(world, what(world), how, OURS | BELOW, interrupts)


# The store by itself.


def store_alone(world: InRedis) -> Scene:
    """With connections that are opened for it."""
    claim = Claim("singleton:v2:{alone:1}", "alone", TTL)

    @contextmanager
    def prepared() -> Iterator[None]:
        world.connect_anew()
        yield
        world.store.release(claim, 1)

    def body() -> None:
        store = world.store
        store.acquire(claim)
        store.acquire(replace(claim, token="refused"))
        store.renew([claim], 1.0)
        store.remaining([claim], 1.0)
        store.release(claim, 1)

    return Scene(claim.key, body, prepared)


def store_that_listens(world: InRedis) -> Scene:
    claim = Claim("singleton:v2:{alone:1}", "alone", TTL)

    @contextmanager
    def prepared() -> Iterator[None]:
        with held_until_somebody_waits(world, claim.key):
            yield
        world.store.release(claim, 1)

    def body() -> None:
        with world.store.waiter(claim) as waiter:
            while not isinstance(answer := waiter.ask(), Grant):
                assert isinstance(answer, float)
                waiter.sleep(answer)

    return Scene(claim.key, body, prepared)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("what", [store_alone, store_that_listens])
def test_the_wire(what: Callable[[InRedis], Scene], how: How, valkey: Server, interrupts: list[Any]) -> None:
    world = InRedis(valkey)
    strike_all(world, what(world), how, OURS | BELOW | REDIS_PYS, interrupts)
