"""What a command of celery loads of the library, and what a project gets that never imports it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server
from tests.waiting import until
from tests.workers import Process

APP = "tests.acceptance.unaware_app"
LOADED = """
import atexit, runpy, sys
atexit.register(lambda: print(*(name for name in sys.modules if name.startswith("celery_singleton_lock"))))
sys.argv[0] = "celery"
runpy.run_module("celery", run_name="__main__")
"""


def celery(*arguments: str, **env: str) -> tuple[str, set[str]]:
    """What a command writes, and what it loads of the library."""
    command = [sys.executable, "-c", LOADED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    text, _, loaded = done.stdout.rstrip("\n").rpartition("\n")
    return text, set(loaded.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["worker", "--help"]], ids=" ".join)
def test_a_command_of_celerys_own_loads_the_name_of_ours(arguments: list[str]) -> None:
    text, loaded = celery(*arguments)

    assert loaded == {"celery_singleton_lock", "celery_singleton_lock.command", "celery_singleton_lock.signals"}
    assert arguments != ["--help"] or "singleton  Show the locks of singleton tasks" in text


def test_our_command_has_its_own_commands() -> None:
    text, loaded = celery("singleton", "--help")

    assert "celery_singleton_lock.operations.cli" in loaded
    assert all(f"\n  {name} " in text for name in ("break", "doctor", "list", "show", "web"))


def test_our_command_takes_the_options_that_an_app_adds_to_each(valkey: Server) -> None:
    app = ["--app", APP]

    assert celery(*app, "singleton", "--site", "blue", "list", "--json", TEST_STORE=valkey.url)[0] == "[]"
    assert "--site" in celery(*app, "singleton", "--help", TEST_STORE=valkey.url)[0]


def test_a_worker_whose_project_never_imports_us_tells_of_an_option_without_the_base(valkey: Server) -> None:
    worker = Process(APP, {"TEST_STORE": valkey.url}, "worker", "--pool", "solo", "--without-gossip")
    try:
        until(lambda: " ready." in worker.log(), "it is ready", timeout=60)
        assert "lock.no_base: task bare (" in worker.log()
    finally:
        worker.close()


def test_a_quiet_beat_whose_project_never_imports_us_is_checked(valkey: Server, tmp_path: Path) -> None:
    env = {"TEST_STORE": valkey.url, "TEST_LOCKS": "memory://"}
    beat = Process(APP, env, "--quiet", "beat", "--pidfile", "", "--schedule", str(tmp_path / "schedule"))
    try:
        until(lambda: "lock.misconfigured: " in beat.log(), "it is refused", timeout=60)
    finally:
        beat.close()
