"""Celery's own integration tests end with the lock as they do without it; for `make seeds` a fixed part of them."""

from importlib.util import find_spec

import pytest

from tests.celery_suite.play import play_both
from tests.servers import missing

_HANGS = "hangs without the lock as well: "
_RACES = "is a race of the test itself: "

LEFT_OUT = {
    "test_tasks.py::test_tasks::test_revoked_by_headers_complex_canvas": (
        f"{_HANGS}it waits until the worker is idle, which takes longer than its 20 s"
    ),
    "test_canvas.py::test_chord::test_disabling_flag_allow_error_cb_on_chord_header": (
        f"{_HANGS}it spends 20 s on each of seven chords, and is over its time before the last"
    ),
    "test_canvas.py::test_chord::test_error_propagates_from_chord": (
        f"{_HANGS}Celery expects it to fail, which it does after a minute"
    ),
    "test_tasks.py::test_task_replacement::test_replaced_task_nesting_level_0": (
        f"{_RACES}it clears what the worker has noted, after it has sent the task"
    ),
    "test_tasks.py::test_tasks::test_retry": (
        f"{_RACES}its task counts its attempts in a process, and the pool has four"
    ),
    "test_canvas.py::test_chord::test_mutable_errback_called_by_chord_from_group_fail_multiple_on_body_failure": (
        f"{_RACES}42 equal calls fail, here one after the other, and it waits for the first of them only"
    ),
}

DIFFERENT = {
    "test_tasks.py::test_tasks::test_expired": (
        "four equal calls are to fill the pool; with the lock they run one at a time, so the next task finds a process "
        "free, and does not expire"
    )
}

PART = (
    *DIFFERENT,
    "test_tasks.py::test_class_based_tasks",
    "test_tasks.py::test_tasks::test_basic_task",
    "test_tasks.py::test_tasks::test_pydantic_model_arguments",
    "test_tasks.py::test_tasks::test_reject_with_requeue_redelivers_and_succeeds",
    "test_tasks.py::test_tasks::test_reject_without_requeue_stores_failure",
    "test_tasks.py::test_task_replacement",
    "test_canvas.py::test_link_error::test_link_error_callback_retries",
    "test_canvas.py::test_chain::test_complex_chain",
    "test_canvas.py::test_chain::test_second_order_replace",
    "test_canvas.py::test_chain::test_chain_of_nine_chords",
    "test_canvas.py::test_group::test_errback_called_by_group_fail_multiple",
    "test_canvas.py::test_group::test_group_child_with_callback_replaced_with_chain",
    "test_canvas.py::test_group::test_large_group",
    "test_canvas.py::test_group::test_nested_group_chord_counting_mixed",
    "test_canvas.py::test_chord::test_chord_header_task_replaced_with_chain",
    "test_canvas.py::test_chord::test_chord_order",
    "test_canvas.py::test_chord::test_nested_chord",
    "test_canvas.py::test_chord::test_parallel_chords",
    "test_canvas.py::test_xmap_xstarmap",
    "test_canvas.py::test_stamping_mechanism::test_replace_merge_stamps",
    "test_canvas.py::test_stamping_mechanism::test_stamps_remain_on_task_retry",
)


@pytest.fixture
def requirements() -> None:
    for name in ("pydantic", "pytest_timeout"):
        if find_spec(name) is None:
            missing(f"{name} is not installed")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("only", [PART, pytest.param((), marks=pytest.mark.nightly)], ids=["a part", "all"])
def test_celerys_tests_end_with_the_lock_as_without_it(requirements: None, only: tuple[str, ...]) -> None:
    plain, locked = play_both(only=only, without=tuple(LEFT_OUT), seconds=900 if only else 3400)

    wrong = [test for test in {*plain, *locked} if (plain[test] == locked[test]) is (test in DIFFERENT)]
    told = [f"{each.test}: {each.outcome}\n{each.why}" for test in wrong for each in (*plain[test], *locked[test])]
    assert not wrong, "\n".join(told)
    assert len(plain) > len(PART)
