"""Programs of `tests/combinations`, sent while the nemesis strikes."""

import dataclasses
import gc
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import redis
from celery import Celery

from tests.combinations.factors import why_not
from tests.combinations.history import Answer, History
from tests.combinations.play import Part, is_over
from tests.combinations.program import TTL, Program, draw
from tests.fire.load import states
from tests.fire.program_checker import unended
from tests.fire.stage import Stage
from tests.fire.watch import Watch

# Whoever sends sleeps most of the time.
_ABREAST = 16
# Of those that are drawn, so many make sense on fire's workers.
_SHARE = 1 / 4
# What is left over counts until the leases of the dead, and then the marks of calls that were lost, have ended.
_LONGEST_LEFT = 15 + 2 * TTL + 8


def facts(*, broker_is_redis: bool) -> dict[str, Any]:
    """What fire's workers are, in the words of a program's stage."""
    broker = "redis" if broker_is_redis else "classic"
    return {"broker": broker, "results": "redis", "pool": "prefork", "track": False, "redelivers": False}


def drawn(seed: int, number: int, stage: dict[str, Any]) -> list[Program]:
    """So many that make sense on this stage, whichever they were drawn for."""
    moved = (_moved(program, stage) for program in draw(seed, round(number / _SHARE)))
    return list(islice(filter(_makes_sense, moved), number))


def _moved(program: Program, stage: dict[str, Any]) -> Program:
    """On this stage, without what fire's checker knows nothing of: a deploy, a second try, and a `Lock` in a body."""
    tasks = tuple({**task, "deploy": None, "again": None} for task in program.tasks)
    calls = tuple(dataclasses.replace(call, lock="none") for call in program.calls)
    return dataclasses.replace(program, stage=stage, tasks=tasks, calls=calls)


def _makes_sense(program: Program) -> bool:
    rows = [{**program.stage, **program.tasks[call.task], **dataclasses.asdict(call)} for call in program.calls]
    return not any(why_not(row) for row in rows)


@dataclasses.dataclass(frozen=True)
class Place:
    """What a program wants to know of where it is played."""

    facts: Mapping[str, Any]
    app: Celery
    watch: Watch
    locks: redis.Redis
    path: str


class Programs:
    """A thread that begins one program after another, spread over so many seconds, and what became of them."""

    def __init__(self, programs: Sequence[Program], stage: Stage, watch: Watch, seconds: float) -> None:
        from tests.fire.app import app

        self._stage, self._locks = stage, stage.client_of_locks()
        place = Place(facts(broker_is_redis=stage.loses_messages), app, watch, self._locks, stage.path)
        self._parts = [Part(place, program, f"program {number}", 0) for number, program in enumerate(programs)]
        self._begun: list[Part] = []
        self._pause = seconds / (len(programs) + 1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="programs")
        self._sent: list[Future[None]] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin no more; those that have begun are sent to their end."""
        self._over.set()
        self._thread.join()
        for done in self._sent:
            done.result()
        for part in self._begun:
            part.await_strikes()

    def have_ended(self) -> bool:
        """Every call has, or something explains that it never will."""
        return not any(list(unended(history, forgetful=self._stage.loses_messages)) for history in self._known())

    def histories(self) -> list[History]:
        """What is known of each, when all should be over and nothing left; this is the last that is asked for."""
        left = [part.left(_LONGEST_LEFT) for part in self._begun]
        found = [dataclasses.replace(one, left=keys) for one, keys in zip(self._known(), left, strict=True)]
        self._locks.close()
        # Results that are collected only when their server is gone complain.
        self._begun.clear()
        gc.collect()
        return found

    def _run(self) -> None:
        with ThreadPoolExecutor(_ABREAST) as pool:
            while self._parts and not self._over.wait(self._pause):
                part = self._parts.pop(0)
                self._begun.append(part)
                self._sent.append(pool.submit(part.send_all))

    def _known(self) -> list[History]:
        answers = [answer for part in self._begun for answer in part.answers.values()]
        ids = {task_id for answer in answers for task_id in (answer.task_id, *answer.parts)}
        ended = states(self._stage.results, sorted(ids))
        return [self._history(part, ended) for part in self._begun]

    def _history(self, part: Part, ended: Mapping[str, tuple[str, str]]) -> History:
        events = list(part.events())
        answers = [_answered(part, answer, ended) for _, answer in sorted(part.answers.items())]
        return History(part.program, events, answers)


def _answered(part: Part, answer: Answer, ended: Mapping[str, tuple[str, str]]) -> Answer:
    """With the state that its sender would see; where nothing can be read, what its workers have noted."""
    if answer.merged or answer.state == "UNSENT":
        return answer
    if not part.is_readable(answer.call):
        over = is_over(answer.task_id, part.events())
        return dataclasses.replace(answer, state="ENDED" if over else "PENDING")
    found = [ended.get(task_id, ("PENDING", "")) for task_id in answer.parts or (answer.task_id,)]
    state, error = next((some for some in found if some[0] != "SUCCESS"), found[0])
    return dataclasses.replace(answer, state=state, error=error)
