"""The commands of `celery -A proj singleton`."""

import getpass
import json
import os
import socket
import sys
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn
from urllib.parse import urlsplit

import click
from celery import Celery, states
from celery.bin.base import JSON_ARRAY, JSON_OBJECT, handle_preload_options
from celery.platforms import EX_UNAVAILABLE

from celery_singleton_lock import operations
from celery_singleton_lock.definition.options import as_set
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.log import shown
from celery_singleton_lock.operations import doctor, rows
from celery_singleton_lock.stores.records import LockState, lock_name_of

PASSWORD = "SINGLETON_WEB_PASSWORD"
LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1", "[::1]"))
as_json = click.option("--json", "is_json", is_flag=True, help="Write JSON, and nothing else, to standard output.")
wide_option = click.option("--wide", is_flag=True, help="Show whole names, ids and keys, on lines of any length.")
arguments_option = click.option("-a", "--args", type=JSON_ARRAY, help="With a task: positional arguments, as JSON.")
seconds_option = partial(click.option, metavar="SECONDS", show_default=True)
keywords_option = click.option("-k", "--kwargs", type=JSON_OBJECT, help="With a task: keyword arguments, as JSON.")


class Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (StoreError, ConfigurationError) as error:
            click.echo(f"Error: {as_set(ctx.obj.app, str(error))}", err=True)
            ctx.exit(EX_UNAVAILABLE if isinstance(error, StoreError) else 2)


def app_of(obj: Any) -> Celery:
    if click.get_current_context().find_root().params.get("app", "") is None:
        raise click.UsageError("no app: give -A, as in `celery -A proj singleton list`")
    app: Celery = obj.app
    app.loader.import_default_modules()
    return app


def locks_of(obj: Any) -> rows.Locks:
    locks = rows.Locks(app_of(obj))
    if locks.store.is_of_one_process:
        click.echo(rows.OF_ONE_PROCESS, err=True)
    return locks


@click.group(cls=Commands)
@click.pass_context
@handle_preload_options
def singleton(ctx: click.Context, **_: Any) -> None:
    """Show the locks of singleton tasks, and free them.

    The commands read the store of the locks, so no worker has to run. If a holder has died,
    its lock becomes free within its TTL.
    """


@singleton.command("list")
@click.argument("pattern", required=False)
@wide_option
@as_json
@click.pass_obj
def list_locks(obj: Any, pattern: str | None, wide: bool, is_json: bool) -> None:
    """List who holds a lock, and which calls are queued or next.

    PATTERN is a glob for lock names, such as 'shop.*'.
    """
    locks = locks_of(obj)
    surveys = list[LockState]()
    problem = None
    try:
        # `extend` keeps the locks that were found before an error.
        surveys.extend(locks.surveys(pattern))
    except StoreError as error:
        problem = error
    found = locks.rows(surveys)
    if is_json and (found or problem is None):
        click.echo(json.dumps([row.as_json() for row in found]))
    elif found:
        click.echo(rows.table([row.cells for row in found], is_wide=wide or not sys.stdout.isatty()))
    elif problem is None:
        click.echo("No locks." if pattern is None else f"No locks whose name matches {pattern!r}.", err=True)
    if problem is not None:
        raise problem


@singleton.command("show")
@click.argument("what")
@arguments_option
@keywords_option
@as_json
@click.pass_obj
def show(obj: Any, what: str, args: list[Any] | None, kwargs: dict[str, Any] | None, is_json: bool) -> None:
    """Show one lock in full, or what happened to a call.

    WHAT is a lock key, a task id, or the name of a task with the arguments of a call.
    The beginning of a key, of its digest, or of a task id is enough. Exits with 1 if
    nothing is known.
    """
    locks = locks_of(obj)
    lock, task_id = operations.named(locks, what, args, kwargs)
    if task_id is None:
        _show_lock(locks, lock, is_json=is_json)
    else:
        _show_call(*rows.call_of(locks, task_id), is_json=is_json)


@singleton.command("break")
@click.argument("what", required=False)
@arguments_option
@keywords_option
@click.option("--marks", metavar="PATTERN", help="Drop the marks of all locks with such names, if nobody holds them.")
@click.option("--holder", metavar="ID", help="Break only this holder: its task id, or hostname:pid.")
@click.option("--force", is_flag=True, help="Free the lock at once. Its body may still run beside the next one.")
@seconds_option("--wait", type=click.FloatRange(min=0), help="How long to wait until the lock is free.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@as_json
@click.pass_obj
def break_lock(
    obj: Any,
    what: str | None,
    args: list[Any] | None,
    kwargs: dict[str, Any] | None,
    marks: str | None,
    holder: str | None,
    force: bool,
    wait: float | None,
    dry_run: bool,
    yes: bool,
    is_json: bool,
) -> None:
    """Ask the holder of one lock to stop, and drop the marks of queued calls.

    The holder learns of the break at its next renewal, and ends as REVOKED. Only then is
    the lock free, so two runs do not overlap. Calls that wait in a living process keep
    their turns. A dead holder needs no break, because its lock becomes free within its TTL.

    WHAT is the same as for `show`. A task id breaks only that call. After a purge of
    the broker, --marks 'shop.*' drops the queued and next marks of many locks, but
    not of locks that are held.
    """
    locks = locks_of(obj)
    if marks is not None and not (what or args or kwargs or holder or force or wait is not None):
        _break_marks(locks, marks, dry_run=dry_run, yes=yes, is_json=is_json)
    if what is None or marks is not None:
        raise click.UsageError("Give one lock or call; or --marks PATTERN, without --holder, --force and --wait.")
    lock, task_id = operations.named(locks, what, args, kwargs)
    plan = operations.Plan.of(lock, holder or task_id)
    if not plan:
        why = lock.problem or "nobody holds it, there are no marks, and nobody waits"
        if plan.name is not None:
            why = f"{shown(plan.name)} does not hold it, and neither is queued nor waits for it"
        _end(plan.as_json(), f"Nothing to break in {shown(plan.key)}: {why}.", 1, is_json=is_json)
    if dry_run:
        _end(plan.as_json(), plan.text(force=force), 0, is_json=is_json)
    click.echo(plan.text(force=force), err=True)
    if not yes:
        _confirm()
    done = operations.ask(locks, plan, _operator(), force=force)
    left, seconds = ([], 0.0) if force or not done.holders else operations.wait_until_gone(locks, done, wait)
    app_name = click.get_current_context().find_root().params.get("app") or locks.app.main or "proj"
    notice = operations.outcome_text(done, left, seconds, force=force, app=app_name)
    _end(done.as_json(gone=not left, seconds=seconds), notice, int(bool(left) or not done), is_json=is_json)


@singleton.command("history")
@click.argument("pattern", required=False)
@wide_option
@as_json
@click.pass_obj
def history(obj: Any, pattern: str | None, wide: bool, is_json: bool) -> None:
    """Show what happened: skipped and refused calls, lost leases, dead holders, a silent store.

    The newest event comes first. Events of the last seconds may be missing. PATTERN is
    a glob for lock names, such as 'shop.*'.
    """
    locks = locks_of(obj)
    kept = locks.history()
    events = [event for event in kept if rows.matches(event["key"], pattern)]
    if is_json:
        click.echo(json.dumps(events))
    elif events:
        click.echo(rows.table(list(map(rows.event_cells, events)), is_wide=wide or not sys.stdout.isatty()))
    click.echo(locks.extent(kept, len(events)), err=True)


@singleton.command("doctor")
@seconds_option("--timeout", type=click.FloatRange(0.1, 60), default=1.0, help="How long to wait for each answer.")
@as_json
@click.pass_obj
def examine(obj: Any, timeout: float, is_json: bool) -> None:
    """Check what locks need: store, settings, tasks and workers.

    It takes a lock on a key of its own, and changes nothing else. Exits with 1 if
    something is wrong, and with 69 if the store does not answer.
    """
    findings, is_away = doctor.examine(app_of(obj), timeout)
    is_well = all(finding["ok"] is not False for finding in findings)
    if is_json:
        click.echo(json.dumps({"ok": is_well, "checks": findings}))
    else:
        click.echo(doctor.findings_table(findings))
    sys.exit(EX_UNAVAILABLE if is_away else int(not is_well))


@singleton.command("web")
@click.option("--bind", default="127.0.0.1:8765", show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.pass_obj
def web(obj: Any, bind: str) -> None:
    """Serve a web page with the locks.

    There are also /locks.json, /healthz, and /metrics for Prometheus. The page frees no
    lock. Other machines can reach it only with --bind and a password in the environment
    variable SINGLETON_WEB_PASSWORD.
    """
    try:
        from celery_singleton_lock.web import application  # noqa: PLC0415 (the others work without the extra [web])
    except ImportError as error:
        raise click.UsageError(str(error)) from error

    host = port = None
    with suppress(ValueError):
        address = urlsplit(f"//{bind}")
        host, port = address.hostname, address.port
    if not host or port is None:
        raise click.UsageError(f"--bind {bind!r} is not an address to listen on; give HOST:PORT, as 127.0.0.1:8765")
    password = os.environ.get(PASSWORD) or None
    if password is None and host not in LOOPBACK:
        raise click.UsageError(
            f"--bind {host}: others can reach that address, and there is no password; set {PASSWORD}, or listen on "
            "127.0.0.1, behind a proxy that authenticates"
        )
    app = locks_of(obj).app
    server = application(app, password=password, hosts=None if password else LOOPBACK).server(host, port)
    shown_host = f"[{host}]" if ":" in host else host
    click.echo(f"Locks of {app.main or 'this app'} on http://{shown_host}:{server.port}/")
    server.serve_forever()


def _show_lock(locks: rows.Locks, survey: LockState, *, is_json: bool) -> None:
    tasks = rows.tasks_by_lock(locks.app).get(lock_name_of(survey.key))
    found = locks.rows([survey], with_turns=True)
    limit = None
    # A task with a wrong option must not hide its locks.
    with suppress(ConfigurationError):
        limit = int(tasks[0].lock_options.limit) if tasks else None
    if is_json:
        quiet_for = [round(row.about.expires_in, 3) for row in found if row.state == "cooldown"]
        known = {
            "key": survey.key,
            "limit": limit,
            "fence": survey.fence,
            "holders": [row.as_json() for row in found if row.about.has_lease],
            "waiters": survey.waiting,
            "queued": survey.queued,
            "next": survey.next,
            "quiet_for": max(quiet_for, default=None),
            "turns": [turn.task_id or None for turn in survey.turns],
        }
        click.echo(json.dumps(known | ({"problem": survey.problem} if survey.problem else {})))
    elif found:
        facts = {"key": survey.key, "limit": limit or "-", "fence": survey.fence or "-", "waiting": survey.waiting}
        click.echo(rows.facts_and_rows(facts, found))
    else:
        click.echo(f"Nobody holds {shown(survey.key)}, and nothing waits for it.", err=True)
    sys.exit(int(not found))


def _show_call(call: dict[str, Any], found: list[rows.Row], problem: str | None, *, is_json: bool) -> None:
    if is_json:
        click.echo(json.dumps(call))
    if problem is not None:
        click.echo(f"Its result cannot be read: {shown(problem)}", err=True)
    if not found and call["state"] in (None, states.PENDING):
        name = shown(call["task_id"])
        click.echo(f"Nothing is known of {name}: no lock key, no task, no call in a lock, no result.", err=True)
        hint = "A call that waits in the broker, or that has ended and keeps no result, is only in the log"
        click.echo(f"{hint}: task_id={name}", err=True)
        sys.exit(1)
    if not is_json:
        click.echo(rows.call_text(call, found))


def _break_marks(locks: rows.Locks, pattern: str, *, dry_run: bool, yes: bool, is_json: bool) -> NoReturn:
    marks, held = operations.marks_left(locks.surveys(pattern))

    def text(verb: str) -> str:
        return f"Marks {verb}: {len(marks)}." + (f" Locks left alone because they are held: {held}." if held else "")

    notice, code = text("to be dropped"), int(not marks)
    if marks and dry_run and not is_json:
        # Show due times. Otherwise the operator would take a call that waits for its countdown for lost.
        found = locks.rows({row.lock.key: row.lock for row in marks}.values())
        click.echo(rows.table([row.cells for row in found if row.about.is_queued_or_next], is_wide=True))
    if marks and not dry_run:
        if not yes:
            click.echo(notice, err=True)
            _confirm()
        marks, held_since = operations.drop_marks(locks, marks)
        held += held_since
        notice = text("dropped")
    dropped = [{"key": row.lock.key, "state": row.state, "task_id": row.about.task_id} for row in marks]
    _end({"pattern": pattern, "dropped": dropped, "held": held}, notice, code, is_json=is_json)


def _end(facts: dict[str, Any], notice: str, code: int, *, is_json: bool) -> NoReturn:
    if is_json:
        click.echo(json.dumps(facts))
    click.echo(notice, err=is_json or code != 0)
    sys.exit(code)


def _confirm() -> None:
    # Without a terminal, the prompt would read the input of a calling script.
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.ClickException("nothing was done, because there is no terminal to ask; give --yes")
    click.confirm("Go on?", abort=True, err=True)


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user of a container may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
