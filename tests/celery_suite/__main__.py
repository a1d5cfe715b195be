"""`make celery-suite`: Celery's own integration tests with the lock and without it, outcome by outcome."""

import argparse
import sys
import time
from collections import Counter

from rich.console import Console

from tests.celery_suite.comparison import differences
from tests.celery_suite.exceptions import DIFFERENT, LEFT_OUT
from tests.celery_suite.play import Outcome, play_both


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.celery_suite", description=__doc__)
    parser.add_argument("tests", nargs="*", help="only these, such as test_canvas.py::test_group; default: all")
    parser.add_argument("--all", action="store_true", help="also those that are left out")
    parser.add_argument("--seconds", type=float, default=3600, help="the most it may take (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    options, began = arguments(), time.monotonic()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    left_out = {} if options.all else LEFT_OUT
    plain, locked = play_both(only=options.tests, without=tuple(left_out), seconds=options.seconds)
    found = differences(plain, locked, DIFFERENT)
    for difference in found:
        console.print(str(difference))
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}")
    for name, reason in DIFFERENT.items():
        console.print(f"must differ: {name}: {reason}")
    for side, outcomes in (("plain", plain), ("locked", locked)):
        console.print(f"{side}: {counted(outcomes)}")
    tests = len({outcome.test for outcome in plain})
    console.print(f"{tests} tests, {len(found)} differ unexpectedly, in {time.monotonic() - began:.0f} s")
    return 1 if found else 0


def counted(outcomes: list[Outcome]) -> str:
    return ", ".join(f"{number} {name}" for name, number in Counter(each.outcome for each in outcomes).most_common())


if __name__ == "__main__":
    sys.exit(main())
