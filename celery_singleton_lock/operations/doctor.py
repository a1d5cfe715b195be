"""The checks of a deployment: the store and its servers, settings, tasks, workers and holders. They change nothing."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from celery import Celery, Task
from celery.utils.imports import symbol_by_name

from celery_singleton_lock.checks import faults_of, faults_with, lockable, try_store, without_base
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations.inventory import (
    OF_ONE_PROCESS,
    Locks,
    Row,
    a_few,
    aligned,
    is_of_one_process,
    shown,
    tasks_by_lock,
)
from celery_singleton_lock.options import LockOptions
from celery_singleton_lock.settings import open_store
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.inventory import LockState
from celery_singleton_lock.stores.records import Holder

SERVER = ("server", "eviction", "persistence", "connections")
OTHERS = ("locking", *SERVER, "clock", "expiry")
"""The checks that need an answer from the store."""

_SLOW = 0.02
_CLOCKS_DIFFER_BY = 1.0
_OLDEST = 7
_NEARLY_ALL = 0.8
_FEW_SLOTS = 4
_QUEUED_LONG = 600.0
_DELIVER_AGAIN = ("redis", "valkey", "sentinel", "sqs")
_VERDICTS = {True: "ok", False: "NO", None: "-"}
_SEE_STORE = "not checked, because the store cannot be used"
_ALIVE, _NO_TASK = "alive", "held by a Lock or a beat, which no worker knows"
_SILENT, _IDLE = "on a worker that has not answered", "not active on a worker that has answered"
_QUESTIONS = ("stats", "active", "active_queues")
# To connect to the broker.
_TO_CONNECT = 5.0


@dataclass(frozen=True)
class Finding:
    """An answer to one question.

    Attributes:
        name: What was looked at.
        ok: None if it could not be looked at, which is no fault.
        detail: What was found, and what to do about it.
    """

    name: str
    ok: bool | None
    detail: str

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "detail": self.detail}


def findings_table(findings: Sequence[Finding]) -> str:
    """One line for each; what could not be checked for the same reason has one line."""
    lines = dict[tuple[bool | None, str], list[str]]()
    for each in findings:
        lines.setdefault((each.ok, each.detail), []).append(each.name)
    return aligned(
        [
            (_VERDICTS[ok], names[0], shown(detail))
            if len(names) == 1
            else (_VERDICTS[ok], "others", f"{', '.join(names)}: {shown(detail)}")
            for (ok, detail), names in lines.items()
        ]
    )


def examine(app: Celery, timeout: float) -> tuple[list[Finding], bool]:
    """All findings, and whether the store does not answer; the workers and the store have *timeout* seconds each."""
    locks, problem = _locks_of(app)
    try:
        return _examine(app, locks, problem, timeout)
    finally:
        if locks is not None:
            locks.store.close()


def _examine(app: Celery, locks: Locks | None, problem: Finding, timeout: float) -> tuple[list[Finding], bool]:
    surveys, unlisted = list[LockState](), ""
    try:
        # Before the question to the workers: a run that holds a lock now is active later, or gives it back.
        surveys = list(locks.surveys()) if locks is not None else []
    except StoreError as error:
        unlisted = str(error)
    heard = ask_workers(app, timeout)
    of_store, is_away = _about_store(app, locks, problem, timeout)
    of_tasks = _about_tasks(app)
    workers = heard()
    if locks is None or unlisted:
        of_holders = unseen(("holders",), _SEE_STORE if locks is None or is_away else unlisted)
    else:
        of_holders = if_allowed(("holders",), lambda: [_about_holders(locks, surveys, workers)])
    rows = list(locks.rows_in(surveys)) if locks is not None else []
    return [*of_store, of_tasks, _about_workers(app, workers), *of_holders, *_advice(app, rows, workers)], is_away


def _locks_of(app: Celery) -> tuple[Locks | None, Finding]:
    try:
        store = open_store(app)
    except ConfigurationError as error:
        return None, Finding("store", False, str(error))
    if is_of_one_process(store):
        return None, Finding("store", None, OF_ONE_PROCESS)
    return Locks(app, store), Finding("store", True, store.address)


def _about_tasks(app: Celery) -> Finding:
    faults = [*faults_of(app), *without_base(app)]
    well = f"{len(lockable(app))} with a lock, and their options can work"
    return Finding("tasks", not faults, "; ".join(faults) or well)


# The store.


def unseen(names: tuple[str, ...], why: str) -> list[Finding]:
    return [Finding(name, None, why) for name in names]


def if_allowed(names: tuple[str, ...], look: Callable[[], list[Finding]]) -> list[Finding]:
    """The finding of a look, or the finding that the store does not allow it."""
    try:
        return look()
    except StoreError as error:
        return unseen(names, str(error))


def _about_store(app: Celery, locks: Locks | None, problem: Finding, timeout: float) -> tuple[list[Finding], bool]:
    if locks is None:
        return [problem, *unseen(OTHERS, _SEE_STORE)], False
    store = locks.store
    try:
        latency = store.latency(timeout)
    except StoreError as error:
        return [Finding("store", False, str(error)), *unseen(OTHERS, _SEE_STORE)], True
    slow = "; that is slow, and each task waits for two answers" if latency.round_trip > _SLOW else ""
    return [
        Finding("store", True, f"{store.address} answers in {latency.round_trip * 1000:.2f} ms{slow}"),
        _locking(app, timeout),
        *if_allowed(SERVER, lambda: _about_servers(store.about_servers(timeout))),
        _clock(latency.ahead),
        *if_allowed(("expiry",), lambda: [_expiry(sorted(store.without_expiry(locks.start)))]),
    ], False


def _locking(app: Celery, timeout: float) -> Finding:
    try:
        try_store(app, timeout)
    except (ConfigurationError, StoreError) as error:
        return Finding("locking", False, str(error))
    return Finding("locking", True, "a lock was acquired, waited for, released, and its waiter woken")


def _clock(ahead: float) -> Finding:
    if abs(ahead) <= _CLOCKS_DIFFER_BY:
        return Finding("clock", True, f"the store and this machine agree within {_CLOCKS_DIFFER_BY:g} s")
    side = "ahead of" if ahead > 0 else "behind"
    why = "ages and the slots of a beat are wrong by that, leases are not; fix the time service of the wrong one"
    return Finding("clock", False, f"that of the store is {abs(ahead):.1f} s {side} this machine's: {why}")


def _expiry(keys: list[str]) -> Finding:
    if not keys:
        return Finding("expiry", True, "every key of the locks has an expiry")
    why = "something else has changed them; delete each once nobody holds it"
    return Finding("expiry", False, f"have no expiry: {a_few(keys)}: {why}")


# Its servers, by their own reports.


def _about_servers(said: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """One finding for each of the names, in their order; of several servers, it names those with a fault."""
    looks = _version, _eviction, _persistence, _connections
    by_name = zip(SERVER, looks, strict=True)
    return [_of_all(name, {where: look(each) for where, each in said.items()}) for name, look in by_name]


def _of_all(name: str, found: Mapping[str, tuple[bool, str]]) -> Finding:
    is_well = all(ok for ok, _ in found.values())
    by_detail: dict[str, list[str]] = {}
    for where, (ok, detail) in sorted(found.items()):
        if ok == is_well:
            by_detail.setdefault(detail, []).append(where)
    if len(found) == 1 or (len(by_detail) == 1 and is_well):
        return Finding(name, is_well, next(iter(by_detail)))
    return Finding(name, is_well, "; ".join(f"{', '.join(where)}: {detail}" for detail, where in by_detail.items()))


def _version(said: Mapping[str, str]) -> tuple[bool, str]:
    version = said.get("redis_version", "")
    name = f"Valkey {said['valkey_version']}" if "valkey_version" in said else f"Redis {version}"
    if int(version.partition(".")[0] or _OLDEST) < _OLDEST:
        return False, f"{name}: the scripts need Redis {_OLDEST}.0 or newer, or Valkey"
    if said.get("role", "master") != "master":
        return False, f"{name}, a replica: let singleton_lock_url name the master, or use sentinel://"
    return True, f"{name}, a master"


def _eviction(said: Mapping[str, str]) -> tuple[bool, str]:
    limit, policy, evicted = (said.get(name, "0") for name in ("maxmemory", "maxmemory_policy", "evicted_keys"))
    if limit != "0" and policy != "noeviction":
        return False, (
            f"maxmemory-policy {policy} evicts locks once {limit} bytes are in use, for they all have an expiry; set "
            "it to noeviction, or give the locks a server of their own"
        )
    if evicted != "0":
        return False, (
            f"{evicted} keys were evicted, and locks may have been among them; once the cause is fixed, "
            "CONFIG RESETSTAT resets the count"
        )
    return True, "maxmemory is not set" if limit == "0" else f"maxmemory {limit}, noeviction: when full, it refuses"


def _persistence(said: Mapping[str, str]) -> tuple[bool, str]:
    has_file, replicas = said.get("aof_enabled") == "1", int(said.get("connected_slaves", "0"))
    if has_file and said.get("aof_last_write_status") != "ok":
        return False, "the append-only file cannot be written, so the server refuses to write; check its disk"
    parts = []
    if not has_file:
        parts.append("there is no append-only file, so a restart can grant twice")
    if replicas:
        parts.append(f"replicas ({replicas}) get a lease a moment later, so a failover can grant twice")
    return True, f"{'; '.join(parts)}: use the fence" if parts else "an append-only file"


def _connections(said: Mapping[str, str]) -> tuple[bool, str]:
    used, most = int(said.get("connected_clients", "0")), int(said.get("maxclients", "0"))
    if most and used > _NEARLY_ALL * most:
        return False, f"{used} of {most} are in use; raise maxclients, or have fewer processes"
    return True, f"{used} of {most or 'any number'} are in use"


# The workers.


@dataclass(frozen=True)
class Workers:
    """The answers of the workers.

    Attributes:
        pools: By worker, its pool; None if this process does not know that.
        slots: By worker, how many bodies may run at once.
        queues: By worker, the queues from which it takes messages.
        active: By worker, the task ids of its runs.
        problem: The reason why no worker could be asked.
    """

    pools: Mapping[str, type | None] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)
    queues: Mapping[str, set[str]] = field(default_factory=dict)
    active: Mapping[str, set[str]] = field(default_factory=dict)
    problem: str | None = None


def ask_workers(app: Celery, timeout: float) -> Callable[[], Workers]:
    """Ask all workers in the background; they have *timeout* seconds to answer. The result waits for them."""
    answers, problems = dict[str, Any](), list[str]()

    def ask(question: str) -> None:
        try:
            answers[question] = getattr(app.control.inspect(timeout=timeout), question)() or {}
        except Exception as error:  # noqa: BLE001 (whatever the transport raises)
            problems.append(f"{type(error).__name__}: {error}".partition("\n")[0])

    # A silent broker must not delay the end of the process.
    asking = [threading.Thread(target=ask, args=(question,), daemon=True) for question in _QUESTIONS]
    for thread in asking:
        thread.start()
    # One question after the other, because the app may allow one connection only.
    give_up_at = clock() + len(asking) * timeout + _TO_CONNECT

    def heard() -> Workers:
        for thread in asking:
            thread.join(max(0.0, give_up_at - clock()))
        return _workers(dict(answers), problems[0] if problems else "the broker does not answer")

    return heard


def _workers(answers: dict[str, Any], problem: str) -> Workers:
    if any(question not in answers for question in _QUESTIONS):
        return Workers(problem=problem)
    pools = {name: stats.get("pool", {}) for name, stats in answers["stats"].items()}
    return Workers(
        {name: _pool_of(pool) for name, pool in pools.items()},
        {name: int(pool.get("max-concurrency") or 1) for name, pool in pools.items()},
        {name: {each["name"] for each in queues} for name, queues in _listed(answers["active_queues"])},
        {name: {each["id"] for each in runs} for name, runs in _listed(answers["active"])},
    )


def _listed(answers: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """The lists of the workers that have answered with one; a worker with an error answers with its text."""
    yield from ((name, answer) for name, answer in answers.items() if isinstance(answer, list))


def _pool_of(said: Mapping[str, Any]) -> type | None:
    name, pool = str(said.get("implementation")), None
    # Import nothing else just because a worker names it.
    if name.startswith("celery.concurrency."):
        with suppress(ImportError, AttributeError):
            pool = symbol_by_name(name)
    return pool


def _about_workers(app: Celery, workers: Workers) -> Finding:
    if workers.problem is not None:
        return Finding("workers", None, f"the workers could not be asked: {workers.problem}")
    if not workers.pools:
        return Finding("workers", None, "no worker has answered; one with the solo pool cannot while it runs a task")
    faults = [
        f"{name}: {fault}"
        for name, pool in sorted(workers.pools.items())
        if pool is not None
        for fault in faults_with(app, pool, workers.queues.get(name, set()))
    ]
    parts = a_few([f"{name} ({workers.slots[name]} at once)" for name in sorted(workers.pools)])
    return Finding("workers", not faults, "; ".join(faults) or f"{parts}: each can run the tasks of its queues")


# The holders.


def _about_holders(locks: Locks, before: list[LockState], workers: Workers) -> Finding:
    """Those that are alive, as far as the workers that have answered can tell; no verdict, and nothing is freed."""
    states = [(holder, _state_of(holder, workers)) for survey in before for holder in survey.leases]
    doubtful = sorted({holder.key for holder, state in states if state == _IDLE})
    still = {holder.token: holder for survey in locks.store.survey(doubtful) for holder in survey.leases}
    # A holder that has ended meanwhile was alive before.
    idle = [still[holder.token] for holder, state in states if state == _IDLE and holder.token in still]
    silent = [holder for holder, state in states if state == _SILENT]
    count = Counter(state for _, state in states)
    parts = [f"{count[state]} {state}" for state in (_ALIVE, _NO_TASK) if count[state]]
    parts += [f"{state}: {_named(holders)}" for state, holders in ((_SILENT, silent), (_IDLE, idle)) if holders]
    return Finding("holders", None if silent else True, "; ".join(parts) or "nobody holds a lock")


def _state_of(holder: Holder, workers: Workers) -> str:
    if holder.task_id is None:
        return _NO_TASK
    active = workers.active.get(holder.hostname or "")
    if active is None:
        return _SILENT
    return _ALIVE if holder.task_id in active else _IDLE


def _named(holders: list[Holder]) -> str:
    until = "task_id={0.task_id} on {0.hostname} (free in {0.expires_in:.1f} s unless it is renewed)"
    return a_few([until.format(holder) for holder in holders])


# Advice.

_ENDLESS = "no time limit, so a body that hangs keeps its lock for ever"
_COPIED = (
    "acks_late and a time limit above the visibility timeout of the broker, so a message may be delivered again while "
    "it runs; the copy waits"
)
_WAITING = "lock_on_conflict='wait' occupies a slot while it waits, and there are {} of them; consider 'reschedule'"
_OF_OTHERS = (
    "locks in the store whose names no task of this app has, so they belong to a Lock, or to another app with the same "
    "singleton_lock_prefix"
)
_QUEUED = (
    f"calls are queued for more than {_QUEUED_LONG / 60:g} minutes though a worker is idle. Either no worker takes "
    "their queue, or a worker that had received them was killed{}. If their messages are lost, `singleton break "
    "--marks PATTERN` drops their marks"
)
_AGAIN = "; the broker delivers them again after its visibility timeout, {:g} s"


def _advice(app: Celery, rows: list[Row], workers: Workers) -> list[Finding]:
    tasks, slots, known = _usable(app), sum(workers.slots.values()), tasks_by_lock(app)
    is_delivered_again = _broker_of(app).startswith(_DELIVER_AGAIN)
    timeout = next((options.visibility_timeout for _, options in tasks), 0.0)
    endless = [task.name for task, _ in tasks if _limit_of(task) is None]
    longer = [task.name for task, _ in tasks if task.acks_late and (_limit_of(task) or 0.0) > timeout]
    waiting = [task.name for task, options in tasks if options.on_conflict == "wait"]
    others = {row.name for row in rows if row.name not in known and not row.name.startswith("celery.beat.")}
    late = _queued_for_long(rows, workers)
    pieces = {
        _ENDLESS: endless,
        _COPIED: longer if is_delivered_again else [],
        _WAITING.format(slots): waiting if 0 < slots <= _FEW_SLOTS else [],
        _OF_OTHERS: sorted(others),
        _QUEUED.format(_AGAIN.format(timeout) if is_delivered_again else ""): late,
    }
    texts = [f"{text}: {a_few(names)}" for text, names in pieces.items() if names]
    if app.conf.task_always_eager and known:
        texts.append("task_always_eager: calls run where they are made, one after the other, and no message is sent")
    return [Finding("advice", True, text) for text in texts]


def _usable(app: Celery) -> list[tuple[Task, LockOptions]]:
    """The tasks whose options can work; another check names the others."""
    found = []
    for task in lockable(app):
        with suppress(ConfigurationError):
            found.append((task, task.lock_options))
    return found


def _broker_of(app: Celery) -> str:
    urls = app.conf.broker_read_url or app.conf.broker_url or ""
    return urls if isinstance(urls, str) else str([*urls, ""][0])


def _limit_of(task: Task) -> float | None:
    conf = task.app.conf
    limits = task.time_limit, task.soft_time_limit, conf.task_time_limit, conf.task_soft_time_limit
    return next((float(limit) for limit in limits if limit), None)


def _queued_for_long(rows: list[Row], workers: Workers) -> list[str]:
    """What a worker that was killed leaves: calls that it had received, and that nobody delivers for now."""
    if not any(len(runs) < workers.slots.get(worker, 0) for worker, runs in workers.active.items()):
        return []
    held = {row.key for row in rows if row.state == "held"}
    late = Counter(row.name for row in rows if row.key not in held and (row.queued_for or 0.0) > _QUEUED_LONG)
    return [f"{name} ({count})" for name, count in late.most_common()]
