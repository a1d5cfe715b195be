"""docker-compose.yml as a user brings it up: the example's story, told by containers, to its end."""

import os
import re
import secrets
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest

from tests.servers import missing

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Compose:
    """The project under a name of its own, so that it meets no other."""

    command: tuple[str, ...]
    lock: str
    name: str

    def story(self) -> "subprocess.CompletedProcess[str]":
        """Bring it up, let the story end, and take everything down, whatever happens."""
        try:
            return self.run("up", "--no-color", "--exit-code-from", "story", timeout=300)
        finally:
            self.run("down", "-v", "--remove-orphans", timeout=90)

    def run(self, *arguments: str, timeout: float) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*self.command, "-p", self.name, *arguments],
            cwd=ROOT,
            env={**os.environ, "SHOP_LOCK": self.lock},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=timeout,
        )


@dataclass(frozen=True)
class Told:
    """How a story ended."""

    project: Compose
    code: int
    output: str

    def overlaps(self, title: str) -> int:
        line = re.search(rf"{title} the lock: overlaps: (\d+) \(", self.output)
        assert line, self.output
        return int(line[1])


@pytest.fixture(scope="module")
def compose(docker_client: "docker.DockerClient") -> tuple[str, ...]:
    """The command, as a plugin of the client or as the program of old."""
    if shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return ("docker", "compose")
    if not shutil.which("docker-compose"):
        missing("docker compose is not installed")
    return ("docker-compose",)


@pytest.fixture(scope="module")
def stories(compose: tuple[str, ...]) -> dict[str, Told]:
    """Both at the same time, with the lock and without."""
    projects = [Compose(compose, lock, f"shop-{lock}-{secrets.token_hex(4)}") for lock in ("on", "off")]
    built = projects[0].run("build", timeout=300)
    assert built.returncode == 0, built.stdout
    with ThreadPoolExecutor() as pool:
        ended = zip(projects, pool.map(Compose.story, projects), strict=True)
        return {project.lock: Told(project, result.returncode, result.stdout) for project, result in ended}


def test_with_the_lock_nothing_overlaps_and_the_story_ends_with_0(stories: dict[str, Told]) -> None:
    told = stories["on"]

    assert told.overlaps("with") == 0
    assert told.code == 0, told.output


def test_without_the_lock_much_overlaps_and_the_story_ends_with_1(stories: dict[str, Told]) -> None:
    told = stories["off"]

    assert told.overlaps("without") > 0
    assert told.code == 1, told.output


@pytest.mark.parametrize("lock", ["on", "off"])
def test_nothing_is_left_of_it(stories: dict[str, Told], lock: str, docker_client: "docker.DockerClient") -> None:
    mine = {"label": f"com.docker.compose.project={stories[lock].project.name}"}

    assert docker_client.containers.list(all=True, filters=mine) == []
    assert docker_client.networks.list(filters=mine) == []
    assert docker_client.volumes.list(filters=mine) == []
