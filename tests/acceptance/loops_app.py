"""A task whose body runs a coroutine, in each way of doing so, for the workers of the acceptance tests."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

import uvloop
from asgiref.sync import async_to_sync

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import app, recorder

__all__ = ["app"]

Work = Coroutine[Any, Any, None]


@cache
def kept(make: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
    """The loop of a thread that serves the whole process."""
    loop = make()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


WAYS: dict[str, Callable[[Work], object]] = {
    "asyncio": asyncio.run,
    "uvloop, kept for nothing else": lambda work: uvloop.new_event_loop().run_until_complete(work),
    "uvloop.run": uvloop.run,
    "runner": lambda work: asyncio.Runner(loop_factory=uvloop.new_event_loop).run(work),
    "async_to_sync": lambda work: async_to_sync(lambda: work)(),
    "another thread": lambda work: asyncio.run_coroutine_threadsafe(work, kept(asyncio.new_event_loop)).result(),
    "another thread, uvloop": lambda work: asyncio.run_coroutine_threadsafe(work, kept(uvloop.new_event_loop)).result(),
}


@app.task(base=SingletonTask, bind=True, lock_key=("key",), lock_on_conflict="replace")
def waits(self: Any, key: str, way: str, seconds: float) -> str:
    """Waits in a coroutine for so long."""

    async def work() -> None:
        with recorder.body(key, self.request.id):
            await asyncio.sleep(seconds)

    WAYS[way](work())
    return "ran"
