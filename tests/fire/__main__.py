"""`make fire`: real workers under load, a nemesis, and a checker that reads what the bodies have written."""

import argparse
import dataclasses
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fire.checker import History, Verdict, check
from tests.fire.drain import drain
from tests.fire.load import Load
from tests.fire.nemesis import Nemesis
from tests.fire.stage import Stage
from tests.fire.topologies import TOPOLOGIES
from tests.runs.watch import Watch

_MOST_TOLD = 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fire", description=__doc__)
    parser.add_argument("--duration", type=float, default=180, help="seconds of load (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="what happens when; default: random")
    parser.add_argument(
        "--store", choices=("valkey", "redis", *TOPOLOGIES), default="valkey", help="the store of locks"
    )
    parser.add_argument("--drain", type=float, default=60, help="seconds to end within (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="directory for what is written")
    # For the test that the verdict can be red.
    parser.add_argument("--sabotage", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("worker-*.log"):
        old.unlink()
    began = time.monotonic()
    with Stage(options.out, options.store, sabotage=options.sabotage) as stage:
        print(f"seed {options.seed}: locks at {options.store}, {options.duration:g} s of load", flush=True)
        history = burn(stage, options)
    verdict = check(history)
    save(history, verdict, options)
    report(verdict)
    title = f"seed {options.seed}, {options.duration:g} s: {'good' if verdict.good else 'BAD'}"
    print(f"{title}, in {time.monotonic() - began:.0f} s; {os.path.relpath(options.out)}/ has all of it")
    return 0 if verdict.good else 1


def burn(stage: Stage, options: argparse.Namespace) -> History:
    with Watch(stage.path, stage.record) as watch:
        load = Load(options.seed, stage.record, stage.results)
        load.start()
        try:
            Nemesis(stage, watch, load, options.seed).rage(options.duration)
        finally:
            load.stop()
        print("healed; everything has to end now", flush=True)
        return drain(stage, watch, options.drain)


def save(history: History, verdict: Verdict, options: argparse.Namespace) -> None:
    found = {
        "seed": options.seed,
        "good": verdict.good,
        "counts": verdict.counts,
        "fates": verdict.fates,
        "excused": verdict.excused,
        "findings": [dataclasses.asdict(finding) for finding in verdict.findings],
        "history": dataclasses.asdict(history),
    }
    (options.out / "fire.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


def report(verdict: Verdict) -> None:
    told = Counter(verdict.counts)
    told += Counter({f"calls: {name}": count for name, count in verdict.fates.items()})
    told += Counter({f"overlaps declared: {name}": count for name, count in verdict.excused.items()})
    for name, count in told.items():
        print(f"  {name:60} {count}")
    for finding in verdict.findings[:_MOST_TOLD]:
        print(finding)
    if len(verdict.findings) > _MOST_TOLD:
        print(f"and {len(verdict.findings) - _MOST_TOLD} more")


if __name__ == "__main__":
    sys.exit(main())
