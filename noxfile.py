"""The tests under every Celery that is supported: `make matrix`, or one of them with `make matrix CELERY=5.4`.

Each topology once under every redis-py: `make clients`, or one of them with `make clients REDIS=6.4`.
All options with each other under one Celery: `make combinations CELERY=5.4`.
"""

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["celery"]

# What each was used with in its time; with the oldest, the oldest that pyproject.toml allows.
COMPANIONS = {
    "5.4": ("kombu==5.3.4", "redis==5.0.0"),
    "5.5": ("kombu~=5.5.0", "redis~=5.0"),
    "5.6": ("kombu~=5.6.0", "redis~=6.0"),
    "5.7": (),
}
# Every redis-py that changed what topologies rest on, each with a Celery whose kombu takes it.
CLIENTS = {
    "5.0": ("5.4", "redis==5.0.0"),
    "5.2": ("5.5", "redis~=5.2.0"),
    "6.4": ("5.6", "redis~=6.4.0"),
    "7.0": ("5.7", "redis~=7.0.0"),
    "7.4": ("5.7", "redis~=7.4.0"),
    "newest": ("5.7", "redis"),
}
TESTS = (
    "tests/unit",
    "tests/contract",
    "tests/integration",
    "tests/acceptance",
    "tests/frameworks",
    "tests/testing_kit",
    "tests/pages",
)
# They look at the benchmarks and the example, which `make test` does under the newest.
ELSEWHERE = ("test_demo.py",)


@nox.session
@nox.parametrize("celery", list(COMPANIONS), ids=list(COMPANIONS))
def celery(session: nox.Session, celery: str) -> None:
    """Run the tests under this Celery; arguments take the place of the folders."""
    install(session, celery)
    ignored = [f"--ignore=tests/acceptance/{name}" for name in ELSEWHERE]
    run(session, *ignored, *(session.posargs or TESTS))


@nox.session
@nox.parametrize("redis", list(CLIENTS), ids=list(CLIENTS))
def clients(session: nox.Session, redis: str) -> None:
    """Run the tests of topologies that are marked so under this redis-py."""
    celery, client = CLIENTS[redis]
    install(session, celery, client)
    run(session, "-m", "clients", "tests/topologies", *session.posargs)


@nox.session
@nox.parametrize("celery", list(COMPANIONS), ids=list(COMPANIONS))
def combinations(session: nox.Session, celery: str) -> None:
    """Play combinations under this Celery; arguments are those of `make combinations`."""
    install(session, celery)
    session.run("python", "-m", "tests.combinations", *session.posargs)


def install(session: nox.Session, celery: str, *more: str) -> None:
    """This Celery, and what it was used with."""
    session.install("--editable", ".", "--group", "test", f"celery~={celery}.0", *COMPANIONS[celery], *more)


def run(session: nox.Session, *arguments: str) -> None:
    """Run tests; more at a time than there are cores, for they wait most of the time."""
    session.run("pytest", "--numprocesses=4", "--dist=worksteal", *arguments)
