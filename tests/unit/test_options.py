"""Options and settings: what is allowed, what is not, and which of two values counts."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task
from kombu.transport import TRANSPORT_ALIASES, virtual

from celery_singleton_lock import ConfigurationError, SingletonTask
from celery_singleton_lock.checks import check_beat, faults_of
from celery_singleton_lock.signals import lock_acquired
from tests.unit.conftest import make, refused

NOT_A_DURATION = [True, float("nan"), float("inf"), "30", [30]]
APP_WIDE = (
    "ttl",
    "on_conflict",
    "wait_timeout",
    "on_lost",
    "on_store_error",
    "min_hold",
    "min_hold_on_failure",
    "queue_ttl",
)


ALLOWED = {
    "mode": ["while_executing", "until_executed"],
    "limit": [1, 1000],
    "ttl": [1, 2.5, timedelta(minutes=1)],
    "on_conflict": ["skip", "raise", "reschedule", "wait"],
    "wait_timeout": [0, 0.5, timedelta(seconds=90)],
    "on_lost": ["abort", "warn"],
    "on_store_error": ["reschedule", "raise", "run", "skip"],
    "min_hold": [0, 0.5, timedelta(hours=1)],
    "min_hold_on_failure": [True, False],
    "queue_ttl": [60, 3600],
    "label": [None, "no. {x}"],
}
REFUSED: dict[str, list[Any]] = {
    "mode": ["", "while-executing", True, "for_ever"],
    "limit": [True, 0, -1, 1001, 1.0, "2", [2], float("nan")],
    "ttl": [*NOT_A_DURATION, 0, -1, 0.999, timedelta(milliseconds=999)],
    "on_conflict": ["", "ignore", "SKIP", True, ["skip"]],
    "wait_timeout": [*NOT_A_DURATION, -0.001, timedelta(seconds=-1)],
    "on_lost": ["", "ignore", "ABORT", True],
    "on_store_error": ["", "wait", False],
    "min_hold": [*NOT_A_DURATION, -0.001, timedelta(seconds=-1)],
    "min_hold_on_failure": [0, 1, "no"],
    "queue_ttl": [0, True],
    "label": [7, True, ["{x}"], b"{x}"],
}


def told(name: str) -> list[str]:
    if isinstance(ALLOWED[name][0], str):
        return [repr(value) for value in ALLOWED[name]]
    of_numbers = {"limit": ["a whole number from 1 to 1000"], "label": ["a format string", "{parameter}"]}
    of_numbers["min_hold_on_failure"] = ["True or False"]
    least = 1 if name in ("ttl", "queue_ttl") else 0
    return of_numbers.get(name, ["a number of seconds", f"at least {least}", "timedelta"])


def ttl_of(task: Any) -> Any:
    """About how many seconds a lease of a run of *task* lasts: some are spent before one can ask."""
    left: list[float] = []

    def hear(lease: Any, **_: Any) -> None:
        left.append(lease.remaining())

    lock_acquired.connect(hear)
    task.apply((1,), throw=True)
    lock_acquired.disconnect(hear)
    return pytest.approx(left[0], abs=5)


def test_a_lease_lasts_thirty_seconds_if_nobody_says_otherwise(app: Celery) -> None:
    assert ttl_of(make(app)) == 30


NOT_SENT = (
    "in which an equal call is not sent and gets the result of the queued call; use 'skip', 'raise', "
    "'reschedule' or 'wait', or lock_mode="
)
NEXT = NOT_SENT + "'until_and_while_executing', in which the newest call runs next"
UNLOCKED = (
    "in which a run has no lock and so cannot be asked to stop; use 'rerun', or lock_mode='until_and_while_executing'"
)
REFUSED_PAIRS = [
    ("until_executing", "join", NOT_SENT + "'while_executing'"),
    ("until_executed", "join", NOT_SENT + "'while_executing'"),
    ("until_and_while_executing", "join", NOT_SENT + "'while_executing'"),
    ("until_executed", "rerun", NEXT),
    ("until_executed", "replace", NEXT),
    ("until_executing", "replace", UNLOCKED),
]


@pytest.mark.parametrize(("mode", "policy", "why"), REFUSED_PAIRS)
def test_a_mode_is_refused_with_a_policy_with_which_it_cannot_work(mode: str, policy: str, why: str) -> None:
    class Succeeding(SingletonTask):
        abstract = True
        lock_on_conflict = policy

    apps = [Celery("shop", set_as_current=False) for _ in range(3)]
    apps[2].conf.update(singleton_lock_on_conflict=policy, singleton_lock_url="memory://")
    ways: list[Callable[[], Any]] = [
        lambda: make(apps[0], lock_mode=mode, lock_on_conflict=policy),
        lambda: make(apps[1], base=Succeeding, lock_mode=mode),
        lambda: make(apps[2], lock_mode=mode).apply((1,), throw=True),
    ]
    for way, option in zip(ways, ["lock_on_conflict", "lock_on_conflict", "singleton_lock_on_conflict"], strict=True):
        with refused(f"task shop.tasks.sync: {option}='{policy}' does not go with lock_mode='{mode}', {why}"):
            way()


@pytest.mark.parametrize("name", ALLOWED)
def test_a_task_and_where_it_is_one_the_app_can_set_this(name: str) -> None:
    for value in ALLOWED[name]:
        assert make(Celery("shop", set_as_current=False), **{f"lock_{name}": value}).lock_key_for(1)

        if name in APP_WIDE:
            app = Celery("other", set_as_current=False)
            app.conf[f"singleton_lock_{name}"] = value
            assert make(app).lock_key_for(1)


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_cannot_work_fails_when_the_task_is_made(name: str) -> None:
    for value in REFUSED[name]:
        with refused("task shop.tasks.sync", f"lock_{name}={value!r}", "not allowed", *told(name)):
            make(Celery("shop", set_as_current=False), **{f"lock_{name}": value})


def test_a_class_that_names_its_app_and_was_not_registered_waits_for_no_other_thread(app: Celery) -> None:
    class Sync(SingletonTask):
        name = "shop.tasks.sync"

        def run(self) -> None: ...

    Sync.app = app

    assert Sync().lock_options
    assert Sync.request_stack is not None


@pytest.mark.parametrize("options", [{"lock_key": ["z"]}, {"lock_key": "all"}, {"lock_name": ""}, {"lock_ttl": 0}])
def test_it_fails_however_the_task_is_made(app: Celery, options: dict[str, Any]) -> None:
    told = rf"{next(iter(options))}="

    class Sync(SingletonTask):
        name = "shop.tasks.other"

        def run(self, x: int) -> None: ...

    for name, value in options.items():
        setattr(Sync, name, value)
    with pytest.raises(ConfigurationError, match=told):
        app.register_task(Sync())
    del Sync.name
    with pytest.raises(ConfigurationError, match=rf"task {__name__}\.Sync: .*{told}"):
        app.register_task(Sync())
    with pytest.raises(ConfigurationError, match=told):
        make(app, **options)
    another = Celery("another", broker="memory://", set_as_current=False)
    another.conf.task_annotations = {"shop.tasks.lazy": options}

    @another.task(base=SingletonTask, name="shop.tasks.lazy", shared=False)
    def lazy(x: int) -> None: ...

    with pytest.raises(ConfigurationError, match=told):
        lazy.delay(1)


def test_a_class_without_a_name_gets_the_name_that_celery_gives(app: Celery) -> None:
    subclasses = list[str]()

    class Sync(SingletonTask):
        lock_mode = "until_executed"

        def __init_subclass__(cls) -> None:
            subclasses.append(cls.__name__)

        def run(self, x: int) -> int:
            return x

    class Other(Sync): ...

    for task in (app.register_task(Sync()), app.register_task(Other())):
        assert task.name == f"{__name__}.{type(task).__name__}"
        assert task.lock_key_for(1).startswith(f"singleton:v3:{{{task.name}:")
        assert task.apply((7,)).get() == 7
        assert task.delay(1).id == task.lock_state(1).queued
    check_beat(app, has_lease=False)
    assert subclasses == ["Other"]


def test_a_fault_of_a_class_without_a_name_is_told_under_that_name(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sync(SingletonTask):
        lock_tll = 3

        def run(self) -> None: ...

    # As in a worker, which tells the faults of all tasks at its start.
    monkeypatch.setattr("celery_singleton_lock.task.is_checked_at_start", lambda _: True)
    app.register_task(Sync())

    (fault,) = faults_of(app)

    assert fault.startswith(f"task {__name__}.Sync: there is no option lock_tll")


@pytest.mark.parametrize(("setting", "value"), [("singleton_beat_ttl", 0), ("singleton_beat_name", "")])
def test_a_wrong_setting_of_beats_is_a_fault_for_all_since_a_beat_in_a_worker_could_only_end_itself(
    app: Celery, setting: str, value: Any
) -> None:
    app.conf[setting] = value

    (fault,) = faults_of(app)

    assert fault.startswith(f"{setting}={value!r} is not allowed")


class Defaults:
    lock_ttl = 99
    lock_key = ("x",)
    lock_skip_result = 7


class CompanyTask(Task, Defaults):
    abstract = True


@pytest.mark.parametrize("behind", [Defaults, CompanyTask])
def test_options_of_a_class_behind_ours_count(app: Celery, behind: type) -> None:
    class Base(SingletonTask, behind):  # type: ignore[misc, valid-type]
        abstract = True

    task = make(app, Base)

    assert (task.lock_ttl, ttl_of(task), task.lock_skip_result) == (99, 99, 7)
    assert task.lock_key_for(1, 2) == task.lock_key_for(1, 3)
    assert not hasattr(SingletonTask, "lock_ttl")


@pytest.mark.parametrize(("name", "value"), [("lock_ttl", 0), ("lock_key", ("z",)), ("lock_name", 7)])
def test_a_bad_value_on_the_object_is_refused_with_its_name(app: Celery, name: str, value: Any) -> None:
    task = make(app)
    setattr(task, name, value)

    with pytest.raises(ConfigurationError, match=rf"^task shop.tasks.sync: {name}"):
        task.delay(1)


@pytest.mark.parametrize("name", APP_WIDE)
def test_a_setting_that_cannot_work_is_refused_by_its_name(app: Celery, name: str) -> None:
    task = make(app)
    for value in REFUSED[name]:
        app.conf[f"singleton_lock_{name}"] = value
        with refused(f"singleton_lock_{name}={value!r}", *told(name)):
            task.lock_key_for(1)


def test_a_task_that_sets_an_option_does_not_look_at_the_setting(app: Celery) -> None:
    app.conf.singleton_lock_ttl = 60
    app.conf.singleton_lock_on_conflict = "never"

    task = make(app, lock_ttl=90, lock_on_conflict="raise")

    assert ttl_of(task) == 90
    assert task.lock_on_conflict == "raise"


@pytest.mark.parametrize("way", ["update", "config_from_object", "namespace"])
def test_settings_are_found_wherever_celery_finds_its_own(app: Celery, way: str) -> None:
    settings = {"singleton_lock_ttl": 60, "singleton_lock_on_conflict": "raise", "singleton_lock_prefix": "shop"}
    settings["timezone"] = "UTC"
    if way == "update":
        app.conf.update(settings)
    elif way == "config_from_object":
        app.config_from_object(settings)
    else:
        app.config_from_object({f"CELERY_{name.upper()}": it for name, it in settings.items()}, namespace="CELERY")

    task = make(app)

    assert ttl_of(task) == 60
    assert task.lock_key_for(1).startswith("shop:v3:{shop.tasks.sync:")


@pytest.mark.parametrize("annotated", ["shop.tasks.sync", "*"])
def test_an_annotation_wins_over_the_code(app: Celery, annotated: str) -> None:
    app.conf.task_annotations = {annotated: {"lock_ttl": 60, "lock_on_conflict": "raise", "lock_key": ()}}

    task = make(app, lock_ttl=90)

    assert ttl_of(task) == 60
    assert task.lock_on_conflict == "raise"
    assert task.lock_key_for(1) == task.lock_key_for(2)


@pytest.mark.parametrize("prefix", ["", "a{b", "a}b", "{shop}", None, 7, b"shop", "\udc80"])
def test_a_prefix_that_would_break_the_hash_tag_is_refused(app: Celery, prefix: Any) -> None:
    app.conf.singleton_lock_prefix = prefix
    task = make(app)

    with refused(f"singleton_lock_prefix={prefix!r}", "a text without braces"):
        task.lock_key_for(1)


def test_celerys_own_tasks_still_run_where_every_task_is_a_singleton() -> None:
    app = Celery("shop", set_as_current=False)
    app.Task = SingletonTask
    app.conf.task_always_eager = True
    app.finalize()

    summed = app.tasks["celery.accumulate"].apply((1, 2), {"index": None})

    assert summed.get() == (1, 2)


class Transport(virtual.Transport):
    """A transport of kombu."""


@pytest.mark.parametrize(
    ("default", "options", "seconds"),
    [
        # As those of Redis, SQS and Service Bus.
        ({"visibility_timeout": 3600}, {}, 3600),
        ({"visibility_timeout": property(lambda _: 0), "default_visibility_timeout": 1800}, {}, 1800),
        ({"default_peek_lock_seconds": 60}, {}, 60),
        ({"default_peek_lock_seconds": 60}, {"peek_lock_seconds": 300}, 300),
        ({"default_visibility_timeout": 1800}, {"visibility_timeout": 90}, 90),
        # One without such a timeout.
        ({}, {}, 3600),
    ],
)
def test_where_no_option_tells_the_visibility_timeout_is_that_of_the_transport(
    app: Celery, monkeypatch: pytest.MonkeyPatch, default: dict[str, Any], options: dict[str, Any], seconds: float
) -> None:
    channel = type("Channel", (virtual.Channel,), default)
    monkeypatch.setattr(Transport, "Channel", channel)
    monkeypatch.setitem(TRANSPORT_ALIASES, "queues", f"{__name__}:Transport")
    app.conf.broker_url = "queues://"
    app.conf.broker_transport_options = options

    @app.task(base=SingletonTask)
    def count() -> None: ...

    assert count.lock_options.visibility_timeout == seconds


@pytest.mark.parametrize("value", ["1h", None, -1, float("nan"), float("inf")])
def test_a_visibility_timeout_that_is_no_number_is_refused(app: Celery, value: Any) -> None:
    app.conf.broker_transport_options = {"visibility_timeout": value}

    @app.task(base=SingletonTask)
    def count() -> None: ...

    with refused("broker_transport_options", f"visibility_timeout={value!r}", "number of seconds"):
        count.delay()


OF_BROKER, OF_RESULTS = "broker_transport_options", "result_backend_transport_options"


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [
        ({OF_RESULTS: {"global_keyprefix": "shop:"}}, "shop:singleton"),
        ({OF_BROKER: {"global_keyprefix": "{shop}:"}}, "shop:singleton"),
        ({OF_BROKER: {"global_keyprefix": "a:"}, OF_RESULTS: {"global_keyprefix": "b:"}}, "b:singleton"),
        ({OF_BROKER: {"global_keyprefix": "shop:"}, "singleton_lock_prefix": "ours"}, "ours"),
        ({OF_BROKER: {"visibility_timeout": 60}}, "singleton"),
    ],
)
def test_the_default_prefix_takes_the_global_keyprefix_in(app: Celery, settings: dict[str, Any], prefix: str) -> None:
    app.conf.update(settings)

    assert make(app).lock_key_for(1).startswith(f"{prefix}:v3:")


@pytest.mark.parametrize("option", ["lock_label", "lock_key", "lock_name", "lock_on_conflict"])
def test_a_text_that_is_translated_later_is_refused_by_its_type(app: Celery, option: str) -> None:
    from django.utils.translation import gettext_lazy

    with pytest.raises(ConfigurationError, match=rf"{option}=<a .*__proxy__ "):
        make(app, **{option: gettext_lazy("skip")})
