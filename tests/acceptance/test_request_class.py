"""A request class of the user's and ours serve the same task: neither loses what it does."""

from tests.acceptance.request_app import TASKS, app
from tests.recorder import Recorder
from tests.waiting import until
from tests.workers import kill_child, workers

APP = "tests.acceptance.request_app"


def test_the_key_of_a_killed_child_is_free_within_seconds_and_their_class_is_told(recorder: Recorder) -> None:
    with workers(APP, concurrency=len(TASKS)):
        for name, task in TASKS.items():
            task.delay(name)
        begun = until(lambda: len(found := recorder.events("enter")) == len(TASKS) and found, "all run")
        for event in begun:
            kill_child(app, event)

        for name, task in TASKS.items():
            until(lambda t=task, n=name: not t.lock_holders(n), f"the key of {name} is free", timeout=40)
        told = until(lambda: len(found := recorder.events("told")) == len(TASKS) and found, "theirs is told")

    assert {event.key for event in told} == set(TASKS)
