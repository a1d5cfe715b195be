"""Tasks that replace themselves by a workflow, for the workers of the acceptance tests."""

from typing import Any

from celery import chain, chord, group

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import app, collect, recorder
from tests.gates import wait_at

__all__ = ["app"]


@app.task(bind=True)
def step(self: Any, gate: str | None = None, fails: bool = False) -> str:
    with recorder.body("step", self.request.id):
        if gate:
            wait_at(recorder, gate)
        if fails:
            raise ValueError("a step")
    return "done"


def workflow_with(name: str, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name=name, lock_mode="until_executed", lock_key=("key",), **options)
    def workflow(self: Any, key: Any, kind: str = "", gate: str | None = None) -> Any:
        with recorder.body("begin", self.request.id):
            pass
        if not kind:
            return "alone"
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
            "unserialisable": lambda: step.si(object()),
        }
        raise self.replace(canvases[kind]())

    return workflow


workflow = workflow_with("workflow")
short_lived = workflow_with("short_lived", lock_queue_ttl=3)
rescheduled = workflow_with("rescheduled", lock_on_conflict="reschedule")
