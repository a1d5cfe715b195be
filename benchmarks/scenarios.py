"""Faults of daily practice, played with each library: real workers, real kills, and what was seen.

Each scenario is played in a process of its own, with a server and workers of its own. Libraries are set up as
their own documentation begins; where a scenario needs a lock that expires soon, each gets one by its own option.
"""

import argparse
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from celery import chord
from celery.exceptions import TimeoutError as NoResult
from celery.states import READY_STATES
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import report
from benchmarks.libraries import LOCKING, Library, named, problems, usable, versions
from benchmarks.stage import Stage, Verdict, happens
from tests.recorder import most_at_once
from tests.waiting import until
from tests.workers import is_alive

# They mostly wait.
AT_A_TIME = 5
LONGEST = 90
# Seconds of a lock that has to expire soon.
EXPIRY = 2
NOT_SEEN = "not seen"
HANGS = "does not end"

DELIVERED_AGAIN_SOON = {
    "task_acks_late": True,
    "broker_transport_options": {
        "visibility_timeout": 2,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
}


def worker_killed(library: Library) -> Verdict:
    """With all its children, as a host that goes away; another worker is there."""
    with Stage(library, workers=2, concurrency=1) as stage:
        _, run = stage.begin("k", "sleep", 60)
        stage.worker_of(run).kill()
        return stage.next_call("k", within=36)


def child_killed(library: Library) -> Verdict:
    """As by the kernel when memory is short."""
    with Stage(library) as stage:
        _, run = stage.begin("k", "sleep", 60)
        os.kill(run.pid, signal.SIGKILL)
        return stage.next_call("k")


def ended_by(order: str, value: Any = None, **options: Any) -> Callable[[Library], Verdict]:
    """A scenario in which the body, or Celery, ends a run; *order* tells the body how."""

    def ended(library: Library) -> Verdict:
        with Stage(library) as stage:
            _, run = stage.begin("k", order, value, **options)
            until(lambda: stage.is_quiet("k") or not is_alive(run.pid), "it has ended")
            return stage.next_call("k")

    return ended


def revoked(library: Library) -> Verdict:
    """While it is queued behind another."""
    with Stage(library, concurrency=1) as stage:
        stage.begin("in front", "sleep", 2)
        result = stage.call("k")
        result.revoke()
        until(lambda: result.state == "REVOKED", "it is revoked")
        return stage.next_call("k")


def unpublished(library: Library) -> Verdict:
    """The broker resets every connection, and later serves them again."""
    with Stage(library) as stage:
        stage.broker.reset()
        error = _raised(lambda: stage.call("k"))
        stage.broker.forward()
        seen = stage.next_call("k")
        return Verdict(seen.word, f"publishing raised {error}; then {seen.detail}")


def retried(library: Library, countdown: int) -> Verdict:
    """Once, by itself."""
    with Stage(library) as stage:
        result, first = stage.begin("k", "retry", countdown)
        if happens(lambda: len(stage.runs("k")) > 1, within=8):
            return Verdict("runs", f"{stage.runs('k')[1].at - first.at:.1f} s after the first try")
        state = result.state
        return Verdict("is lost", f"its state stays {state}; the next call runs {stage.next_call('k', 3).word}")


def delivered_twice(library: Library) -> Verdict:
    """A message whose visibility timeout is shorter than its run, acknowledged late."""
    with Stage(library, workers=2, concurrency=1, **DELIVERED_AGAIN_SOON) as stage:
        result, _ = stage.begin("k", "sleep", 8)
        until(lambda: stage.is_quiet("k"), "nothing runs any more")
        # A copy that waited would run now.
        happens(lambda: not stage.is_quiet("k"), within=2)
        return _at_once(stage, f"{len(stage.runs('k'))} of its deliveries ran, its state is {result.state}")


def outliving(library: Library) -> Verdict:
    """Calls keep coming."""
    with Stage(library, expiry=EXPIRY) as stage:
        first, _ = stage.begin("k", "sleep", 3 * EXPIRY)
        stage.runs_again("k", within=2 * EXPIRY)
        first.get(timeout=10, propagate=False)
        return _at_once(stage, f"its lock lasts {EXPIRY} s and its body {3 * EXPIRY} s")


def expired(library: Library) -> Verdict:
    """A run is stopped until its lock has expired and another runs; then it goes on, and ends."""
    with Stage(library, expiry=EXPIRY, concurrency=3) as stage:
        first, run = stage.begin("k", "sleep", 1)
        stage.order("k", "sleep", 8)
        os.kill(run.pid, signal.SIGSTOP)
        assert stage.runs_again("k", within=6 * EXPIRY), "the lock of the stopped run expires"
        second = stage.runs("k")[1]
        os.kill(run.pid, signal.SIGCONT)
        first.get(timeout=5, propagate=False)
        third = stage.runs_again("k", within=2)
        assert stage.still_runs(second), "the successor runs all that time"
        if third is None:
            return Verdict("kept", "nobody else ran before the successor had ended")
        return Verdict("freed", f"a third body began beside it, {third:.1f} s after the stopped one had ended")


def by_name(library: Library) -> Verdict:
    """With `send_task`, as a service does that lacks the code."""
    with Stage(library) as stage:
        stage.begin("k", "sleep", 3)
        stage.app.send_task("job", ("k",))
        happens(lambda: len(stage.runs("k")) > 1, within=3)
        return _at_once(stage, f"{len(stage.runs('k'))} of 2 calls ran")


def by_name_then_as_usual(library: Library) -> Verdict:
    """When the second has ended, one way or the other, and the first has not."""
    with Stage(library) as stage:
        _, first = stage.begin("k", "sleep", 8)
        second = stage.app.send_task("job", ("k",))
        until(lambda: second.state in READY_STATES, "the second has ended")
        stage.runs_again("k", within=3)
        assert stage.still_runs(first), "the first runs all that time"
        return _at_once(stage, f"{len(stage.runs('k'))} of 3 calls ran, the second's state is {second.state}")


def called_twice(library: Library) -> Verdict:
    """See what the second caller gets while the first call runs."""
    with Stage(library) as stage:
        first, _ = stage.begin("k", "sleep", 3)
        second = stage.call("k")
        if second is None:
            return Verdict(f"`{library.refusal}`", f"{'raised' if library.refusal else 'returned'} by `delay`")
        outcome = _outcome(second)
        if second.id == first.id:
            return Verdict("the first's result", f"`delay` returns the first's `AsyncResult`; its `.get()` {outcome}")
        return Verdict(outcome.removeprefix("raises "), f"its own `.get()` {outcome}")


def chorded(library: Library) -> Verdict:
    """Two of the three members of its header are the same call."""
    with Stage(library, concurrency=3) as stage:
        stage.order("twice", "sleep", 1)
        members = [stage.job.s(key) for key in ("twice", "twice", "once")]
        try:
            result = chord(members)(stage.collect.s())
        except library.refusals as error:
            return Verdict(f"`{type(error).__name__}`", "raised while the header is sent")
        outcome = _outcome(result)
        return Verdict("hangs" if outcome == HANGS else "ends", f"`.get()` {outcome}")


def _outcome(result: Any) -> str:
    try:
        return f"returns {result.get(timeout=8)!r}"
    except NoResult:
        return HANGS
    except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
        return f"raises `{type(error).__name__}`"


def _raised(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
        return type(error).__name__
    return "nothing"


def _at_once(stage: Stage, detail: str) -> Verdict:
    most = most_at_once(stage.events("k"))
    return Verdict("one at a time" if most == 1 else f"{most} at once", detail)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A story, as the table's row tells it, and how it is played."""

    name: str
    story: str
    play: Callable[[Library], Verdict]


SCENARIOS = (
    Scenario("worker killed", "The worker is killed: the same call can run", worker_killed),
    Scenario("child killed", "The pool process is killed: the same call can run", child_killed),
    Scenario("raises", "It raises: the same call can run", ended_by("fail")),
    Scenario("ignores", "It raises `Ignore`: the same call can run", ended_by("ignore")),
    Scenario("hard limit", "A hard time limit: the same call can run", ended_by("sleep", 60, time_limit=1)),
    Scenario("revoked", "It is revoked in the queue: the same call can run", revoked),
    Scenario("unpublished", "The broker is down when it is published: the same call can run", unpublished),
    Scenario("retry at once", "`self.retry(countdown=0)`: the retry", partial(retried, countdown=0)),
    Scenario("retry later", "`self.retry(countdown=1)`: the retry", partial(retried, countdown=1)),
    Scenario("delivered twice", "One message is delivered twice: bodies", delivered_twice),
    Scenario("outlives", "A body outlives the lock's expiry: bodies", outliving),
    Scenario("expired", "A paused run ends after its lock has expired: its successor's lock is", expired),
    Scenario("by name", "A second call comes by `send_task`: bodies", by_name),
    Scenario("by name, as usual", "A second comes by `send_task`, a third by `delay`: bodies", by_name_then_as_usual),
    Scenario("called twice", "A second call by `delay`: its caller gets", called_twice),
    Scenario("chord", "A chord with a duplicate in its header", chorded),
)


def play(scenario: str, label: str) -> Verdict:
    """One scenario with one library, in this process."""
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(LONGEST)
    (found,) = [each for each in SCENARIOS if each.name == scenario]
    try:
        return found.play(named(label))
    except Exception as error:  # noqa: BLE001 (told, and the run fails)
        return Verdict(NOT_SEEN, f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"not within {LONGEST} s")


Verdicts = dict[str, dict[str, Verdict]]


def play_all(scenarios: Sequence[Scenario], libraries: Iterable[Library], console: Console) -> Verdicts:
    """All of them, several at a time."""
    pool = partial(ProcessPoolExecutor, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with pool(AT_A_TIME) as processes:
        cells: dict[Future[Verdict], tuple[str, str]] = {
            processes.submit(play, scenario.name, library.label): (scenario.name, library.label)
            for scenario in scenarios
            for library in libraries
        }
        for _ in track(as_completed(cells), "scenarios", len(cells), console=console, transient=True):
            pass
        seen: Verdicts = {scenario.name: {} for scenario in scenarios}
        for cell, (scenario, label) in cells.items():
            seen[scenario][label] = cell.result()
    return seen


def table(seen: Verdicts, libraries: Sequence[Library]) -> Table:
    """Words, and below each what was seen."""
    shown = Table(title="the same scenarios, each library", title_justify="left", box=SIMPLE_HEAD, show_lines=True)
    for heading in ("", *(library.label for library in libraries)):
        shown.add_column(heading, overflow="fold")
    for scenario in SCENARIOS:
        if scenario.name in seen:
            verdicts = [seen[scenario.name][library.label] for library in libraries]
            shown.add_row(scenario.story, *(f"{each.word}\n[dim]{each.detail}" for each in verdicts))
    return shown


def main() -> None:
    """Play, show and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenarios", description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    labels = [library.label for library in LOCKING]
    parser.add_argument("--scenario", action="append", choices=names, help="only this one; may be repeated")
    parser.add_argument("--library", action="append", choices=labels, help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/scenarios.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    console = Console()
    scenarios = [each for each in SCENARIOS if each.name in (arguments.scenario or names)]
    libraries = [each for each in usable(LOCKING) if each.label in (arguments.library or labels)]
    seen = play_all(scenarios, libraries, console)
    console.print(table(seen, libraries))
    for label, problem in problems(LOCKING).items():
        console.print(f"{label} takes no part: {problem}")
    report.save(_found(scenarios, seen), arguments.out)
    console.print(f"saved as {arguments.out}")
    sys.exit(any(verdict.word == NOT_SEEN for verdicts in seen.values() for verdict in verdicts.values()))


def _found(scenarios: Sequence[Scenario], seen: Verdicts) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": versions(),
        "problems": problems(LOCKING),
        "scenarios": [
            {
                "name": each.name,
                "story": each.story,
                "verdicts": {label: asdict(verdict) for label, verdict in seen[each.name].items()},
            }
            for each in scenarios
        ],
    }


if __name__ == "__main__":
    main()
