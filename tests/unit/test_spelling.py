"""Names that are no option and no setting are refused, and the error says what was probably meant."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, Lock, SingletonOptions, SingletonTask
from celery_singleton_lock.options import faults_in_settings


@pytest.fixture(autouse=True)
def nothing_imports_celery_singleton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "celery_singleton", raising=False)


@pytest.fixture
def app() -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.singleton_lock_url = "memory://spelling"
    return app


def make(app: Celery, base: type = SingletonTask, **options: Any) -> Any:
    @app.task(base=base, name="shop.tasks.sync", shared=False, **options)
    def sync(x: Any) -> None: ...

    app.finalize()
    return app.tasks["shop.tasks.sync"]


def refusal(app: Celery, **options: Any) -> str:
    with pytest.raises(ConfigurationError, match=r"^task shop\.tasks\.sync: ") as refused:
        make(app, **options)
    return str(refused.value)


# Options.


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lock_on_confict", "lock_on_conflict"),
        ("lock_confict", "lock_on_conflict"),
        ("lock_timeout", "lock_wait_timeout"),
        ("lock_tll", "lock_ttl"),
        ("lock_keys", "lock_key"),
        ("lock_on_backend_error", "lock_on_store_error"),
        ("Lock_ttl", "lock_ttl"),
        ("LOCK_TTL", "lock_ttl"),
        ("lock_Key", "lock_key"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_one_that_was_meant(app: Celery, written: str, meant: str) -> None:
    assert f"there is no option {written}; did you mean {meant}?" in refusal(app, **{written: 5})


def test_if_no_option_is_near_all_are_named(app: Celery) -> None:
    told = refusal(app, lock_zzzzzzzzzzzzzzzzzzzzzzzz=5)

    assert all(name in told for name in SingletonOptions.__annotations__)


@pytest.mark.parametrize(
    "value", [5, None, lambda *args: args, property(lambda self: 5)], ids=["int", "None", "lambda", "property"]
)
def test_whatever_its_value_a_keyword_of_the_decorator_is_an_option(app: Celery, value: Any) -> None:
    assert "lock_kye; did you mean lock_key?" in refusal(app, lock_kye=value)


def test_a_task_that_was_refused_once_is_refused_again(app: Celery) -> None:
    @app.task(base=SingletonTask, shared=False, lock_tll=5)
    def sync() -> None: ...

    for _ in range(3):
        with pytest.raises(ConfigurationError, match="lock_tll"):
            sync.delay()


def test_an_argument_of_the_function_makes_no_name_the_tasks_own(app: Celery) -> None:
    @app.task(base=SingletonTask, shared=False, lock_owner=5)
    def sync(lock_owner: int) -> None: ...

    with pytest.raises(ConfigurationError, match="lock_owner"):
        app.finalize()


@pytest.mark.parametrize("annotated", ["shop.tasks.sync", "*"])
def test_an_annotation_of_the_app_is_looked_at_as_well(app: Celery, annotated: str) -> None:
    app.conf.task_annotations = {annotated: {"lock_tll": 5}}

    assert "lock_tll; did you mean lock_ttl?" in refusal(app)


def test_so_are_a_class_and_its_bases(app: Celery) -> None:
    class Base(SingletonTask):
        abstract = True
        lock_tll = 5

    class Sync(Base):
        name = "shop.tasks.sync"

        def run(self) -> None: ...

    assert "lock_tll" in refusal(app, base=Base)
    with pytest.raises(ConfigurationError, match="lock_tll"):
        Celery("other", set_as_current=False).register_task(Sync())


def test_so_is_a_mixin(app: Celery) -> None:
    class Mixin:
        once = {"graceful": True}  # noqa: RUF012 (as celery-once has it)

    class Base(Mixin, SingletonTask):
        abstract = True

    assert "once is an option of celery-once" in refusal(app, base=Base)


class WithItsOwn(SingletonTask):
    abstract = True
    timeout = 5

    def lock_everything(self) -> None: ...

    @property
    def lock_size(self) -> int:
        return 1

    @staticmethod
    def lock_static() -> None: ...


def test_what_a_class_declares_is_its_own(app: Celery) -> None:
    task = make(app, base=WithItsOwn, timeout=6)

    assert (task.timeout, task.lock_size) == (6, 1)


def test_the_error_says_how_a_name_becomes_ones_own(app: Celery) -> None:
    assert "An attribute of your own needs a name that does not begin with lock_" in refusal(app, lock_owner="shop")


def test_every_option_can_be_written(app: Celery) -> None:
    make(app, **dict.fromkeys(SingletonOptions.__annotations__))


def test_the_dict_of_options_says_what_the_task_says() -> None:
    of_task = {name: hint for name, hint in get_type_hints(SingletonTask).items() if name.startswith("lock_")}

    assert get_type_hints(SingletonOptions) == of_task


# Options and settings of others.


DOCS = re.findall(r'^Documentation = "(.*)"', (Path(__file__).parents[2] / "pyproject.toml").read_text(), re.MULTILINE)[
    0
]
OF_OTHERS = {
    "unique_on": "celery-singleton",
    "lock_expiry": "celery-singleton",
    "once": "celery-once",
    "heimdall": "celery-heimdall",
}
"""Options of the libraries that people come from."""


@pytest.mark.parametrize("name", OF_OTHERS)
def test_an_option_of_another_library_is_refused_and_told_where_to_read_on(app: Celery, name: str) -> None:
    told = refusal(app, **{name: {}})

    assert f"{name} is an option of {OF_OTHERS[name]}; here it is lock_" in told
    assert told.endswith(f"see {DOCS}migrate/#from-{OF_OTHERS[name]}")


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


# Settings.


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("singleton_lock_tll", "there is no setting singleton_lock_tll; did you mean singleton_lock_ttl?"),
        ("singleton_locks_url", "there is no setting singleton_locks_url; did you mean singleton_lock_url?"),
        ("singleton_beat_tll", "there is no setting singleton_beat_tll; did you mean singleton_beat_ttl?"),
        ("singleton_lock_mode", "there is no setting singleton_lock_mode: lock_mode is an option of each task alone"),
        (
            "singleton_lock_limit",
            "there is no setting singleton_lock_limit: lock_limit is an option of each task alone",
        ),
        ("singleton_lock_TTL", "the setting singleton_lock_TTL is not read; write singleton_lock_ttl"),
        ("SINGLETON_LOCK_TTL", "the setting SINGLETON_LOCK_TTL is not read; write singleton_lock_ttl"),
        ("CELERY_SINGLETON_LOCK_TTL", "the setting CELERY_SINGLETON_LOCK_TTL is not read; write singleton_lock_ttl"),
        ("SINGLETON_LOCK_TLL", "there is no setting SINGLETON_LOCK_TLL; did you mean singleton_lock_ttl?"),
        ("singelton_lock_url", "there is no setting singelton_lock_url; did you mean singleton_lock_url?"),
        ("singelton_beat_tll", "there is no setting singelton_beat_tll; did you mean singleton_beat_ttl?"),
        ("lock_ttl", "there is no setting lock_ttl; did you mean singleton_lock_ttl?"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_one_that_was_meant(app: Celery, written: str, told: str) -> None:
    task = make(app)
    app.conf[written] = 5

    with pytest.raises(ConfigurationError, match=f"^{re.escape(told)}$"):
        task.lock_key_for(1)
    with pytest.raises(ConfigurationError, match=f"^{re.escape(told)}$"):
        Lock("stock", app=app)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("CELERY_SINGLETON_LOCK_TLL", "no setting CELERY_SINGLETON_LOCK_TLL; did you mean CELERY_SINGLETON_LOCK_TTL?"),
        ("SINGLETON_LOCK_TTL", "SINGLETON_LOCK_TTL is not read; write CELERY_SINGLETON_LOCK_TTL"),
        ("CELERY_singleton_lock_ttl", "CELERY_singleton_lock_ttl is not read; write CELERY_SINGLETON_LOCK_TTL"),
        ("CELERY_SINGLETON_LOCK_MODE", "no setting CELERY_SINGLETON_LOCK_MODE: lock_mode is an option of each task"),
        ("CELERY_SINGLETON_KEY_PREFIX", "CELERY_SINGLETON_KEY_PREFIX is a setting of celery-singleton"),
    ],
)
@pytest.mark.parametrize("namespace", ["CELERY", "CELERY_"])
def test_a_setting_in_a_namespace_is_refused_as_it_is_written_there(namespace: str, written: str, told: str) -> None:
    app = Celery("shop", set_as_current=False)
    app.config_from_object({written: 5, "CELERY_TIMEZONE": "UTC"}, namespace=namespace)

    with pytest.raises(ConfigurationError, match=re.escape(told)):
        make(app).lock_key_for(1)


def test_settings_of_others_in_the_same_place_are_left_alone() -> None:
    app = Celery("shop", set_as_current=False)
    settings = {"SINGLETON_PATTERN": 1, "OTHER_SINGLETON_LOCK_TLL": 1, "CELERY_SINGLETON_LOCK_TTL": 5, "LOCK_TTL": 1}
    settings |= {"SINGELTON_LOCK_URL": 1, "CELERY_REDBEAT_LOCK_TIMEOUT": 5, "CELERY_REDBEAT_LOCK_KEY": "k"}
    app.config_from_object(settings, namespace="CELERY")

    assert make(app).lock_key_for(1)


def test_so_are_those_that_celery_does_not_read() -> None:
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"LOCK_TTL": 1, "SINGELTON_LOCK_URL": 1, "timezone": "UTC", "redbeat_lock_timeout": 5})

    assert list(faults_in_settings(app)) == []


def test_every_setting_can_be_written(app: Celery) -> None:
    app.conf.update(singleton_lock_prefix="shop", singleton_lock_client_options={}, singleton_lock_replicas=0)
    app.conf.update(singleton_beat_ttl=5, singleton_beat_name="shop", singleton_lock_ttl=5)

    make(app).lock_holders(1)


def test_the_values_of_other_settings_are_not_read() -> None:
    class Settings(SimpleNamespace):
        timezone = "UTC"

        @property
        def SECRET(self) -> str:  # noqa: N802 (as Django has it)
            raise AssertionError("it is nobody's business")

    app = Celery("shop", set_as_current=False)
    app.config_from_object(Settings())

    assert make(app).lock_key_for(1)
