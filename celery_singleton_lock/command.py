"""Loaded by every command of Celery: the name of `celery singleton`, and the hook of workers and beats."""

from importlib import import_module
from typing import Any

import click
from celery.signals import import_modules


class _Named(click.Group):
    """Imports the commands of operators only when one of them is used."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        group: click.Group = import_module(f"{__package__}.operations.cli").singleton
        # Celery adds the app's own options to each command that it knows.
        group.params += [each for each in self.params if each not in group.params]
        return group.make_context(*args, **options)


singleton = _Named("singleton", help="Show the locks of singleton tasks, and free them.")


@import_modules.connect(weak=False)
def load_the_runtime(**_: Any) -> None:
    """Load the checks of workers and beats, even where no task is locked."""
    import_module(f"{__package__}.receivers")
