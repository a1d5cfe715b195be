"""The store in memory, as a process without a server uses it."""

import os
import subprocess
import sys

import pytest

from tests.servers import FakeClock

CLIENT_WHOSE_CLOCK_IS_SET = """
import sys, time
from celery_singleton_lock import Lock
with Lock("stock", url="memory://", ttl=60) as lease:
    print(time.time(), flush=True)
    sys.stdin.readline()
    others = Lock("stock", url="memory://").acquire(blocking=False)
    print(time.time(), others is None, flush=True)
"""


@pytest.mark.parametrize("step", ["+3600", "-3600"])
def test_a_wall_clock_that_is_set_moves_no_lock(wall_clock: FakeClock, step: str) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT_WHOSE_CLOCK_IS_SET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **wall_clock.env},
    )
    assert client.stdout is not None
    before = float(client.stdout.readline())
    wall_clock.step(step)
    output, _ = client.communicate("\n", timeout=20)

    after, is_held = output.split()
    assert abs(float(after) - before - int(step)) < 60
    assert is_held == "True"


def test_without_its_extra_one_line_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['{}'] = None\nfrom celery_singleton_lock import Lock\nLock('stock', url='memory://')"
    )
    for package in ("fakeredis", "lupa"):
        ran = subprocess.run(
            [sys.executable, "-c", program.format(package)], capture_output=True, text=True, timeout=30
        )

        *_, said = ran.stderr.splitlines()
        assert "ConfigurationError: memory:// needs more packages" in said
        assert said.endswith('pip install "celery-singleton-lock[testing]"')
