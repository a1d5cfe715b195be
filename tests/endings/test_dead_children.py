"""The main process and its children: who is dead, who still runs, who may be killed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock import Lease
from celery_singleton_lock.leases.deadman import DeadMan
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Claim
from tests.endings.app import LONG, TASKS, killed
from tests.endings.conftest import APP, begun
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import until
from tests.workers import is_alive, workers

TASK = TASKS[LONG, False]


def test_the_key_of_a_killed_child_is_free_within_seconds(env: dict[str, str], recorder: Recorder) -> None:
    with workers(APP, env):
        TASK.delay("k", "stay")
        os.kill(begun(recorder).pid, signal.SIGKILL)

        until(lambda: not TASK.lock_holders("k", ""), "the key is free", timeout=8)


# Only for a moment could it be seen that the key is free too early.
@pytest.mark.parametrize("turn", range(4))
def test_the_key_of_a_child_that_refuses_to_end_is_its_own_while_it_runs(
    env: dict[str, str], recorder: Recorder, turn: int
) -> None:
    with workers(APP, env) as (worker,):
        TASK.apply_async(("k", "refuse to end"), time_limit=1)
        pid = begun(recorder).pid
        # So that the child goes on for a while after its main process was told of the limit.
        until(lambda: "Hard time limit" in worker.log(), "the limit is reached")
        while is_alive(pid):
            held = bool(TASK.lock_holders("k", ""))
            assert held or not is_alive(pid)

        until(lambda: not TASK.lock_holders("k", ""), "the key is free", timeout=8)


def test_a_child_outlives_the_timer_of_its_last_task(env: dict[str, str], recorder: Recorder) -> None:
    with workers(APP, env, concurrency=1):
        assert killed.delay("k", 0.1).get(timeout=10) == "ran"
        first = begun(recorder)
        # Longer than the ttl of the first, whose timer nobody sets anew.
        assert TASK.delay("k", "return").get(timeout=10) == "ran"
        until(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) > first.at + 3, "its deadline has passed")
        assert TASK.delay("other", "return").get(timeout=10) == "ran"

    assert {event.pid for event in recorder.events("enter")} == {first.pid}


def in_a_child(body: Any) -> int:
    """How a forked process has ended."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def spin(seconds: float) -> None:
    end = now() + seconds
    while now() < end:
        pass


def test_an_armed_timer_kills_its_process_at_the_deadline() -> None:
    def body() -> None:
        timer = DeadMan()
        timer.arm(now() + 0.2)
        spin(5)

    began = now()
    assert in_a_child(body) == -signal.SIGKILL
    assert 0.2 <= now() - began < 3


def test_a_timer_that_is_armed_after_its_deadline_kills_at_once() -> None:
    def body() -> None:
        timer = DeadMan()
        timer.arm(now() - 1)
        spin(5)

    assert in_a_child(body) == -signal.SIGKILL


def test_a_timer_that_is_armed_anew_or_disarmed_lets_its_process_live() -> None:
    def body() -> None:
        timer = DeadMan()
        for _ in range(5):
            timer.arm(now() + 2.0)
            spin(0.5)
        timer.disarm()
        timer.arm(now() + 0.1)
        spin(0.4)

    assert in_a_child(body) == 0


def test_runs_that_do_not_get_the_lock_leave_no_timer() -> None:
    store = MemoryStore()
    holder = Lease(store, Claim("k", "holder", 30.0), deadman=DeadMan())
    assert holder.acquire() is None
    before = timers()

    refused = [Lease(store, Claim("k", f"t{number}", 30.0), deadman=DeadMan()) for number in range(50)]
    conflicts = [lease.acquire() for lease in refused]

    assert None not in conflicts
    assert timers() == before
    holder.release()
    assert timers() == before - 1


def test_a_lease_that_was_left_behind_leaves_no_timer() -> None:
    before = timers()
    lease = Lease(MemoryStore(), Claim("k", "t", 30.0), deadman=DeadMan())
    assert lease.acquire() is None
    assert timers() == before + 1

    del lease

    assert timers() == before


def timers() -> int:
    """How many the kernel keeps for this process."""
    return Path("/proc/self/timers").read_text().count("notify:")


def test_arming_costs_less_than_a_tenth_of_a_ping(valkey: Server) -> None:
    timer, client = DeadMan(), valkey.client()
    deadline = now() + 3600

    def cost(call: Any) -> float:
        call()
        return min(_seconds(call) for _ in range(20))

    assert cost(lambda: timer.arm(deadline)) < 0.1 * cost(client.ping)
    timer.disarm()


def _seconds(call: Any) -> float:
    began = time.perf_counter()
    for _ in range(100):
        call()
    return time.perf_counter() - began
