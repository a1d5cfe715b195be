"""Names that are no option and no setting are refused, and the error says what was probably meant."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from celery import Celery, group

from celery_singleton_lock import ConfigurationError, Lock, SingletonTask
from tests.unit.conftest import make


@pytest.fixture(autouse=True)
def nothing_imports_celery_singleton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "celery_singleton", raising=False)


def refusal(app: Celery, **options: Any) -> str:
    with pytest.raises(ConfigurationError, match=r"^task shop\.tasks\.sync: ") as refused:
        make(app, **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lock_on_confict", "lock_on_conflict"),
        ("lock_tll", "lock_ttl"),
        ("lock_timeout", "lock_ttl"),
        ("lock_blocking_timeout", "lock_wait_timeout"),
        ("lock_keys", "lock_key"),
        ("lock_on_backend_error", "lock_on_store_error"),
        ("LOCK_TTL", "lock_ttl"),
        ("singleton_lock_mode", "lock_mode"),
        # An option without its prefix, in the decorator.
        ("ttl", "lock_ttl"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_one_that_was_meant(app: Celery, written: str, meant: str) -> None:
    assert f"there is no option {written}; did you mean {meant}?" in refusal(app, **{written: 5})


@pytest.mark.parametrize("annotated", ["shop.tasks.sync", "*"])
def test_an_annotation_of_the_app_is_looked_at_as_well(app: Celery, annotated: str) -> None:
    app.conf.task_annotations = {annotated: {"lock_tll": 5}}

    assert "lock_tll; did you mean lock_ttl?" in refusal(app)


@pytest.mark.parametrize(("name", "told"), [("lock_tll", "did you mean lock_ttl"), ("once", "of celery-once")])
def test_what_is_no_option_is_refused_on_the_object(app: Celery, name: str, told: str) -> None:
    task = make(app)

    with pytest.raises(ConfigurationError, match=told):
        setattr(task, name, 5)
    assert not hasattr(task, name)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lock_ttl", r"lock_ttl cannot be given with a call, .*, lock_ttl=\.\.\."),
        ("lock_tll", r"lock_tll cannot be given with a call, .*, lock_ttl=\.\.\."),
        ("lock_zzzzzzzz", r"lock_zzzzzzzz cannot be given with a call, .*, lock_\.\.\.=\.\.\."),
        ("singleton_lock_ttl", r"singleton_lock_ttl cannot be given with a call, .*, lock_ttl="),
        ("once", "once is an option of celery-once"),
    ],
)
def test_an_option_of_a_call_is_refused_in_the_caller(app: Celery, name: str, told: str) -> None:
    task = make(app)

    for publish in (
        lambda: task.apply_async((1,), **{name: 5}),
        lambda: task.s(1).set(**{name: 5}).delay(),
        lambda: group(task.s(1).set(**{name: 5})).delay(),
        lambda: task.apply((1,), **{name: 5}),
    ):
        with pytest.raises(ConfigurationError, match=rf"^task shop\.tasks\.sync: {told}"):
            publish()


@pytest.mark.parametrize("name", ["unique", "one", "loc_key", "_lock_ttl", "rate_limit"])
def test_attributes_of_others_are_left_alone(app: Celery, name: str) -> None:
    assert getattr(make(app, **{name: 5}), name) == 5


DOCS = re.findall(r'^Documentation = "(.*)"', (Path(__file__).parents[2] / "pyproject.toml").read_text(), re.MULTILINE)[
    0
]
OF_OTHERS = {
    "unique_on": "celery-singleton",
    "lock_expiry": "celery-singleton",
    "once": "celery-once",
    "queue_lock": "celery-once-task",
    "running_lock_timeout": "celery-once-task",
    "heimdall": "celery-heimdall",
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_an_option_of_another_library_is_refused_and_told_where_to_read_on(app: Celery, name: str) -> None:
    told = refusal(app, **{name: {}})

    assert f"{name} is an option of {OF_OTHERS[name]}; here it is lock_" in told
    assert told.endswith(f"see {DOCS}how-to/migrate/#from-{OF_OTHERS[name]}")


@pytest.mark.parametrize(
    "name", ["get_key", "generate_lock", "unlock", "on_duplicate", "setup_redis", "clear_lock", "_acquire_lock"]
)
def test_a_method_that_a_class_has_overridden_for_another_library_is_refused(app: Celery, name: str) -> None:
    class Base(SingletonTask):
        abstract = True

    setattr(Base, name, lambda self, *args: None)

    assert re.search(
        rf"{name} is a method of celery-[a-z-]+; here it is \S.*: see {DOCS}how-to/migrate/#", refusal(app, base=Base)
    )


def test_a_setting_of_another_library_is_refused_until_that_library_is_used(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.conf.singleton_key_prefix = "shop"
    with pytest.raises(ConfigurationError, match="singleton_key_prefix is a setting of celery-singleton; here it is "):
        make(app).lock_key_for(1)

    monkeypatch.setitem(sys.modules, "celery_singleton", ModuleType("celery_singleton"))
    other = Celery("other", set_as_current=False)
    other.conf.singleton_key_prefix = "shop"
    assert make(other).lock_key_for(1)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("singleton_lock_tll", "there is no setting singleton_lock_tll; did you mean singleton_lock_ttl?"),
        ("singleton_locks_url", "there is no setting singleton_locks_url; did you mean singleton_lock_url?"),
        ("singleton_beat_tll", "there is no setting singleton_beat_tll; did you mean singleton_beat_ttl?"),
        ("singleton_lock_mode", "there is no setting singleton_lock_mode; set lock_mode on each task"),
        ("singleton_lock_TTL", "the setting singleton_lock_TTL is not read; write singleton_lock_ttl"),
        ("CELERY_SINGLETON_LOCK_TTL", "the setting CELERY_SINGLETON_LOCK_TTL is not read; write singleton_lock_ttl"),
        ("SINGLETON_LOCK_TLL", "there is no setting SINGLETON_LOCK_TLL; did you mean singleton_lock_ttl?"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_one_that_was_meant(app: Celery, written: str, told: str) -> None:
    task = make(app)
    app.conf[written] = 5

    with pytest.raises(ConfigurationError, match=f"^{re.escape(told)}$"):
        task.lock_key_for(1)
    with pytest.raises(ConfigurationError, match=f"^{re.escape(told)}$"):
        Lock("stock", app=app)


def test_a_misspelt_setting_of_django_is_corrected_as_it_is_written_there() -> None:
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"CELERY_SINGLETON_LOCK_TLL": 5}, namespace="CELERY")
    told = "there is no setting CELERY_SINGLETON_LOCK_TLL; did you mean CELERY_SINGLETON_LOCK_TTL?"

    with pytest.raises(ConfigurationError, match=f"^{re.escape(told)}$"):
        make(app).lock_holders(1)


def test_settings_of_others_in_the_same_place_are_left_alone() -> None:
    app = Celery("shop", set_as_current=False)
    settings = {"SINGLETON_PATTERN": 1, "OTHER_SINGLETON_LOCK_TLL": 1, "CELERY_SINGLETON_LOCK_TTL": 5, "LOCK_TTL": 1}
    settings |= {"CELERY_REDBEAT_LOCK_TIMEOUT": 5, "CELERY_REDBEAT_LOCK_KEY": "k"}
    app.config_from_object(settings, namespace="CELERY")

    assert make(app).lock_key_for(1)


def test_the_values_of_other_settings_are_not_read() -> None:
    class Settings(SimpleNamespace):
        timezone = "UTC"

        @property
        def SECRET(self) -> str:  # noqa: N802 (as Django has it)
            raise AssertionError("it is nobody's business")

    app = Celery("shop", set_as_current=False)
    app.config_from_object(Settings())

    assert make(app).lock_key_for(1)
