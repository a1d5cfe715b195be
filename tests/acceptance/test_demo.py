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

pytestmark = pytest.mark.prove

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 200.0
# The server, and of each shop a beat, a story and two workers with two children each.
PROCESSES = 1 + 2 * 8


@dataclass
class Demo:
    """A demo with a temporary directory of its own, by which its processes are known."""

    process: "subprocess.Popen[str]"
    directory: Path
    output: str = ""

    def finish(self) -> int:
        self.output, _ = self.process.communicate(timeout=LONGEST)
        return self.process.returncode

    def children(self) -> list[str]:
        """What it has started and what still runs."""
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with demo(tmp_path_factory.mktemp("demo")) as running:
        running.finish()
        yield running


def test_the_demo_succeeds(finished: Demo):
    assert finished.process.returncode == 0, finished.output


def test_nothing_overlaps_with_the_lock_and_much_does_without(finished: Demo):
    assert re.search(r"^with the lock: overlaps: 0 \(", finished.output, re.MULTILINE)

    without = re.search(r"^without the lock: overlaps: (\d+)", finished.output, re.MULTILINE)
    assert int(without[1]) > 0


def test_the_demo_shows_what_an_operator_sees_of_the_killed_run(finished: Demo):
    _, _, listed = finished.output.partition("$ celery -A example_project.app singleton list\n")
    head, *rows = listed.partition("\n\n")[0].splitlines()

    assert head.startswith("LOCK ")
    assert [row for row in rows if row.startswith("example_project.tasks.book_delivery") and " held " in row]


def test_many_changes_cause_one_more_rebuild_of_the_index(finished: Demo):
    runs, superseded = re.findall(r"^rebuild_index .* (\d+) ran .*?(\d+)↷", finished.output, re.MULTILINE)[0]

    # Of four calls; a busy machine may publish the last one after the second run.
    assert int(runs) <= 3
    assert int(runs) + int(superseded) == 4
    assert re.search(r"^with the lock: .* index: 4\)", finished.output, re.MULTILINE)


def said_in(picture: Path) -> list[str]:
    """The style and the texts of a timeline, without what differs from one demonstration to the next."""
    said = ["".join(each.itertext()) for each in ET.parse(picture).iter() if each.tag.endswith(("style", "text"))]
    # What dies with a worker is a matter of luck, beside the lamps.
    differs = re.compile(r"\d|$|worker \w+ killed$|Worker \w+ is killed|The (key of|next|killed) ")
    return [re.sub(r"(?<=overlaps: )[1-9]\d*", "many", each) for each in said if not differs.match(each)]


def test_the_picture_of_the_readme_is_that_of_this_demonstration(finished: Demo):
    drawn = re.search(r"^timeline: (\S+)", finished.output, re.MULTILINE)
    shown = re.search(r"\]\((docs/\S+?\.svg)\)", (ROOT / "README.md").read_text(encoding="utf-8"))

    assert said_in(ROOT / shown[1]) == said_in(ROOT / drawn[1]), "the picture is out of date: `make picture`"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_the_demo_leaves_nothing_behind(finished: Demo):
    assert finished.children() == []
    assert list(finished.directory.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path):
    with demo(tmp_path) as running:
        until(lambda: len(running.children()) == PROCESSES, "everything has started", timeout=90)
        running.process.send_signal(signal.SIGINT)

        assert running.finish() == 128 + signal.SIGINT
        assert running.children() == []
        assert list(tmp_path.iterdir()) == []
