"""What operators read beside a key: a fact of the holder, and of the call that is queued."""

from dataclasses import replace
from typing import Any

import pytest

from celery_singleton_lock.stores.records import Claim, Marked
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import KEY, Contract, call, found, granted, mark_queued, refused, succeed

LABEL = "supplier 7, 100 % of Müller"


def labelled(wanted: Claim, label: str = LABEL, **facts: Any) -> Claim:
    return replace(wanted, facts=replace(wanted.facts, label=label, **facts))


def mark_labelled(store: Store, task_id: str, label: str = LABEL) -> None:
    assert store.mark_queued(KEY, task_id, 60.0, limit=0, cooldown=0.0, label=label) == Marked()


class Labels(Contract):
    """They are told, and change nothing else."""

    @pytest.mark.parametrize("task_name", ["", "shop.other"])
    def test_a_holder_is_told_with_its_label(self, store: Store, task_name: str) -> None:
        granted(store.acquire(labelled(call("a"), task_name=task_name)))
        conflict = refused(store.acquire(call("b")))
        (survey,) = store.survey([KEY])

        for holder in (store.holders(KEY)[0], conflict.first, survey.holders[0]):
            assert (holder.label, holder.task_id) == (LABEL, "a")
            assert holder.task_name == (task_name or "shop.tasks.sync")

    def test_a_queued_call_is_told_with_its_label(self, store: Store) -> None:
        mark_labelled(store, "q")
        (survey,) = store.survey([KEY])

        (mark,) = survey.marks
        assert (mark.state, mark.task_id, mark.label) == ("queued", "q", LABEL)
        assert found(mark_queued(store, "other")).task_id == "q"

    def test_a_queued_call_is_known_by_its_id(self, store: Store) -> None:
        mark_labelled(store, "q")

        mark_labelled(store, "q", "of its retry")
        assert refused(store.acquire(call("other", heeds_queued=True))).first.task_id == "q"
        granted(store.acquire(call("q", heeds_queued=True)))

        assert store.survey([KEY])[0].marks == ()

    def test_a_successor_is_known_by_its_task_whatever_its_label(self, store: Store) -> None:
        granted(store.acquire(call("holder")))
        succeed(store, labelled(call("b", 3000)), "rerun", "shop.other")

        assert succeed(store, labelled(call("c", 2000), "another"), "rerun", "shop.other") == "b"
        assert succeed(store, labelled(call("d", 2000)), "rerun") is None
