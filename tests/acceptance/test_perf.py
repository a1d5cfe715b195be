"""Events are counted in other processes, where this machine has a `perf`; of instructions, not every machine says."""

import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from benchmarks import perf
from tests.waiting import until

# The kernel counts them itself, so they are there without a processor that counts.
FAULTS = "page-faults"
PAGES = 2000
# Writes to so many new pages whenever it is told to.
PROGRAM = f"""
import mmap
for line in open(0):
    with mmap.mmap(-1, {PAGES} * mmap.PAGESIZE) as pages:
        for page in range({PAGES}):
            pages[page * mmap.PAGESIZE] = 1
    print("written", flush=True)
"""

_is_there = pytest.mark.skipif(shutil.which("perf") is None, reason="perf is not installed")


def needs_perf(test: Callable[..., None]) -> Callable[..., None]:
    """A bare machine has none."""
    return pytest.mark.prove(_is_there(test))


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:
        writes(it)
        yield it
        it.kill()


def writes(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write("write\n")
    program.stdin.flush()
    assert program.stdout.readline() == "written\n"


@needs_perf
def test_what_happens_between_the_beginning_and_the_end_is_counted(program: subprocess.Popen[str]) -> None:
    if perf.problem(FAULTS):
        pytest.skip("perf may not count even this")
    writes(program)
    with perf.counters([program.pid], event=FAULTS) as (counter,):
        writes(program)
        counted = counter.end()
    writes(program)
    assert PAGES <= counted < 2 * PAGES


@needs_perf
def test_what_cannot_be_counted_is_no_number_and_no_error(program: subprocess.Popen[str]) -> None:
    with perf.counters([program.pid], event="no-such-event") as (counter,):
        assert math.isnan(counter.end())


@needs_perf
def test_a_process_that_is_gone_is_no_error_either(program: subprocess.Popen[str]) -> None:
    program.kill()
    until(lambda: program.poll() is not None, "it has ended")
    with perf.counters([program.pid], event=FAULTS) as (counter,):
        assert math.isnan(counter.end())


def test_why_there_is_nothing_to_count_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    perf.problem.cache_clear()
    try:
        assert perf.problem() == "perf is not installed"
    finally:
        perf.problem.cache_clear()
