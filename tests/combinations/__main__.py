"""`make combinations`: programs drawn from a seed, played on real workers, and checked."""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import celery
from rich.console import Console

from tests.combinations.cover import pairs_of, possible
from tests.combinations.factors import why_not
from tests.combinations.found import FOUND
from tests.combinations.play import Played, play
from tests.combinations.program import HANDFUL, Program, draw, read
from tests.combinations.stage import Servers, Stage

# Two workers each, which mostly wait.
STAGES_ABREAST = 5
LOGS = Path(__file__).parent / "out"


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
    """Stages, some abreast, and what came of their programs."""

    def __init__(self, servers: Servers, console: Console) -> None:
        self._servers, self._console = servers, console
        self._numbers = count()
        self.played: list[Played] = []
        self.troubles: list[str] = []

    def play(self, programs: Sequence[Program], seconds: float) -> None:
        """Play all that can be begun within so many seconds."""
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(STAGES_ABREAST) as pool:
            for played in pool.map(lambda hand: self._stage(hand) if time.monotonic() < end else [], hands(programs)):
                self.played += played

    def _stage(self, hand: Sequence[Program]) -> list[Played]:
        began, number = time.monotonic(), next(self._numbers)
        with Stage(self._servers, hand, number) as stage:
            played = play(stage, hand)
            troubles = stage.troubles()
            why_void = stage.why_void()
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
        told += [line for some in failed for line in tell(some)]
        self._console.print("\n".join(told), markup=False)
        self.troubles += troubles
        return played


def main() -> int:
    options = arguments()
    console = Console(highlight=False, soft_wrap=True)
    LOGS.mkdir(exist_ok=True)
    # Who is told to end takes its workers and servers along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    given = list(FOUND.values()) if options.found else (options.replay or "").splitlines()
    programs = playable([read(line) for line in given], console) if given else draw(options.seed, options.programs)
    told = "" if given else f" of seed {options.seed}"
    console.print(f"{len(programs)} programs{told}, Celery {celery.__version__}")
    with Servers() as servers:
        run = Run(servers, console)
        # Only now: on a slow machine it takes a while to draw programs and to start servers.
        began = time.monotonic()
        run.play(programs, options.seconds)
        failed = [some for some in run.played if some.findings]
    console.print(f"{len(run.played)} programs, {len(failed)} failed, in {time.monotonic() - began:.0f} s")
    pairs = {pair for some in run.played for row in some.program.rows for pair in pairs_of(row)}
    console.print(f"covered: {len(pairs)} of {len(possible())} pairs")
    return 1 if failed or run.troubles else 0


def playable(programs: Sequence[Program], console: Console) -> list[Program]:
    """Those for which there is a stage; why the others have none is told."""
    reasons = {program: why_not(program.stage) for program in programs}
    for program, reason in reasons.items():
        if reason is not None:
            console.print(f"left out, {reason}: {program.line()}", markup=False)
    return [program for program in programs if reasons[program] is None]


def hands(programs: Sequence[Program]) -> list[list[Program]]:
    """Those of one stage together, as many as can be played at a time; those that take longest begin."""
    found = []
    together = {json.dumps(program.stage): [] for program in programs}
    for program in programs:
        together[json.dumps(program.stage)].append(program)
    for some in together.values():
        found += [some[begin : begin + HANDFUL] for begin in range(0, len(some), HANDFUL)]
    return sorted(found, key=lambda hand: hand[0].stage["pool"] != "solo")


def tell(some: Played) -> Iterator[str]:
    """What is wrong with a program, and the line that replays it."""
    yield from (f"  {finding}" for finding in some.findings)
    yield f"    make combinations REPLAY='{some.program.line()}'"


if __name__ == "__main__":
    sys.exit(main())
