"""The ticket sale: with `Lock` exactly as many are sold as there are, without it more."""

import re
import subprocess
import sys


def test_ten_tickets_are_sold_ten_times_with_the_lock_and_oversold_without() -> None:
    done = subprocess.run([sys.executable, "-m", "example_project.tickets"], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    locked, unlocked = map(int, re.findall(r"(\d+) sold", done.stdout))
    assert locked == 10
    assert unlocked > 10
