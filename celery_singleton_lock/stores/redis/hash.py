"""Reading a lock's hash; its layout is told at the top of acquire.lua."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from celery_singleton_lock.stores.base import lock_name_of
from celery_singleton_lock.stores.records import Holder


def holders_in(key: str, now: float, fields: Mapping[str, str]) -> list[Holder]:
    """Who holds the lock *key* at *now*, microseconds by the server's clock; the lease that ends first, first."""
    holders = [
        _holder(key, place, token, now, fields)
        for place, token in fields.items()
        if place.isdecimal() and deadline_in(fields, token) > now
    ]
    return sorted(holders, key=lambda holder: holder.expires_in)


def deadline_in(fields: Mapping[str, str], token: str) -> float:
    """When the lease of a token ends, whether or not it was asked to make way."""
    return float(fields.get(token) or fields[f"!{token}"])


def successor_in(now: float, fields: Mapping[str, str]) -> str | None:
    """Task id of the one who is next."""
    deadline, _, task_id = fields.get("next", "0 ").partition(" ")
    return task_id if float(deadline) > now else None


def published_in(key: str, now: float, fields: Mapping[str, str]) -> Holder:
    """The call that is queued, else one that runs, else the one that keeps the key quiet."""
    queued, quiet = (_marks_in(key, now, fields, [name]) for name in ("queued", "quiet"))
    return (queued or holders_in(key, now, fields) or quiet)[0]


def _marks_in(key: str, now: float, fields: Mapping[str, str], names: Sequence[str]) -> list[Holder]:
    since = datetime.fromtimestamp(now / 1_000_000, UTC)
    marks = [fields[name].partition(" ") for name in names if name in fields]
    return [
        Holder(key, "", 0, since, (float(deadline) - now) / 1_000_000, task_id or None)
        for deadline, _, task_id in marks
        if float(deadline) > now
    ]


def turns_in(key: str, now: float, fields: Mapping[str, str]) -> list[Holder]:
    """Who is next, then who waits, in order of arrival, described as the holders they are about to be."""
    tickets = sorted(int(field[1:]) for field in fields if field[0] == "q" and field[1:].isdecimal())
    waiting = [fields[f"q{ticket}"].split(" ", 2) for ticket in tickets]
    since = datetime.fromtimestamp(now / 1_000_000, UTC)
    return _marks_in(key, now, fields, ("next", "queued")) + [
        Holder(key, token, 0, since, (float(deadline) - now) / 1_000_000, task_id or None)
        for deadline, token, task_id in waiting
        if float(deadline) > now
    ]


def _holder(key: str, place: str, token: str, now: float, fields: Mapping[str, str]) -> Holder:
    def fact(name: str) -> str | None:
        return fields.get(f"{place}:{name}")

    task_id, pid = fact("task_id"), fact("pid")
    return Holder(
        key=key,
        token=token,
        fence=int(fact("fence") or 0),
        acquired_at=datetime.fromtimestamp(int(fact("since") or 0) / 1_000_000, UTC),
        expires_in=(deadline_in(fields, token) - now) / 1_000_000,
        task_id=task_id,
        # Not stored where it is the lock's name already.
        task_name=fact("task_name") or (lock_name_of(key) if task_id else None),
        hostname=fact("hostname"),
        pid=int(pid) if pid else None,
        attempt=int(fact("attempt") or 0),
    )
