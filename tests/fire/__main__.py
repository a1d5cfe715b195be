"""`make fire`: real workers under load, a nemesis, and a checker that reads what the bodies have written."""

import argparse
import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.combinations.history import History as ProgramHistory
from tests.combinations.program import Program, tasks_of
from tests.fire.checker import History, Verdict, check
from tests.fire.drain import drain
from tests.fire.load import Load
from tests.fire.nemesis import Nemesis
from tests.fire.picture import draw
from tests.fire.program_checker import check as check_program
from tests.fire.program_checker import runs_of
from tests.fire.programs import Programs, drawn, facts
from tests.fire.stage import Stage
from tests.fire.topologies import TOPOLOGIES
from tests.fire.watch import Watch

_MOST_TOLD = 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fire", description=__doc__)
    parser.add_argument("--duration", type=float, default=180, help="seconds of load (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="what happens when; default: random")
    parser.add_argument("--programs", type=int, default=0, help="how many of tests/combinations are played meanwhile")
    parser.add_argument("--workers", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument(
        "--store", choices=("valkey", "redis", *TOPOLOGIES), default="valkey", help="the store of locks"
    )
    parser.add_argument("--broker", choices=("rabbitmq", "redis"), help="default: RabbitMQ where it is installed")
    parser.add_argument("--drain", type=float, default=60, help="seconds to end within (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="directory for what is written")
    # For the test that the verdict can be red.
    parser.add_argument("--sabotage", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.programs and options.store in TOPOLOGIES:
        parser.error(f"--programs are played with one server of locks, not with --store {options.store}")
    return options


def main() -> int:
    options = arguments()
    console = Console(highlight=False, soft_wrap=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("worker-*.log"):
        old.unlink()
    began = time.monotonic()
    stage = Stage(options.out, options.workers, options.store, options.broker, sabotage=options.sabotage)
    programs = drawn(options.seed, options.programs, facts(broker_is_redis=stage.loses_messages))
    stage.declare(tasks_of(programs))
    with stage:
        kind = type(stage.broker).__name__
        kinds = f"locks at {options.store}, broker {kind}"
        console.print(f"seed {options.seed}: {options.workers} workers, {kinds}, {options.duration:g} s of load")
        history, played = burn(stage, programs, options, console)
    verdict = check(history)
    judge(played, verdict, forgetful=history.forgetful)
    title = f"seed {options.seed}, {options.duration:g} s: {'good' if verdict.good else 'BAD'}"
    save(history, played, verdict, options)
    draw(history, verdict.findings, title, options.out / "fire.svg")
    report(verdict, console)
    console.print(f"{title}, in {time.monotonic() - began:.0f} s; {os.path.relpath(options.out)}/ has all of it")
    return 0 if verdict.good else 1


def burn(
    stage: Stage, drawn_ones: Sequence[Program], options: argparse.Namespace, console: Console
) -> tuple[History, list[ProgramHistory]]:
    with Watch(stage.path, stage.record) as watch:
        load = Load(options.seed, stage.record, stage.results)
        programs = Programs(drawn_ones, stage, watch, options.duration)
        load.start()
        programs.start()
        try:
            Nemesis(stage, watch, load, options.seed, console.print).rage(options.duration)
        finally:
            load.stop()
            programs.stop()
        console.print("healed; everything has to end now")
        return drain(stage, watch, programs, options.drain), programs.histories()


def judge(played: Sequence[ProgramHistory], verdict: Verdict, *, forgetful: bool) -> None:
    """Add to the verdict what the programs show."""
    for history in played:
        findings, excused = check_program(history, forgetful=forgetful)
        verdict.excused += excused
        for finding in findings:
            what = f"{finding.what} of {history.program.line()}"
            verdict.findings.append(dataclasses.replace(finding, what=what))
    if played:
        verdict.counts["programs"] = len(played)
        verdict.counts["calls of programs"] = sum(len(history.answers) for history in played)
        verdict.counts["bodies of programs"] = sum(run.ran for history in played for run in runs_of(history))


def save(history: History, played: Sequence[ProgramHistory], verdict: Verdict, options: argparse.Namespace) -> None:
    found = {
        "seed": options.seed,
        "good": verdict.good,
        "counts": verdict.counts,
        "fates": verdict.fates,
        "excused": verdict.excused,
        "findings": [dataclasses.asdict(finding) for finding in verdict.findings],
        "history": dataclasses.asdict(history),
        "programs": [
            {"line": some.program.line(), "answers": [dataclasses.asdict(answer) for answer in some.answers]}
            for some in played
        ],
    }
    (options.out / "fire.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


def report(verdict: Verdict, console: Console) -> None:
    table = Table(show_header=False, box=None)
    for name, count in verdict.counts.items():
        table.add_row(name, str(count))
    for name, count in verdict.fates.most_common():
        table.add_row(f"calls: {name}", str(count))
    for name, count in verdict.excused.most_common():
        table.add_row(f"overlaps declared: {name}", str(count))
    console.print(table)
    for finding in verdict.findings[:_MOST_TOLD]:
        # A program is full of brackets.
        console.print(f"[bold red]{finding.promise}[/]: {escape(f'{finding.key} {finding.what}')}")
    if len(verdict.findings) > _MOST_TOLD:
        console.print(f"and {len(verdict.findings) - _MOST_TOLD} more")


if __name__ == "__main__":
    sys.exit(main())
