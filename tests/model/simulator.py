"""Clients, a server and a network in virtual time, around the real lease and heartbeat.

One seed makes one schedule: who wants which key when, which messages are lost,
doubled or late, who is stopped or dies, and what happens to the server. The code
of the library runs unchanged in greenlets; what it takes from the operating
system (clock, threads, sleep, chance) is replaced by that of a `World`. A
`Referee`, who sees all clocks at one instant, says when a promise is broken.
"""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from random import Random
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

from greenlet import GreenletExit, getcurrent, greenlet

from celery_singleton_lock.errors import LockLost, StoreError
from celery_singleton_lock.leases import heartbeat as heartbeat_module
from celery_singleton_lock.leases import lease as lease_module
from celery_singleton_lock.leases import leftovers as leftovers_module
from celery_singleton_lock.leases import one_thread as one_thread_module
from celery_singleton_lock.leases import pulse as pulse_module
from celery_singleton_lock.leases import renewal as renewal_module
from celery_singleton_lock.leases.heartbeat import Heartbeat
from celery_singleton_lock.leases.lease import Lease, new_token
from celery_singleton_lock.leases.leftovers import Leftovers, Unreleased
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, RELEASE_BOUND, LockStore, Store, Waiter
from celery_singleton_lock.stores.memory import admission as admission_module
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Done, Ending, Grant, Look
from celery_singleton_lock.stores.redis.wire import REPLY_TIMEOUT

KINDS = ("network", "restart", "network", "failover", "network", "steps", "network", "leap")
"""What else goes wrong, by the seed's remainder; the network and the clients are bad in each."""

SAFE = ("network", "steps")
"""Kinds in which the server keeps its word, so nobody may hold a place that another has been given."""

EPOCH = 1_700_000_000.0
SHORTEST = 1e-6  # shorter than this, a clock far from zero might not move
SERVICE = 1e-5  # a server runs one script after the other
MOST_LOOKS = 1000  # at the clock, while no time passes
GRACE = 2.0  # a waiter may be this late for its turn
LATEST_TELLING = 1.5  # a loss is told this late at most, by a client that was not stopped
WORST_RATE = 0.005
LARGEST_STEP = 0.004  # of a ttl; together with the worst rate it stays below the drift allowance


class Violation(AssertionError):
    """A promise was broken."""


class NoReplyError(Exception):
    """A request was not answered in time, or its connection broke."""


@dataclass(frozen=True)
class Key:
    """A lock, and what all who use it agree on."""

    name: str
    ttl: float
    limit: int
    min_hold: float


class Client:
    """A process: its clock, its heartbeat, its connection."""

    def __init__(self, world: "World", name: str, *, rate: float) -> None:
        self.name = name
        self._rate = rate
        self._born = world.random.uniform(100, 1000)
        self.stopped_until = 0.0
        self.crashed = False
        self.store = SimStore(world, self)
        self.heartbeat = Heartbeat()
        self.leftovers = Leftovers()

    def time(self, now: float) -> float:
        """What its monotonic clock shows at the true time *now*."""
        return self._born + now * self._rate

    def truly(self, seconds: float) -> float:
        """How long *seconds* of its clock take."""
        return max(seconds / self._rate, SHORTEST)


class Task(greenlet):
    """A thread of a client."""

    def __init__(self, hub: greenlet, client: Client, run: Callable[[], None]) -> None:
        super().__init__(run, parent=hub)
        self.client = client
        self.turn = 0


class World:
    """Virtual time, and all that happens in it, in an order that the seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.now = 0.0
        self.over = False
        self.looking: Client | None = None
        self.running: Task | None = None
        self.trace: list[tuple[Any, ...]] = []
        self.broken: str | None = None
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._tasks: list[Task] = []
        self._hub = getcurrent()
        self._looks = 0
        self.ttl = self.random.choice((1.5, 3.0, 6.0))
        self.healed_at = self.random.uniform(2, 5) * self.ttl
        self.preemption = self.random.choice((0.0, 0.02, 0.06))

    @property
    def healed(self) -> bool:
        """No fault happens any more."""
        return self.now >= self.healed_at

    def note(self, *what: Any) -> None:
        """Write a line of the trace."""
        self.trace.append((round(self.now, 6), *what))

    def violate(self, promise: str) -> None:
        """Remember the first broken promise; raised here, the library might catch it."""
        self.note("VIOLATION", promise)
        self.broken = self.broken or promise

    def at(self, moment: float, do: Callable[..., None], *args: Any) -> None:
        """Let something happen at *moment*."""
        heappush(self._events, (moment, next(self._numbers), do, args))

    def run(self) -> None:
        """Let time pass until somebody says it is over, or a promise is broken."""
        try:
            while not self.over and self.broken is None:
                if not self._events:
                    self.violate("everything stands still and somebody has not finished")
                    break
                self.now, _, do, args = heappop(self._events)
                do(*args)
        finally:
            self.over = True
            for task in self._tasks:
                task.throw(GreenletExit)

    def clock(self) -> float:
        """The monotonic clock of whoever looks at it, who may be preempted right afterwards."""
        if self.looking is not None:
            return self.looking.time(self.now)
        if self.running is None:
            return self.now
        client = self.running.client
        shown = client.time(self.now)
        self._looks += 1
        if self._looks > MOST_LOOKS and not self.over:
            self.violate(f"{client.name} runs in circles")
            self.suspend()
        if not self.over and self.random.random() < self.preemption:
            self._preempt(client)
        return shown

    def _preempt(self, client: Client) -> None:
        if not self.healed and self.random.random() < 0.05:
            self.stop(client, self.random.uniform(0.1, 2) * self.ttl)
        self.suspend(self.random.uniform(0, 0.02))

    @contextmanager
    def looking_as(self, client: Client) -> Iterator[None]:
        """Let the clock show what it shows to *client* now, without a preemption."""
        self.looking = client
        try:
            yield
        finally:
            self.looking = None

    def stop(self, client: Client, seconds: float) -> None:
        """Stop all threads of *client*; its clock goes on."""
        client.stopped_until = max(client.stopped_until, min(self.now + seconds, self.healed_at))
        self.note("stopped", client.name, round(client.stopped_until, 6))

    def start(self, client: Client, run: Callable[[], None]) -> Task:
        """Start a thread."""
        task = Task(self._hub, client, run)
        self._tasks.append(task)
        self.at(self.now, self._resume, task, task.turn)
        return task

    def here(self) -> tuple[Task, int]:
        """The running thread, as `wake` wants it."""
        assert self.running is not None
        return self.running, self.running.turn

    def wake(self, sleeper: tuple[Task, int]) -> None:
        """End a `suspend`; too late, it ends nothing."""
        self.at(self.now, self._resume, *sleeper)

    def suspend(self, seconds: float | None = None) -> None:
        """Let others run until woken, and at the latest after so many seconds of the client's clock."""
        task, turn = self.here()
        if seconds is not None:
            self.at(self.now + task.client.truly(seconds), self._resume, task, turn)
        self._hub.switch()

    def _resume(self, task: Task, turn: int) -> None:
        client = task.client
        if client.crashed or task.turn != turn:
            return
        if client.stopped_until > self.now:
            self.at(client.stopped_until, self._resume, task, turn)
            return
        task.turn += 1
        self._looks = 0
        self.running = task
        task.switch()
        self.running = None


class VirtualRLock:
    """`threading.RLock` between the greenlets of one client."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Task | None = None
        self._depth = 0
        self._entering: deque[tuple[Task, int]] = deque()

    def __enter__(self) -> None:
        while self._owner not in (None, self._world.running) and not self._world.over:
            self._entering.append(self._world.here())
            self._world.suspend()
        self._owner = self._world.running
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._owner = None
        if self._entering and not self._world.over:
            self._world.wake(self._entering.popleft())


class VirtualLock:
    """`threading.Lock` as an alarm: one greenlet waits for it, others let it go."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._taken = False
        self._waiting: tuple[Task, int] | None = None

    def acquire(self, timeout: float) -> bool:
        if self._taken:
            self._waiting = self._world.here()
            self._world.suspend(timeout)
            self._waiting = None
        rung, self._taken = not self._taken, True
        return rung

    def release(self) -> None:
        if not self._taken:
            raise RuntimeError("release unlocked lock")
        self._taken = False
        if self._waiting is not None:
            self._world.wake(self._waiting)


@dataclass(frozen=True)
class Request:
    """What a client asks of the server."""

    verb: str
    claims: tuple[Claim, ...]
    run: Callable[[MemoryStore], Any]


class Call:
    """One try to have a request answered."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.sleeper = world.here()
        self.reply: Any = None

    def deliver(self, reply: Any) -> None:
        """Wake the caller, who has an answer or knows that the connection is broken."""
        if self.reply is None:
            self.reply = reply
            self._world.wake(self.sleeper)


class Server:
    """One store, its clock, and those who listen for releases."""

    def __init__(self, world: World, referee: "Referee") -> None:
        self._world = world
        self._referee = referee
        self._ahead = EPOCH
        self._free_at = 0.0
        self._snapshot: Any = {}, 0
        self.memory = MemoryStore(now=self.time)
        self.listeners: list[tuple[str, Callable[[], None]]] = []

    def time(self) -> float:
        """Its wall clock."""
        return self._ahead + self._world.now

    def arrive(self, request: Request, answered: Callable[[Any], None] | None) -> None:
        """Run a request as soon as those before it are done."""
        if self._free_at > self._world.now:
            self._world.at(self._free_at, self.arrive, request, answered)
            return
        self._free_at = self._world.now + SERVICE
        living = self._referee.living(self, request)
        answer = request.run(self.memory)
        self._referee.served(self, request, answer, living)
        if request.verb == "release":
            for key, wake in self.listeners:
                if key == request.claims[0].key:
                    wake()
        if answered is not None:
            answered(answer)

    def step(self, seconds: float) -> None:
        """Set the clock."""
        self._world.note("clock step", seconds)
        self._ahead += seconds
        if seconds < 0:
            self._referee.clock_set_back()

    def restart(self) -> None:
        """Lose everything."""
        self._world.note("restart")
        self.memory = MemoryStore(now=self.time)

    def replicate(self) -> None:
        """What is written from now on is lost by a failover."""
        self._snapshot = copy.deepcopy(self.memory._locks), self.memory._fence

    def fail_over(self) -> None:
        """Go back to the snapshot."""
        self._world.note("failover")
        self.memory._locks, self.memory._fence = self._snapshot


class Network:
    """Loses, doubles and delays, until it has healed."""

    def __init__(self, world: World, server: Server) -> None:
        self._world = world
        self._server = server
        chances = (0.0, 0.02, 0.1, 0.3)
        self._lost, self._reset, self._twice, self._slow = (world.random.choice(chances) for _ in range(4))
        self._holes = [self._hole() for _ in range(world.random.choice((0, 0, 1, 2)))]

    def _hole(self) -> tuple[float, float, int]:
        begin = self._world.random.uniform(0, self._world.healed_at)
        length = self._world.random.uniform(0.1, 1.5) * self._world.ttl
        return begin, begin + length, self._world.random.randrange(-1, 5)

    def send(self, client: Client, request: Request, call: Call) -> None:
        """Carry a request to the server, once, twice or not at all, and the reply back."""
        world, random = self._world, self._world.random
        if world.healed:
            world.at(world.now + self._soon(), self._server.arrive, request, partial(self._reply, client, call))
            return
        if random.random() < self._twice:
            world.at(self._late(), self._server.arrive, request, None)
        if random.random() < self._reset:
            world.at(world.now + self._soon(), call.deliver, NoReplyError("connection reset"))
        if not self._swallows(client):
            moment = self._late() if random.random() < self._slow else world.now + self._soon()
            world.at(moment, self._server.arrive, request, partial(self._reply, client, call))

    def tell(self, client: Client, wake: Callable[[], None]) -> None:
        """Carry a message that nobody asked for."""
        if not self._swallows(client):
            self._world.at(self._world.now + self._soon(), wake)

    def _reply(self, client: Client, call: Call, answer: Any) -> None:
        if not self._swallows(client):
            late = not self._world.healed and self._world.random.random() < self._slow / 2
            self._world.at(self._late() if late else self._world.now + self._soon(), call.deliver, answer)

    def _swallows(self, client: Client) -> bool:
        now = self._world.now
        if self._world.healed:
            return False
        number = int(client.name[1:])
        in_hole = any(begin <= now < end and whose in (-1, number) for begin, end, whose in self._holes)
        return in_hole or self._world.random.random() < self._lost

    def _soon(self) -> float:
        return min(0.05, 1e-4 + self._world.random.expovariate(300))

    def _late(self) -> float:
        moment = self._world.now + self._world.random.uniform(0, 2) * self._world.ttl
        return max(self._world.now + SHORTEST, min(moment, self._world.healed_at))


class SimStore(LockStore):
    """A client's view of the server; it persists as the one for Redis does."""

    address = "sim://server"

    def __init__(self, world: World, client: Client) -> None:
        self._world = world
        self._client = client
        self.network: Network | None = None
        self.server: Server | None = None

    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        raise NotImplementedError

    def twin(self) -> Store:
        raise NotImplementedError

    def acquire(self, claim: Claim) -> Grant | Conflict | Done:
        return self.take(Request("acquire", (claim,), lambda memory: memory.acquire(claim)))

    def take(self, request: Request) -> Any:
        answer, sent_at = self._persist(request, ACQUIRE_BOUND)
        return replace(answer, sent_at=sent_at) if isinstance(answer, Grant) else answer

    def waiter(self, claim: Claim) -> "SimWaiter":
        return SimWaiter(self._world, self, self._client, claim)

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:
        request = Request("renew", tuple(claims), lambda memory: memory.renew(claims, 1.0))
        return self._persist(request, timeout)[0]

    def release(
        self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND, ending: Ending | None = None
    ) -> Answer:
        request = Request("release", (claim,), lambda memory: memory.release(claim, place, ending=ending))
        unheard: list[float] = []
        answer = self._persist(request, bound, unheard)[0]
        # An earlier try may have released it without our hearing of it.
        return Answer.DONE if unheard else answer

    def look(self, key: str) -> Look:
        raise NotImplementedError

    def _persist(self, request: Request, bound: float, unheard: list[float] | None = None) -> tuple[Any, float]:
        clock = self._world.clock
        give_up_at = clock() + bound
        pause = 0.02
        while True:
            sent_at = clock()
            try:
                return self._ask(request, min(REPLY_TIMEOUT, give_up_at - sent_at)), sent_at
            except NoReplyError as error:
                if unheard is not None:
                    unheard.append(sent_at)
                if clock() + pause >= give_up_at:
                    raise StoreError(self.address, str(error)) from error
            self._world.suspend(pause)
            pause *= 2

    def _ask(self, request: Request, timeout: float) -> Any:
        assert self.network is not None
        call = Call(self._world)
        self.network.send(self._client, request, call)
        self._world.suspend(timeout)
        if call.reply is None:
            call.reply = NoReplyError("timeout")
        if isinstance(call.reply, NoReplyError):
            raise call.reply
        return call.reply


class SimWaiter(Waiter):
    """A turn in the queue, woken through the network."""

    def __init__(self, world: World, store: SimStore, client: Client, claim: Claim) -> None:
        self._world = world
        self._store = store
        self._client = client
        self._claim = claim
        self._sleeper: tuple[Task, int] | None = None
        self._heard = False
        self._ear = (claim.key, self._published)

    def __enter__(self) -> Self:
        self._store.server.listeners.append(self._ear)
        return self

    def __exit__(self, *_: object) -> None:
        self._store.server.listeners.remove(self._ear)

    def ask(self) -> Grant | Conflict | Done | float:
        claim = self._claim
        return self._store.take(Request("queue", (claim,), lambda memory: memory.queue(claim)))

    def sleep(self, seconds: float) -> None:
        if not self._heard:
            self._sleeper = self._world.here()
            self._world.suspend(seconds)
        self._sleeper, self._heard = None, False

    def _published(self) -> None:
        self._store.network.tell(self._client, self._hear)

    def _hear(self) -> None:
        self._heard = True
        if self._sleeper is not None:
            self._world.wake(self._sleeper)


class Referee:
    """Sees all clocks at one instant, and knows what the server has promised to whom."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._safe = world.kind in SAFE
        self._leases: dict[str, tuple[Client, Lease]] = {}
        self._told: set[str] = set()
        self._given: set[tuple[str, int]] = set()
        self._places: dict[tuple[str, int], str] = {}
        self._last_fence: dict[str, int] = {}
        self.last_grant: dict[str, float] = {}
        self.grants = 0

    def watch(self, client: Client, lease: Lease) -> None:
        """*client* may come to believe that it holds *lease*."""
        self._leases[lease.token] = client, lease

    def forget(self, lease: Lease) -> None:
        """It has been released, and is nobody's concern any more."""
        self._leases.pop(lease.token, None)

    def remaining(self, token: str) -> float:
        """For how long the owner of *token* believes to hold it, by its own clock."""
        if token not in self._leases:
            return 0.0
        client, lease = self._leases[token]
        if client.crashed:
            return 0.0
        with self._world.looking_as(client):
            return lease.remaining()

    def believers(self, key: str) -> list[str]:
        """Tokens of those who believe to hold *key*."""
        return [token for token, (_, lease) in self._leases.items() if lease.key == key and self.remaining(token) > 0]

    def look(self, keys: Iterable[Key]) -> None:
        """No more believe to hold a key than may."""
        for key in keys:
            if self._safe and len(believers := self.believers(key.name)) > key.limit:
                self._world.violate(f"{believers} believe to hold {key.name}, limit {key.limit}")

    def living(self, server: Server, request: Request) -> dict[str, set[str]]:
        """Tokens whose deadline lies ahead, for each key of the request."""
        now, locks = server.time(), server.memory._locks
        return {
            claim.key: {place.claim.token for place in locks[claim.key].places.values() if place.deadline > now}
            for claim in request.claims
            if claim.key in locks
        }

    def served(self, server: Server, request: Request, answer: Any, before: dict[str, set[str]]) -> None:
        """Look at what the server has done."""
        tokens = [claim.token for claim in request.claims]
        self._world.note(request.verb, *tokens, answer if isinstance(answer, (list, Answer, float)) else type(answer))
        for key, living in before.items():
            lock = server.memory._locks.get(key)
            after = {place.claim.token for place in lock.places.values()} if lock is not None else set()
            if gone := living - after - set(tokens):
                self._world.violate(f"{request.verb} by {tokens} has freed the place of {sorted(gone)}")
        if isinstance(answer, Grant) and (tokens[0], answer.fence) not in self._given:
            self._granted(request.claims[0], answer)

    def _granted(self, claim: Claim, grant: Grant) -> None:
        self._world.note("granted", claim.key, claim.token, grant.place, grant.fence)
        self.grants += 1
        self._given.add((claim.token, grant.fence))
        self.last_grant[claim.key] = self._world.now
        last = self._last_fence.get(claim.key, 0)
        if grant.fence <= last:
            self._world.violate(f"{claim.token} got fence {grant.fence} after {last}")
        self._last_fence[claim.key] = grant.fence
        before = self._places.get((claim.key, grant.place), claim.token)
        # Granted again after it had expired, it may have got another place than the one before.
        self._places = {place: token for place, token in self._places.items() if token != claim.token}
        self._places[claim.key, grant.place] = claim.token
        others = [token for token in self.believers(claim.key) if token != claim.token]
        if self._safe and before in others:
            self._world.violate(
                f"{claim.token} got the place of {before}, who has {self.remaining(before):.6f} s left by its own clock"
            )
        if self._safe and len(others) >= claim.limit:
            self._world.violate(f"{claim.token} got {claim.key} while {others} believe to hold it")

    def lost(self, lease: Lease) -> None:
        """A loss is told once, in time, and not for nothing."""
        world = self._world
        assert world.running is not None
        client = world.running.client
        late = client.time(world.now) - lease._renewal.deadline
        world.note("lost", client.name, lease.token, lease.lost_reason)
        if lease.token in self._told:
            world.violate(f"the loss of {lease.token} was told twice")
        self._told.add(lease.token)
        in_release = lease._renewal.is_over
        unhindered = client.stopped_until < world.now - LATEST_TELLING - 1
        if not in_release and unhindered and late > LATEST_TELLING:
            world.violate(f"the loss of {lease.token} was told {late:.3f} s late")
        if self._safe and not in_release and late < 0:
            world.violate(f"{lease.token} was told a loss, but had {-late:.3f} s left")

    def clock_set_back(self) -> None:
        """Fences of locks that the server has forgotten may come again."""
        self._last_fence.clear()


class Body:
    """What a client does: take, work in steps, look, give back; again."""

    def __init__(self, simulation: "Simulation", client: Client, keys: Sequence[Key], rounds: int, manner: str) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._referee = simulation.referee
        self._client = client
        self._keys = keys
        self._rounds = rounds
        self._manner = manner
        self.finished = False

    @property
    def client(self) -> Client:
        """Whose body it is."""
        return self._client

    def run(self) -> None:
        """All rounds."""
        random = self._world.random
        for _ in range(self._rounds):
            self._world.suspend(random.uniform(0, 0.7) * self._world.ttl)
            leases: list[Lease] = []
            for key in self._keys:
                lease = self._take(key)
                if lease is None:
                    break
                leases.append(lease)
            self._work(leases)
            for lease in reversed(leases):
                self._give_back(lease)
        self.finished = True
        self._simulation.somebody_finished()

    def _take(self, key: Key) -> Lease | None:
        client = self._client
        claim = Claim(key.name, new_token(), key.ttl, key.limit, min_hold=key.min_hold)
        lease = Lease(client.store, claim, on_lost=self._referee.lost, heartbeat=client.heartbeat)
        self._referee.watch(client, lease)
        try:
            if self._asked(lease):
                return lease
        except StoreError:
            self._world.note("unanswered", lease.token)
        self._give_back(lease)
        return None

    def _asked(self, lease: Lease) -> bool:
        refusal = lease.acquire()
        if isinstance(refusal, Conflict) and self._manner != "once":
            patience = self._world.random.uniform(0.2, 1.5) * lease.ttl if self._manner == "impatient" else None
            refusal = lease.wait(refusal, patience)
        return refusal is None

    def _work(self, leases: Sequence[Lease]) -> None:
        try:
            for _ in range(self._world.random.randrange(1, 6) if leases else 0):
                self._world.suspend(self._world.random.uniform(0.02, 0.5) * self._world.ttl)
                for lease in leases:
                    lease.check()
                self._referee.look(self._keys)
        except LockLost as error:
            self._world.note("stops", self._client.name, error.reason)

    def _give_back(self, lease: Lease) -> None:
        if lease.unreleased:
            lease.release()
        self._referee.forget(lease)


class Simulation:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = World(seed)
        self.referee = Referee(self.world)
        self.server = Server(self.world, self.referee)
        self._tokens = itertools.count()
        self._clients: list[Client] = []
        self._bodies: list[Body] = []

    def run(self) -> list[tuple[Any, ...]]:
        """Play it and return what has happened.

        Raises:
            Violation: A promise was broken.
        """
        with self._installed():
            self._populate()
            self.world.run()
        if self.world.broken is not None:
            story = "\n".join(map(str, self.world.trace[-40:]))
            again = f'SIMULATION_SEED={self.seed} make prove ARGS="-k one_schedule"'
            raise Violation(f"{self.world.kind}: {self.world.broken}\n{story}\n{again}")
        return self.world.trace

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Replace what the library takes from the operating system."""
        world = self.world
        threads = SimpleNamespace(
            RLock=partial(VirtualRLock, world),
            Lock=partial(VirtualLock, world),
            current_thread=SimpleNamespace,
        )
        # A thread is a greenlet of the client that starts it.
        greenlets = SimpleNamespace(
            start_new_thread=lambda run, args: id(world.start(world.here()[0].client, partial(run, *args))),
            get_ident=lambda: id(getcurrent()),
        )
        timed = (lease_module, renewal_module, pulse_module, heartbeat_module, leftovers_module, admission_module)
        threaded = (one_thread_module, pulse_module, heartbeat_module, leftovers_module)
        replaced = [(module, "clock", world.clock) for module in timed]
        replaced += [(module, "logger", self._logger()) for module in (lease_module, renewal_module, pulse_module)]
        replaced += [(module, "threading", threads) for module in threaded]
        # Without os.register_at_fork, which would keep every heartbeat for the life of the process.
        replaced += [(module, "os", SimpleNamespace()) for module in (heartbeat_module, leftovers_module)]
        replaced += [
            (one_thread_module, "_thread", greenlets),
            (pulse_module, "time", SimpleNamespace(sleep=world.suspend)),
            (leftovers_module, "time", SimpleNamespace(sleep=world.suspend)),
            (leftovers_module, "logger", self._logger()),
            *(
                (module, "scribe", SimpleNamespace(tell=lambda write: write()))
                for module in (renewal_module, pulse_module)
            ),
            (lease_module, "b2a_base64", lambda *_, **__: f"t{next(self._tokens):03}".encode()),
            (lease_module, "leftovers", SimpleNamespace(add=self._leave_behind)),
        ]
        with ExitStack() as stack:
            for module, name, value in replaced:
                stack.enter_context(patch.object(module, name, value))
            yield

    def _leave_behind(self, leftover: Unreleased, *, may_arrive: bool = False) -> None:
        """Each client has leftovers of its own."""
        if not self.world.over:
            self.world.here()[0].client.leftovers.add(leftover, may_arrive=may_arrive)

    def _logger(self) -> SimpleNamespace:
        """One that takes an exception where none is expected for what it is: a defect."""

        def silent(*_: object) -> None:
            pass

        def loud(message: str, *args: object) -> None:
            self.world.violate(f"unexpected exception: {message % args}")

        levels = dict.fromkeys(("log", "debug", "info", "warning", "error"), silent)
        return SimpleNamespace(**levels, isEnabledFor=lambda _: True, exception=loud)

    def _populate(self) -> None:
        world, random = self.world, self.world.random
        network = Network(world, self.server)
        for number in range(random.randrange(2, 6) + 1):
            client = Client(world, f"c{number}", rate=1 + WORST_RATE * random.choice((-1, 1, random.uniform(-1, 1))))
            client.store.network, client.store.server = network, self.server
            self._clients.append(client)
        self._keys = [self._key(f"k{number}") for number in range(random.choice((1, 1, 2)))]
        *clients, doctor = self._clients
        for client in clients:
            keys = self._keys if random.random() < 0.3 else [random.choice(self._keys)]
            manner = random.choice(("once", "impatient", "patient"))
            self._start(Body(self, client, keys, random.randrange(1, 4), manner))
        for key in self._keys:
            world.at(world.healed_at, self._start, Body(self, doctor, [key], 1, "patient"))
        self._trouble_clients(clients)
        self._trouble_server()
        grace = self._longest_ttl + GRACE + 1
        world.at(world.healed_at + grace, self._nobody_is_stuck)
        world.at(world.healed_at + 10 * len(self._clients) * grace, self._all_have_finished)

    def _key(self, name: str) -> Key:
        random, ttl = self.world.random, self.world.ttl
        return Key(name, ttl * random.choice((1, 1, 0.5)), random.choice((1, 1, 1, 2)), random.choice((0, 0, ttl / 3)))

    @property
    def _longest_ttl(self) -> float:
        return max(key.ttl for key in self._keys)

    def _start(self, body: Body) -> None:
        self._bodies.append(body)
        self.world.start(body.client, body.run)

    def _trouble_clients(self, clients: Sequence[Client]) -> None:
        world, random = self.world, self.world.random
        for _ in range(random.choice((0, 1, 2, 4))):
            length = random.uniform(0.1, 2.5) * world.ttl
            world.at(random.uniform(0, world.healed_at), world.stop, random.choice(clients), length)
        for client in random.sample(clients, random.choice((0, 0, 1, 2))):
            world.at(random.uniform(0, world.healed_at), self._crash, client)

    def _crash(self, client: Client) -> None:
        self.world.note("crash", client.name)
        client.crashed = True
        self.somebody_finished()

    def _trouble_server(self) -> None:
        world, random, server = self.world, self.world.random, self.server
        first = random.uniform(0.1, 0.9) * world.healed_at
        if world.kind == "restart":
            world.at(first, server.restart)
        elif world.kind == "failover":
            world.at(max(0.0, first - random.uniform(0, 1) * world.ttl), server.replicate)
            world.at(first, server.fail_over)
        elif world.kind == "leap":
            world.at(first, server.step, random.choice((0.5, 1.0, 3.0, 1000.0)) * world.ttl)
        elif world.kind == "steps":
            step = LARGEST_STEP * self._longest_ttl / 2
            moments = [moment for number in range(3) if (moment := first + number * 1.5 * world.ttl) < world.healed_at]
            for moment in moments:
                world.at(moment, server.step, random.uniform(-step, step))

    def _nobody_is_stuck(self) -> None:
        for key in self._keys:
            if self._is_stuck(key.name):
                # Who held it until a moment ago has woken the next.
                self.world.at(self.world.now + 1.0, self._is_not_stuck, key.name)

    def _is_stuck(self, key: str) -> bool:
        return self.referee.last_grant.get(key, -1.0) < self.world.healed_at and not self.referee.believers(key)

    def _is_not_stuck(self, key: str) -> None:
        if self._is_stuck(key):
            self.world.violate(f"nobody has got {key} within ttl and grace, though all is well again")

    def _all_have_finished(self) -> None:
        if not self._done():
            self.world.violate("somebody has not finished, though all is well again")

    def _done(self) -> bool:
        return self.world.healed and all(body.finished or body.client.crashed for body in self._bodies)

    def somebody_finished(self) -> None:
        """If it was the last, look once more when nothing may be left."""
        if self._done():
            world = self.world
            world.note("all have finished")
            longest = max(2 * self._longest_ttl, self._longest_ttl + GRACE) + 0.2
            world.at(world.now + longest, self._nothing_is_left)

    def _nothing_is_left(self) -> None:
        world, now = self.world, self.server.time()
        for key, lock in self.server.memory._locks.items():
            held = [place.claim.token for place in lock.places.values() if place.deadline > now]
            if held or lock.expiry > now:
                world.violate(f"{key} is still there, held by {held}")
        for client in self._clients:
            if not client.crashed and (client.heartbeat.watched() or client.leftovers._left):
                world.violate(f"{client.name} still cares for leases that nobody has")
        world.over = True


def first_violation(seeds: Iterable[int]) -> tuple[int, str] | None:
    """Play schedules until one breaks a promise; its seed, and what has happened."""
    for seed in seeds:
        try:
            Simulation(seed).run()
        except Violation as violation:
            return seed, str(violation)
    return None
