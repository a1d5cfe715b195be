"""`celery -A proj singleton`: see the locks of an app, and free one."""

import getpass
import os
import socket
import sys
from typing import Any, NoReturn

import click
from celery import Celery
from celery.bin.base import JSON_ARRAY, JSON_OBJECT, handle_preload_options

from celery_singleton_lock.operations.breaking import (
    Broken,
    ask,
    meant,
    name_of,
    patience_with,
    preview,
    wait_until_gone,
)
from celery_singleton_lock.operations.doctor import doctor
from celery_singleton_lock.operations.ending import Call, call_of
from celery_singleton_lock.operations.inventory import in_order, lock_as_json, rows_of
from celery_singleton_lock.operations.serving import web
from celery_singleton_lock.operations.shell import Seconds, as_json, locks_of, told, write_json
from celery_singleton_lock.operations.watch import watch
from celery_singleton_lock.operations.words import nothing, outcome, planned, shown, table, told_of, unknown
from celery_singleton_lock.stores.base import lock_name_of
from celery_singleton_lock.stores.inventory import Survey


@click.group()
@click.pass_context
@handle_preload_options
def singleton(ctx: click.Context, **_: Any) -> None:
    """See the locks of singleton tasks, and free one.

    All is read from the store of the locks, so no worker has to run. A lock whose
    holder has died needs nobody: it is free within its ttl.
    """


singleton.add_command(doctor)
singleton.add_command(watch)
singleton.add_command(web)


@singleton.command("list")
@click.argument("pattern", required=False)
@as_json
@click.pass_obj
def list_locks(obj: Any, pattern: str | None, is_json: bool) -> None:
    """List who holds a lock, and what calls have left that wait for one.

    PATTERN is a glob for lock names, such as 'shop.*'.
    """
    with told():
        rows, problem = locks_of(obj.app).found(pattern)
        if is_json and (rows or problem is None):
            write_json([row.as_json() for row in rows])
        elif rows:
            click.echo(table(rows))
        elif problem is None:
            click.echo("No locks." if pattern is None else f"No locks whose name matches {pattern!r}.", err=True)
        if problem is not None:
            raise problem


@singleton.command("show")
@click.argument("what")
@click.option("-a", "--args", type=JSON_ARRAY, help="With a task: the positional arguments of the call, as JSON.")
@click.option("-k", "--kwargs", type=JSON_OBJECT, help="With a task: its keyword arguments, as JSON.")
@as_json
@click.pass_obj
def show(obj: Any, what: str, args: list[Any] | None, kwargs: dict[str, Any] | None, is_json: bool) -> None:
    """Show all about one lock, or what has become of a call.

    WHAT is a lock key; or the name of a task, with the arguments of a call; or the
    task id of a call. Exits with 1 if nothing is known.
    """
    app: Celery = obj.app
    with told():
        locks = locks_of(app)
        app.loader.import_default_modules()
        if args is not None or kwargs is not None or what in app.tasks:
            survey = locks.survey(_key_of_call(app, what, args or [], kwargs or {}))
        elif locks.is_key(what) or "{" in what:
            survey = locks.survey(locks.checked_key(what))
        else:
            _show_call(call_of(app, locks, what), is_json=is_json)
            return
    _show_lock(survey, _limit_of(app, survey), is_json=is_json)


@singleton.command("break")
@click.argument("key")
@click.option("--holder", metavar="ID", help="Only this one of several holders: its task id, or hostname:pid.")
@click.option("--force", is_flag=True, help="Free the lock at once, though the body may go on beside the next one.")
@click.option("--wait", type=Seconds(min=0), metavar="SECONDS", help="How long to wait until it is free.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_obj
def break_lock(
    obj: Any, key: str, holder: str | None, force: bool, wait: float | None, dry_run: bool, yes: bool, is_json: bool
) -> None:
    """Ask the holder of one lock to end, and drop the marks of queued calls.

    A holder that has died needs no break: its lock is free within its ttl. The
    holder hears of it at its next renewal, ends as REVOKED, and then the lock is
    free, so nothing overlaps. Those who wait keep their turns.

    KEY is one lock key, as `list` and the log show it.
    """
    with told():
        locks = locks_of(obj.app)
        survey = locks.survey(locks.checked_key(key))
        found = preview(survey, holder)
        if not found.was_there:
            _end(found, nothing(key, holder), 1, is_json=is_json)
        if dry_run:
            _end(found, planned(found, force=force), 0, is_json=is_json)
        click.echo(planned(found, force=force), err=True)
        if not yes:
            _confirm()
            _check_the_same(survey, locks.survey(survey.key), holder)
        broken = ask(locks, survey, holder, by=_operator(), force=force)
        if not broken.gone:
            broken = wait_until_gone(locks, broken, patience_with(broken.left) if wait is None else wait)
    _end(broken, outcome(broken, force=force), 0 if broken.gone else 1, is_json=is_json)


def _key_of_call(app: Celery, name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    task = app.tasks.get(name)
    if task is None:
        raise click.UsageError(f"There is no task {name!r} in this app.")
    if not hasattr(task, "lock_key_for"):
        raise click.UsageError(f"The task {name!r} is not a SingletonTask, so it has no locks.")
    try:
        return str(task.lock_key_for(*args, **kwargs))
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"The task {name!r} cannot be called like this: {error}") from error


def _limit_of(app: Celery, survey: Survey) -> int | None:
    """The limit of the task whose lock it is, if this app has it."""
    name = lock_name_of(survey.key)
    for task in app.tasks.values():
        if name == (getattr(task, "lock_name", None) or task.name) and hasattr(task, "lock_options"):
            return int(task.lock_options.limit)
    return None


def _show_lock(survey: Survey, limit: int | None, *, is_json: bool) -> None:
    facts, rows = lock_as_json(survey, limit), in_order(rows_of(survey))
    if is_json:
        write_json(facts)
    elif not rows and not survey.waiters:
        click.echo(f"Nobody holds {shown(survey.key)}, and nothing waits for it.", err=True)
    else:
        click.echo(f"key      {shown(survey.key)}\nlimit    {limit or '-'}\nfence    {survey.fence or '-'}")
        click.echo(f"waiting  {survey.waiters}\n\n{table(rows)}" if rows else f"waiting  {survey.waiters}")
    if not rows and not survey.waiters:
        sys.exit(1)


def _show_call(call: Call, *, is_json: bool) -> None:
    if is_json:
        write_json(call.as_json())
    if call.problem is not None:
        click.echo(f"Its result cannot be read: {shown(call.problem)}", err=True)
    if not call.is_known:
        click.echo(unknown(call), err=True)
        sys.exit(1)
    if not is_json:
        click.echo(told_of(call))


def _end(broken: Broken, said: str, code: int, *, is_json: bool) -> NoReturn:
    if is_json:
        write_json(broken.as_json())
    click.echo(said, err=is_json or code != 0)
    sys.exit(code)


def _confirm() -> None:
    if not sys.stdin.isatty():
        click.echo("Nothing was done: there is no terminal to ask, so give --yes.", err=True)
        sys.exit(1)
    if not click.confirm("Go on?", err=True):
        click.echo("Nothing was done.", err=True)
        sys.exit(1)


def _check_the_same(before: Survey, now: Survey, holder: str | None) -> None:
    """A holder that came while the person was thinking is not one that the person has agreed to."""
    known = {each.token for each in meant(before, holder)}
    others = [name_of(now, each) for each in meant(now, holder) if each.token not in known]
    if others:
        click.echo(f"Nothing was done: it is held by another one now, {shown(', '.join(others))}.", err=True)
        sys.exit(1)


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container, for example, the user may have no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
