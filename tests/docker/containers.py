"""The nodes as containers, by pytest-celery."""

import os
import sys
from pathlib import Path
from typing import Any

import celery
from pytest_celery import CeleryTestWorker, CeleryWorkerContainer, RedisContainer
from pytest_docker_tools import build, container, fxtr
from pytest_docker_tools.exceptions import ContainerFailed
from pytest_docker_tools.wrappers import Container

from tests.recorder import Event
from tests.waiting import until

APP = "tests.docker.app"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class PromptlyReady:
    """Ready as soon as its log says so."""

    def _wait_ready(self, timeout: int = 180) -> bool:
        until(self._says_so, f"{self.name} is ready", timeout)
        return True

    def _says_so(self) -> bool:
        self.reload()
        if self.status != "running":
            raise ContainerFailed(self, f"{self.name} died while it started")
        return self.ready_prompt.encode() in self._container.logs()


# Reached by the port that is published on the host: who finds a file /.dockerenv on it would
# else take the host for a container, and the port within for the port without.


class StoreContainer(PromptlyReady, RedisContainer):
    @property
    def port(self) -> int:
        return self.ports["6379/tcp"][0]


class WorkerContainer(PromptlyReady, CeleryWorkerContainer):
    @classmethod
    def of(cls, begun: Container) -> "WorkerContainer":
        return cls(begun._container)

    @classmethod
    def command(cls, *args: str, **kwargs: object) -> list[str]:
        return [
            *("celery", "-A", APP, "worker", "--loglevel", cls.log_level(), "-n", f"{cls.worker_name()}@%h"),
            *("--concurrency", "2", "--without-gossip", "--without-mingle", *args),
        ]


class WorkerNode(CeleryTestWorker):
    """A worker in a container, which can be killed."""

    def runs(self, event: Event) -> bool:
        return event.facts["worker"] == self.hostname()


# Fixtures, to be given a name in conftest.py. The servers live as long as the session, the workers as long as a test.


def store() -> Any:
    return container(
        image="redis:7-alpine",
        wrapper_class=StoreContainer,
        scope="session",
        network="{default_pytest_celery_network.name}",
        ports={"6379/tcp": ("127.0.0.1",)},
        command=StoreContainer.command(),
        timeout=180,
    )


def worker_image() -> Any:
    return build(
        path=str(HERE / "worker"),
        tag="celery-singleton-lock/worker:tests",
        buildargs={"PYTHON": "{}.{}".format(*sys.version_info), "CELERY": f"celery[redis]=={celery.__version__}"},
    )


def worker(image: str) -> Any:
    """Begun, and not waited for, so that two can start at the same time."""
    return container(
        image=f"{{{image}.id}}",
        network="{default_pytest_celery_network.name}",
        command=WorkerContainer.command(),
        environment=fxtr("default_worker_env"),
        volumes={str(ROOT): {"bind": "/src", "mode": "ro"}},
        # Whoever may read the sources here may read them there.
        user=str(os.getuid()),
        timeout=180,
    )
