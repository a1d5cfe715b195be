"""`celery -A proj singleton web`: the page, served by ourselves, to this machine unless there is a password."""

import ipaddress
import os
import re
from typing import Any

import click

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations.shell import warn_of_memory
from celery_singleton_lock.settings import store_of

PASSWORD = "SINGLETON_WEB_PASSWORD"


@click.command("web")
@click.option("--bind", default="127.0.0.1:8765", show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option("--allow-break", is_flag=True, help="Show a button by which a holder is asked to end.")
@click.pass_obj
def web(obj: Any, bind: str, allow_break: bool) -> None:
    """Serve a page with the locks, for a browser.

    Also /locks.json, /healthz and, for Prometheus, /metrics. It asks the store and no
    worker. Whoever reaches it sees it, so it listens on this machine alone, unless
    SINGLETON_WEB_PASSWORD is set.
    """
    # Each command of celery, also a worker, imports this file, and needs no web server.
    from celery_singleton_lock.web import application  # noqa: PLC0415
    from celery_singleton_lock.web.access import for_this_machine, with_password  # noqa: PLC0415
    from celery_singleton_lock.web.server import Handler, Server  # noqa: PLC0415

    host, port = _place_in(bind)
    password = _password_for(host)
    page = application(obj.app, allow_break=allow_break)
    served = with_password(page, password) if password else for_this_machine(page, host)
    obj.app.loader.import_default_modules()
    try:
        warn_of_memory(store_of(obj.app))
    except StoreError:
        # The page tells.
        pass
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {bind}: {error.strerror or error}") from error
    with server:
        server.set_app(served)
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"Locks of {obj.app.main or 'this app'} on http://{shown}:{server.server_port}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("", err=True)


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
            "127.0.0.1, behind a proxy that asks who it is"
        )
    return password


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
