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

from tests.combinations.app import OTHER, SENT_AS, name_of
from tests.combinations.checker import ITEMS, LOOPS, Finding, check
from tests.combinations.history import Answer, History
from tests.combinations.program import TTL, VISIBILITY, Call, Program
from tests.combinations.stage import Stage
from tests.fire.record import now
from tests.fire.stacks import send
from tests.recorder import Event

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
# What Redis says of a key without an expiry.
_FOR_EVER = -1
# Microseconds since the epoch; numbers below count something else.
_A_MOMENT = 1e15


@dataclasses.dataclass(frozen=True)
class Played:
    """A program that was played, and what was found."""

    program: Program
    history: History
    findings: list[Finding]


def play(stage: Stage, programs: Sequence[Program]) -> list[Played]:
    """Play all of them at the same time, each on keys of its own."""
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
    """One program being played, by a thread of its own."""

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
        known = self._ids()
        revoked = self._known_as_revoked()
        sent = now()
        try:
            result, canvas = self._publish(call)
        except Exception as error:  # noqa: BLE001 (whatever it is, the checker judges it)
            self.answers[call.number] = Answer(
                call.number, sent=sent, state="UNSENT", error=type(error).__name__, text=str(error), revoked=revoked
            )
            return
        self._results[call.number], self._canvases[call.number] = result, canvas
        parts = tuple(child.id for child in getattr(result, "results", None) or ())
        task_id = result.id
        merged = task_id in known
        self.answers[call.number] = Answer(
            call.number, task_id, sent, published=now(), merged=merged, parts=parts, revoked=revoked
        )
        if not merged:
            self._strike(call, result)

    def _known_as_revoked(self) -> tuple[str, ...]:
        """Those of the calls so far whose results say so: a busy worker hears of it late."""
        if self._stage.facts["results"] not in ("redis", "database"):
            return ()
        revoked = [number for number in self._results if self.program.calls[number].ending == "revoke"]
        return tuple(self._results[number].id for number in revoked if self._results[number].state == "REVOKED")

    def _publish(self, call: Call) -> tuple[AsyncResult, Any]:
        """The call's own result, and that of its canvas, if there is one."""
        app, task = self._stage.app, self._task(call)
        key = self.key + OTHER if call.other else self.key
        args = (key, call.number, self._script(call))
        options = self._options(call)
        if call.route == "send_task":
            return app.send_task(task.name, args, **options), None
        if call.place == "single":
            own = {"task_id": uuid()} if call.route == "own id" else {}
            return task.apply_async(args, **own, **options), None
        if call.place in LOOPS:
            loops = {"map": lambda: task.map([args[0]] * ITEMS), "starmap": lambda: task.starmap([args] * ITEMS)}
            loop = loops[call.place]() if call.place in loops else task.chunks([args] * ITEMS, 1).group()
            return loop.apply_async(**options), None
        own = task.si(*args).set(**options, task_id=uuid())
        step = app.tasks["step"].si(self.key, call.number)
        canvas = _canvas(call.place, own, step).apply_async()
        return _find(canvas, own.options["task_id"]) or app.AsyncResult(own.options["task_id"]), canvas

    def _script(self, call: Call) -> dict[str, Any]:
        """What its body is to do; where it is pickled, with something that nothing else can carry."""
        # Celery's own retries, and its canvases, do not keep the serialiser.
        kept = call.place == "single" and call.retries == "none" and not self.program.tasks[call.task]["autoretry"]
        return {**call.script, "only": 1j} if call.serializer == "pickle" and kept else call.script

    def _options(self, call: Call) -> dict[str, Any]:
        headers = {SENT_AS: call.number}
        options: dict[str, Any] = {"serializer": call.serializer, "headers": headers, **_LIMITS.get(call.ending, {})}
        if call.timing == "countdown":
            options["countdown"] = 1
        elif call.timing == "eta":
            # On a quorum queue Celery counts whole seconds, and wants at least one.
            options["eta"] = datetime.now(UTC) + timedelta(seconds=2.5)
        elif call.timing == "expires":
            options["expires"] = 1.5
        return options

    def _strike(self, call: Call, result: AsyncResult) -> None:
        """Revoke it where its ending says so: at once, or when its body runs."""
        if call.ending == "revoke":
            self._revoke(result)
        elif call.ending == "terminate":
            timer = threading.Timer(2.5, self._revoke, [result], {"terminate": True})
            timer.start()
            self._timers.append(timer)

    def _revoke(self, result: AsyncResult, **options: Any) -> None:
        self._stage.app.control.revoke(result.id, **options)

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
            if self.program.calls[number].place in LOOPS and not self.is_readable(number):
                # Tasks of Celery's own, which note nothing.
                pass
            elif self.is_readable(number):
                state, error, text = _got(result, self._patience(number, end))
                answer = dataclasses.replace(answer, state=state, error=error, text=text)
            else:
                answer = dataclasses.replace(answer, state=self._ended(answer.task_id, self._patience(number, end)))
            self.answers[number] = answer
        if self._stage.facts["results"] == "forgotten":
            for result in self._results.values():
                result.forget()
        for timer in self._timers:
            timer.join()

    def _patience(self, number: int, end: float) -> float:
        """Celery itself stores no end of what raises Ignore or Reject, nor of a map whose item asks for a retry."""
        call, answer, result = self.program.calls[number], self.answers[number], self._results[number]
        if call.place in LOOPS and call.retries != "none":
            ids = {answer.task_id, *answer.parts}
            self._until(lambda: self._was_retried(ids) or result.ready(), end - time.monotonic())
        elif call.ending in ("ignore", "reject"):
            is_readable = self.is_readable(number)
            self._until(
                lambda: is_over(answer.task_id, self._stage.watch.events) or (is_readable and result.ready()),
                end - time.monotonic(),
            )
        else:
            return end
        return min(end, time.monotonic() + 3)

    def _was_retried(self, task_ids: set[str]) -> bool:
        return any(
            event.name == "leave" and event.facts["outcome"] == "Retry" and event.facts["task_id"] in task_ids
            for event in self._stage.watch.events
        )

    def is_readable(self, number: int | None = None) -> bool:
        if self._stage.facts["results"] == "none":
            return False
        if number is None or self.program.calls[number].place in LOOPS:
            return True
        return not self.program.tasks[self.program.calls[number].task]["ignore"]

    def _ended(self, task_id: str, end: float) -> str:
        """ENDED once the record says that a worker has ended it for good."""
        while not is_over(task_id, self._stage.watch.events):
            if time.monotonic() > end:
                return "HUNG"
            time.sleep(_STEP)
        return "ENDED"

    # What is left.

    def _settle(self) -> None:
        """Wait until nothing happens any more, and the keys of the program are gone."""
        quiet = VISIBILITY + 2 * _QUIET if self._stage.facts["redelivers"] else _QUIET
        self._until(lambda: self._is_quiet(quiet), self._bound / 2)
        for body in self._bodies():
            self._open.append(f"{body.label} still runs, in {body.pid}")
            # Where it hangs is in the log of its worker.
            send(body.pid, signal.SIGUSR2)
        self._until(lambda: not self._holds_keys(), _LONGEST_LEFT)
        self._left = self._keys()

    def _until(self, condition: Callable[[], bool], timeout: float) -> None:
        end = time.monotonic() + timeout
        while not condition() and time.monotonic() < end:
            time.sleep(_STEP)

    def _is_quiet(self, seconds: float) -> bool:
        latest = max((event.at for event in self.events()), default=0.0)
        return now() - latest > seconds and not self._bodies()

    def _bodies(self) -> list[Any]:
        return [body for body in self._stage.watch.bodies() if body.label in self._labels()]

    def _labels(self) -> list[str]:
        return [self.key + number * OTHER for number in range(_MOST_KEYS)]

    def _keys(self) -> list[str]:
        """Of this program in the store of locks, whatever they are, with what is in them."""
        tags = [key[key.index("{") :] for key in self._lock_keys()]
        keys = self._stage.locks.scan_iter("singleton:*", count=1000)
        own = [key for key in keys if any(tag in key for tag in tags)]
        return [f"{key}: {told}" for key in own if (told := self._held(key))]

    def _held(self, key: str) -> dict[str, str] | str:
        """What is in a lock and still means something; a key that never expires is told as a whole."""
        if self._stage.locks.ttl(key) == _FOR_EVER:
            return "it does not expire"
        fields = self._stage.locks.hgetall(key)
        return {name: value for name, value in fields.items() if not (_is_fact(name) or _is_past(value))}

    def _holds_keys(self) -> bool:
        """Something is in one of the locks of this program; unlike `_keys`, at no cost."""
        return any(self._held(key) for key in self._lock_keys() if self._stage.locks.exists(key))

    def _lock_keys(self) -> list[str]:
        task = self._task(self.program.calls[0])
        return [task.lock_key_for(label, 0, None) for label in self._labels()]

    def _ids(self) -> set[str]:
        """Of all messages that were sent for it."""
        return {task_id for answer in self.answers.values() for task_id in (answer.task_id, *answer.parts)}

    def events(self) -> list[Event]:
        """Those of this program, once all of it is sent: only what is new is looked through."""
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
    """Of a field of a lock: it says something about a fence, a place or an ended message, and holds nothing itself."""
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
    """The result with this id in those of a canvas."""
    if result is None or result.id == task_id:
        return result
    for child in getattr(result, "results", None) or ():
        if child.id == task_id:
            return child
    return _find(result.parent, task_id)


def _got(result: Any, end: float) -> tuple[str, str, str]:
    """State, error and text of a result, as who waits for it gets them."""
    try:
        result.get(timeout=max(0.5, end - time.monotonic()), interval=_STEP)
    except NotWithin:
        return "HUNG", "", ""
    except Exception as error:  # noqa: BLE001 (whatever it is, the checker judges it)
        name = type(error).__name__
        return "REVOKED" if isinstance(error, TaskRevokedError) else "FAILURE", name, str(error)
    return "SUCCESS", "", ""


def is_over(task_id: str, events: Sequence[Event]) -> bool:
    """The last that is known of a call is that it has ended, and not that it is requeued."""
    over = False
    for event in list(events):
        if event.facts.get("task_id") != task_id:
            continue
        if event.name in ("revoked", "failed", "refused"):
            over = True
        elif event.name == "ended":
            over = over or event.facts["outcome"] not in ("Retry", "Ignore")
        elif event.name == "conflict":
            # Who is refused by an error may try again, and notes its end.
            over = over or event.facts["outcome"] in ("skipped", "superseded")
        elif event.name == "leave":
            over = over or event.facts["outcome"] in ("returned", "Ignore")
    return over
