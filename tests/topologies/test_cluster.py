"""A cluster whose slots move: under a held lease, a renewal, a waiter, and the end of a run."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from celery_singleton_lock.stores.records import RELEASED, Claim, Conflict, Done, Ending, Grant, Release, Renewal
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.listener import LISTENING
from celery_singleton_lock.stores.redis.store import Store
from tests.clusters import Cluster, Node, slot_of
from tests.contract.asking import Waiter
from tests.contract.chapters.hearing import hearing, publish
from tests.topologies import leases
from tests.waiting import lasted, until

ENDED = Ending("ended", 60.0, is_due=False)


def claim_of(name: object, token: str = "mine", **facts: Any) -> Claim:
    return replace(leases.claim_of(name, token=token), **facts)


def key_of(name: object) -> str:
    return claim_of(name).key


def redirects(cluster: Cluster) -> int:
    number = 0
    for node in cluster.nodes:
        with node.client() as client:
            told = client.info("errorstats")
        number += sum(int(told[name]["count"]) for name in ("errorstat_MOVED", "errorstat_ASK") if name in told)
    return number


def test_each_lock_is_at_the_server_that_has_its_slot(cluster: Cluster, store: Store) -> None:
    store.acquire(claim_of("first"))
    before = redirects(cluster)

    for number in range(30):
        assert isinstance(store.acquire(claim_of(number)), Grant)
        with cluster.owner(key_of(number)).client() as client:
            assert client.exists(key_of(number))
        assert isinstance(store.acquire(claim_of(number, "another")), Conflict)
        assert store.release(claim_of(number), 1) == RELEASED

    assert redirects(cluster) == before


STAGES = ("it has not begun", "the slot moves, the key has not", "the key has moved, the slot has not", "it has ended")


class Move:
    def __init__(self, cluster: Cluster, key: str) -> None:
        self._cluster, self._key = cluster, key
        self._ends: tuple[Node, Node] | None = None

    def go_on_to(self, stage: str) -> None:
        number = STAGES.index(stage)
        if number == 1:
            self._ends = self._cluster.begin_to_move(self._key)
        elif number == 2:
            self._cluster.move_keys(slot_of(self._key), *self._ends)
        elif number == 3:
            self._cluster.end_to_move(self._key, *self._ends)


@pytest.mark.clients
def test_a_held_lease_stays_and_is_renewed_at_each_stage(cluster: Cluster, store: Store) -> None:
    mine, move = claim_of("held"), Move(cluster, key_of("held"))
    fence = granted(store.acquire(mine)).fence

    for stage in STAGES:
        move.go_on_to(stage)
        assert store.renew([claim_of("beside"), mine], 1.0) == [Renewal.GONE, Renewal.RENEWED], stage
        assert isinstance(store.acquire(claim_of("held", "another")), Conflict), stage
        (holder,) = store.holders(mine.key)
        assert holder.expires_in > leases.TTL - 1, stage
        assert granted(store.acquire(mine)).fence == fence, stage
    assert store.release(mine, 1) == RELEASED


def test_many_leases_beside_a_key_that_has_moved_are_renewed_in_a_few_requests(cluster: Cluster, store: Store) -> None:
    claims, move = [claim_of(number) for number in range(96)], Move(cluster, key_of(0))
    for claim in claims:
        store.acquire(claim)
    for stage in STAGES[:3]:
        move.go_on_to(stage)
        with patch.object(Connections, "call", autospec=True, side_effect=Connections.call) as called:
            assert store.renew(claims, 5.0) == [Renewal.RENEWED] * 96, stage

    assert called.call_count < 24
    move.go_on_to(STAGES[3])


def granted(answer: object) -> Grant:
    assert isinstance(answer, Grant)
    return answer


def of_a_message(name: str, token: str = "mine", **more: Any) -> Claim:
    return claim_of(name, token, task_id="a task", published=7, message=7, **more)


@pytest.mark.parametrize("stage", STAGES)
def test_the_copy_of_an_ended_run_is_dropped_at_each_stage(cluster: Cluster, store: Store, stage: str) -> None:
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
    assert store.release(mine, 1, ending=ENDED) == Release("left")

    assert store.acquire(copy) == Done(0, "ended")
    assert store.holders(mine.key) == []
    newcomer = of_a_message(name, "newcomer", may_be_copy=True)
    assert isinstance(store.acquire(replace(newcomer, message=8)), Grant)


def listeners(node: Node, channel: str) -> int:
    with node.client() as client:
        return dict(client.execute_command("PUBSUB SHARDNUMSUB", channel))[channel]


@pytest.mark.clients
def test_who_waits_hears_that_the_slot_has_moved_and_then_of_the_release(cluster: Cluster, store: Store) -> None:
    mine = claim_of("waits", "waits")
    store.acquire(claim_of("waits"))
    with Waiter(store, mine) as waiter:
        assert isinstance(waiter.ask(), float)
        _, target = cluster.move(mine.key)
        waiter.sleep(20)
        assert isinstance(waiter.ask(), float)
        # It was woken as it could not be called any more, too.
        until(lambda: listeners(target, waiter.claim.channel) == 1, "it listens at the new owner")
        store.release(claim_of("waits"), 1)
        assert lasted(lambda: waiter.sleep(20)) < 5
        granted(waiter.ask())


@pytest.mark.clients
def test_a_listener_hears_each_channel_wherever_its_slot_moves(cluster: Cluster, store: Store) -> None:
    channels = [f"{key_of(number)}:moves" for number in range(6)]
    with ExitStack() as stack:
        told = {channel: stack.enter_context(hearing(store, channel)) for channel in channels}
        for channel in channels:
            assert publish(store, channel, "here") == 1
        _, target = cluster.move(channels[0])
        # Sooner than it asks a server that is silent.
        until(lambda: told[channels[0]].count(LISTENING) > 1, "it listens at the new owner")
        assert listeners(target, channels[0]) == 1
        for channel in channels:
            assert publish(store, channel, "there") == 1

        until(lambda: all("there" in heard for heard in told.values()), "all are heard")
        assert all("here" in heard for heard in told.values())
