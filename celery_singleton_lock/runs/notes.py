"""The notes that we write on a message, in one header."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores.records import Newest

HEADER = "singleton_lock"
"""The header of our notes: the time of publication, or the notes if there is more to say."""

ENTRY_HEADER = "beat_entry"
DUE_HEADER = "beat_due"
"""The headers in which a beat notes which entry it has sent, and when the entry was due."""

NEXT_RUN = -1
"""In place of a rank: the message waits to be the next run, by `rerun` or `replace`."""

DELIVERY = "singleton_delivery"
"""The name under which the main process sends a pool process the facts of this delivery, beside the message."""


def text_of(task_id: Any) -> str:
    """*task_id* as the text that the store has: Celery takes a `uuid.UUID`, or a subclass of `str`, as well."""
    return str.__str__(task_id) if isinstance(task_id, str) else str(task_id)


class Origin(NamedTuple):
    """The run that a call replaces: a call of the same key, published by `replace()`, waits for the end of that run."""

    key: str
    fence: int  # 0 if it ran without a lease
    published: int  # its `first_published`


@dataclass
class Notes:
    """The notes that we have written on a message. Times are in microseconds since the epoch; 0 is none."""

    key: str = ""
    published: int = 0  # first, whoever publishes it again; by the store's clock where the newest call wins
    tries: int = 0  # how many times it was requeued
    refused_at: int = 0  # first, by the store's clock
    is_copy: bool = False  # it may have been delivered before
    joins: str = ""  # the task id of the run that it has joined
    joins_fence: int = 0  # of that run, when it was seen last; less than it will have if it has yet to run
    joins_since: int = 0  # the publication of that run, if an earlier call with its task id has left a result
    free_since: int = 0  # when that run was first seen without a lock, by the store's clock
    newest: Newest = ""
    is_bare: bool = False  # it came without notes at first, so its other deliveries do not know `published`
    unanswered: int = 0  # microseconds that it has spent asking the store in vain, up to its next delivery
    origin: Origin | None = None  # the run that it replaces
    task_id: str = ""  # of the call they were written for: a body may hand its headers on to another call
    marked: bool = False  # it was published as queued, even if its task has another mode by now
    rank: int = 0  # of its turn in the line of the lock, a moment by the store's clock; or `NEXT_RUN`
    later: tuple[tuple[str, Any], ...] = ()  # names and values that only a later version knows

    @property
    def first_published(self) -> int:
        """When the call was published; a call is no newer than the run that it replaces."""
        return (self.origin or self).published

    @property
    def left_something(self) -> bool:
        """Its call may have left something in the store that is to end with its message."""
        return self.marked or bool(self.newest) or self.rank > 0

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None, task_id: str | None = None) -> "Notes":
        """The notes in the headers of a message, if they are about the call with this id.

        Arguments:
            headers: Of the message.
            task_id: Of the call; None for any, empty for a new call, of which no headers can know anything.

        Raises:
            ConfigurationError: The header is there, but not as we write it.
        """
        # Fields that are not written keep the default of the class, because most have only a few.
        notes = cls.__new__(cls)
        written = (headers or {}).get(HEADER)
        if written is None:
            return notes
        if type(written) is int:
            if task_id != "":
                notes.published = written
            return notes
        if not (isinstance(written, Mapping) and list(map(type, written.values())) == list(map(_TYPES.get, written))):
            written = _known_in(written)
        vars(notes).update(written)
        return cls() if task_id is not None and notes.task_id not in ("", task_id, str(task_id)) else notes

    def header(self) -> dict[str, Any]:
        written = {name: value for name, value in vars(self).items() if value}
        return {**dict(written.pop("later")), **written} if "later" in written else written

    def dated(self, now: Callable[[], int | None]) -> "Notes":
        """These notes, with a time of publication: if there was none, it is *now* by the store's clock, or by ours."""
        if not self.published:
            self.published = now() or time.time_ns() // 1000
            self.is_bare = True
        return self

    def of_the_call(self) -> "Notes":
        """The notes that stay once a body has begun: a retry of the body begins a new wait."""
        kept = Notes(self.key, self.published, origin=self.origin, task_id=self.task_id)
        kept.later = self.later
        return kept


_TYPES = {field.name: type(field.default) for field in fields(Notes) if field.name != "later"} | {"origin": Origin}
_TYPES_IN_ORIGIN = [str, int, int]


def _known_in(written: Any) -> dict[str, Any]:
    """The notes that this version knows, and beside them those of a later version, which stay on the message.

    Raises:
        ConfigurationError: No version writes such notes.
    """
    if isinstance(written, Mapping) and all(isinstance(name, str) for name in written):
        known = {name: value for name, value in written.items() if name in _TYPES}
        # A message brings a tuple as a list.
        if type(origin := known.get("origin")) is list and list(map(type, origin)) == _TYPES_IN_ORIGIN:
            known["origin"] = Origin(*origin)
        if all(type(value) is _TYPES[name] for name, value in known.items()):
            later = tuple((name, value) for name, value in written.items() if name not in _TYPES)
            return {**known, "later": later}
    advice = "give a header of your own another name"
    raise ConfigurationError(f"header {HEADER}={written!r:.200} is not ours; {advice}")


def message_of(notes: Notes) -> int:
    """What distinguishes messages of one task id, which may be used again: the time of publication of the call."""
    return 0 if notes.is_bare else notes.published


def with_notes(headers: Any, notes: Notes) -> dict[str, Any]:
    """The headers with our notes; what is no dict is left out, as nobody could send it."""
    given = headers if isinstance(headers, Mapping) else {}
    kept = {name: value for name, value in given.items() if name != DELIVERY}
    return {**kept, HEADER: notes.header()}
