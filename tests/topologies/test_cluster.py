"""A cluster whose slots move: under a held lease, a renewal, a waiter, and the end of a run."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from celery_singleton_lock import Lease, Lock
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Done, Ending, Facts, Grant
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.clusters import Cluster, Node, clustered, slot_of
from tests.servers import FakeClock, Server
from tests.waiting import until

TTL = 6.0
ENDED = Ending("ended", 60.0, is_due=False)


def key_of(name: object) -> str:
    return f"singleton:v3:{{{name}:00}}"


def claim_of(name: object, token: str = "mine", **facts: Any) -> Claim:
    return Claim(key_of(name), token, TTL, **facts)


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    store = store_from_url(cluster.url)
    yield store
    store.close()


def redirects(cluster: Cluster) -> int:
    """How often a server has sent somebody elsewhere."""
    number = 0
    for node in cluster.nodes:
        with node.client() as client:
            told = client.info("errorstats")
        number += sum(int(told[name]["count"]) for name in ("errorstat_MOVED", "errorstat_ASK") if name in told)
    return number


def token_of(store: Store, key: str) -> list[str]:
    return [holder.token for holder in store.holders(key)]


# Whom to ask.


def test_each_lock_is_at_the_server_that_has_its_slot(cluster: Cluster, store: Store) -> None:
    store.acquire(claim_of("first"))
    before = redirects(cluster)

    for number in range(30):
        assert isinstance(store.acquire(claim_of(number)), Grant)
        with cluster.owner(key_of(number)).client() as client:
            assert client.exists(key_of(number))
        assert isinstance(store.acquire(claim_of(number, "another")), Conflict)
        assert store.release(claim_of(number), 1) is Answer.DONE

    assert redirects(cluster) == before


def test_after_a_slot_has_moved_one_call_is_sent_on(cluster: Cluster, store: Store) -> None:
    store.acquire(claim_of("moves"))
    cluster.move(key_of("moves"))
    before = redirects(cluster)

    assert isinstance(store.acquire(claim_of("moves", "another")), Conflict)
    assert store.release(claim_of("moves"), 1) is Answer.DONE
    assert isinstance(store.acquire(claim_of("moves", "another")), Grant)

    assert redirects(cluster) == before + 1


def test_one_server_that_is_named_is_enough(cluster: Cluster) -> None:
    store = store_from_url(f"redis+cluster://{cluster.hosts[-1]}")

    for number in range(20):
        assert isinstance(store.acquire(claim_of(number)), Grant)
    store.close()


def test_a_lock_of_its_own_works_as_at_one_server(cluster: Cluster) -> None:
    for number in range(10):
        with Lock(f"stock-{number}", url=cluster.url) as lease:
            assert lease.held
            assert Lock(f"stock-{number}", url=cluster.url).acquire(blocking=False) is None


# While a slot moves.

STAGES = ("it has not begun", "the slot moves, the key has not", "the key has moved, the slot has not", "it has ended")


class Move:
    """A slot on its way, step by step."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        self._cluster, self._key = cluster, key
        self._ends: tuple[Node, Node] | None = None

    def go_on_to(self, stage: str) -> None:
        number = STAGES.index(stage)
        if number == 1:
            self._ends = self._cluster.begin_to_move(self._key)
        elif number == 2:
            assert self._ends is not None
            self._cluster.move_keys(slot_of(self._key), *self._ends)
        elif number == 3:
            assert self._ends is not None
            self._cluster.end_to_move(self._key, *self._ends)


def test_a_held_lease_stays_and_is_renewed_at_each_stage(cluster: Cluster, store: Store) -> None:
    mine, move = claim_of("held"), Move(cluster, key_of("held"))
    fence = granted(store.acquire(mine)).fence

    for stage in STAGES:
        move.go_on_to(stage)
        assert store.renew([claim_of("beside"), mine], 1.0) == [Answer.GONE, Answer.DONE], stage
        assert isinstance(store.acquire(claim_of("held", "another")), Conflict), stage
        (remaining,) = store.remaining([mine], 1.0)
        assert remaining is not None
        assert remaining > TTL - 1, stage
        assert granted(store.acquire(mine)).fence == fence, stage
    assert store.release(mine, 1) is Answer.DONE


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_new_lock_is_granted_and_released_at_each_stage(cluster: Cluster, store: Store, stage: str) -> None:
    name = f"new {STAGES.index(stage)}"
    held, move = claim_of(name), Move(cluster, key_of(name))
    fence = granted(store.acquire(held)).fence
    for each in STAGES[: STAGES.index(stage) + 1]:
        move.go_on_to(each)
    assert store.release(held, 1) is Answer.DONE

    assert granted(store.acquire(claim_of(name, "next"))).fence > fence
    assert isinstance(store.acquire(held), Conflict)
    assert store.release(claim_of(name, "next"), 1) is Answer.DONE

    assert store.holders(key_of(name)) == []


def granted(answer: object) -> Grant:
    assert isinstance(answer, Grant)
    return answer


def of_a_message(name: str, token: str = "mine", **more: Any) -> Claim:
    facts = Facts(task_id="a task", published=7)
    return claim_of(name, token, facts=facts, message=7, **more)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_ends_is_marked_and_its_copy_is_dropped_at_each_stage(
    cluster: Cluster, store: Store, stage: str
) -> None:
    name = f"run {STAGES.index(stage)}"
    mine, copy = of_a_message(name), of_a_message(name, "copy", may_be_copy=True, limit=2)
    move = Move(cluster, mine.key)
    store.acquire(mine)
    for each in STAGES[: STAGES.index(stage) + 1]:
        move.go_on_to(each)

    living = store.acquire(copy)
    assert isinstance(living, Conflict)
    assert living.is_own
    # It is due now, because a copy has come.
    assert store.release(mine, 1, ending=ENDED) is Answer.MARKED

    assert store.acquire(copy) == Done(0, "ended")
    assert store.holders(mine.key) == []
    newcomer = of_a_message(name, "newcomer", may_be_copy=True)
    assert isinstance(store.acquire(replace(newcomer, message=8)), Grant)


def test_a_fence_grows_though_the_next_server_has_an_earlier_time(wall_clock: FakeClock) -> None:
    wall_clock.step("-30")
    with clustered("valkey", replicas=0, env=wall_clock.env) as cluster:
        behind = cluster.nodes[-1]
        name = next(number for number in range(100) if cluster.owner(key_of(number)) is not behind)
        store = store_from_url(cluster.url)
        fence = granted(store.acquire(claim_of(name))).fence
        store.release(claim_of(name), 1)

        cluster.move(key_of(name), behind)

        assert granted(store.acquire(claim_of(name, "next"))).fence > fence
        store.close()


# Those who wait.


def listeners(node: Node, channel: str) -> int:
    with node.client() as client:
        return dict(client.execute_command("PUBSUB SHARDNUMSUB", channel))[channel]


def test_who_waits_listens_at_the_server_that_has_the_key(cluster: Cluster, store: Store) -> None:
    for number in range(6):
        mine = claim_of(number, "waits")
        store.acquire(claim_of(number))
        with store.waiter(mine) as waiter:
            assert isinstance(waiter.ask(), float)
            assert listeners(cluster.owner(mine.key), f"{mine.key}:waits") == 1
            store.release(claim_of(number), 1)
            began = clock()
            waiter.sleep(20)
            assert clock() - began < 5
            granted(waiter.ask())


def test_who_waits_hears_that_the_slot_has_moved_and_then_of_the_release(cluster: Cluster, store: Store) -> None:
    mine = claim_of("waits", "waits")
    store.acquire(claim_of("waits"))
    with store.waiter(mine) as waiter:
        assert isinstance(waiter.ask(), float)
        _, target = cluster.move(mine.key)
        began = clock()
        waiter.sleep(20)
        assert isinstance(waiter.ask(), float)
        assert listeners(target, f"{mine.key}:waits") == 1
        store.release(claim_of("waits"), 1)
        waiter.sleep(20)
        assert clock() - began < 5
        granted(waiter.ask())


def test_who_waits_while_the_key_moves_ahead_of_its_slot_is_granted_in_the_end(cluster: Cluster, store: Store) -> None:
    lease, waiting = Lease(store, claim_of("ahead")), Lease(store, claim_of("ahead", "waits"))
    assert lease.acquire() is None
    conflict = waiting.acquire()
    assert isinstance(conflict, Conflict)
    thread = threading.Thread(target=waiting.wait, args=(conflict, 30.0))
    thread.start()
    until(lambda: listeners(cluster.owner(lease.key), f"{lease.key}:waits"), "it waits")
    source, target = cluster.begin_to_move(lease.key)
    cluster.move_keys(slot_of(lease.key), source, target)

    lease.release()
    cluster.end_to_move(lease.key, source, target)
    thread.join(30)

    assert waiting.held
    waiting.release()


# Many at once.


def test_a_thousand_renewals_cost_a_small_multiple_of_those_at_one_server(
    cluster: Cluster, store: Store, redis_process: Server
) -> None:
    alone = RedisStore(redis_process.url, {})
    claims = [replace(claim_of(number), ttl=60.0) for number in range(1000)]
    for claim in claims:
        assert isinstance(store.acquire(claim), Grant)
        assert isinstance(alone.acquire(claim), Grant)
    masters = [node for node in cluster.nodes if node in cluster.masters]

    def cost(renewing: RedisStore, servers: Sequence[Server]) -> float:
        """Processor time of ours and of the servers, which other programs do not change."""
        began = time.thread_time() + sum(map(processor_time, servers))
        for _ in range(10):
            assert set(renewing.renew(claims, 30.0)) == {Answer.DONE}
        return time.thread_time() + sum(map(processor_time, servers)) - began

    costs = [(cost(store, masters), cost(alone, [redis_process])) for _ in range(3)]

    # They lie in as many slots, so each is a script of its own.
    assert min(in_cluster / at_one for in_cluster, at_one in costs) <= 10
    alone.close()


def processor_time(server: Server) -> float:
    with server.client() as client:
        told = client.info("cpu")
    return float(told["used_cpu_user"] + told["used_cpu_sys"])


def test_a_hand_off_takes_at_most_twice_as_long_as_at_one_server(
    cluster: Cluster, store: Store, redis_process: Server
) -> None:
    alone = RedisStore(redis_process.url, {})
    # The quickest, for a busy machine is late for some of them.
    took = {each: min(hand_off(each, number) for number in range(60)) for each in (store, alone)}

    # And a millisecond, for the replicas need the same cores.
    assert took[store] <= 2 * took[alone] + 0.001
    alone.close()


def hand_off(store: RedisStore, number: int) -> float:
    """Seconds from a release until the one who waits has the lock."""
    mine, other = claim_of(f"hand-off {number}"), claim_of(f"hand-off {number}", "waits")
    store.acquire(mine)
    with store.waiter(other) as waiter:
        waiter.ask()
        began = clock()
        store.release(mine, 1)
        waiter.sleep(20)
        granted(waiter.ask())
        took = clock() - began
    store.release(other, 1)
    return took


# For those who look after locks.


def test_all_locks_of_all_servers_are_found_and_can_be_broken(cluster: Cluster, store: Store) -> None:
    keys = {key_of(number) for number in range(40)}
    for number in range(40):
        store.acquire(claim_of(number))

    found = list(store.keys("singleton:v3:"))
    surveys = store.survey(found)

    assert sorted(found) == sorted(keys)
    assert [survey.key for survey in surveys] == found
    assert all(len(survey.holders) == 1 for survey in surveys)
    assert all(store.break_lock(key, None, "me", force=False).holders for key in keys)
    assert set(store.renew([claim_of(number) for number in range(40)], 5.0)) == {Answer.BROKEN}
    assert store.broken_by(claim_of(3)) == "me"


def test_the_store_tells_a_time_of_its_servers(store: Store) -> None:
    assert abs(store.now() / 1_000_000 - time.time()) < 60


def test_it_can_be_tried_out(cluster: Cluster, store: Store) -> None:
    for node in cluster.masters:
        with node.client() as client:
            client.config_resetstat()

    store.try_out(key_of("trial"), 5.0)

    for node in cluster.masters:
        with node.client() as client:
            assert list(client.scan_iter("*trial*")) == []
            assert client.info("commandstats")["cmdstat_hincrby"]["calls"] >= 1
