"""A task whose body runs a coroutine."""

import asyncio
from typing import Any

import uvloop

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import app, recorder

__all__ = ["app"]


@app.task(base=SingletonTask, bind=True, lock_key=("key",), lock_on_conflict="replace")
def waits(self: Any, key: str, seconds: float) -> str:
    async def work() -> None:
        with recorder.body(key, self.request.id):
            await asyncio.sleep(seconds)

    uvloop.new_event_loop().run_until_complete(work())
    return "ran"
