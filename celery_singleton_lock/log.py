"""The log: each line is an event, its fields and a text; the record has the fields as attributes."""

import logging
from functools import partialmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_singleton_lock.stores.records import Facts, Holder

logger = logging.getLogger("celery_singleton_lock")

_MOST_LABELS = 10_000
# These names are too general for attributes of a record.
_ATTRIBUTES = {"key": "lock_key", "label": "lock_label"}


def shown(text: str) -> str:
    """*text* with unprintable characters escaped, such as a newline."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class Log(logging.Filter):
    """Writes the log. As the logger's filter, it keeps each record on one line."""

    shows_labels = False
    """An app of this process has `singleton_lock_log_labels`."""

    def __init__(self) -> None:
        super().__init__()
        self._labels: dict[str, str] = {}

    def remember_label(self, task_id: str, label: str | None) -> None:
        """Show *label* in later lines about this call."""
        if label and self.shows_labels:
            if len(self._labels) >= _MOST_LABELS:
                self._labels.clear()
            self._labels[task_id] = label

    def write(self, level: int, event: str, text: str = "", *args: object, exc_info: Any = None, **fields: Any) -> None:
        """Write `event field=value ...: text`, with *args* in the text."""
        if not logger.isEnabledFor(level):
            return
        told = dict[str, Any]()
        for name, value in fields.items():
            told[name] = value
            if name == "task_id" and (label := self._labels.get(str(value))):
                told["label"] = label
        words = "".join(f" {name}={_form_of(name, value)}" for name, value in told.items())
        # Tools group records by `msg`, so values stay in `args`.
        form = f"{event}{words}: {text}" if text else f"{event}{words}"
        extra = {_ATTRIBUTES.get(name, name): value for name, value in told.items()} | {"lock_event": event}
        logger.log(level, form, *told.values(), *args, exc_info=exc_info, extra=extra, stacklevel=2)

    debug = partialmethod(write, logging.DEBUG)
    info = partialmethod(write, logging.INFO)
    warning = partialmethod(write, logging.WARNING)
    error = partialmethod(write, logging.ERROR)
    critical = partialmethod(write, logging.CRITICAL)

    def filter(self, record: logging.LogRecord) -> bool:
        """Escape characters that would begin a new line."""
        if isinstance(record.args, tuple):
            record.args = tuple(map(_on_one_line, record.args))
        return True

    def tell_of_conflict(
        self, key: str, task_id: str | None, holder: "Holder", outcome: str, *, is_first: bool = True
    ) -> None:
        """Log that *holder* keeps a call out, and what becomes of the call."""
        its: dict[str, Any] = {"state": holder.state_in_log, "age": holder.age, "remaining": holder.expires_in}
        level = logging.INFO if is_first else logging.DEBUG
        self.write(level, "lock.conflict", key=key, task_id=task_id, holder=holder.task_id, **its, outcome=outcome)

    def tell_of_death(self, key: str, died: "Facts | Holder", known: str) -> None:
        """Log that a holder ended without a release, and what is *known* of its end."""
        self.remember_label(died.task_id or "", died.label)
        who = {"task_id": died.task_id or None, "task": died.task_name or None, "host": died.hostname or None}
        self.warning("lock.holder_died", known, key=key, **who)


def _form_of(name: str, value: Any) -> str:
    if name == "label":
        return "%r"
    return "%.1f" if isinstance(value, float) else "%s"


def _on_one_line(value: Any) -> Any:
    text = str(value) if isinstance(value, BaseException) else value
    return shown(text) if isinstance(text, str) and not text.isprintable() else value


log = Log()
logger.addFilter(log)
