"""The log: one line for each event, whatever names and ids are made of; and the labels of calls in them."""

import logging
from contextlib import suppress
from typing import Any

from celery_singleton_lock.stores.records import Facts, Holder

logger = logging.getLogger("celery_singleton_lock")

# More calls than one process has at once.
_MOST_LABELS = 10_000


def shown(text: str) -> str:
    """*text*, with what cannot be printed, such as a newline or the start of a colour, as an escape."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class Log(logging.Filter):
    """Each record of our logger passes here, before any handler."""

    shows_labels = False
    """An app of this process has `singleton_lock_log_labels`."""

    def __init__(self) -> None:
        super().__init__()
        self._labels: dict[str, str] = {}

    def note_label(self, task_id: str, label: str | None) -> None:
        """From now on the label stands in each line about this call, if it is wanted there."""
        if label and self.shows_labels:
            if len(self._labels) >= _MOST_LABELS:
                # Another thread may do the same.
                with suppress(KeyError, RuntimeError):
                    del self._labels[next(iter(self._labels))]
            self._labels[task_id] = label

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the arguments of a record, and let it pass."""
        if isinstance(record.args, tuple):
            arguments = [_on_one_line(each) for each in record.args]
            before, field, after = str(record.msg).partition("task_id=%s")
            place = before.count("%") + 1
            if field and self._labels and (label := self._labels.get(str(arguments[place - 1]))):
                arguments.insert(place, label)
                record.msg = f"{before}{field} label=%r{after}"
            record.args = tuple(arguments)
        return True


def _on_one_line(value: Any) -> Any:
    text = str(value) if isinstance(value, BaseException) else value
    return shown(text) if isinstance(text, str) and not text.isprintable() else value


def tell_of_death(key: str, died: Facts | Holder) -> None:
    """Name a holder that has died, by what it had left in its lock."""
    log.note_label(died.task_id or "", died.label)
    who = died.task_id or None, died.task_name or None, died.hostname or None
    logger.warning("lock.holder_died key=%s task_id=%s task=%s host=%s: it held the lock when it died", key, *who)


log = Log()
logger.addFilter(log)
