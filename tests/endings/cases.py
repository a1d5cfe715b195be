"""Every way in which a run can end, and what is promised of it on each pool."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.endings.app import LONG, SHORT
from tests.recorder import Event
from tests.workers import kill_child

if TYPE_CHECKING:
    from tests.endings.stage import Stage

COLUMNS = ("prefork", "prefork, acks_late", "solo", "threads", "gevent", "eventlet")
GREEN = ("gevent", "eventlet")

# Seconds from the end of a run until its key must be free. The pool takes up to 4 s to notice
# that a pool process is dead; where nobody is left to notice, the lease lasts its ttl.
BOUNDS = {"at once": 2.0, "within seconds": 8.0, "within the ttl": SHORT + 4.0}

Act = Callable[["Stage", Event, Any], None]


def by_itself(stage: "Stage", run: Event, result: Any) -> None:
    """Nobody does anything."""


def _kill_pool_process(stage: "Stage", run: Event, result: Any) -> None:
    kill_child(result.app, run, number=len(stage.workers))


def _revoke(number: str) -> Act:
    return lambda stage, run, result: result.revoke(terminate=True, signal=number)


def _signal_worker(number: int) -> Act:
    return lambda stage, run, result: stage.worker_of(run).send(number)


def _kill_worker(stage: "Stage", run: Event, result: Any) -> None:
    stage.worker_of(run).kill()


def _cut(stage: "Stage", run: Event, result: Any) -> None:
    stage.broker_of(stage.worker_of(run)).cut()


@dataclass(frozen=True)
class Ending:
    name: str
    how: str = "stay"
    act: Act = by_itself
    promised: str = "at once"
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    ttl: float = SHORT
    options: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def cell(self, column: str) -> str:
        """The bound that is promised on that pool, or the reason why the ending cannot happen there."""
        return self.elsewhere.get(column, self.promised)


def _only(reason: str, *columns: str) -> dict[str, str]:
    return {column: reason for column in COLUMNS if column.split(",")[0] not in columns}


_NO_LIMIT = "the pool has no such limit"
_NO_TERMINATE = "the pool cannot terminate a task"
_NO_POOL_PROCESS = "there is no pool process: see the worker's end"
_ITS_PROCESS_DIES: dict[str, Any] = {
    "ttl": LONG,
    "promised": "within seconds",
    "elsewhere": _only(_NO_POOL_PROCESS, "prefork"),
}

ENDINGS = (
    Ending("it returns", how="return"),
    Ending("it raises", how="raise"),
    Ending("it retries", how="retry"),
    Ending("it raises `Ignore`", how="ignore"),
    Ending("it raises `Reject`", how="reject"),
    Ending("it is replaced", how="be replaced"),
    Ending("it raises `SystemExit`", how="exit", alone=True),
    Ending("it raises `MemoryError`", how="run out of memory", alone=True),
    # If a machine stood still for a second, a shorter limit would strike before the body has begun.
    Ending("soft time limit", options={"soft_time_limit": 4}, elsewhere=_only(_NO_LIMIT, "prefork")),
    Ending("hard time limit", options={"time_limit": 4}, elsewhere=_only(_NO_LIMIT, "prefork", "gevent")),
    Ending(
        "hard time limit, and the body refuses to end",
        how="refuse to end",
        ttl=LONG,
        options={"time_limit": 4},
        promised="within seconds",
        elsewhere=_only(_NO_LIMIT, "prefork"),
    ),
    Ending("revoked with `terminate`", act=_revoke("SIGTERM"), elsewhere=_only(_NO_TERMINATE, "prefork", *GREEN)),
    Ending("revoked with `terminate` and SIGKILL", act=_revoke("SIGKILL"), **_ITS_PROCESS_DIES),
    Ending("the pool process is killed, as by a lack of memory", act=_kill_pool_process, **_ITS_PROCESS_DIES),
    Ending("the pool process crashes", how="crash", **_ITS_PROCESS_DIES),
    Ending(
        "the pool process has done its `max_tasks_per_child`",
        how="return",
        elsewhere=_only(_NO_POOL_PROCESS, "prefork"),
        alone=True,
        arguments=("--max-tasks-per-child", "1"),
    ),
    Ending("warm shutdown", how="return", act=_signal_worker(signal.SIGTERM), alone=True),
    Ending("soft shutdown", act=_signal_worker(signal.SIGQUIT), alone=True, env={"TEST_SOFT_SHUTDOWN": "1"}),
    Ending("cold shutdown", act=_signal_worker(signal.SIGQUIT), alone=True),
    Ending("the worker is killed", act=_kill_worker, promised="within the ttl", alone=True),
    Ending("the broker's connection is lost", how="return", act=_cut, alone=True),
    Ending(
        "the broker's connection is lost, and tasks are cancelled",
        act=_cut,
        elsewhere=_only("the pool cannot cancel a task: it runs on", "prefork", *GREEN),
        alone=True,
        env={"TEST_CANCEL": "1"},
    ),
)
