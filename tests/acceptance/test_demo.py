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
from rich.console import Console

from example_project.stage.history import History
from example_project.stage.records import Record
from example_project.stage.report import report
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


def test_the_demo_tells_how_the_key_of_a_killed_run_came_free(finished: Demo):
    killed = r"is killed \(SIGKILL\) in .*book_delivery lamp"
    freed = r"The key of book_delivery lamp comes free"
    taken = r"The (next|killed) book_delivery lamp runs"

    assert re.search(f"{killed}.*{freed}.*{taken}", finished.output, re.DOTALL)


def test_the_drawing_is_xml_and_where_the_demo_says(finished: Demo):
    path = re.search(r"^timeline: (\S+)", finished.output, re.MULTILINE)

    assert ET.parse(ROOT / path[1]).getroot().tag.endswith("svg")


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


def test_the_demo_ends_with_what_to_try_next(finished: Demo):
    _, _, following = finished.output.partition("What to try next:\n")
    named = re.findall(r"^  (?!make )(\S+)", following, re.MULTILINE)

    assert named == ["example_project/tasks.py", "docs/tutorial.md"]
    assert all((ROOT / name).is_file() for name in named)
    assert following.endswith("a lock without a task\n")


def test_what_is_no_terminal_gets_no_control_codes(finished: Demo):
    assert "\x1b" not in finished.output


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


def record(what: str, at: float, **facts: str) -> Record:
    return Record(what, int(at * 1e9), facts)


def run(name: str, start: float, end: float, *, worker: str = "one", leaves: bool = True) -> list[Record]:
    facts = {"run": name, "key": "book_delivery lamp", "task_id": name, "worker": worker}
    return [record("enter", start, **facts), record("leave" if leaves else "tick", end, **facts)]


OPENING = record("told", 0.0, text="The shop opens.")
KILLED = [*run("killed", 1.0, 2.0, leaves=False), record("killed", 2.1, worker="one")]
SUCCESSOR = run("successor", 6.0, 7.0, worker="two")
END = record("end", 8.0, lamps="20", delivered="20", mails="1")


def history_of(*records: Record) -> History:
    history = History(locked=True, keys=["book_delivery lamp"])
    history.read(records)
    return history


def exit_code(*records: Record) -> int:
    return report([history_of(*records)], Console(quiet=True), kill=True)


def test_a_run_that_enters_before_another_leaves_is_an_overlap():
    history = history_of(OPENING, *run("first", 1.0, 2.0), *run("second", 1.9, 3.0), *run("third", 3.0, 4.0))

    assert history.overlaps == 1


def test_every_pair_of_runs_counts():
    runs = [line for number in range(4) for line in run(str(number), 1.0 + number / 10, 5.0)]

    assert history_of(OPENING, *runs).overlaps == 6


def test_a_killed_run_lasts_until_its_last_tick():
    assert history_of(OPENING, *KILLED, *run("early", 1.9, 3.0)).overlaps == 1
    assert history_of(OPENING, *KILLED, *run("later", 2.05, 3.0)).overlaps == 0


def test_the_exit_code_is_0_where_the_story_went_well():
    assert exit_code(OPENING, *KILLED, *SUCCESSOR, END) == 0


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([OPENING, *KILLED, *SUCCESSOR, *run("intruder", 6.5, 7.5), END], id="an overlap"),
        pytest.param([OPENING, END], id="nothing ran"),
        pytest.param([OPENING, *KILLED, END], id="nobody ran after the killed run"),
        pytest.param([OPENING, *SUCCESSOR, END], id="nobody was killed"),
        pytest.param([OPENING, *KILLED, *SUCCESSOR], id="the story did not end"),
    ],
)
def test_the_exit_code_is_1_where_it_did_not(records: list[Record]):
    assert exit_code(*records) == 1
