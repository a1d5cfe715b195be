"""P4, you are told: what becomes of a body that loses its lease, gives its heartbeat no time, or refuses to end."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from billiard.exceptions import WorkerLostError

from celery_singleton_lock import LockLost
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.leases.counters import hash_of
from celery_singleton_lock.stores.records import Claim
from tests.endings import app as tasks
from tests.endings.conftest import APP, begun
from tests.proxy import Proxy
from tests.recorder import Recorder
from tests.servers import Server, missing
from tests.waiting import until
from tests.workers import is_alive, workers

pytestmark = pytest.mark.usefixtures("at_valkey")
POOLS = ("prefork", "solo", "threads", "gevent", "eventlet")


def forget_locks(server: Server) -> None:
    with server.client(database=2) as client:
        client.flushdb()


@pytest.mark.parametrize("pool", POOLS)
def test_abort_ends_a_sleeping_body(pool: str, recorder: Recorder, valkey: Server) -> None:
    # A thread is interrupted between two bytecodes only, so there it sleeps in slices.
    slices = {"TEST_SLICES": "yes"} if pool == "threads" else {}
    with workers(APP, slices, pool=pool):
        result = tasks.aborted.delay("k", 60)
        begun(recorder)
        forget_locks(valkey)

        with pytest.raises(LockLost, match="expired"):
            result.get(timeout=40)
        assert tasks.aborted.delay("k", 0).get(timeout=40) == "ran"


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_who_is_cut_off_from_the_store_is_told_before_the_next_run_begins(
    pool: str, recorder: Recorder, valkey: Server
) -> None:
    with Proxy(valkey.port) as proxy, workers(APP, {"TEST_LOCKS": f"{proxy.url[:-1]}2"}, pool=pool):
        first = tasks.aborted.apply_async(("k", 60))
        begun(recorder)
        proxy.black_hole()
        with workers(APP):
            second = tasks.aborted.delay("k", 0)
            with pytest.raises(LockLost, match="unreachable"):
                first.get(timeout=40)
            proxy.forward()
            assert second.get(timeout=40) == "ran"

    told = recorder.events("told")[0]
    entered = next(event for event in recorder.events("enter") if event.run == second.id)
    assert told.at < entered.at


@pytest.mark.parametrize("by", ["a signal", "a cgroup"])
def test_kill_ends_a_run_that_stands_still_before_the_next_begins(by: str, recorder: Recorder) -> None:
    with workers(APP, {}, 2) as both:
        tasks.killed.delay("k", 60)
        first = begun(recorder, "tick")
        with standing_still(by, first.pid):
            until(lambda: not tasks.killed.lock_holders("k", 0), "the lease has ended")
            second = tasks.killed.delay("k", 0.5)
            until(lambda: [event for event in recorder.events("enter") if event.run == second.id], "the next has begun")
        assert second.get(timeout=40) == "ran"
        until(lambda: not is_alive(first.pid), "the first is dead")

        # Its main process says what it could not say.
        told = f"lock.lost key={tasks.killed.lock_key_for('k', 60)} task_id={first.run} reason="
        until(lambda: told in both[0].log() + both[1].log(), "the loss is told")
        until(lambda: recorder.events("signalled"), "the signal is sent")

    entered = next(event for event in recorder.events("enter") if event.run == second.id)
    assert max(event.at for event in recorder.events("tick") if event.run == first.run) < entered.at


@pytest.mark.parametrize("reason", ["expired", "taken"])
def test_a_run_that_is_killed_because_the_store_has_forgotten_its_lease_tells_of_it_once(
    recorder: Recorder, valkey: Server, reason: str
) -> None:
    key = tasks.killed.lock_key_for("k", 60)
    with workers(APP, {"TEST_TTL_OF_KILLED": "6"}) as (worker,):
        result = tasks.killed.delay("k", 60)
        begun(recorder, "tick")
        forget_locks(valkey)
        if reason == "taken":
            store_of(tasks.app).acquire(Claim(key, "another", 3.0))
        with pytest.raises(WorkerLostError):
            result.get(timeout=30)
        # Its main process would have logged the loss by now.
        assert tasks.killed.delay("k", 0).get(timeout=40) == "ran"

        told = f"lock.lost key={key} task_id={result.id} reason="
        assert [line.partition(told)[2] for line in worker.log().splitlines() if told in line] == [reason]
        assert [event.facts["reason"] for event in recorder.events("signalled")] == [reason]
    counts = store_of(tasks.app).fields(hash_of(key))
    assert {name: count for name, count in counts.items() if name.startswith("lost:")} == {
        f"lost:{reason}:{tasks.killed.name}": "1"
    }


def test_a_run_that_something_else_has_killed_has_not_lost_its_lease(recorder: Recorder) -> None:
    # So long that it is not lost because the machine has stood still.
    with workers(APP, {"TEST_TTL_OF_KILLED": "6"}) as (worker,):
        result = tasks.killed.delay("k", 60)
        first = begun(recorder, "tick")
        # By then it has been renewed a few times.
        time.sleep(6.5)
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            result.get(timeout=40)
        assert tasks.killed.delay("k", 0).get(timeout=40) == "ran"

        assert "lock.lost" not in worker.log()


def test_a_run_whose_body_has_ended_is_not_killed_and_its_loss_is_told() -> None:
    with workers(APP) as (worker,):
        assert tasks.forgotten_at_its_end.delay().get(timeout=40) == "ran"

        until(lambda: "lock.lost" in worker.log(), "the loss is told")


@contextmanager
def standing_still(by: str, pid: int) -> Iterator[None]:
    """The process does not run inside, and may run after."""
    if by == "a cgroup":
        with frozen(pid):
            yield
        return
    os.kill(pid, signal.SIGSTOP)
    yield
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    first, second = Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup")
    group = (first if first.exists() else second) / f"singleton-lock-{pid}"
    switch, on, off = ("freezer.state", "FROZEN", "THAWED") if first.exists() else ("cgroup.freeze", "1", "0")
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        (group / switch).write_text(on)
    except OSError as error:
        missing(f"no cgroup can be made here: {error}")
    try:
        yield
    finally:
        (group / switch).write_text(off)
        until(lambda: not (group / "cgroup.procs").read_text(), "nobody is left in the cgroup")
        group.rmdir()


TASK = tasks.TASKS[tasks.LONG, False]


# Only for a moment could it be seen that the key is free too early.
@pytest.mark.parametrize("turn", range(4))
def test_the_key_of_a_child_that_refuses_to_end_is_its_own_while_it_runs(recorder: Recorder, turn: int) -> None:
    with workers(APP) as (worker,):
        TASK.apply_async(("k", "refuse to end"), time_limit=1)
        pid = begun(recorder).pid
        # The child goes on for a while after its main process was told of the limit.
        until(lambda: "Hard time limit" in worker.log(), "the limit is reached")
        while is_alive(pid):
            held = bool(TASK.lock_holders("k", ""))
            assert held or not is_alive(pid)

        until(lambda: not TASK.lock_holders("k", ""), "the key is free", timeout=40)


def test_a_child_outlives_the_timer_of_its_last_task(recorder: Recorder) -> None:
    with workers(APP, concurrency=1):
        assert tasks.killed.delay("k", 0.1).get(timeout=40) == "ran"
        first = begun(recorder)
        # Longer than the ttl of the first, whose timer nobody renews.
        assert TASK.delay("k", "return").get(timeout=40) == "ran"
        until(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) > first.at + 3, "its deadline has passed")
        assert TASK.delay("other", "return").get(timeout=40) == "ran"
        # A run that did not get the lock at first leaves no timer either.
        store_of(tasks.app).acquire(Claim(tasks.killed.lock_key_for("held", 0), "holder", 2.0))
        assert tasks.killed.delay("held", 0).get(timeout=40) == "ran"
        until(lambda: timers(first.pid) == 0, "there is none")

    assert {event.pid for event in recorder.events("enter")} == {first.pid}


def timers(pid: int) -> int:
    return Path(f"/proc/{pid}/timers").read_text().count("notify:")
