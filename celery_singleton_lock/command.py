"""The command `celery singleton`. Every command of Celery loads this file, so it imports the rest only when needed."""

from importlib import import_module
from typing import Any

import click
from celery.signals import import_modules


class _Named(click.Group):
    """Imports the commands of operators only when one is used."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        group: click.Group = import_module(f"{__package__}.operations.cli").singleton
        # Celery has added the app's own options to `self`, not to this group.
        group.params += [each for each in self.params if each not in group.params]
        return group.make_context(*args, **options)


singleton = _Named("singleton", help="Show the locks of singleton tasks, and free them.")


@import_modules.connect(weak=False)
def load_the_runtime(**_: Any) -> None:
    """Load the receivers of workers and beats, even if no task is locked."""
    import_module(f"{__package__}.receivers")
