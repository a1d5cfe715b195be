"""What a newcomer gets wrong is said: all of it by one start of a worker, and by `delay`, in the user's own words."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.testing import memory_store
from tests.acceptance import mistakes_app
from tests.servers import Server

MIGRATE = "https://celery-singleton-lock.github.io/celery-singleton-lock/migrate/#from-celery-singleton"
POLICIES = "'skip', 'raise', 'reschedule', 'wait', 'join', 'rerun' or 'replace'"
HINT = " An attribute of your own needs a name that does not begin with lock_"
OF_TASKS: dict[str, list[str]] = {
    "misspelt": ["there is no option lock_on_confict; did you mean lock_on_conflict?"],
    "annotated": ["there is no option lock_tll; did you mean lock_ttl?"],
    "bare": [
        "there is no option key; did you mean lock_key?",
        "there is no option ttl; did you mean lock_ttl?",
        "there is no option limit; did you mean lock_limit?",
        "there is no option timeout; did you mean lock_wait_timeout?",
        "there is no option mode; did you mean lock_mode?",
        "there is no option policy; did you mean lock_on_conflict?",
        "there is no option label; did you mean lock_label?",
    ],
    "celery_singleton": [
        f"unique_on is an option of celery-singleton; here it is lock_key: see {MIGRATE}",
        f"lock_expiry is an option of celery-singleton; here it is lock_queue_ttl: see {MIGRATE}",
        f'raise_on_duplicate is an option of celery-singleton; here it is lock_on_conflict="raise": see {MIGRATE}',
    ],
    "bad_policy": [(f"lock_on_conflict='ignore' is not allowed; choose {POLICIES}")],
    "no_such_parameter": ["lock_key=('supplier',): unknown parameter 'supplier'; the function has supplier_id, a"],
    "missing_comma": [
        (
            "lock_key='supplier_id' is the name of a parameter and no format string; did you mean "
            '("supplier_id",) or "{supplier_id}"?'
        )
    ],
    "bad_numbers": [
        "lock_limit=0 is not allowed: give a whole number from 1 to 1000",
        "lock_ttl=-1 is not allowed: give a number of seconds, at least 1 and less than a century, or a timedelta",
        (
            "lock_wait_timeout='30' is not allowed: give a number of seconds, at least 0 and less than a century, or a "
            "timedelta"
        ),
    ],
    "wrong_order": [
        (
            "Careless.__call__ never calls super().__call__(), so it would bypass the lock; write "
            "`return super().__call__(*args, **kwargs)` where it runs the body, or put SingletonTask first "
            "among the base classes"
        )
    ],
    "joins_nothing": [
        (
            "lock_on_conflict='join' needs the holder's result, and the task has ignore_result=True, so its "
            "holder keeps none"
        )
    ],
}
"""The lines about each task, without its name."""
OF_SETTINGS = [
    "there is no setting {singleton_lock_tll}; did you mean {singleton_lock_ttl}?",
    "there is no setting {singelton_lock_url}; did you mean {singleton_lock_url}?",
    "there is no setting {lock_min_hold}; did you mean {singleton_lock_min_hold}?",
    f"{{singleton_key_prefix}} is a setting of celery-singleton; here it is {{singleton_lock_prefix}}: see {MIGRATE}",
    "{singleton_lock_expiry} is a setting of celery-singleton; here it is {singleton_lock_queue_ttl}: see " + MIGRATE,
    "{singleton_raise_on_duplicate} is a setting of celery-singleton; here it is {singleton_lock_on_conflict}: see "
    + MIGRATE,
    (f"{{singleton_lock_on_conflict}}='skp' is not allowed; choose {POLICIES}"),
]


@pytest.fixture(autouse=True)
def nothing_imports_celery_singleton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "celery_singleton", raising=False)


def of_settings(namespace: str) -> list[str]:
    """The lines about settings, each as its user has written it."""
    spelt = (lambda found: f"{namespace}{found[1]}".upper()) if namespace else (lambda found: found[1])
    return [re.sub(r"{(\w+)}", spelt, line) for line in OF_SETTINGS]


def start(server: Server, namespace: str) -> tuple[int, str]:
    """Exit code and log of a worker that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tests.acceptance.mistakes_app", "worker", "--pool", "solo"],
        env={**os.environ, "TEST_STORE": server.url, "TEST_NAMESPACE": namespace},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("namespace", ["", "CELERY_"], ids=["", "in a namespace"])
def test_one_start_names_every_mistake_in_a_line_of_its_own(valkey: Server, namespace: str) -> None:
    code, log = start(valkey, namespace)

    of_tasks = [f"task {name}: {line}" for name, lines in OF_TASKS.items() for line in lines]
    said = [line.partition("lock.misconfigured: ")[2] for line in log.splitlines() if "lock.misconfigured: " in line]
    assert sorted(line.removesuffix(HINT) for line in said) == sorted([*of_tasks, *of_settings(namespace)])
    assert (code, "Traceback" in log) == (1, False)
    (warning,) = [line for line in log.splitlines() if "lock.no_base: " in line]
    body = mistakes_app.make(Celery("here", set_as_current=False), "no_base").run.__code__
    assert "WARNING" in warning
    assert (
        f"task no_base ({body.co_filename}:{body.co_firstlineno}) has lock_key, lock_ttl and no base=Singl" in warning
    )


@pytest.mark.parametrize("name", OF_TASKS)
def test_the_first_call_names_every_mistake_of_its_task(name: str) -> None:
    app = Celery("mistakes", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_annotations = {"annotated": {"lock_tll": 5}}
    with memory_store(app), pytest.raises(ConfigurationError) as refused:
        mistakes_app.make(app, name).delay(1)

    said = str(refused.value).splitlines()
    assert [line.removesuffix(HINT) for line in said] == [f"task {name}: {line}" for line in OF_TASKS[name]]


@pytest.mark.parametrize("namespace", ["", "CELERY_"], ids=["", "in a namespace"])
def test_the_first_call_names_every_setting_that_does_not_exist(namespace: str) -> None:
    app = Celery("mistakes", set_as_current=False)
    settings = {**mistakes_app.SETTINGS, "broker_url": "memory://"}
    app.config_from_object({(namespace + name).upper(): value for name, value in settings.items()}, namespace="CELERY")
    if not namespace:
        app = Celery("mistakes", set_as_current=False)
        app.conf.update(settings)
    with pytest.raises(ConfigurationError) as refused:
        mistakes_app.make(app, "works").delay(1)

    *lines, _ = of_settings(namespace)
    assert sorted(str(refused.value).splitlines()) == sorted(lines)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "CELERY_SINGLETON_LOCK_URL is not set, .*; set CELERY_SINGLETON_LOCK_URL, for example"),
        ({"SINGLETON_LOCK_URL": "http://here"}, "CELERY_SINGLETON_LOCK_URL: unknown scheme 'http'"),
        ({"SINGLETON_LOCK_URL": ["redis://"]}, "CELERY_SINGLETON_LOCK_URL=<a list> is not allowed"),
        ({"SINGLETON_LOCK_TTL": "30"}, "CELERY_SINGLETON_LOCK_TTL='30' is not allowed"),
        ({"SINGLETON_LOCK_PREFIX": ""}, "CELERY_SINGLETON_LOCK_PREFIX='' is not allowed"),
        ({"SINGLETON_LOCK_REPLICAS": -1}, "CELERY_SINGLETON_LOCK_REPLICAS=-1 is not allowed"),
    ],
)
def test_a_setting_of_django_is_named_as_it_is_written_there(settings: dict[str, Any], told: str) -> None:
    app = Celery("mistakes", set_as_current=False)
    written = {"CELERY_BROKER_URL": "memory://", **{f"CELERY_{name}": value for name, value in settings.items()}}
    if settings and "SINGLETON_LOCK_URL" not in settings:
        written["CELERY_SINGLETON_LOCK_URL"] = "redis://"
    app.config_from_object(written, namespace="CELERY")

    with pytest.raises(ConfigurationError, match=f"^{told}"):
        mistakes_app.make(app, "works").lock_holders()


def test_the_doctor_names_a_task_without_the_base(valkey: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tests.acceptance.mistakes_app", "singleton", "doctor", "--json"],
        env={**os.environ, "TEST_STORE": valkey.url, "TEST_NAMESPACE": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    (tasks,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "tasks"]

    assert (done.returncode, tasks["ok"]) == (1, False)
    assert "task no_base (" in tasks["detail"]
    assert "has lock_key, lock_ttl and no base=SingletonTask, so it runs without a lock" in tasks["detail"]
