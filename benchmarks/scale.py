"""The load that one process, and one worker, can carry: very many leases, tasks, and messages that wait for one key.

Figures are counts, bytes and ratios. Rates are those of the servers, each of which counts what it alone was
asked; of the time by the clock there are only bounds.
"""

import argparse
import os
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import connections, crowd, many, report, scale_page

POLICIES = ("reschedule", "join", "wait", "rerun", "replace")


@dataclass(frozen=True, slots=True)
class Plan:
    """How many, and for how long."""

    leases: int
    ttl: float
    held: float
    few: int
    tasks: int
    processes: int
    crowds: tuple[int, ...]
    counted: float


FULL = Plan(leases=20_000, ttl=5, held=60, few=2_000, tasks=20_000, processes=2, crowds=(100, 1_000), counted=20)
QUICK = Plan(leases=2_000, ttl=5, held=4, few=100, tasks=300, processes=2, crowds=(20,), counted=3)


def measure(plan: Plan, policies: tuple[str, ...] = POLICIES) -> dict[str, Any]:
    """Everything, one after the other."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("celery", "celery-singleton-lock", "kombu", "redis")},
        "plan": asdict(plan),
        "leases": in_a_process(many.leases, plan.leases, plan.ttl, plan.held),
        "tasks": in_a_process(many.tasks, plan.few, plan.tasks, plan.processes),
        "connections": {kind: in_a_process(connections.of_a_deployment, kind) for kind in connections.KINDS},
        "waiting": {each: in_a_process(crowd.of_one_message, each, plan.crowds, plan.counted) for each in policies},
    }


def in_a_process(measurement: Callable[..., Any], *arguments: Any) -> Any:
    """Measure in a new process, because an app knows one broker and one store for ever."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measurement, *arguments).result()


def main() -> None:
    """Measure, show and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few of each, which only prove that everything works")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/scale.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    found = measure(QUICK if arguments.quick else FULL)
    report.save(found, arguments.out)
    console = Console()
    console.print(scale_page.section(found), markup=False)
    console.print(f"saved as {arguments.out}")


if __name__ == "__main__":
    main()
