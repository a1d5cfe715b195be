"""The common parts of the commands of operators."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from celery import Celery
from celery.platforms import EX_UNAVAILABLE

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations.inventory import Locks, is_of_one_process
from celery_singleton_lock.operations.words import OF_ONE_PROCESS
from celery_singleton_lock.stores.base import Store

as_json = click.option("--json", "is_json", is_flag=True, help="Write JSON, and nothing else, to standard output.")


class Seconds(click.FloatRange):
    """A number of seconds in a range. `nan` and `inf` are none, though Python reads them as numbers."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number.

        Raises:
            click.BadParameter: It is no number, not finite, or not in the range.
        """
        seconds: float = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return float(super().convert(seconds, param, ctx))


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
    """The locks of an app; says so if only one process can see them."""
    locks = Locks(app)
    warn_of_memory(locks.store)
    return locks


def warn_of_memory(store: Store) -> None:
    """Say so if only one process can see what is in the store."""
    if is_of_one_process(store):
        click.echo(OF_ONE_PROCESS, err=True)


def write_json(facts: Any) -> None:
    """One line of standard output."""
    click.echo(json.dumps(facts))
