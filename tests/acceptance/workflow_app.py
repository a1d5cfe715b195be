import logging
import os
import signal
import time
from typing import Any

from celery import chain, chord, group, signature
from celery.backends.base import Backend
from celery.backends.redis import RedisBackend

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import app, collect, recorder

__all__ = ["app"]


@app.task(bind=True)
def step(self: Any, gate: str | None = None, fails: bool = False) -> str:
    with recorder.body("step", self.request.id):
        if gate:
            recorder.wait_at(gate)
        if fails:
            raise ValueError("a step")
    return "done"


def workflow_with(name: str, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name=name, lock_mode="until_executed", lock_key=("key",), **options)
    def workflow(self: Any, key: Any, kind: str = "", gate: str | None = None, until: str | None = None) -> Any:
        with recorder.body("begin", self.request.id):
            if not kind:
                return "alone"
            try:
                raise self.replace(canvas(self, key, kind, gate))
            finally:
                if until:
                    recorder.wait_at(until)

    def canvas(self: Any, key: Any, kind: str, gate: str | None) -> Any:
        canvases = {
            "chain": lambda: chain(step.si(gate), step.si()),
            "group": lambda: group(step.si(gate), step.si()),
            "chord": lambda: chord([step.si(gate), step.si()], collect.s()),
            "failing chain": lambda: chain(step.si(gate, fails=True), step.si()),
            "failing chord": lambda: chord([step.si(gate, fails=True), step.si()], collect.s()),
            "failing last": lambda: chain(step.si(), step.si(gate, fails=True)),
            "lost": lambda: chain(step.si(gate), step.si().set(queue="nobody takes from it")),
            "own key": lambda: chain(step.si(gate), self.si(key), step.si()),
            "own key last": lambda: chain(step.si(gate), self.si(key)),
        }
        return canvases[kind]()

    return workflow


# With results that nobody keeps, only the worker that ends a workflow knows that it has ended.


@app.task(bind=True, max_retries=None)
def held(self: Any, gate: str) -> str:
    """It waits until the gate opens, by retries of its own, and so occupies no process."""
    recorder.write("held", "step", self.request.id)
    if not recorder._client.exists(f"gate:{gate}"):
        raise self.retry(countdown=0.3)
    return "done"


@app.task(bind=True)
def ends(self: Any, how: str = "well") -> str:
    if how == "fails":
        raise ValueError("a step")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleeps":
        recorder.write("sleeps", "step", self.request.id)
        # Python hears a signal that comes just before a sleep only after that sleep.
        for _ in range(100):
            time.sleep(1)
    return "done"


@app.task(backend=RedisBackend(app=app, url=app.conf.result_backend))
def ends_elsewhere() -> str:
    return "done"


def replaces_itself(self: Any) -> Any:
    raise self.replace(chain(ends.si(), ends.si()))


replaced = app.task(bind=True, name="replaced")(replaces_itself)
replaced_of_ours = app.task(base=SingletonTask, bind=True, name="replaced_of_ours")(replaces_itself)


@app.task(bind=True)
def replaced_by_group(self: Any) -> Any:
    raise self.replace(group(ends.si(), ends.si()))


@app.task(base=SingletonTask, lock_key=())
def skipped() -> str:
    return "ran"


@app.task(base=SingletonTask, bind=True, lock_mode="until_executed", lock_key=("key",))
def inner(self: Any, key: str) -> Any:
    raise self.replace(chain(ends.si(), ends.si()))


ENDINGS: dict[str, Any] = {
    "one step": lambda first: first,
    "a chain": lambda first: chain(first, ends.si()),
    "a group": lambda first: group(first, ends.si()),
    "a chord": lambda first: chord([first, ends.si()], collect.s()),
    "a chord in a chain": lambda first: chain(first, group(ends.si(), ends.si()), ends.si(), ends.si()),
    "the last step keeps its result elsewhere": lambda first: chain(first, ends_elsewhere.si()),
    "a step fails": lambda first: chain(first, ends.si("fails"), ends.si(), ends.si()),
    "the last step fails": lambda first: chain(first, ends.si("fails")),
    "a step before a chord fails": lambda first: chain(first, ends.si("fails"), group(ends.si(), ends.si()), ends.si()),
    "a member of a chord fails": lambda first: chord([first, ends.si("fails")], collect.s()),
    "a member fails in a chain": lambda first: chain(
        first, chord([ends.si("fails"), chain(ends.si(), ends.si())], ends.si()), ends.si()
    ),
    "the body of a chord fails": lambda first: chord([first, ends.si()], ends.si("fails")),
    "a step is killed": lambda first: chain(first, ends.si("is killed"), ends.si()),
    "a member of a chord is killed": lambda first: chord([chain(first, ends.si("is killed")), ends.si()], collect.s()),
    "a step is stopped by its time limit": lambda first: chain(first, ends.si("sleeps").set(time_limit=1), ends.si()),
    "a step expires": lambda first: chain(first, ends.si().set(expires=0.001, countdown=0.5), ends.si()),
    "a step is revoked": lambda first: chain(first, ends.si().set(task_id="revoked"), ends.si()),
    "a step is terminated": lambda first: chain(first, ends.si("sleeps").set(task_id="terminated"), ends.si()),
    "a step is skipped": lambda first: chain(first, skipped.si(), ends.si()),
    "a step is replaced": lambda first: chain(first, replaced.si(), ends.si()),
    "the last step is replaced": lambda first: chain(first, replaced.si()),
    "the last step is replaced by a group": lambda first: chain(first, replaced_by_group.si()),
    "a step of ours is replaced": lambda first: chain(first, replaced_of_ours.si(), ends.si()),
    "the last step of ours is replaced": lambda first: chain(first, replaced_of_ours.si()),
    "the last step is a workflow": lambda first: chain(first, inner.si("inner")),
    "the last step is unknown": lambda first: chain(first, signature("nobody.knows.it", immutable=True, app=app)),
}


@app.task(base=SingletonTask, bind=True, ignore_result=True, lock_mode="until_executed", lock_key=("how",))
def ending(self: Any, how: str) -> Any:
    """It keeps no result, so nobody can look whether its workflow has ended."""
    raise self.replace(ENDINGS[how](held.si("all are held")))


workflow = workflow_with("workflow")
short_lived = workflow_with("short_lived", lock_queue_ttl=3)
rescheduled = workflow_with("rescheduled", lock_on_conflict="reschedule")

if os.environ.get("TEST_AGENT"):
    mark_as_done = Backend.mark_as_done

    def _traced(backend: Any, task_id: str, *args: Any, **kwargs: Any) -> Any:
        """As an agent that is loaded after this library."""
        logging.getLogger(__name__).warning("the agent has seen the end of %s", task_id)
        return mark_as_done(backend, task_id, *args, **kwargs)

    Backend.mark_as_done = _traced
