"""A result backend that is slow to store STARTED for a later delivery of a message: until its call has ended."""

from typing import Any

from celery import states
from celery.backends.redis import RedisBackend

from tests.waiting import until


class LateStarted(RedisBackend):
    """That of Redis, but for this."""

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        if state == states.STARTED and self.client.incr(f"started {task_id}") > 1:
            until(lambda: self.get_task_meta(task_id, cache=False)["status"] in states.READY_STATES, "it has ended")
        return super().store_result(task_id, result, state, *args, **kwargs)
