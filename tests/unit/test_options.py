"""Options and settings: what is allowed, what is not, and which of two values counts."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task

from celery_singleton_lock import ConfigurationError, Lock, LockHeld, SingletonTask
from celery_singleton_lock.signals import lock_acquired
from celery_singleton_lock.testing import hold
from tests.servers import Server

NOT_A_DURATION = [True, float("nan"), float("inf"), "30", [30]]
APP_WIDE = ("ttl", "on_conflict", "wait_timeout", "on_lost", "on_store_error", "min_hold", "queue_ttl")

ALLOWED = [
    ("mode", "while_executing", "while_executing"),
    ("limit", 1, 1),
    ("limit", 2, 2),
    ("limit", 1000, 1000),
    ("ttl", 1, 1.0),
    ("ttl", 2.5, 2.5),
    ("ttl", timedelta(minutes=1), 60.0),
    ("on_conflict", "skip", "skip"),
    ("on_conflict", "raise", "raise"),
    ("on_conflict", "reschedule", "reschedule"),
    ("on_conflict", "wait", "wait"),
    ("wait_timeout", 0, 0.0),
    ("wait_timeout", 0.5, 0.5),
    ("wait_timeout", timedelta(seconds=90), 90.0),
    ("on_lost", "abort", "abort"),
    ("on_lost", "warn", "warn"),
    ("on_store_error", "reschedule", "reschedule"),
    ("on_store_error", "raise", "raise"),
    ("on_store_error", "run", "run"),
    ("on_store_error", "skip", "skip"),
    ("min_hold", 0, 0.0),
    ("min_hold", 0.5, 0.5),
    ("min_hold", timedelta(hours=1), 3600.0),
    ("queue_ttl", 3600, 3600.0),
    ("mode", "until_executed", "until_executed"),
    ("queue_ttl", 60, 60.0),
    ("label", None, None),
    ("label", "no. {x}", "no. {x}"),
]

REFUSED = [
    *[("limit", value) for value in [True, False, 0, -1, 1001, 1.0, 2.5, "2", [2], float("nan")]],
    *[("ttl", value) for value in [*NOT_A_DURATION, 0, -1, 0.999, timedelta(0), timedelta(milliseconds=999)]],
    *[("wait_timeout", value) for value in [*NOT_A_DURATION, -1, -0.001, timedelta(seconds=-1)]],
    *[("min_hold", value) for value in [*NOT_A_DURATION, -1, -0.001, timedelta(seconds=-1)]],
    *[("on_conflict", value) for value in ["", "ignore", "SKIP", "Skip", True, 1, ["skip"]]],
    *[("on_lost", value) for value in ["", "ignore", "ABORT", True, 0]],
    *[("on_store_error", value) for value in ["", "ignore", "wait", False, 1.0]],
    *[("mode", value) for value in ["", "while-executing", True, 1]],
    ("mode", "for_ever"),
    ("queue_ttl", 0),
    ("queue_ttl", True),
    *[("label", value) for value in [7, True, ["{x}"], b"{x}"]],
]

WHAT_IS_ALLOWED = {
    "mode": ["'while_executing'", "'until_executing'", "'until_executed'", "'until_and_while_executing'"],
    "limit": ["a whole number from 1 to 1000"],
    "ttl": ["a number of seconds", "at least 1", "timedelta"],
    "on_conflict": ["'skip'", "'raise'", "'reschedule'", "'wait'"],
    "wait_timeout": ["a number of seconds", "at least 0", "timedelta"],
    "on_lost": ["'abort'", "'warn'"],
    "on_store_error": ["'reschedule'", "'raise'", "'run'", "'skip'"],
    "min_hold": ["a number of seconds", "at least 0", "timedelta"],
    "queue_ttl": ["a number of seconds", "at least 1", "timedelta"],
    "label": ["a format string", "{parameter}"],
}


@pytest.fixture
def app() -> Celery:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory://options"
    return app


def make(app: Celery, base: type[Task] = SingletonTask, **options: Any) -> Any:
    """A task of *app*, made as Celery makes it: when the app is finalised."""

    @app.task(base=base, name="shop.tasks.sync", shared=False, **options)
    def sync(x: Any) -> None: ...

    app.finalize()
    return app.tasks["shop.tasks.sync"]


def ttl_of(task: Any) -> Any:
    """About how many seconds a lease of a run of *task* lasts: some are spent before one can ask."""
    left: list[float] = []

    def hear(lease: Any, **_: Any) -> None:
        left.append(lease.remaining())

    lock_acquired.connect(hear)
    task.apply((1,), throw=True)
    lock_acquired.disconnect(hear)
    return pytest.approx(left[0], abs=5)


# A task's own options.


def test_a_lease_lasts_thirty_seconds_if_nobody_says_otherwise(app: Celery) -> None:
    assert ttl_of(make(app)) == 30


@pytest.mark.parametrize(("name", "value", "_"), ALLOWED)
def test_a_task_and_where_it_is_one_the_app_can_set_this(app: Celery, name: str, value: Any, _: Any) -> None:
    assert make(app, **{f"lock_{name}": value}).lock_key_for(1)

    if name in APP_WIDE:
        other = Celery("other", set_as_current=False)
        other.conf[f"singleton_lock_{name}"] = value
        assert make(other).lock_key_for(1)


QUEUE_MODES = ["until_executing", "until_executed", "until_and_while_executing"]
REFUSED_PAIRS = [(mode, policy) for mode in QUEUE_MODES for policy in ("join", "rerun", "replace")]


def refused_pair(mode: str, policy: str, option: str = "lock_on_conflict") -> str:
    return (
        f"task shop.tasks.sync: {option}='{policy}' does not go with lock_mode='{mode}', in which an equal call is not "
        "sent and gets the result of the one that is queued; use 'skip', 'raise', 'reschedule' or 'wait', or "
        "lock_mode='while_executing'"
    )


@pytest.mark.parametrize(("mode", "policy"), REFUSED_PAIRS)
def test_a_queue_mode_goes_with_no_policy_for_which_other_calls_end(app: Celery, mode: str, policy: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make(app, lock_mode=mode, lock_on_conflict=policy)

    assert str(refused.value) == refused_pair(mode, policy)


@pytest.mark.parametrize(("mode", "policy"), REFUSED_PAIRS)
def test_nor_with_one_that_its_class_has(app: Celery, mode: str, policy: str) -> None:
    class Succeeding(SingletonTask):
        abstract = True
        lock_on_conflict = policy

    with pytest.raises(ConfigurationError) as refused:
        make(app, base=Succeeding, lock_mode=mode)

    assert str(refused.value) == refused_pair(mode, policy)


@pytest.mark.parametrize(("mode", "policy"), REFUSED_PAIRS)
def test_nor_with_one_that_the_app_has(app: Celery, mode: str, policy: str) -> None:
    app.conf.singleton_lock_on_conflict = policy
    task = make(app, lock_mode=mode)

    with pytest.raises(ConfigurationError) as refused:
        task.apply((1,), throw=True)

    assert str(refused.value) == refused_pair(mode, policy, "singleton_lock_on_conflict")


@pytest.mark.parametrize("mode", QUEUE_MODES)
@pytest.mark.parametrize("policy", ["skip", "raise", "reschedule", "wait"])
def test_a_queue_mode_goes_with_the_other_policies(app: Celery, mode: str, policy: str) -> None:
    assert make(app, lock_mode=mode, lock_on_conflict=policy).lock_options.mode == mode


def test_a_ttl_may_be_a_timedelta(app: Celery) -> None:
    assert ttl_of(make(app, lock_ttl=timedelta(minutes=1))) == 60


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_value_that_cannot_work_fails_when_the_task_is_made(app: Celery, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make(app, **{f"lock_{name}": value})

    for words in ("task shop.tasks.sync", f"lock_{name}={value!r}", "not allowed", *WHAT_IS_ALLOWED[name]):
        assert words in str(refused.value)


@pytest.mark.parametrize("options", [{"lock_key": ["z"]}, {"lock_key": "all"}, {"lock_key": 1}, {"lock_name": ""}])
def test_a_key_that_cannot_work_fails_when_the_task_is_made(app: Celery, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"task shop\.tasks\.sync: lock_"):
        make(app, **options)


def test_a_task_that_celery_makes_lazily_fails_at_its_first_use(app: Celery) -> None:
    @app.task(base=SingletonTask, shared=False, lock_ttl=0)
    def sync() -> None: ...

    with pytest.raises(ConfigurationError, match="lock_ttl=0"):
        sync.delay()


def test_a_task_class_is_checked_when_it_is_registered(app: Celery) -> None:
    class Sync(SingletonTask):
        name = "shop.tasks.sync"
        lock_on_conflict = "never"

        def run(self) -> None: ...

    with pytest.raises(ConfigurationError, match="lock_on_conflict='never'"):
        app.register_task(Sync())


# The app's settings.


@pytest.mark.parametrize(("name", "value"), [row for row in REFUSED if row[0] in APP_WIDE])
def test_a_setting_that_cannot_work_is_refused_by_its_name(app: Celery, name: str, value: Any) -> None:
    app.conf[f"singleton_lock_{name}"] = value
    task = make(app)

    with pytest.raises(ConfigurationError) as refused:
        task.lock_key_for(1)

    for words in (f"singleton_lock_{name}={value!r}", *WHAT_IS_ALLOWED[name]):
        assert words in str(refused.value)


def test_a_task_that_sets_an_option_does_not_look_at_the_setting(app: Celery) -> None:
    app.conf.singleton_lock_ttl = 60
    app.conf.singleton_lock_on_conflict = "never"

    task = make(app, lock_ttl=90, lock_on_conflict="raise")

    assert ttl_of(task) == 90
    assert task.lock_on_conflict == "raise"


def test_settings_may_come_after_the_task(app: Celery) -> None:
    task = make(app)

    app.conf.singleton_lock_ttl = 60

    assert ttl_of(task) == 60


@pytest.mark.parametrize(
    "configure",
    [
        pytest.param(lambda app, settings: app.conf.update(settings), id="update"),
        pytest.param(lambda app, settings: app.config_from_object(settings), id="config_from_object"),
        pytest.param(
            lambda app, settings: app.config_from_object(
                {f"CELERY_{name.upper()}": value for name, value in settings.items()}, namespace="CELERY"
            ),
            id="namespace",
        ),
    ],
)
def test_settings_are_found_wherever_celery_finds_its_own(
    app: Celery, configure: Callable[[Celery, dict[str, Any]], None]
) -> None:
    configure(
        app,
        {
            "singleton_lock_ttl": 60,
            "singleton_lock_on_conflict": "raise",
            "singleton_lock_prefix": "shop",
            "timezone": "UTC",
        },
    )

    task = make(app)

    assert ttl_of(task) == 60
    assert task.lock_key_for(1).startswith("shop:v3:{shop.tasks.sync:")


def test_a_setting_is_not_overridden_by_a_default_of_ours(app: Celery) -> None:
    app.conf.singleton_lock_ttl = 60
    make(app)

    app.conf.update(singleton_lock_ttl=90)

    assert app.conf.singleton_lock_ttl == 90
    assert "singleton_lock_on_conflict" not in app.conf


@pytest.mark.parametrize("annotated", ["shop.tasks.sync", "*"])
def test_an_annotation_wins_over_the_code(app: Celery, annotated: str) -> None:
    app.conf.task_annotations = {annotated: {"lock_ttl": 60, "lock_on_conflict": "raise", "lock_key": ()}}

    task = make(app, lock_ttl=90)

    assert ttl_of(task) == 60
    assert task.lock_on_conflict == "raise"
    assert task.lock_key_for(1) == task.lock_key_for(2)


def test_an_annotation_is_checked_like_the_code(app: Celery) -> None:
    app.conf.task_annotations = {"shop.tasks.sync": {"lock_ttl": 0}}

    with pytest.raises(ConfigurationError, match=r"task shop\.tasks\.sync: lock_ttl=0 is not allowed"):
        make(app)


@pytest.mark.parametrize("prefix", ["", "a{b", "a}b", "{shop}", None, 7, b"shop"])
def test_a_prefix_that_would_break_the_hash_tag_is_refused(app: Celery, prefix: Any) -> None:
    app.conf.singleton_lock_prefix = prefix
    task = make(app)

    with pytest.raises(ConfigurationError) as refused:
        task.lock_key_for(1)

    assert f"singleton_lock_prefix={prefix!r}" in str(refused.value)
    assert "a text without braces" in str(refused.value)


# Other base classes.


def test_celerys_own_tasks_still_run_where_every_task_is_a_singleton() -> None:
    app = Celery("shop", set_as_current=False)
    app.Task = SingletonTask
    app.conf.task_always_eager = True
    app.finalize()

    summed = app.tasks["celery.accumulate"].apply((1, 2), {"index": None})

    assert summed.get() == (1, 2)


class PastTheLock(Task):
    """The recipe of Flask's documentation."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with timing():
            return self.run(*args, **kwargs)


class ThroughTheLock(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with timing():
            return super().__call__(*args, **kwargs)


class ThroughTheLockInside(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def go_on() -> Any:
            return super(ThroughTheLockInside, self).__call__(*args, **kwargs)

        return go_on()


class timing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_a_mixin_that_would_run_the_body_past_the_lock_is_refused(app: Celery) -> None:
    class Base(PastTheLock, SingletonTask):
        abstract = True

    with pytest.raises(ConfigurationError) as refused:
        make(app, base=Base)

    for words in ("task shop.tasks.sync", "PastTheLock.__call__", "super().__call__()", "put SingletonTask first"):
        assert words in str(refused.value)


def test_a_subclass_that_would_run_the_body_past_the_lock_is_refused(app: Celery) -> None:
    class Base(SingletonTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    with pytest.raises(ConfigurationError, match=r"Base.__call__ never calls super\(\).__call__\(\)"):
        make(app, base=Base)


def test_the_same_mixin_is_fine_behind_the_lock(app: Celery) -> None:
    class Base(SingletonTask, PastTheLock):
        abstract = True

    assert make(app, base=Base).lock_key_for(1)


@pytest.mark.parametrize("mixin", [ThroughTheLock, ThroughTheLockInside])
def test_a_mixin_that_calls_super_is_fine_before_the_lock(app: Celery, mixin: type[Task]) -> None:
    class Base(mixin, SingletonTask):  # type: ignore[misc, valid-type]
        abstract = True

    assert make(app, base=Base).lock_key_for(1)


def test_a_class_may_say_what_its_body_takes_and_returns(app: Celery) -> None:
    class Count(SingletonTask[[int], str]):
        name = "shop.tasks.count"
        lock_ttl = 60

        def run(self, supplier_id: int) -> str:
            return str(supplier_id)

    assert ttl_of(app.register_task(Count())) == 60
    assert app.tasks["shop.tasks.count"](7) == "7"


@pytest.mark.parametrize("value", ["1h", None, timedelta(hours=1), -1, float("nan"), float("inf")])
def test_a_visibility_timeout_that_is_no_number_is_refused(app: Celery, value: Any) -> None:
    app.conf.broker_transport_options = {"visibility_timeout": value}

    @app.task(base=SingletonTask)
    def count() -> None: ...

    with pytest.raises(ConfigurationError) as refused:
        count.delay()

    for words in ("broker_transport_options", f"visibility_timeout={value!r}", "number of seconds"):
        assert words in str(refused.value)


def test_deployments_that_a_keyprefix_tells_apart_do_not_exclude_one_another(valkey: Server) -> None:
    def lock_of(deployment: str) -> Lock:
        app = Celery("shop", broker=valkey.url, set_as_current=False)
        app.conf.broker_transport_options = {"global_keyprefix": deployment}
        return Lock("stock", app=app)

    with lock_of("north:"):
        assert lock_of("north:").acquire(blocking=False) is None
        assert lock_of("south:").acquire(blocking=False) is not None


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [
        ({"result_backend_transport_options": {"global_keyprefix": "shop:"}}, "shop:singleton"),
        ({"broker_transport_options": {"global_keyprefix": "shop:"}}, "shop:singleton"),
        (
            {
                "broker_transport_options": {"global_keyprefix": "messages:"},
                "result_backend_transport_options": {"global_keyprefix": "results:"},
            },
            "results:singleton",
        ),
        ({"broker_transport_options": {"global_keyprefix": "{shop}:"}}, "shop:singleton"),
        ({"broker_transport_options": {"global_keyprefix": "shop:"}, "singleton_lock_prefix": "ours"}, "ours"),
        ({"broker_transport_options": {"visibility_timeout": 60}}, "singleton"),
    ],
)
def test_the_default_prefix_takes_the_global_keyprefix_in(app: Celery, settings: dict[str, Any], prefix: str) -> None:
    app.conf.update(settings)

    assert make(app).lock_key_for(1).startswith(f"{prefix}:v3:")


@pytest.mark.parametrize("value", [60, "60", 0.5])
def test_a_visibility_timeout_is_a_number_or_its_text(app: Celery, value: Any) -> None:
    app.conf.broker_transport_options = {"visibility_timeout": value}

    assert make(app).apply((1,), throw=True).successful()


def test_what_an_app_says_of_conflicts_counts_for_its_tasks(app: Celery) -> None:
    app.conf.singleton_lock_on_conflict = "raise"
    task = make(app)

    with hold(task, 1), pytest.raises(LockHeld):
        task.apply((1,), throw=True)


@pytest.mark.parametrize(("options", "state"), [({}, "REVOKED"), ({"lock_skip_result": None}, "SUCCESS")])
def test_a_skip_result_of_none_counts_as_set(app: Celery, options: dict[str, Any], state: str) -> None:
    task = make(app, **options)

    with hold(task, 1):
        assert task.apply((1,)).state == state
