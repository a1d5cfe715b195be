"""The app whose worker runs what `benchmarks.scale` counts."""

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask

BROKER = os.environ.get("SCALE_BROKER", "redis://127.0.0.1:6379/0")
BACKEND = os.environ.get("SCALE_BACKEND", BROKER)
STORE = os.environ.get("SCALE_STORE", BROKER)

app = Celery("scale", broker=BROKER, backend=BACKEND)
app.conf.broker_connection_retry_on_startup = True
app.conf.singleton_lock_url = STORE


def _plain(number: int) -> None:  # noqa: ARG001 (makes each call another one)
    return None


plain = app.task(name="plain", ignore_result=True)(_plain)
tasks = {
    mode: app.task(base=SingletonTask, name=mode, lock_mode=mode, ignore_result=True)(_plain)
    for mode in ("while_executing", "until_executed")
}


def _one_key(policy: str) -> Any:
    # A holder that is asked to make way stays, for what is counted is those who wait for it.
    @app.task(base=SingletonTask, name=policy, lock_key=(), lock_on_conflict=policy, lock_on_lost="warn")
    def runs(number: int, until: str | None = None) -> int:
        # A file, because no server is to be asked.
        while until and not Path(until).exists():
            time.sleep(0.2)
        return number

    return runs


one_key = {policy: _one_key(policy) for policy in ("reschedule", "join", "wait", "rerun", "replace")}


# Connections.


def _work(number: int, seconds: float = 0.05) -> int:
    time.sleep(seconds)
    return number


work = app.task(name="work")(_work)


def _locked(name: str, **options: Any) -> Any:
    return app.task(base=SingletonTask, name=f"work_{name}", lock_ttl=3, **options)(_work)


kinds = {
    "plain": [work],
    "singleton": [_locked("once"), _locked("queued", lock_mode="until_executed")],
    "reschedule": [_locked("in_turn", lock_key=(), lock_on_conflict="reschedule")],
}
every_second = "plain" if os.environ.get("SCALE_KIND", "plain") == "plain" else "while_executing"
app.conf.beat_schedule = {"each": {"task": every_second, "schedule": 1.0, "args": (0,)}}
