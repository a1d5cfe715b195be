"""Those who call a lock: threads, and tasks of asyncio. Each does what it is told, and says in which of them."""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 10.0


@dataclass
class Call:
    """Something that a caller does: known first by who calls, and in the end by what came of it.

    Attributes:
        owner: To a lock, whose it is: the asyncio task that calls, or else the thread.
    """

    body: Callable[[], Any]
    owner: Any = None
    _result: Any = None
    _error: BaseException | None = None
    _began: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.owner = running_task() or threading.get_ident()
        self._began.set()
        try:
            self._result = self.body()
        except Exception as error:  # noqa: BLE001 (it is told by end())
            self._error = error
        self._ended.set()

    def begin(self) -> "Call":
        """Itself, once its owner is known."""
        assert self._began.wait(PATIENCE), "the call has not begun"
        return self

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def end(self) -> Any:
        """What came of it; it has to end soon."""
        assert self._ended.wait(PATIENCE), "the call has not ended"
        if self._error is not None:
            raise self._error
        return self._result


class Here:
    """The thread of the test itself."""

    def begin(self, body: Callable[[], Any]) -> Call:
        call = Call(body)
        call()
        return call

    def close(self) -> None:
        """Nothing was started."""


class Thread:
    """A thread that does one thing after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        # A caller that is stuck fails its test, and must not keep the process.
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, body: Callable[[], Any]) -> Call:
        call = Call(body)
        self._calls.put(call)
        return call.begin()

    def close(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class Loop:
    """An event loop whose tasks call by `asyncio.to_thread`, so in any of several threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self, body: Callable[[], Any]) -> Call:
        call = Call(body)
        asyncio.run_coroutine_threadsafe(asyncio.to_thread(call), self._loop)
        return call.begin()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(PATIENCE)

    async def _end(self) -> None:
        """Its tasks have to hear first that their calls have ended."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=1)
        self._loop.stop()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()


class Tasks:
    """An event loop whose tasks call in its own thread, so nobody else of it runs meanwhile."""

    def __init__(self, size: int) -> None:
        self.tasks = [Task(self) for _ in range(size)]
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.loop.run_until_complete(self._run_all())
        self.loop.close()

    async def _run_all(self) -> None:
        await asyncio.gather(*(task.run() for task in self.tasks))


class Task:
    """A task that does one thing after the other."""

    def __init__(self, among: Tasks) -> None:
        self._among = among
        self._calls: asyncio.Queue[Call | None] = asyncio.Queue()

    def begin(self, body: Callable[[], Any]) -> Call:
        call = Call(body)
        self._put(call)
        return call.begin()

    def close(self) -> None:
        self._put(None)

    async def run(self) -> None:
        while (call := await self._calls.get()) is not None:
            call()

    def _put(self, call: Call | None) -> None:
        self._among.loop.call_soon_threadsafe(self._calls.put_nowait, call)


def running_task() -> Any:
    """The asyncio task that runs in this thread, if one does."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
