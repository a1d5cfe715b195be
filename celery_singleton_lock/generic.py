"""Type parameters for `SingletonTask`, as the package celery-types has them for Celery's own `Task`."""

from types import GenericAlias
from typing import TYPE_CHECKING

from celery import Task

if TYPE_CHECKING:
    from typing import Any, Generic

    # They have defaults, so that `SingletonTask` without parameters is a complete type.
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R_co = TypeVar("R_co", covariant=True, default=Any)

    class TypedTask(Task[P, R_co], Generic[P, R_co]):
        """A task whose `run` takes P and returns R_co."""
else:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R_co = TypeVar("R_co", covariant=True)

    class TypedTask(Task):
        """Celery's task; before 5.7 that has no parameters when the program runs."""

        abstract = True
        __class_getitem__ = classmethod(GenericAlias)
