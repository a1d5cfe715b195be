"""Plays programs on a stage: sends their calls, waits for what comes of them, and looks at what is left."""

import dataclasses
import gc
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import chain, chord, group, uuid
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as NotWithin
from celery.result import AsyncResult

from tests.combinations.app import OTHER, name_of
from tests.combinations.checker import check
from tests.combinations.history import Answer, History
from tests.combinations.program import TTL, VISIBILITY, Call, Program
from tests.combinations.stage import Stage
from tests.recorder import Event
from tests.runs.record import now
from tests.runs.rules import Finding
from tests.runs.watch import send

# Within so many seconds of the last call every call has to have ended.
BOUND = 45.0
# Programs at a time, where there are not slots enough for all.
_ABREAST = {"solo": 4}
# A retry with other arguments is on the next key, and one of a call on that key on the one after it.
_MOST_KEYS = 3
# As long as there may be between two signs of life of a program.
_QUIET = 2.0
# A holder that has died leaves its key for two ttl.
_LONGEST_LEFT = 2 * TTL + 8
_LIMITS = {"soft limit": {"soft_time_limit": 1}, "hard limit": {"time_limit": 1}}
_STEP = 0.1
# The TTL that Redis tells of a key without an expiry.
_FOR_EVER = -1
# Microseconds since the epoch; numbers below count something else.
_A_MOMENT = 1e15


@dataclasses.dataclass(frozen=True)
class Played:
    program: Program
    history: History
    findings: list[Finding]


def play(stage: Stage, programs: Sequence[Program]) -> list[Played]:
    bound = BOUND
    if stage.facts["pool"] == "solo":
        # The bodies of all come one after another, and those that retry come twice.
        bound += 2 * sum(call.seconds for program in programs for call in program.calls)
    parts = [Part(stage, program, stage.key(number), bound) for number, program in enumerate(programs)]
    with ThreadPoolExecutor(_ABREAST.get(stage.facts["pool"], len(parts))) as pool:
        for done in [pool.submit(part.play) for part in parts]:
            done.result()
    played = [part.played() for part in parts]
    # Results that are collected only when their server is gone complain.
    del parts
    gc.collect()
    return played


class Part:
    def __init__(self, stage: Stage, program: Program, key: str, bound: float) -> None:
        self.key, self._bound = key, bound
        self._stage, self.program = stage, program
        self.answers: dict[int, Answer] = {}
        self._results: dict[int, Any] = {}
        self._canvases: dict[int, Any] = {}
        self._timers: list[threading.Timer] = []
        self._left: list[str] = []
        self._open: list[str] = []
        self._read, self._own = 0, list[Event]()

    def play(self) -> None:
        self.send_all()
        self._await_all()
        self._settle()

    def played(self) -> Played:
        answers = [self.answers[number] for number in sorted(self.answers)]
        history = History(self.program, self.events(), answers, self._left, self._open)
        return Played(self.program, history, check(history))

    # Sending.

    def send_all(self) -> None:
        began = time.monotonic()
        for call in self.program.calls:
            time.sleep(max(0.0, began + call.at - time.monotonic()))
            self._send(call)

    def _send(self, call: Call) -> None:
        known, sent = self._ids(), now()
        try:
            result, canvas = self._publish(call)
        except Exception as error:  # noqa: BLE001 (whatever it is, the checker judges it)
            kind = type(error).__name__
            self.answers[call.number] = Answer(call.number, sent=sent, state="UNSENT", error=kind, text=str(error))
            return
        self._results[call.number], self._canvases[call.number] = result, canvas
        merged = result.id in known
        self.answers[call.number] = Answer(call.number, result.id, sent, merged, published=now())
        if not merged:
            self._strike(call, result)

    def _publish(self, call: Call) -> tuple[AsyncResult, Any]:
        app, task = self._stage.app, self._task(call)
        key = self.key + OTHER if call.other else self.key
        args = (key, call.number, self._script(call))
        options = self._options(call)
        if call.route == "send_task":
            return app.send_task(task.name, args, **options), None
        if call.place == "single":
            own = {"task_id": uuid()} if call.route == "own id" else {}
            return task.apply_async(args, **own, **options), None
        own = task.si(*args).set(**options, task_id=uuid())
        step = app.tasks["step"].si(self.key, call.number)
        canvas = _canvas(call.place, own, step).apply_async()
        return _find(canvas, own.options["task_id"]) or app.AsyncResult(own.options["task_id"]), canvas

    def _script(self, call: Call) -> dict[str, Any]:
        """The script of the body; if the call is pickled, with a value that only pickle can carry."""
        # Celery's own retries, and its canvases, do not keep the serialiser.
        kept = call.place == "single" and call.retries == "none" and not self.program.tasks[call.task]["autoretry"]
        return {**call.script, "only": 1j} if call.serializer == "pickle" and kept else call.script

    def _options(self, call: Call) -> dict[str, Any]:
        options: dict[str, Any] = {"serializer": call.serializer, **_LIMITS.get(call.ending, {})}
        if call.timing == "countdown":
            options["countdown"] = 1
        elif call.timing == "eta":
            # On a quorum queue Celery counts whole seconds, and wants at least one.
            options["eta"] = datetime.now(UTC) + timedelta(seconds=2.5)
        elif call.timing == "expires":
            options["expires"] = 1.5
        return options

    def _strike(self, call: Call, result: AsyncResult) -> None:
        if call.ending == "revoke":
            result.revoke()
        elif call.ending == "terminate":
            timer = threading.Timer(2.5, result.revoke, kwargs={"terminate": True})
            timer.start()
            self._timers.append(timer)

    def _task(self, call: Call) -> Any:
        return self._stage.app.tasks[name_of(self.program.tasks[call.task])]

    # Waiting.

    def _await_all(self) -> None:
        end = time.monotonic() + self._bound
        for number, result in self._results.items():
            answer = self.answers[number]
            if answer.merged:
                continue
            canvas = self._canvases[number]
            if canvas is not None and self.is_readable():
                state, error, _ = _got(canvas, end)
                answer = dataclasses.replace(answer, canvas=state, canvas_error=error)
            if self.is_readable(number):
                state, error, text = _got(result, self._patience(number, end))
                answer = dataclasses.replace(answer, state=state, error=error, text=text)
            else:
                self._until(lambda task_id=answer.task_id: self._is_over(task_id), self._patience(number, end))
                answer = dataclasses.replace(answer, state="ENDED" if self._is_over(answer.task_id) else "HUNG")
            self.answers[number] = answer
        if self._stage.facts["results"] == "forgotten":
            for result in self._results.values():
                result.forget()
        for timer in self._timers:
            timer.join()

    def _patience(self, number: int, end: float) -> float:
        """Celery itself stores no end of what raises Ignore or Reject."""
        if self.program.calls[number].ending not in ("ignore", "reject"):
            return end
        answer, is_readable = self.answers[number], self.is_readable(number)
        self._until(lambda: self._is_over(answer.task_id) or (is_readable and self._results[number].ready()), end)
        return min(end, time.monotonic() + 3)

    def _is_over(self, task_id: str) -> bool:
        return is_over(task_id, self._stage.watch.events)

    def is_readable(self, number: int | None = None) -> bool:
        if self._stage.facts["results"] == "none":
            return False
        return number is None or not self.program.tasks[self.program.calls[number].task]["ignore"]

    # What is left.

    def _settle(self) -> None:
        quiet = VISIBILITY + 2 * _QUIET if self._stage.facts["redelivers"] else _QUIET
        self._until(lambda: self._is_quiet(quiet), time.monotonic() + self._bound / 2)
        for body in self._bodies():
            self._open.append(f"{body.key} still runs, in {body.pid}")
            send(body.pid, signal.SIGUSR2)
        self._until(lambda: not self._holds_keys(), time.monotonic() + _LONGEST_LEFT)
        self._left = self._keys()

    def _until(self, condition: Callable[[], bool], end: float) -> None:
        while not condition() and time.monotonic() < end:
            time.sleep(_STEP)

    def _is_quiet(self, seconds: float) -> bool:
        latest = max((event.at for event in self.events()), default=0.0)
        return now() - latest > seconds and not self._bodies()

    def _bodies(self) -> list[Any]:
        return [body for body in self._stage.watch.bodies() if body.key in self._labels()]

    def _labels(self) -> list[str]:
        return [self.key + number * OTHER for number in range(_MOST_KEYS)]

    def _keys(self) -> list[str]:
        tags = [key[key.index("{") :] for key in self._lock_keys()]
        keys = self._stage.locks.scan_iter("singleton:*", count=1000)
        own = [key for key in keys if any(tag in key for tag in tags)]
        return [f"{key}: {told}" for key in own if (told := self._held(key))]

    def _held(self, key: str) -> dict[str, str] | str:
        """The fields of a lock that still count; a key that never expires is reported as such."""
        if self._stage.locks.ttl(key) == _FOR_EVER:
            return "it does not expire"
        fields = self._stage.locks.hgetall(key)
        return {name: value for name, value in fields.items() if not (_is_fact(name) or _is_past(value))}

    def _holds_keys(self) -> bool:
        return any(self._held(key) for key in self._lock_keys() if self._stage.locks.exists(key))

    def _lock_keys(self) -> list[str]:
        task = self._task(self.program.calls[0])
        return [task.lock_key_for(label, 0, None) for label in self._labels()]

    def _ids(self) -> set[str]:
        return {answer.task_id for answer in self.answers.values()}

    def events(self) -> list[Event]:
        """The events of this program, once all of it is sent; a call reads only the new ones."""
        ids, labels = self._ids(), self._labels()
        unread = self._stage.watch.events[self._read :]
        self._read += len(unread)
        self._own += [
            event
            for event in unread
            if event.key in labels or event.facts.get("task_id") in ids or event.name == "died"
        ]
        return self._own


def _is_fact(name: str) -> bool:
    """The field of a lock is about a fence, a place or an ended message, and holds nothing itself."""
    return name in ("fence", "places") or name.startswith("done:") or name[0].isdigit()


def _is_past(value: str) -> bool:
    """It begins with the moment until which it counts, in microseconds, and that is over; 0 once its run began."""
    until, *_ = value.split(" ")
    return until == "0" or (until.isdigit() and _A_MOMENT < int(until) < time.time() * 1_000_000)


def _canvas(place: str, own: Any, step: Any) -> Any:
    return {
        "first of a chain": lambda: chain(own, step),
        "middle of a chain": lambda: chain(step, own, step.clone()),
        "group": lambda: group(own, step),
        "chord header": lambda: chord([own, step], step.clone()),
        "chord body": lambda: chord([step, step.clone()], own),
        "before a group": lambda: chain(own, group(step, step.clone())),
    }[place]()


def _find(result: Any, task_id: str) -> AsyncResult | None:
    if result is None or result.id == task_id:
        return result
    for child in getattr(result, "results", None) or ():
        if child.id == task_id:
            return child
    return _find(result.parent, task_id)


def _got(result: Any, end: float) -> tuple[str, str, str]:
    try:
        result.get(timeout=max(0.5, end - time.monotonic()), interval=_STEP)
    except NotWithin:
        return "HUNG", "", ""
    except Exception as error:  # noqa: BLE001 (whatever it is, the checker judges it)
        name = type(error).__name__
        return "REVOKED" if isinstance(error, TaskRevokedError) else "FAILURE", name, str(error)
    return "SUCCESS", "", ""


def is_over(task_id: str, events: Sequence[Event]) -> bool:
    over = False
    for event in list(events):
        if event.facts.get("task_id") != task_id:
            continue
        if event.name in ("revoked", "failed", "refused"):
            over = True
        elif event.name == "ended":
            over = over or event.facts["outcome"] not in ("Retry", "Ignore")
        elif event.name == "conflict":
            # A call that is refused by an error may try again, and records its end.
            over = over or event.facts["outcome"] in ("skipped", "superseded")
        elif event.name == "leave":
            over = over or event.facts["outcome"] in ("returned", "Ignore")
    return over
