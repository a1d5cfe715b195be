"""The situations of `docs/reference/what-you-see.md`, each played with real parts.

A situation is one function under `@situation`: it brings the situation about, and returns what is seen of it. Its
docstring is what the page says of it.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from inspect import getdoc
from typing import Any, NamedTuple

from tests.acceptance import seen_app as tasks
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import Worker

LOGGER = "celery_singleton_lock"
AWAY = "away"
"""The queue of the worker that has lost its store."""

_LINE = re.compile(r"^\[[^\]]*: ([A-Z]+)/[^\]]*\] ((?:lock|beat)\..*)$", re.MULTILINE)
_VOLATILE = [
    (r"redis://[^\s/]*/\d+", "<store>"),
    (r" (fence|age|remaining|waited)=\S+", ""),
    (r"\b\d+\.\d(?= s\b)", "<n>"),
    (r"(<store> failed: ).*", r"\1<why>"),
]


class Seen(NamedTuple):
    log: tuple[str, ...]
    state: str
    get: str


class Situation(NamedTuple):
    name: str
    text: str
    play: Callable[["Scene"], Seen]


SITUATIONS: list[Situation] = []


def situation(name: str) -> Callable[[Callable[["Scene"], Seen]], Callable[["Scene"], Seen]]:
    def add(play: Callable[["Scene"], Seen]) -> Callable[["Scene"], Seen]:
        SITUATIONS.append(Situation(name, getdoc(play) or "", play))
        return play

    return add


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


@dataclass(frozen=True)
class Scene:
    key: str
    """The argument that counts for the lock, its own."""
    workers: tuple[Worker, ...]
    log: Log
    recorder: Recorder
    server: Server
    names: dict[str, str]
    """The page has these in place of task ids."""

    def call(self, task: Any, number: int, name: str = "this call", **options: Any) -> Any:
        return self.named(task.apply_async((self.key, number), options.pop("kwargs", {}), **options), name)

    def hold(self, task: Any, name: str = "the holder", **kwargs: Any) -> Any:
        return self.recorder.begun(self.call(task, 1, name, kwargs={"waits": True, **kwargs}))

    def named(self, result: Any, name: str) -> Any:
        self.names[result.id] = name
        return result

    def has_been_refused(self, result: Any) -> None:
        until(lambda: f"task_id={result.id} holder=" in self._written(), "it has been refused", SOON)

    def is_in_state(self, result: Any, state: str) -> None:
        until(lambda: result.state == state, f"its state is {state}", SOON)

    def open_gate(self) -> None:
        self.recorder.open_gate(self.key)

    def lose_lease(self, task: Any) -> None:
        """Have the store forget the holder, as after a flush or a failover."""
        with self.server.client(database=2) as client:
            assert client.delete(task.lock_key_for(self.key))

    def end(self, task: Any, result: Any, *states: str, log_has: str = "") -> Seen:
        try:
            got = f"`.get()` returns `{result.get(timeout=SOON)!r}`"
        except Exception as error:  # noqa: BLE001 (whatever it is, the page tells it)
            got = f"`.get()` raises `{self.plain(f'{type(error).__name__}: {error}', task)}`"
        until(lambda: log_has in self._written(), "the log has it", SOON)
        states = (*states, result.state)
        return Seen(self._lines(task, result), ", then ".join(f"`{state}`" for state in states), got)

    def plain(self, text: str, task: Any = None) -> str:
        if task is not None:
            text = text.replace(task.lock_key_for(self.key), "<key>")
        for task_id, name in self.names.items():
            text = text.replace(task_id, f"<{name}>")
        for volatile, name in _VOLATILE:
            text = re.sub(volatile, name, text)
        return text

    def _written(self) -> str:
        return "\n".join(worker.log() for worker in self.workers)

    def _lines(self, task: Any, result: Any) -> tuple[str, ...]:
        about = f" key={task.lock_key_for(self.key)} task_id="
        lines = [*_LINE.findall(self._written()), *self.log.lines]
        mine = [(level, text) for level, text in lines if re.search(rf"{re.escape(about)}({result.id}|None)\b", text)]
        # A machine that was paused writes this line; no situation does.
        mine = [(level, text) for level, text in mine if not text.startswith("lock.late")]
        # A call that is requeued says the same each time.
        return tuple(dict.fromkeys(f"{level} {self.plain(text, task)}" for level, text in mine))


@situation("A call is skipped")
def skipped(scene: Scene) -> Seen:
    """`lock_on_conflict="skip"`, the default: another run has the key.

    [The result names the holder](../how-to/results.md). Celery's own line `Task ... ignored` follows.
    """
    scene.hold(tasks.skip)
    seen = scene.end(tasks.skip, scene.call(tasks.skip, 2))
    scene.open_gate()
    return seen


@situation("A call is requeued")
def rescheduled(scene: Scene) -> Seen:
    """`lock_on_conflict="reschedule"`. The first line comes once; later refusals are told at DEBUG.

    The state is `RETRY` meanwhile if a pool process refused the call.

    If it takes too long, check what the holder does (`task.lock_holders(...)`), and set `lock_wait_timeout`.
    """
    scene.hold(tasks.reschedule)
    result = scene.call(tasks.reschedule, 2)
    scene.has_been_refused(result)
    scene.is_in_state(result, "PENDING")
    scene.open_gate()
    return scene.end(tasks.reschedule, result, "PENDING")


@situation("A newer call supersedes one that waits")
def superseded(scene: Scene) -> Seen:
    """`lock_on_conflict="rerun"` or `"replace"`: this call waited to be the next run, and a newer one came.

    [The result names the newer call](../how-to/results.md).
    """
    scene.hold(tasks.rerun)
    older = scene.call(tasks.rerun, 2)
    scene.has_been_refused(older)
    successor = scene.call(tasks.rerun, 3, "the successor")
    seen = scene.end(tasks.rerun, older, "RETRY")
    scene.open_gate()
    successor.get(timeout=SOON)
    return seen


@situation("A run is replaced")
def replaced(scene: Scene) -> Seen:
    """`lock_on_conflict="replace"`: a later call has taken over. The lines are those of the run that had to end.

    [The result names the successor](../how-to/results.md).
    """
    first = scene.hold(tasks.replace, "this call")
    scene.call(tasks.replace, 2, "the successor")
    seen = scene.end(tasks.replace, first, log_has=f"task_id={first.id} reason=replaced")
    scene.open_gate()
    return seen


@situation("A call is not sent")
def unpublished(scene: Scene) -> Seen:
    """A mode that begins with `until_`: another call is queued or runs.

    Its result is what the caller gets. The line is in the log of the publisher.
    """
    scene.hold(tasks.unique)
    result = scene.call(tasks.unique, 2, "the holder")
    scene.open_gate()
    return scene.end(tasks.unique, result)


@situation("Redis does not answer")
def unanswered(scene: Scene) -> Seen:
    """`lock_on_store_error="reschedule"`, the default. While the store stays silent, the line is repeated at INFO.

    Restore Redis. The call runs when it answers again.
    """
    result = scene.call(tasks.skip, 2, queue=AWAY)
    scene.is_in_state(result, "RETRY")
    lines = scene._lines(tasks.skip, result)
    return Seen(lines, "`RETRY`", "`.get()` waits until Redis answers and the call has run")


@situation("A lease is lost")
def lost(scene: Scene) -> Seen:
    """Redis has forgotten the lease (`expired`), may have given it to another run (`taken`), or did not answer until
    its deadline (`unreachable`). `lock_on_lost="abort"`, the default, has raised `LockLost` in the body.

    Find out why: a failover, a flush, a process that was paused, a clock that was set. Another run may have begun.
    """
    result = scene.hold(tasks.skip, "this call")
    scene.lose_lease(tasks.skip)
    return scene.end(tasks.skip, result, log_has=f"task_id={result.id} reason=expired")
