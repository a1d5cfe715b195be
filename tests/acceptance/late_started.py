from typing import Any

from celery import states
from celery.backends.redis import RedisBackend

from tests.waiting import until


class LateStarted(RedisBackend):
    """Redis' backend. For a later delivery of a message it waits until the call has ended."""

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        if state == states.STARTED and self.client.incr(f"started {task_id}") > 1:
            until(lambda: self.get_task_meta(task_id, cache=False)["status"] in states.READY_STATES, "it has ended")
        return super().store_result(task_id, result, state, *args, **kwargs)


class HangingStarted(RedisBackend):
    """Redis' backend. It waits until a time limit strikes."""

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        if state == states.STARTED:
            until(lambda: False, "a time limit strikes", timeout=60)
        return super().store_result(task_id, result, state, *args, **kwargs)
