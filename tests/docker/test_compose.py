"""docker-compose.yml as a user brings it up: the example's story, told by containers, to its end."""

import os
import re
import secrets
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.servers import missing

ROOT = Path(__file__).resolve().parents[2]


class Told(NamedTuple):
    project: str
    code: int
    output: str


def run(*command: str, timeout: float = 60, **env: str) -> "subprocess.CompletedProcess[str]":
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, encoding="utf-8", timeout=timeout, **streams)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def compose() -> tuple[str, ...]:
    if not shutil.which("docker") or run("docker", "info").returncode:
        missing("no Docker engine answers")
    if not run("docker", "compose", "version").returncode:
        return ("docker", "compose")
    if not shutil.which("docker-compose"):
        missing("docker compose is not installed")
    return ("docker-compose",)


@pytest.fixture(scope="module")
def stories(compose: tuple[str, ...]) -> dict[str, Told]:
    built = run(*compose, "build", timeout=300)
    assert built.returncode == 0, built.stdout

    def story(lock: str) -> Told:
        project = f"shop-{lock}-{secrets.token_hex(4)}"
        command = (*compose, "-p", project)
        try:
            told = run(*command, "up", "--no-color", "--exit-code-from", "story", timeout=300, SHOP_LOCK=lock)
        finally:
            run(*command, "down", "-v", "--remove-orphans", timeout=90)
        return Told(project, told.returncode, told.stdout)

    with ThreadPoolExecutor() as pool:
        return dict(zip(("on", "off"), pool.map(story, ("on", "off")), strict=True))


@pytest.mark.parametrize(("lock", "title", "code"), [("on", "with", 0), ("off", "without", 1)])
def test_with_the_lock_nothing_overlaps_and_without_it_much_does(
    stories: dict[str, Told], lock: str, title: str, code: int
) -> None:
    told = stories[lock]
    (overlaps,) = re.findall(rf"{title} the lock: overlaps: (\d+) \(", told.output)

    assert (told.code, int(overlaps) > 0) == (code, bool(code)), told.output


@pytest.mark.parametrize("lock", ["on", "off"])
def test_nothing_is_left_of_it(stories: dict[str, Told], lock: str) -> None:
    mine = ("-q", "--filter", f"label=com.docker.compose.project={stories[lock].project}")

    for listed in (("docker", "ps", "-a"), ("docker", "network", "ls"), ("docker", "volume", "ls")):
        assert run(*listed, *mine).stdout == ""
