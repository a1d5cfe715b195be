"""Errors: they reach the caller whole, whichever way a result travels, and say what to do."""

import json
import pickle
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
from celery import Celery
from celery.backends.base import Backend

from celery_singleton_lock import (
    CallRevoked,
    ConfigurationError,
    LockHeld,
    LockLost,
    SingletonLockError,
    StoreError,
    errors,
)

KEY = "singleton:v3:{shop.tasks.sync:9f62a583b84f8227e6432bfe2c555eb2}"

EXAMPLES = [
    pytest.param(LockHeld(KEY, "id-of-holder", 12.5), id="LockHeld"),
    pytest.param(LockHeld(KEY, None, 0.0), id="LockHeld by no task"),
    pytest.param(LockHeld(KEY), id="LockHeld with defaults"),
    pytest.param(LockHeld(KEY, "id", 12.5, "cooldown"), id="LockHeld in a cool-down"),
    pytest.param(LockLost(KEY, "taken"), id="LockLost"),
    pytest.param(LockLost(KEY), id="LockLost with defaults"),
    pytest.param(StoreError("redis://localhost:6379/0", "TimeoutError: no reply"), id="StoreError"),
    pytest.param(errors.StoreRefused("redis://localhost:6379/0", "NOAUTH", "give the password"), id="StoreRefused"),
    pytest.param(ConfigurationError("lock_ttl=0 is not allowed"), id="ConfigurationError"),
    pytest.param(CallRevoked("it is held", KEY, "id-of-holder", "skipped"), id="CallRevoked"),
    pytest.param(CallRevoked("it is held", KEY, None, "unanswered"), id="CallRevoked for no task"),
]


def result_backend(serializer: str) -> Backend:
    app = Celery("shop", set_as_current=False)
    return Backend(app=app, serializer=serializer)


@pytest.mark.parametrize("error", EXAMPLES)
def test_an_error_survives_pickle_and_the_json_result_backend(error: SingletonLockError) -> None:
    backend = result_backend("json")
    stored = json.loads(backend.encode(backend.prepare_exception(error)))

    for again in (pickle.loads(pickle.dumps(error)), backend.exception_to_python(stored)):
        assert type(again) is type(error)
        assert again.args == error.args
        assert vars(again) == vars(error)
        assert str(again) == str(error)


def test_the_examples_cover_every_error_there_is() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type)}

    assert {*defined, CallRevoked} - {SingletonLockError} == {type(example.values[0]) for example in EXAMPLES}


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (LockHeld(KEY, "holder", 1.5), {"key": KEY, "holder_task_id": "holder", "expires_in": 1.5, "state": "held"}),
        (LockLost(KEY, "taken"), {"key": KEY, "reason": "taken"}),
        (StoreError("redis://host:1/0", "refused"), {"store": "redis://host:1/0", "problem": "refused"}),
        (
            CallRevoked("text", KEY, "other", "superseded"),
            {"key": KEY, "holder_task_id": "other", "reason": "superseded"},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_can_be_asked_for_its_facts(error: SingletonLockError, attributes: dict[str, Any]) -> None:
    assert vars(error) == attributes


READER = """
import sys
from celery import Celery

backend = Celery("web", broker="memory://", backend="cache+memory://").backend
error = backend.meta_from_decoded(backend.decode(sys.argv[1]))["result"]
assert not any(name.startswith("celery_singleton_lock") for name in sys.modules)
print(type(error).__name__, *error.args, sep="|")
"""


@pytest.mark.parametrize(
    ("error", "state", "read"),
    [
        (
            CallRevoked("it is held", KEY, "holder", "skipped"),
            "REVOKED",
            f"CallRevoked|it is held|{KEY}|holder|skipped",
        ),
        (LockHeld(KEY, "holder", 1.5), "FAILURE", f"LockHeld|{KEY}|holder|1.5"),
    ],
    ids=["CallRevoked", "LockHeld"],
)
def test_a_process_without_this_library_reads_the_facts(error: Exception, state: str, read: str) -> None:
    backend = result_backend("json")
    stored = backend.encode({"status": state, "result": backend.encode_result(error, state)})

    answer = subprocess.run([sys.executable, "-c", READER, stored], capture_output=True, text=True, check=True)

    assert answer.stdout.strip() == read


def test_a_holder_that_is_no_task_is_named_as_a_lock() -> None:
    assert str(LockHeld(KEY, None, 3.0)).startswith(f"lock key={KEY} is held by a Lock; its lease lasts another 3.0 s")
    of_a_later_version: Any = "paused"
    assert (
        str(LockHeld(KEY, "holder", 3.0, of_a_later_version))
        == f"lock key={KEY} is kept by task_id=holder for another 3.0 s"
    )


def test_without_its_extra_one_line_says_what_to_install() -> None:
    store = "from celery_singleton_lock import Lock\nLock('stock', url='memory://')"
    programs = {
        "ConfigurationError: memory://": store,
        "ImportError: celery_singleton_lock.testing": "import celery_singleton_lock.testing",
    }
    for package, (begins, program) in product(("fakeredis", "lupa"), programs.items()):
        command = [sys.executable, "-c", f"import sys; sys.modules[{package!r}] = None\n{program}"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)

        *_, said = ran.stderr.splitlines()
        assert f"{begins} needs more packages" in said
        assert said.endswith('pip install "celery-singleton-lock[testing]"')
