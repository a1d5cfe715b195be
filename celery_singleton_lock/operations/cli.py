"""`celery -A proj singleton`: see the locks of an app, and free one."""

import getpass
import ipaddress
import json
import math
import os
import re
import socket
import sys
from contextlib import suppress
from typing import Any, NoReturn

import click
from celery import Celery
from celery.bin.base import JSON_ARRAY, JSON_OBJECT, handle_preload_options
from celery.platforms import EX_UNAVAILABLE

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations import breaking
from celery_singleton_lock.operations.doctor import examine, findings_table
from celery_singleton_lock.operations.inventory import (
    OF_ONE_PROCESS,
    Call,
    Locks,
    call_of,
    call_text,
    in_order,
    is_of_one_process,
    lines_of,
    lock_as_json,
    rows_of,
    shown,
    table,
    tasks_by_lock,
)
from celery_singleton_lock.operations.watch import watch
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import lock_name_of
from celery_singleton_lock.stores.inventory import LockState

PASSWORD = "SINGLETON_WEB_PASSWORD"
as_json = click.option("--json", "is_json", is_flag=True, help="Write JSON, and nothing else, to standard output.")


class Seconds(click.FloatRange):
    """A number of seconds in a range. `nan` and `inf` are none, though Python reads them as numbers."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        return seconds if math.isfinite(seconds) else self.fail(f"{value} is not a number of seconds.", param, ctx)


class Away(click.ClickException):
    """The store does not answer, or refuses us."""

    exit_code = EX_UNAVAILABLE


class Commands(click.Group):
    """Commands that say what is wrong with store or settings, in place of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StoreError as error:
            raise Away(str(error)) from error
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from error


def app_of(obj: Any) -> Celery:
    """The app of a command.

    Raises:
        click.UsageError: None was given, and Celery's default one has no store for locks.
    """
    app: Celery = obj.app
    if _given_app() is None:
        try:
            store_of(app)
        except ConfigurationError as error:
            raise click.UsageError("no app: give -A, as in `celery -A proj singleton list`") from error
        except StoreError:
            pass
    return app


def _given_app() -> str | None:
    """The app as the person has named it; empty if the command is none of `celery`."""
    name = click.get_current_context().find_root().params.get("app", "")
    return None if name is None else str(name)


def locks_of(app: Celery) -> Locks:
    """The locks of an app; says so if only one process can see them."""
    locks = Locks(app)
    if is_of_one_process(locks.store):
        click.echo(OF_ONE_PROCESS, err=True)
    return locks


def write_json(facts: Any) -> None:
    click.echo(json.dumps(facts))


@click.group(cls=Commands)
@click.pass_context
@handle_preload_options
def singleton(ctx: click.Context, **_: Any) -> None:
    """Show the locks of singleton tasks, and free them.

    Everything is read from the store of the locks, so no worker has to run. A lock whose
    holder has died is free by itself within its ttl.
    """


@singleton.command("list")
@click.argument("pattern", required=False)
@click.option("--wide", is_flag=True, help="Show whole names, task ids and keys, on lines of any length.")
@as_json
@click.pass_obj
def list_locks(obj: Any, pattern: str | None, wide: bool, is_json: bool) -> None:
    """List who holds a lock, and which calls are queued or next.

    PATTERN is a glob for lock names, such as 'shop.*'.
    """
    rows, problem = locks_of(app_of(obj)).found(pattern)
    if is_json and (rows or problem is None):
        write_json([row.as_json() for row in rows])
    elif rows:
        click.echo(table(rows, is_wide=wide))
    elif problem is None:
        click.echo("No locks." if pattern is None else f"No locks whose name matches {pattern!r}.", err=True)
    if problem is not None:
        raise problem


@singleton.command("show")
@click.argument("what")
@click.option("-a", "--args", type=JSON_ARRAY, help="With a task: positional arguments of the call, as JSON.")
@click.option("-k", "--kwargs", type=JSON_OBJECT, help="With a task: keyword arguments, as JSON.")
@as_json
@click.pass_obj
def show(obj: Any, what: str, args: list[Any] | None, kwargs: dict[str, Any] | None, is_json: bool) -> None:
    """Show one lock in full, or what happened to a call.

    WHAT is a lock key; or the name of a task, with those arguments of a call that
    make its key; or the task id of a call. Exits with 1 if nothing is known.
    """
    app = app_of(obj)
    locks = locks_of(app)
    app.loader.import_default_modules()
    if args is not None or kwargs is not None or what in app.tasks:
        _show_lock(app, locks.survey(_key_of_call(app, what, args or [], kwargs or {})), is_json=is_json)
    elif locks.is_key(what) or "{" in what:
        _show_lock(app, locks.survey(locks.checked_key(what)), is_json=is_json)
    else:
        _show_call(call_of(app, locks, what), is_json=is_json)


@singleton.command("break")
@click.argument("key", required=False)
@click.option("--marks", metavar="PATTERN", help="Drop the marks of all locks with such names that nobody holds.")
@click.option("--holder", metavar="ID", help="Only this one of several holders: its task id, or hostname:pid.")
@click.option("--force", is_flag=True, help="Free the lock at once; the body may keep running beside the next one.")
@click.option("--wait", type=Seconds(min=0), metavar="SECONDS", help="How long to wait until it is free.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_obj
def break_lock(
    obj: Any,
    key: str | None,
    marks: str | None,
    holder: str | None,
    force: bool,
    wait: float | None,
    dry_run: bool,
    yes: bool,
    is_json: bool,
) -> None:
    """Ask the holder of one lock to end, and drop the marks of queued calls.

    A holder that has died needs no break: its lock is free within its ttl. The
    holder learns of it at its next renewal, ends as REVOKED, and then the lock is
    free, so nothing overlaps. Waiters keep their turns.

    KEY is one lock key, as `list --wide` and the log show it. After a purge, --marks
    'shop.*' drops the queued and next marks of many locks, and never one that is held.
    """
    app = app_of(obj)
    if marks is not None and not (key or holder or force or wait is not None):
        _break_marks(locks_of(app), marks, dry_run=dry_run, yes=yes, is_json=is_json)
    if key is None or marks is not None:
        raise click.UsageError("Give one KEY; or --marks PATTERN, without KEY, --holder, --force and --wait.")
    locks = locks_of(app)
    survey = locks.survey(locks.checked_key(key))
    found = breaking.preview(survey, holder)
    if not found.was_there:
        _end(found, breaking.nothing(key, holder), 1, is_json=is_json)
    if dry_run:
        _end(found, breaking.planned(found, force=force), 0, is_json=is_json)
    click.echo(breaking.planned(found, force=force), err=True)
    if not yes:
        _confirm()
        _check_the_same(survey, locks.survey(survey.key), holder)
    broken = breaking.ask(locks, survey, holder, by=_operator(), force=force)
    if not broken.gone:
        broken = breaking.wait_until_gone(locks, broken, wait)
    said = breaking.outcome(broken, _given_app() or app.main or "proj", force=force)
    _end(broken, said, 0 if broken.gone else 1, is_json=is_json)


@singleton.command("watch")
@click.argument("pattern", required=False)
@click.option(
    "--interval",
    type=Seconds(min=0.1, max=3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
@as_json
@click.pass_obj
def watch_locks(obj: Any, pattern: str | None, interval: float, is_json: bool) -> None:
    """Show the list of locks and update it until Ctrl-C.

    With --json, or if its output is no terminal, it writes a line for each change
    instead. A change that is undone in between is not shown.

    PATTERN is a glob for lock names, such as 'shop.*'.
    """
    watch(locks_of(app_of(obj)), pattern, interval, is_json=is_json)


@singleton.command("doctor")
@click.option(
    "--timeout",
    type=Seconds(min=0.1, max=60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the store, and for the workers.",
)
@as_json
@click.pass_obj
def doctor(obj: Any, timeout: float, is_json: bool) -> None:
    """Check what locks need: store, settings, tasks and workers.

    It takes a lock on a key of its own, and changes nothing else. Exits with 1 if
    something is wrong, and with 69 if the store does not answer.
    """
    app = app_of(obj)
    app.loader.import_default_modules()
    findings, is_away = examine(app, timeout)
    is_well = all(finding.ok is not False for finding in findings)
    if is_json:
        write_json({"ok": is_well, "checks": [finding.as_json() for finding in findings]})
    else:
        click.echo(findings_table(findings))
    sys.exit(EX_UNAVAILABLE if is_away else int(not is_well))


@singleton.command("web")
@click.option("--bind", default="127.0.0.1:8765", show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option("--allow-break", is_flag=True, help="Show buttons that ask a holder to stop.")
@click.pass_obj
def web(obj: Any, bind: str, allow_break: bool) -> None:
    """Serve a page with the locks, for a browser.

    Also /locks.json, /healthz and, for Prometheus, /metrics. It reads the store and asks
    no worker. It listens on this machine only, unless SINGLETON_WEB_PASSWORD is set.
    """
    # Each command of celery, also a worker, imports this file, and needs no web server.
    from celery_singleton_lock.web import site_of  # noqa: PLC0415

    app = app_of(obj)
    host, port = _place_in(bind)
    password = _password_for(host)
    hosts = None if password else frozenset({"localhost", "127.0.0.1", "::1", host})
    page = site_of(app, allow_break=allow_break, password=password, hosts=hosts)
    app.loader.import_default_modules()
    # The page shows that a store is away.
    with suppress(StoreError):
        locks_of(app)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {bind}: {error.strerror or error}") from error
    with listening:
        shown_host = f"[{host}]" if ":" in host else host
        click.echo(f"Locks of {app.main or 'this app'} on http://{shown_host}:{listening.getsockname()[1]}/")
        page.serve(listening)


def _key_of_call(app: Celery, name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    task = app.tasks.get(name)
    if task is None:
        raise click.UsageError(f"There is no task {name!r} in this app.")
    if not hasattr(task, "lock_key_for"):
        raise click.UsageError(f"The task {name!r} is not a SingletonTask, so it has no locks.")
    try:
        return str(task.lock_key_of_some(*args, **kwargs))
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"The task {name!r} cannot be called like this: {error}") from error


def _show_lock(app: Celery, survey: LockState, *, is_json: bool) -> None:
    task, rows = tasks_by_lock(app).get(lock_name_of(survey.key)), in_order(rows_of(survey))
    limit = None if task is None else int(task.lock_options.limit)
    is_known = bool(rows or survey.waiters)
    if is_json:
        write_json(lock_as_json(survey, limit))
    elif is_known:
        facts = {"key": survey.key, "limit": limit or "-", "fence": survey.fence or "-", "waiting": survey.waiters}
        click.echo(lines_of(facts) + (f"\n\n{table(rows, is_wide=True)}" if rows else ""))
    else:
        click.echo(f"Nobody holds {shown(survey.key)}, and nothing waits for it.", err=True)
    sys.exit(int(not is_known))


def _show_call(call: Call, *, is_json: bool) -> None:
    if is_json:
        write_json(call.as_json())
    if call.problem is not None:
        click.echo(f"Its result cannot be read: {shown(call.problem)}", err=True)
    if not call.is_known:
        name = shown(call.task_id)
        click.echo(f"Nothing is known of {name}: no lock key, no task, no call in a lock, no result.", err=True)
        hint = "A call that waits in the broker, or that has ended and keeps no result, is only in the log"
        click.echo(f"{hint}: task_id={name}", err=True)
        sys.exit(1)
    if not is_json:
        click.echo(call_text(call))


def _break_marks(locks: Locks, pattern: str, *, dry_run: bool, yes: bool, is_json: bool) -> NoReturn:
    found = breaking.marks_left(locks.surveys(pattern), pattern)
    if not found.marks or dry_run:
        _end(found, breaking.marks_text(found, is_done=False), 0 if found.marks else 1, is_json=is_json)
    if not yes:
        click.echo(breaking.marks_text(found, is_done=False), err=True)
        _confirm()
    dropped = breaking.drop_marks(locks, found)
    _end(dropped, breaking.marks_text(dropped, is_done=True), 0, is_json=is_json)


def _end(broken: breaking.Broken | breaking.LeftMarks, said: str, code: int, *, is_json: bool) -> NoReturn:
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


def _check_the_same(before: LockState, now: LockState, holder: str | None) -> None:
    """A holder that came while the person was thinking is not one that the person has agreed to."""
    known = {each.token for each in breaking.meant(before, holder)}
    others = [breaking.name_of(each) for each in breaking.meant(now, holder) if each.token not in known]
    if others:
        click.echo(f"Nothing was done: the lock now has another holder, {shown(', '.join(others))}.", err=True)
        sys.exit(1)


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container, for example, the user may have no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _place_in(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not re.fullmatch(r"\d{1,5}", port, re.ASCII) or int(port) > 65535:
        raise click.UsageError(f"--bind {bind!r} is not an address to listen on; give HOST:PORT, as 127.0.0.1:8765")
    return host, int(port)


def _password_for(host: str) -> str | None:
    password = os.environ.get(PASSWORD) or None
    if password is None and not _is_loopback(host):
        raise click.UsageError(
            f"--bind {host}: others can reach that address, and there is no password; set {PASSWORD}, or listen on "
            "127.0.0.1, behind a proxy that authenticates"
        )
    return password


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
