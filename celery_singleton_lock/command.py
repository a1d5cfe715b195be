"""`celery singleton` as each command of celery, also a worker, loads it: a name, and the runtime once it is needed."""

from importlib import import_module
from typing import Any

import click
from celery.signals import import_modules


class _Named(click.Group):
    """The commands of operators, which are imported once one of them is wanted."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """The context of the group that has the commands."""
        group: click.Group = import_module(f"{__package__}.operations.cli").singleton
        # Celery adds the app's own options to each command that it knows.
        group.params += [each for each in self.params if each not in group.params]
        return group.make_context(*args, **options)


singleton = _Named("singleton", help="Show the locks of singleton tasks, and free them.")


@import_modules.connect(weak=False)
def load_the_runtime(**_: Any) -> None:
    """In a worker or a beat: also where no task is locked, its tasks and its scheduler are checked."""
    import_module(f"{__package__}.receivers")
