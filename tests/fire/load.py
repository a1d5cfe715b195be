"""The load: calls of all kinds, alone and in bursts, on a few hot keys and many cold ones."""

import gc
import json
import random
import threading
import time
from typing import Any

import redis
from celery.exceptions import OperationalError

from tests.fire.kinds import KINDS, SHARED
from tests.runs.record import Record
from tests.servers import Server

RATE = 3.5
BURSTS = (1, 1, 2, 3, 5)
SHARE_OF_SHARED = 0.35
HOT, COLD, SHARE_OF_HOT = 2, 200, 0.7
SHORTEST, LONGEST = 0.01, 3.0
# More than that and the load waits, so that any machine can drain it.
MOST_OPEN = 60
_GIVE_UP = 25.0
_PATIENCE = {"max_retries": 5, "interval_start": 0.1, "interval_step": 0.3, "interval_max": 1.0}
STRUCK_WHILE_PICKLED = "StruckError in MaybeEncodingError"
_TERMINAL = ("SUCCESS", "FAILURE", "REVOKED")


def states(server: Server, task_ids: list[str]) -> dict[str, tuple[str, str]]:
    """State and, where it failed, the name of the error, of each call that has a result."""
    if not task_ids:
        return {}
    with redis.Redis(port=server.port) as client:
        found: Any = client.mget([f"celery-task-meta-{task_id}" for task_id in task_ids])
    results = {task_id: json.loads(text) for task_id, text in zip(task_ids, found, strict=True) if text}
    return {task_id: (meta["status"], _error(meta["result"])) for task_id, meta in results.items()}


def _error(result: Any) -> str:
    name = str(result.get("exc_type", "")) if isinstance(result, dict) else ""
    # A signal may raise while billiard pickles the end of a run.
    return STRUCK_WHILE_PICKLED if name == "MaybeEncodingError" and "StruckError" in str(result) else name


class Load:
    def __init__(self, seed: int, record: Record, results: Server) -> None:
        from tests.fire import app

        self._tasks = app.TASKS
        self._rng = random.Random(f"load {seed}")
        self._record, self._results = record, results
        self._open: dict[str, float] = {}
        self._sent: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        # Results that are collected only when their server is gone complain.
        gc.collect()

    def call(self, name: str, key: str, seconds: float) -> None:
        try:
            task_id = self._tasks[name].apply_async((key, seconds), retry_policy=_PATIENCE).id
        except OperationalError as error:
            # The message may have arrived; the checker expects nothing of it.
            self._record.write("unsent", task=name, error=str(error))
            return
        # A call that was in the queue already is sent no second time.
        if task_id not in self._sent:
            self._sent.add(task_id)
            self._open[task_id] = time.monotonic()
            self._record.write("sent", task_id=task_id, task=name)

    def rival(self, name: str, key: str) -> None:
        self.call("reschedule" if KINDS[name].lock else name, key, 0.3)

    def _run(self) -> None:
        while not self._over.wait(self._rng.expovariate(RATE)):
            if not self._is_full():
                self._send_something()

    def _send_something(self) -> None:
        rng = self._rng
        names = SHARED if rng.random() < SHARE_OF_SHARED else [rng.choice(list(KINDS))]
        key = self._key()
        for _ in range(rng.choice(BURSTS)):
            self.call(rng.choice(names), key, self._seconds())

    def _key(self) -> str:
        if self._rng.random() < SHARE_OF_HOT:
            return f"hot {self._rng.randrange(HOT)}"
        return f"cold {self._rng.randrange(COLD)}"

    def _seconds(self) -> float:
        return round(float(SHORTEST * (LONGEST / SHORTEST) ** self._rng.random()), 3)

    def _is_full(self) -> bool:
        if len(self._open) < MOST_OPEN:
            return False
        ended = states(self._results, list(self._open))
        long_ago = time.monotonic() - _GIVE_UP
        for task_id, sent in list(self._open.items()):
            if ended.get(task_id, ("", ""))[0] in _TERMINAL or sent < long_ago:
                del self._open[task_id]
        return len(self._open) >= MOST_OPEN
