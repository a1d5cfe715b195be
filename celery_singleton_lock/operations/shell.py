"""What the commands of operators have in common."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from celery import Celery
from celery.platforms import EX_UNAVAILABLE

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations.inventory import Locks

as_json = click.option("--json", "is_json", is_flag=True, help="Write JSON, and nothing else, to standard output.")


class Away(click.ClickException):
    """The store does not answer, or refuses us."""

    exit_code = EX_UNAVAILABLE


@contextmanager
def told() -> Iterator[None]:
    """Say what is wrong with store or settings, in place of a traceback."""
    try:
        yield
    except StoreError as error:
        raise Away(str(error)) from error
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error


def locks_of(app: Celery) -> Locks:
    """The locks of an app; if only one process can see them, that is said."""
    locks = Locks(app)
    if locks.store.address.startswith("memory:"):
        click.echo("The locks are in the memory of one process (memory://): this one sees none of others.", err=True)
    return locks


def write_json(facts: Any) -> None:
    """One line of standard output."""
    click.echo(json.dumps(facts))
