"""The demonstration, run as a user runs it, and the count that it rests on."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 200.0
# The server, and of each shop a beat, a story and two workers with two children each.
PROCESSES = 1 + 2 * 8


@dataclass
class Demo:
    process: "subprocess.Popen[str]"
    directory: Path
    output: str = ""

    def finish(self) -> int:
        self.output, _ = self.process.communicate(timeout=LONGEST)
        return self.process.returncode

    def children(self) -> list[str]:
        entries = Path("/proc").glob("[0-9]*")
        return [entry.name for entry in entries if entry.name != str(self.process.pid) and self._started(entry)]

    def _started(self, entry: Path) -> bool:
        try:
            # The server works in the directory, and overwrites its environment with its title.
            known = os.readlink(entry / "cwd").encode() + (entry / "environ").read_bytes()
        except OSError:
            return False
        return str(self.directory).encode() in known


@contextmanager
def demo(directory: Path) -> Iterator[Demo]:
    process = subprocess.Popen(
        [sys.executable, "-m", "example_project.demo"],
        cwd=ROOT,
        # Another process of the tests may play it, too.
        env={**os.environ, "TMPDIR": str(directory), "SHOP_OUT": f"{directory}-out", "FORCE_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    try:
        yield Demo(process, directory)
    finally:
        process.terminate()
        process.communicate(timeout=60)


def said_in(picture: Path) -> list[str]:
    said = ["".join(each.itertext()) for each in ET.parse(picture).iter() if each.tag.endswith(("style", "text"))]
    # Which run dies with a worker is a matter of luck.
    differs = re.compile(r"\d|$|worker \w+ killed$|Worker \w+ is killed|The (key of|next|killed) ")
    return [re.sub(r"(?<=overlaps: )[1-9]\d*", "many", each) for each in said if not differs.match(each)]


@pytest.mark.prove
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_the_demo_shows_what_it_promises_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with demo(tmp_path) as running:
        assert running.finish() == 0, running.output
        assert running.children() == []
        assert list(tmp_path.iterdir()) == []
    output = running.output

    without = re.search(r"^without the lock: overlaps: (\d+)", output, re.MULTILINE)
    assert int(without[1]) > 0
    # There are four calls. A busy machine may publish the last one after the second run.
    runs, superseded = re.findall(r"^rebuild_index .* (\d+) ran .*?(\d+)↷", output, re.MULTILINE)[0]
    assert int(runs) <= 3
    assert int(runs) + int(superseded) == 4
    assert re.search(r"^with the lock: overlaps: 0 \(.* index: 4\)", output, re.MULTILINE)
    head, *rows = (
        output.partition("$ celery -A example_project.app singleton list\n")[2].partition("\n\n")[0].splitlines()
    )
    assert head.startswith("LOCK ")
    assert [row for row in rows if row.startswith("example_project.tasks.book_delivery") and " held " in row]
    drawn = re.search(r"^timeline: (\S+)", output, re.MULTILINE)
    shown = re.search(r"\]\((docs/\S+?\.svg)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert said_in(ROOT / shown[1]) == said_in(ROOT / drawn[1]), "the picture is out of date: `make picture`"


@pytest.mark.prove
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    with demo(tmp_path) as running:
        until(lambda: len(running.children()) == PROCESSES, "everything has started", timeout=90)
        running.process.send_signal(signal.SIGINT)

        assert running.finish() == 128 + signal.SIGINT
        assert running.children() == []
        assert list(tmp_path.iterdir()) == []


def test_ten_tickets_are_sold_ten_times_with_the_lock_and_oversold_without() -> None:
    done = subprocess.run([sys.executable, "-m", "example_project.tickets"], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    locked, unlocked = map(int, re.findall(r"(\d+) sold", done.stdout))
    assert locked == 10
    assert unlocked > 10
