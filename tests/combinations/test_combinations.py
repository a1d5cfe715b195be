"""The programs that found a fault once, and some minutes of a fixed seed, break no promise."""

import re
import subprocess
import sys
from pathlib import Path

# For the fixed seed. No further stage is begun after SECONDS, and the last ones may take a minute.
PROGRAMS, SECONDS = 160, 90
AT_LEAST = 40


def combine(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.combinations", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=Path(__file__).parents[2])
    print(done.stdout)
    return done


def test_what_was_found_once_is_not_found_again() -> None:
    done = combine("--found")

    assert done.returncode == 0, done.stdout + done.stderr


def test_combinations_of_a_fixed_seed_break_no_promise() -> None:
    done = combine("--seed", "13", "--programs", str(PROGRAMS), "--seconds", str(SECONDS))

    assert done.returncode == 0, done.stdout + done.stderr
    assert played(done) >= AT_LEAST, done.stdout


def played(done: subprocess.CompletedProcess[str]) -> int:
    told = re.search(r"^(\d+) programs, \d+ failed, in", done.stdout, re.MULTILINE)
    return int(told[1]) if told else 0
