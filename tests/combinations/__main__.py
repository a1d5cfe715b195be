"""`make combinations`: programs drawn from a seed, played on real workers, and checked."""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import celery

from tests.combinations.factors import why_not
from tests.combinations.play import Played, play
from tests.combinations.program import HANDFUL, Program, draw, read
from tests.combinations.stage import Servers, Stage

# Two workers each, which mostly wait.
STAGES_ABREAST = 5
LOGS = Path(__file__).parent / "out"
FOUND = Path(__file__).parent / "found.txt"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="what is drawn; default: random")
    parser.add_argument("--programs", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument(
        "--replay",
        default=os.environ.get("COMBINATIONS_REPLAY"),
        help="a program, or several, one a line, as a failing one is printed",
    )
    parser.add_argument("--seconds", type=float, default=3600, help="begin no further stage after so many")
    parser.add_argument("--found", action="store_true", help="nothing new: the programs that have found something")
    return parser.parse_args()


class Run:
    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._numbers = count()
        self.played: list[Played] = []
        self.is_good = True

    def play(self, programs: Sequence[Program], seconds: float) -> None:
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(STAGES_ABREAST) as pool:
            for played in pool.map(lambda hand: self._stage(hand) if time.monotonic() < end else [], hands(programs)):
                self.played += played

    def _stage(self, hand: Sequence[Program]) -> list[Played]:
        began, number = time.monotonic(), next(self._numbers)
        with Stage(self._servers, hand, number) as stage:
            played = play(stage, hand)
            troubles, why_void = stage.troubles(), stage.why_void()
        failed = [some for some in played if some.findings]
        if failed or troubles or why_void:
            for index, log in enumerate(stage.logs):
                (LOGS / f"stage-{number}-{index}.log").write_text(log, encoding="utf-8")
            shutil.copy(stage.path, LOGS / f"stage-{number}.jsonl")
        facts = ", ".join(f"{name} {value}" for name, value in stage.facts.items())
        told = [f"stage {number} ({facts}): {len(hand)} programs in {time.monotonic() - began:.0f} s"]
        if why_void:
            told.append(f"  not judged: {why_void}")
            failed, troubles, played = [], [], []
        told += [f"  a worker: {trouble}" for trouble in troubles]
        for some in failed:
            told += [f"  {finding}" for finding in some.findings]
            told.append(f"    make combinations REPLAY='{some.program.line()}'")
        print("\n".join(told), flush=True)
        self.is_good = self.is_good and not (failed or troubles)
        return played


def main() -> int:
    options = arguments()
    LOGS.mkdir(exist_ok=True)
    # Otherwise a run that is told to end would leave its workers and servers behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    given = (FOUND.read_text(encoding="utf-8") if options.found else options.replay or "").splitlines()
    programs = [read(line) for line in given if not line.startswith("#")] or draw(options.seed, options.programs)
    for program in programs:
        if reason := why_not(program.stage):
            print(f"left out, {reason}: {program.line()}")
    programs = [program for program in programs if why_not(program.stage) is None]
    print(
        f"{len(programs)} programs{'' if given else f' of seed {options.seed}'}, Celery {celery.__version__}",
        flush=True,
    )
    with Servers() as servers:
        run = Run(servers)
        # Only now: on a slow machine it takes a while to draw programs and to start servers.
        began = time.monotonic()
        run.play(programs, options.seconds)
    failed = sum(bool(some.findings) for some in run.played)
    print(f"{len(run.played)} programs, {failed} failed, in {time.monotonic() - began:.0f} s")
    return 0 if run.is_good else 1


def hands(programs: Sequence[Program]) -> list[Sequence[Program]]:
    together: dict[str, list[Program]] = {json.dumps(program.stage): [] for program in programs}
    for program in programs:
        together[json.dumps(program.stage)].append(program)
    found = [some[begin : begin + HANDFUL] for some in together.values() for begin in range(0, len(some), HANDFUL)]
    return sorted(found, key=lambda hand: hand[0].stage["pool"] != "solo")


if __name__ == "__main__":
    sys.exit(main())
