"""The counts of workers and publishers arrive on the page for Prometheus, however their processes end."""

import os
import re
import time
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery.exceptions import TaskRevokedError

from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.encoding import RELEASE
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.web import application
from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP
from tests.browsing import Visitor
from tests.proxy import Proxy
from tests.recorder import Recorder, of_key
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import kill_child, workers


def of(what: str, task: Any, more: str = "") -> float:
    text = Visitor(application(tasks.app)).get("/metrics").body
    samples = dict(re.findall(r"^singleton_lock_(\S+) (\S+)$", text, re.MULTILINE))
    return float(samples.get(f'{what}{{{more}task="{task.name}"}}', 0))


@pytest.mark.prove
def test_all_is_counted_though_each_process_runs_one_task_and_some_before_their_first_lease() -> None:
    number, task = 6, tasks.skipped
    with workers(APP, {}, 1, "--max-tasks-per-child", "1") as (worker,):
        with task.lock_for("k"):
            for result in [task.delay("k") for _ in range(number)]:
                with pytest.raises(TaskRevokedError):
                    result.get(timeout=SOON)
        results = [task.delay(key) for key in range(number)]
        assert [result.get(timeout=SOON) for result in results] == ["ran"] * number
        worker.send(SIGTERM)
        worker.wait(SOON)

    until(lambda: of("acquired_total", task) >= number, "all is counted", timeout=SOON)
    whats = ("acquired_total", "held_seconds_count", "waited_seconds_count")
    assert [of(what, task) for what in whats] == [number] * 3
    assert of("conflicts_total", task, 'outcome="skipped",') == number


def test_each_end_of_a_call_and_each_death_of_a_holder_is_counted(recorder: Recorder) -> None:
    task, other = tasks.by_policy["skip"], tasks.skipped
    key, store = other.lock_key_for("dead"), store_of(tasks.app)
    with workers(APP, {"TEST_TTL": "30"}, concurrency=4) as (worker,):
        holder, *killed = task.delay("k", 1, 2.0, gate="all are refused"), *(other.delay(n, 60.0) for n in range(2))
        begun = until(lambda: len(found := recorder.events("enter")) == 3 and found, "they run", timeout=SOON)
        for event in begun:
            if event.run in [each.id for each in killed]:
                kill_child(tasks.app, event)
        for _ in range(3):
            with pytest.raises(TaskRevokedError):
                task.delay("k").get(timeout=SOON)
        recorder.open_gate("all are refused")
        # The store knows of a dead holder for one more ttl.
        store.acquire(Claim(key, "dead", 6.0, task_id="id-dead"))
        holder.get(timeout=SOON)
        until(lambda: of("held_seconds_count", task) == 1, "it is counted", timeout=SOON)
        until(lambda: not store.holders(key), "its lease has run out", timeout=SOON)
        assert other.delay("dead").get(timeout=SOON) == "ran"
        until(lambda: of("holder_died_total", other) >= 3, "each is counted", timeout=SOON)
        broken = recorder.begun(other.delay("k", 60.0))
        (lease,) = store.holders(other.lock_key_for("k"))
        Inventory(store).break_lock(lease.key, [lease.token], "alice")
        with pytest.raises(TaskRevokedError):
            broken.get(timeout=SOON)
        worker.send(SIGTERM)
        worker.wait(SOON)

    assert of("acquired_total", task) == 1
    assert of("conflicts_total", task, 'outcome="skipped",') == 3
    assert of("held_seconds_sum", task) >= 2
    assert of("taken_over_total", other) == 1
    assert of("lost_total", other, 'reason="broken",') == 1


@pytest.mark.parametrize("loses", ["requests", "an answer"])
def test_a_death_is_told_once_though_the_store_is_silent_then(recorder: Recorder, valkey: Server, loses: str) -> None:
    task = tasks.skipped
    with Proxy(valkey.port) as proxy:
        env = {"TEST_TTL": "60", "TEST_LOCKS": f"{proxy.url.removesuffix('/0')}/2"}
        with workers(APP, env) as (worker,):
            # A server that does not know the script would answer with an error.
            task.delay("another").get(timeout=SOON)
            killed = task.delay("k", 60.0)
            (event,) = until(lambda: of_key(recorder, "k", "enter"), "it runs", timeout=SOON)
            if loses == "an answer":
                lost = proxy.lose_reply(to=RELEASE.digest.encode())
            else:
                proxy.black_hole()
            os.kill(event.pid, SIGKILL)
            with pytest.raises(WorkerLostError):
                killed.get(timeout=SOON)
            if loses == "an answer":
                assert lost.wait(SOON)
            else:
                # Longer than the first request of the main process waits.
                back_at = time.monotonic() + 4
                until(lambda: time.monotonic() > back_at, "the store was silent", timeout=SOON)
                proxy.forward()

            told = f"lock.holder_died key={task.lock_key_for('k')} task_id={killed.id} "
            until(lambda: told in worker.log(), "the death is told", timeout=SOON)
            until(lambda: not task.lock_holders("k"), "its key is free", timeout=SOON)
            assert task.delay("k").get(timeout=SOON) == "ran"
            until(lambda: of("holder_died_total", task) >= 1, "the death is counted", timeout=SOON)
            assert worker.log().count("lock.holder_died") == 1
    assert (of("holder_died_total", task), of("taken_over_total", task)) == (1, 0)
