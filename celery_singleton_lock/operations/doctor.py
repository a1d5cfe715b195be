"""`singleton doctor`: look at store, settings, tasks, workers and holders, and change nothing."""

import json
import sys
from typing import Any

import click
from celery import Celery
from celery.platforms import EX_UNAVAILABLE

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations.advice import advice
from celery_singleton_lock.operations.finding import Finding
from celery_singleton_lock.operations.holders import about_holders
from celery_singleton_lock.operations.inventory import Locks, is_of_one_process
from celery_singleton_lock.operations.shell import Seconds, as_json
from celery_singleton_lock.operations.store import OTHERS, about_store, if_allowed, unseen
from celery_singleton_lock.operations.words import findings_table
from celery_singleton_lock.operations.workers import about_workers, ask_workers
from celery_singleton_lock.settings import open_store
from celery_singleton_lock.start import faults_of, lockable
from celery_singleton_lock.stores.base import lock_name_of
from celery_singleton_lock.stores.inventory import Survey


@click.command("doctor")
@click.option(
    "--timeout",
    type=Seconds(min=0.1, max=60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the store has for a trial, and the workers for their answers.",
)
@as_json
@click.pass_obj
def doctor(obj: Any, timeout: float, is_json: bool) -> None:
    """Look whether all that locks need is as it should be.

    It looks at the store, at settings and tasks, and asks the workers. It takes a lock
    on a key of its own, and changes nothing. Exits with 1 if something is wrong, and
    with 69 if the store does not answer.
    """
    app: Celery = obj.app
    app.loader.import_default_modules()
    findings, is_away = examine(app, timeout)
    is_well = all(finding.ok is not False for finding in findings)
    if is_json:
        click.echo(json.dumps({"ok": is_well, "checks": [finding.as_json() for finding in findings]}))
    else:
        click.echo(findings_table(findings))
    sys.exit(EX_UNAVAILABLE if is_away else int(not is_well))


def examine(app: Celery, timeout: float) -> tuple[list[Finding], bool]:
    """All findings, and whether the store does not answer; the workers and the store have *timeout* seconds each."""
    locks, problem = _locks_of(app)
    try:
        return _examine(app, locks, problem, timeout)
    finally:
        if locks is not None:
            locks.store.close()


def _examine(app: Celery, locks: Locks | None, problem: Finding, timeout: float) -> tuple[list[Finding], bool]:
    # Before the question to the workers: a run that holds a lock now is active later, or gives it back.
    surveys, unlisted = _surveys(locks) if locks is not None else ([], "")
    heard = ask_workers(app, timeout)
    of_store, is_away = _about_store(app, locks, problem, timeout)
    of_tasks = _about_tasks(app)
    workers = heard()
    if locks is None or unlisted:
        of_holders = unseen(("holders",), unlisted or problem.detail)
    else:
        of_holders = if_allowed(("holders",), lambda: [about_holders(locks, surveys, workers)])
    names = {lock_name_of(survey.key) for survey in surveys}
    of_workers = [about_workers(app, workers), *of_holders, *advice(app, lockable(app), names, workers)]
    return [*of_store, of_tasks, *of_workers], is_away


def _locks_of(app: Celery) -> tuple[Locks | None, Finding]:
    try:
        store = open_store(app)
        if not is_of_one_process(store):
            return Locks(app, store), Finding("store", True, store.address)
    except ConfigurationError as error:
        return None, Finding("store", False, str(error))
    why = "the locks are in the memory of one process (memory://), and this one sees none of others"
    return None, Finding("store", None, why)


def _surveys(locks: Locks) -> tuple[list[Survey], str]:
    """All that is known, or the reason why it could not be found out."""
    try:
        return list(locks.surveys()), ""
    except StoreError as error:
        return [], str(error)


def _about_store(app: Celery, locks: Locks | None, problem: Finding, timeout: float) -> tuple[list[Finding], bool]:
    if locks is None:
        return [problem, *unseen(OTHERS, "there is no store to look at")], False
    try:
        return about_store(app, locks.store, locks.start, timeout), False
    except StoreError as error:
        return [Finding("store", False, str(error)), *unseen(OTHERS, "the store does not answer")], True


def _about_tasks(app: Celery) -> Finding:
    faults = faults_of(app)
    if faults:
        return Finding("tasks", False, "; ".join(faults))
    return Finding("tasks", True, f"{len(lockable(app))} with a lock, and their options can work")
