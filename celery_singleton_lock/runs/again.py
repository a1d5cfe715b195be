"""The run of a delivery, and another run after it.

A `__call__` before ours may catch the end of a run, and try again.
"""

from typing import Any

from celery import Task
from celery.app.task import Context

from celery_singleton_lock.runs import message
from celery_singleton_lock.runs.message import Notes
from celery_singleton_lock.runs.run import Run


def has_run(request: Context, *, may_try_again: bool) -> bool:
    """The request has a run: it is under way, or, unless another one may follow, has ended."""
    run: Run | None = vars(request).get("lock_run")
    return run is not None and (run.is_under_way or not may_try_again)


def run_for(task: Task, request: Context, notes: Notes, key: str, args: Any, kwargs: Any) -> Run:
    """The run that the request has from now on; see `Run`.

    Raises:
        Ignore, Reject, Retry: The end of the run before, because its call is over, or goes on by another message.
    """
    before: Run | None = vars(request).get("lock_run")
    # An item of a map in a body has the request of that body, whose run goes on.
    is_again = before is not None and not before.is_under_way
    if before is not None and is_again:
        _begin_again(before)
        if _are_equal(request.get("lock_merged_over"), (args, kwargs)):
            # The calls that have left theirs have ended in favour of this one. But a try may have arguments of its own.
            args, kwargs = request.args, request.kwargs
    run: Run = Run(task, request, notes, key, args, kwargs)
    if before is not None and is_again:
        # Only the first run can leave a marker, and a call may try very often.
        run.before = before if before.has_marker else before.before
        # The run before was of this very delivery, so this is no copy of a run that may live, or has ended. And the
        # message goes back to the broker no more, because the body has run, and its cool-down may refuse this run.
        run.is_copy = run.claim.may_be_copy = run.can_come_again = False
    request.lock_run = run
    return run


def _begin_again(before: Run) -> None:
    if before.end is not None:
        raise before.end
    # A signal may have broken that off.
    before.give_back()
    # The release of its token may be repeated in the background.
    vars(before.request)[message.DELIVERY] = message.delivery_of(before.request)._replace(token="")


def _are_equal(some: Any, others: Any) -> bool:
    try:
        return bool(some == others)
    except Exception:  # noqa: BLE001 (an argument's own)
        return False
