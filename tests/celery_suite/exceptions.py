"""The tests of Celery that are not played, or that end differently with the lock; each with its reason."""

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
