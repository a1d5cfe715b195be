"""What every command of celery loads: the name of `celery singleton`, and a hook for the runtime of worker or beat."""

from importlib import import_module
from typing import Any

import click
from celery.signals import import_modules


class _Named(click.Group):
    """The commands of operators, imported by the first use of one of them."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """The context of the group that has the commands."""
        group: click.Group = import_module(f"{__package__}.operations.cli").singleton
        # Celery adds the app's own options to each command that it knows.
        group.params += [each for each in self.params if each not in group.params]
        return group.make_context(*args, **options)


singleton = _Named("singleton", help="Show the locks of singleton tasks, and free them.")


@import_modules.connect(weak=False)
def load_the_runtime(**_: Any) -> None:
    """Check tasks and scheduler of each worker and beat, also where no task is locked."""
    import_module(f"{__package__}.receivers")
