"""Texts for people; only the printable characters of keys and names reach a terminal."""

from collections.abc import Sequence

from celery_singleton_lock.operations.breaking import Broken
from celery_singleton_lock.operations.ending import Call
from celery_singleton_lock.operations.finding import Finding
from celery_singleton_lock.operations.inventory import Row
from celery_singleton_lock.stores.base import lock_name_of

OF_ONE_PROCESS = "The locks are in the memory of one process (memory://): this one sees none of others."
_VERDICTS = {True: "ok", False: "NO", None: "-"}
HEAD = ("LOCK", "STATE", "TASK ID", "WORKER", "HELD", "LEFT", "WAITING", "KEY")


def table(rows: Sequence[Row]) -> str:
    """One line for each row, below a head; with a column of labels, if there is one."""
    lines = [HEAD, *(_cells(row) for row in rows)]
    if any(row.label for row in rows):
        labels = ["LABEL", *(shown(row.label or "-") for row in rows)]
        lines = [(cells[0], label, *cells[1:]) for cells, label in zip(lines, labels, strict=True)]
    return _aligned(lines)


def findings_table(findings: Sequence[Finding]) -> str:
    """One line for each."""
    return _aligned([(_VERDICTS[each.ok], each.name, shown(each.detail)) for each in findings])


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        shown(lock_name_of(row.key)),
        row.state,
        shown(row.task_id or "-"),
        shown(row.worker or "-"),
        "-" if row.held is None else duration(row.held),
        duration(row.expires_in),
        str(row.waiters),
        shown(row.key),
    )


def duration(seconds: float) -> str:
    """`4.2s`, `3m12s`, `2h05m`, `3d04h`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def shown(text: str) -> str:
    """*text*, with what cannot be printed, such as the start of a colour, as an escape."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


# Of a call.


def unknown(call: Call) -> str:
    """Say that nothing is known of it."""
    name = shown(call.task_id)
    return (
        f"Nothing is known of {name}: no lock key, no task, no call in a lock, no result.\n"
        f"A call that waits in the broker, or that has ended and keeps no result, is in the log alone: task_id={name}"
    )


def told_of(call: Call) -> str:
    """All that is known of it, in lines."""
    facts = {
        "call": call.task_id,
        "state": call.state,
        "now": call.now,
        "reason": call.reason,
        "key": call.key,
        "left to": call.left_to,
        "says": call.text,
    }
    lines = [f"{name:7}  {shown(value)}" for name, value in facts.items() if value is not None]
    return "\n".join([*lines, "", table(call.rows)] if call.rows else lines)


# Of a break.


def nothing(key: str, name: str | None) -> str:
    """Say that there is nothing to break."""
    if name is None:
        return f"Nothing to break: nobody holds {shown(key)}, and there are no marks."
    return f"Nothing to break: {shown(name)} does not hold {shown(key)}."


def planned(broken: Broken, *, force: bool) -> str:
    """The holders and marks of a break, and its risk."""
    lines = []
    if broken.asked:
        verb = "To be freed at once" if force else "To be asked to end"
        lines.append(f"{verb}: {shown(', '.join(broken.asked))}")
    if broken.asked and force:
        lines.append("A body that is still alive goes on, beside the next one, until its next renewal at the earliest.")
    if broken.dropped:
        lines.append(f"To be dropped: {', '.join(broken.dropped)}")
    return "\n".join(lines)


def outcome(broken: Broken, *, force: bool) -> str:
    """The result."""
    if not broken.gone:
        return _not_free(broken)
    if not broken.asked:
        return f"Dropped: {', '.join(broken.dropped)}." if broken.dropped else "Nobody was there any more."
    if force:
        return "Freed. A body that is still alive learns of it at its next renewal, and ends with LockLost."
    return f"Free after {duration(broken.seconds)}."


def _not_free(broken: Broken) -> str:
    left = max(holder.expires_in for holder in broken.left)
    ids = [holder.task_id for holder in broken.left if holder.task_id]
    lines = [
        f"Not free after {duration(broken.seconds)}. If the process is dead, its lease ends in {duration(left)}.",
        "A body that lets no other thread run, or that is only warned (lock_on_lost='warn'), goes on to its end.",
    ]
    if ids:
        lines.append("To end it with its process:")
    else:
        lines.append("It is no task's but a Lock's, which keeps it until its program releases it.")
    return "\n".join([*lines, *(f"  celery -A proj control terminate SIGKILL {shown(task_id)}" for task_id in ids)])
