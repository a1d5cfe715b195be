"""The libraries that are compared, each set up as its own documentation begins, and plain Celery."""

from abc import ABC, abstractmethod
from importlib import import_module
from importlib.metadata import version
from typing import Any, ClassVar

from celery import Celery, Task

from benchmarks.candidates import OURS

PLAIN, PLAIN_AGAIN = "plain Celery", "plain Celery again"
OURS_QUEUED = f"{OURS}, until_executed"
SINGLETON, ONCE, HEIMDALL = "celery-singleton", "celery-once", "celery-heimdall"
ONCE_TASK = "celery-once-task"
HEIMDALL_AT_ONCE = f"{HEIMDALL}, not blocking"
FLOOR_SCRIPTS, FLOOR_NATIVE = "leanest client, our scripts", "leanest client, SET and DEL"
FLOOR_PUBLISHED = "leanest client, SET when published"


class Library(ABC):
    """One way to have a task run once at a time."""

    label: ClassVar[str]
    distribution: ClassVar[str]
    module: ClassVar[str]
    base: ClassVar[str]
    refusal: ClassVar[str | None] = None
    """The error with which a duplicate is refused when it is published, if that is the default."""

    @abstractmethod
    def options(self, expiry: int | None) -> dict[str, Any]:
        """How a task is declared; *expiry* is how long its lock lasts, in seconds, None for the default."""

    @abstractmethod
    def settings(self, locks: str) -> dict[str, Any]:
        """How the app is told where the locks are."""

    def prepare(self, app: Celery) -> None:  # noqa: B027 (most do nothing)
        """Prepare the app as the library's documentation does, beside the settings."""

    @property
    def version(self) -> str:
        """As installed."""
        return version(self.distribution)

    @property
    def problem(self) -> str | None:
        """Why it cannot be used here; None if it can."""
        try:
            self.named(self.base)
        except (ImportError, AttributeError) as error:
            return str(error)
        return None

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """The errors that publishing raises for a duplicate."""
        return (self.named(self.refusal),) if self.refusal else ()

    def named(self, name: str) -> Any:
        """Something of its module."""
        return getattr(import_module(self.module), name)


class Plain(Library):
    """No lock at all: the unit in which the others are measured."""

    label, distribution, module, base = PLAIN, "celery", "celery", "Task"

    def options(self, expiry: int | None) -> dict[str, Any]:  # noqa: ARG002 (nothing expires)
        """None."""
        return {"base": Task}

    def settings(self, locks: str) -> dict[str, Any]:  # noqa: ARG002 (there are none)
        """None."""
        return {}


class PlainAgain(Plain):
    """The same once more: how far two equal things are apart in these measurements."""

    label = PLAIN_AGAIN


class Ours(Library):
    """A lease while the body runs, renewed."""

    label, distribution, module, base = OURS, "celery-singleton-lock", "celery_singleton_lock", "SingletonTask"

    def options(self, expiry: int | None) -> dict[str, Any]:
        """The expiry is the ttl."""
        return {"base": self.named(self.base), "lock_ttl": expiry}

    def settings(self, locks: str) -> dict[str, Any]:
        """One URL."""
        return {"singleton_lock_url": locks}


class OursInTheQueue(Ours):
    """Unique in the queue as well, which is what the others are."""

    label = OURS_QUEUED

    def options(self, expiry: int | None) -> dict[str, Any]:
        """The expiry is that of what is queued and that of what runs."""
        return {**super().options(expiry), "lock_mode": "until_executed", "lock_queue_ttl": expiry}


class Singleton(Library):
    """A key from publishing to the end; without expiry unless told."""

    label, distribution, module, base = SINGLETON, SINGLETON, "celery_singleton", "Singleton"

    def options(self, expiry: int | None) -> dict[str, Any]:
        """One option."""
        return {"base": self.named(self.base), "lock_expiry": expiry}

    def settings(self, locks: str) -> dict[str, Any]:
        """One URL."""
        return {"singleton_backend_url": locks}


class Once(Library):
    """A key from publishing to the end, for an hour."""

    label, distribution, module, base = ONCE, ONCE, "celery_once", "QueueOnce"
    refusal = "AlreadyQueued"

    def options(self, expiry: int | None) -> dict[str, Any]:
        """One entry of a dict."""
        return {"base": self.named(self.base), "once": {} if expiry is None else {"timeout": expiry}}

    def settings(self, locks: str) -> dict[str, Any]:
        """A backend with settings."""
        return {"ONCE": {"backend": "celery_once.backends.Redis", "settings": {"url": locks}}}


class OnceTask(Library):
    """A key from publishing to the body, and one for the body; each for an hour."""

    label, distribution, module, base = ONCE_TASK, ONCE_TASK, "celery_once_task", "OnceTask"

    def options(self, expiry: int | None) -> dict[str, Any]:
        """None: the expiries are those of the process."""
        if expiry is not None:
            url = self.named("config").get_config().redis_url
            self.named("configure")(redis_url=url, queue_lock_timeout=expiry, running_lock_timeout=expiry)
        return {"base": self.named(self.base)}

    def settings(self, locks: str) -> dict[str, Any]:
        """No settings: the whole process has one URL."""
        self.named("configure")(redis_url=locks)
        return {}

    def prepare(self, app: Celery) -> None:
        """Its signals, and its step of the worker."""
        self.named("setup_once_task_signals")()
        app.steps["worker"].add(self.named("OnceTaskUnlockBootStep"))


class Heimdall(Library):
    """A key from publishing to the end, for an hour, looked at again before the body."""

    label, distribution, module, base = HEIMDALL, HEIMDALL, "celery_heimdall", "HeimdallTask"

    def options(self, expiry: int | None) -> dict[str, Any]:
        """One entry of a dict; the place of the locks is a method to override."""
        timeout = {} if expiry is None else {"unique_timeout": expiry}
        return {"base": _heimdall_at_the_locks(self.named(self.base)), "heimdall": {"unique": True, **timeout}}

    def settings(self, locks: str) -> dict[str, Any]:
        """For the method that is overridden."""
        return {"heimdall_redis_url": locks}


class HeimdallAtOnce(Heimdall):
    """Told not to wait for the lock that its own publisher has taken."""

    label = HEIMDALL_AT_ONCE

    def options(self, expiry: int | None) -> dict[str, Any]:
        """One entry more."""
        options = super().options(expiry)
        return {**options, "heimdall": {**options["heimdall"], "unique_lock_blocking": False}}


class FloorOfScripts(Library):
    """No library: the same scripts, sent by hand, and nothing else in Python."""

    label, distribution, module, base = FLOOR_SCRIPTS, "redis", "benchmarks.floors", "WithOurScripts"

    def options(self, expiry: int | None) -> dict[str, Any]:  # noqa: ARG002 (as the recorded call has it)
        """None."""
        return {"base": self.named(self.base)}

    def settings(self, locks: str) -> dict[str, Any]:
        """One URL."""
        return {"floor_locks": locks}


class FloorOfNative(FloorOfScripts):
    """No library: the least that could be called a lock."""

    label, base = FLOOR_NATIVE, "WithSetAndDel"


class FloorWhenPublished(FloorOfScripts):
    """No library: the least for a call that is unique in the queue."""

    label, base = FLOOR_PUBLISHED, "WithSetWhenPublished"


def _heimdall_at_the_locks(base: Any) -> Any:
    from redis import Redis  # noqa: PLC0415 (only where it is used)

    class AtTheLocks(base):  # type: ignore[misc]
        abstract = True

        def setup_redis(self) -> Redis:
            return Redis.from_url(self.app.conf.get("heimdall_redis_url"))

    return AtTheLocks


LOCKING: tuple[Library, ...] = (Ours(), OursInTheQueue(), Singleton(), Once(), OnceTask(), Heimdall())
FLOORS: tuple[Library, ...] = (FloorOfScripts(), FloorOfNative(), FloorWhenPublished())
LIBRARIES = (Plain(), PlainAgain(), *LOCKING, HeimdallAtOnce(), *FLOORS)


def named(label: str) -> Library:
    """The library of that label."""
    return next(library for library in LIBRARIES if library.label == label)


def late(label: str) -> str:
    """How its tasks with `acks_late` are called."""
    return f"{label}, acks_late"


def usable(libraries: tuple[Library, ...] = LIBRARIES) -> list[Library]:
    """The libraries that are installed and can be imported beside this Celery."""
    return [library for library in libraries if library.problem is None]


def problems(libraries: tuple[Library, ...] = LIBRARIES) -> dict[str, str]:
    """Why the other libraries cannot be used."""
    return {library.label: library.problem for library in libraries if library.problem is not None}


def versions() -> dict[str, str]:
    """The versions of all libraries that take part, and of what they run on."""
    found = {library.distribution: library.version for library in usable()}
    return found | {name: version(name) for name in ("celery", "kombu", "redis", "hiredis")}
