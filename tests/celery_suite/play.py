"""Celery's tests, played with the lock and without it, each on a server of its own."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.servers import Server, running

ROOT = Path(__file__).parents[2]
# The source distribution on PyPI has the tests; no wheel has them.
KEPT = ROOT / "build" / "celery-suite"
# The tests, and what they import. Not Celery itself: the installed one is tried.
WANTED = ("t/__init__.py", "t/canvas_helpers.py", "t/integration/")
FILES = ("test_tasks.py", "test_canvas.py")
# Celery's own marks and names; without its reruns, which would hide what differs.
INI = """
[pytest]
python_classes = test_*
addopts = --strict-markers
markers =
    amqp
    celery
    flaky
xfail_strict = true
"""
# A door that Celery's tests leave open for settings.
SETTINGS = "integration-tests-config.json"
LOCKED = {"singleton_lock_on_conflict": "reschedule"}
PLUGINS = ("celery.contrib.pytest", "pytest_timeout", "tests.celery_suite.inside", "no:cacheprovider")
# Seconds for one test. Celery's longest takes forty.
BOUND = 120


@dataclass(frozen=True)
class Outcome:
    test: str
    outcome: str
    why: str = field(compare=False)


Outcomes = dict[str, list[Outcome]]


def play_both(*, only: Sequence[str] = (), without: Sequence[str] = (), seconds: float) -> tuple[Outcomes, Outcomes]:
    _fetch()
    with ThreadPoolExecutor(2) as pool:
        sides = [pool.submit(_play, only, without, seconds, locked=locked) for locked in (False, True)]
        plain, locked = (side.result() for side in sides)
    return plain, locked


def _play(only: Sequence[str], without: Sequence[str], seconds: float, *, locked: bool) -> Outcomes:
    with tempfile.TemporaryDirectory(prefix="celery-suite-") as name, running("valkey") as server:
        directory = Path(name)
        _unpack(directory)
        (directory / "pytest.ini").write_text(INI, encoding="utf-8")
        (directory / SETTINGS).write_text(json.dumps(LOCKED if locked else {}), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "--quiet", "--tb=short", f"--timeout={BOUND}"]
        command += [part for plugin in PLUGINS for part in ("-p", plugin)]
        command += [f"t/integration/{test}" for test in only or FILES]
        command += [f"--deselect=t/integration/{test}" for test in without]
        code = _run(command, directory, _environment(server, directory, locked=locked), seconds)
        # 0: all have passed, 1: some have not. Anything else, and not all have been played.
        assert code in (0, 1), (directory / "log").read_text(errors="replace")[-5000:]
        lines = (directory / "outcomes").read_text(encoding="utf-8").splitlines()
    found: Outcomes = defaultdict(list)
    for line in lines:
        outcome = Outcome(**json.loads(line))
        found[outcome.test].append(outcome)
    return found


def _run(command: Sequence[str], directory: Path, env: dict[str, str], seconds: float) -> int:
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(seconds)
    finally:
        # With the pool of its worker, which outlives it if it was killed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(server: Server, directory: Path, *, locked: bool) -> dict[str, str]:
    return {
        **os.environ,
        "TEST_BROKER": server.url,
        "TEST_BACKEND": server.url,
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": str(server.port),
        "CELERY_SUITE_OUTCOMES": str(directory / "outcomes"),
        "CELERY_SUITE_LOCKED": "yes" if locked else "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),
    }


def _fetch() -> None:
    """Download the source distribution of the Celery that is installed, unless it is there."""
    if not _archive().exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--no-binary", ":all:", "--dest", str(KEPT)]
        done = subprocess.run(
            [*pip, *options, f"celery=={version('celery')}"], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr


def _unpack(directory: Path) -> None:
    with tarfile.open(_archive()) as archive:
        for member in archive.getmembers():
            inside = member.name.partition("/")[2]
            if inside.startswith(WANTED):
                member.name = inside
                archive.extract(member, directory, filter="data")


def _archive() -> Path:
    return KEPT / f"celery-{version('celery')}.tar.gz"
