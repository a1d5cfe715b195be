"""Reading a lock's hash; its layout is told at the top of acquire.lua."""

from collections.abc import Mapping
from datetime import UTC, datetime

from celery_singleton_lock.backends.base import Holder, lock_name_of


def holders_in(key: str, now: float, fields: Mapping[str, str]) -> list[Holder]:
    """Who holds the lock *key* at *now*, microseconds by the server's clock; the lease that ends first, first."""
    holders = [
        _holder(key, place, token, now, fields)
        for place, token in fields.items()
        if place.isdecimal() and float(fields[token]) > now
    ]
    return sorted(holders, key=lambda holder: holder.expires_in)


def turns_in(key: str, now: float, fields: Mapping[str, str]) -> list[Holder]:
    """Who waits for the lock, in order of arrival, described as the holders they are about to be."""
    tickets = sorted(int(field[1:]) for field in fields if field[0] == "q" and field[1:].isdecimal())
    turns = []
    for ticket in tickets:
        deadline, token, task_id = fields[f"q{ticket}"].split(" ", 2)
        if float(deadline) > now:
            since = datetime.fromtimestamp(now / 1_000_000, UTC)
            expires_in = (float(deadline) - now) / 1_000_000
            turns.append(Holder(key, token, 0, since, expires_in, task_id or None))
    return turns


def _holder(key: str, place: str, token: str, now: float, fields: Mapping[str, str]) -> Holder:
    def fact(name: str) -> str | None:
        return fields.get(f"{place}:{name}")

    task_id, pid = fact("task_id"), fact("pid")
    return Holder(
        key=key,
        token=token,
        fence=int(fact("fence") or 0),
        acquired_at=datetime.fromtimestamp(int(fact("since") or 0) / 1_000_000, UTC),
        expires_in=(float(fields[token]) - now) / 1_000_000,
        task_id=task_id,
        # Not stored where it is the lock's name already.
        task_name=fact("task_name") or (lock_name_of(key) if task_id else None),
        hostname=fact("hostname"),
        pid=int(pid) if pid else None,
        attempt=int(fact("attempt") or 0),
    )
