"""Tasks that public projects lock; test_patterns.py says whose need each is."""

import os
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import worker_init

from celery_singleton_lock import Lease, Lock, SingletonTask, signals

STORE = os.environ.get("TEST_STORE", "redis://")

app = Celery("patterns", broker=STORE, backend=STORE)
app.conf.singleton_lock_url = STORE


@app.task(base=SingletonTask, lock_key=lambda issue, data, user, labels: (issue, user, sorted(labels)))
def track(issue: int, data: str, user: int, labels: list[str]) -> str:
    return data


@app.task(base=SingletonTask, lock_key=("project",))
def pull(project: str) -> str:
    return project


@signals.lock_conflict.connect(weak=False)
def note_that_it_was_busy(sender: Any, **_: Any) -> None:
    if sender.name == pull.name:
        app.backend.set(f"busy:{sender.request.args[0]}", "yes")


class Unique(SingletonTask):
    abstract = True
    lock_mode = "until_executed"
    lock_key = ("character",)


@app.task(base=Unique, ignore_result=True)
def update(character: int, force: bool = False) -> None: ...


@app.task(base=SingletonTask, lock_key=lambda catalogue, force=False: (catalogue, uuid4().hex if force else ""))
def rebuild(catalogue: str, force: bool = False) -> str:
    return f"{catalogue} {force}"


@app.task(base=SingletonTask, lock_mode="until_executed", lock_on_conflict="raise", lock_key=("source",))
def export(source: str) -> str:
    return source


class Notify(SingletonTask):
    """A task that is a class, and takes whatever it is given."""

    name = "patterns.notify"
    lock_key = "{kwargs[repository]}/{kwargs[commit]}"

    def run(self, *args: Any, **kwargs: Any) -> str:
        return f"{kwargs['commit']} {len(args)}"


notify: Any = app.register_task(Notify())


@app.task(base=SingletonTask, bind=True, max_retries=None)
def query(self: Any, team: int, limit: int) -> str:
    place = Lock(f"queries of {team}", app=app, limit=limit)
    if place.acquire(blocking=False) is None:
        raise self.retry(countdown=0.1)
    try:
        return "queried"
    finally:
        place.release()


@app.task(base=SingletonTask, bind=True, max_retries=None)
def measure(self: Any, servers: list[str]) -> str:
    for server in servers:
        free = Lock(f"measures {server}", app=app)
        if free.acquire(blocking=False) is not None:
            try:
                return server
            finally:
                free.release()
    raise self.retry(countdown=0.1)


@app.task(base=SingletonTask, lock_mode="until_and_while_executing", lock_key=(), lock_on_conflict="reschedule")
def poll(rest: int) -> str | None:
    return str(poll.delay(rest - 1).id) if rest else None


class FollowedByItself(SingletonTask):
    """Publishes the next call once its own has ended well."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        if retval:
            self.apply_async((retval - 1,), task_id=f"{task_id}+")


@app.task(base=FollowedByItself, lock_mode="until_executed", lock_key=())
def follow(rest: int) -> int:
    return rest


@app.task(base=SingletonTask, lock_mode="until_executed", lock_key=("document",))
def prune(document: int) -> int:
    return document


primary = Lock("primary", app=app)
leases: list[Lease | None] = []


def become_the_primary(**_: Any) -> None:
    leases.append(primary.acquire(timeout=10))


# No worker that another test starts in this process.
if "TEST_STORE" in os.environ:
    worker_init.connect(become_the_primary)
