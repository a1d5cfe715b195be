"""An app that a newcomer has written, with one mistake in each task and in each of some settings."""

import os
from typing import Any

from celery import Celery, Task

from celery_singleton_lock import SingletonTask


class Careless(Task):
    """Its `__call__` never calls that of the next class."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class CarelessSingleton(Careless, SingletonTask):
    abstract = True


OPTIONS: dict[str, dict[str, Any]] = {
    "misspelt": {"lock_on_confict": "raise"},
    "annotated": {},
    "bare": {"key": ("a",), "ttl": 10, "limit": 2, "timeout": 4, "mode": "m", "policy": "raise", "label": "x"},
    "celery_singleton": {"unique_on": ["a"], "lock_expiry": 60, "raise_on_duplicate": True},
    "bad_policy": {"lock_on_conflict": "ignore"},
    "no_such_parameter": {"lock_key": ("supplier",)},
    "missing_comma": {"lock_key": ("supplier_id")},
    "bad_numbers": {"lock_ttl": -1, "lock_wait_timeout": "30", "lock_limit": 0},
    "wrong_order": {"base": CarelessSingleton},
    "joins_nothing": {"lock_on_conflict": "join", "ignore_result": True},
    "no_base": {"base": Task, "lock_key": ("a",), "lock_ttl": 10},
    "works": {},
}
SETTINGS = {
    "singleton_lock_tll": 5,
    "singelton_lock_url": "redis://",
    "lock_min_hold": 5,
    "singleton_lock_on_conflict": "skp",
    "singleton_key_prefix": "shop",
    "singleton_lock_expiry": 60,
    "singleton_raise_on_duplicate": True,
}


def make(app: Celery, name: str) -> Any:
    """One of the tasks, which is made at its first use."""

    def body(supplier_id: int = 0, a: int = 0) -> None: ...

    return app.task(**{"name": name, "base": SingletonTask, "shared": False, **OPTIONS[name]})(body)


app = Celery("mistakes", set_as_current=False)
if "TEST_STORE" in os.environ:
    store = os.environ["TEST_STORE"]
    settings: dict[str, Any] = {
        **dict.fromkeys(("broker_url", "result_backend", "singleton_lock_url"), store),
        "task_annotations": {"annotated": {"lock_tll": 5}},
        **SETTINGS,
    }
    if os.environ["TEST_NAMESPACE"]:
        app.config_from_object({f"CELERY_{name}".upper(): settings[name] for name in settings}, namespace="CELERY")
    else:
        app.conf.update(settings)
    for name in OPTIONS:
        make(app, name)
