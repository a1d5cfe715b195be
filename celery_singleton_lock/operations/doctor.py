"""The checks of `singleton doctor`."""

import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from celery import Celery

from celery_singleton_lock import checks
from celery_singleton_lock.beat import last_leader_of
from celery_singleton_lock.definition import keys, options
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.log import shown
from celery_singleton_lock.operations.rows import OF_ONE_PROCESS, Locks, Row, a_few, aligned, duration, tasks_by_lock
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Holder, LockState, new_token
from celery_singleton_lock.stores.redis.inventory import Inventory

_OF_SERVERS = ("server", "eviction", "persistence", "connections")
CHECKS = ("store", "locking", *_OF_SERVERS, "clock", "tasks", "workers", "holders")

_SLOW = 0.02  # seconds of a round trip
_CLOCKS_DIFFER_BY = 1.0  # seconds
_OLDEST = 7  # major version of Redis
_NEARLY_ALL = 0.8  # of all connections
_FEW_SLOTS = 4
_LONG_TTL = 600.0  # seconds
_QUEUED_LONG = 60.0  # seconds
_VERDICTS = {True: "ok", False: "NO", None: "-"}
_CLOCK_WRONG = "leases are right, but ages and a beat's slots are wrong by as much; check the time services of both"
_PREVENTED = "not checked, because of the fault above"
_ALIVE = "alive"
_NO_TASK = "held by a Lock or a beat, which no worker knows"
_SILENT = (
    "on a worker that has not answered, because it is dead, busy, cut off from the broker, or of another deployment "
    "with the same singleton_lock_prefix and store"
)
_IDLE = "not active on a worker that has answered"
_OF_ANOTHER = (
    "renewed, but the worker of that name does not run it. Perhaps another deployment has the same "
    "singleton_lock_prefix and store: give each deployment its own prefix. Or the run died a moment ago"
)
_ELSEWHERE = (
    "has another store or another singleton_lock_prefix than this command, so its runs and runs with the settings "
    "of this command can overlap; give all processes the same singleton_lock_url and singleton_lock_prefix"
)
_UNTIL = "task_id={0.task_id} on {0.hostname} (free in {0.expires_in:.1f} s unless it is renewed)"
# A lease's age plus `expires_in`, in TTLs, is 1 before the first renewal, and at least 4/3 afterwards. This number
# lies between the two.
_RENEWED = 7 / 6
_QUESTIONS = ("stats", "active", "active_queues", "singleton_store")
_TO_CONNECT = 5.0  # seconds, to the broker

Found = tuple[bool | None, str]
"""Whether all is well, or None if that could not be checked; and the text for the operator."""


class Worker(NamedTuple):
    """The answers of one worker; None if one is missing."""

    pool: str | None  # None for a pool that is not Celery's; the worker checks such a pool at its start
    slots: int
    queues: set[str] | None
    active: set[str] | None
    store: dict[str, Any]  # `problem`; or `ahead` (seconds of the store's clock) and `sees` (it finds our lock)


def findings_table(findings: Iterable[Mapping[str, Any]]) -> str:
    cells = []
    for each in findings:
        verdict = "note" if each["name"] == "advice" else _VERDICTS[each["ok"]]
        cells.append((verdict, each["name"], shown(each["detail"])))
    return aligned(cells)


def examine(app: Celery, timeout: float) -> tuple[list[dict[str, Any]], bool]:
    """Findings, and whether the store is away. Each answer may take *timeout* seconds."""
    found: dict[str, Found] = {"store": (None, OF_ONE_PROCESS)}
    locks, ahead, is_away = None, 0.0, False
    surveys = list[LockState]()
    try:
        of_app = Locks(app)
        if not of_app.store.is_of_one_process:
            round_trip, ahead = of_app.inventory.latency(timeout)
            slow = "; that is slow, and each task waits for two answers" if round_trip > _SLOW else ""
            found["store"] = True, f"{of_app.store.address} answers in {round_trip * 1000:.2f} ms{slow}"
            locks = of_app
    except (ConfigurationError, StoreError) as error:
        found["store"] = False, str(error)
        is_away = isinstance(error, StoreError)
    if locks:
        found |= _about_use(locks, timeout)
        try:
            # Survey before the workers are asked: a run that began after their answers would seem inactive.
            surveys += locks.surveys()
        except StoreError as error:
            found["holders"] = None, str(error)
    with _lock_held(locks, timeout) as held:
        workers, silence = _ask_workers(app, timeout, held)
    rows = locks.rows(surveys) if locks else []
    advice = _advice(app, rows, workers)
    if locks:
        found["clock"] = _about_clocks(ahead, workers)
        found.setdefault("holders", _about_holders(locks, surveys, workers))
        advice += [*_about_beats(locks), *_about_caches(locks, timeout)]
    faults = [*checks.faults_of(app), *checks.without_base(app), *checks.never_awaited(app)]
    number = len(options.lockable(app))
    found["tasks"] = not faults, "; ".join(faults) or f"{number} with a lock, and their options can work"
    found["workers"] = _about_workers(app, workers, silence, rows)
    unchecked = None, OF_ONE_PROCESS if found["store"][0] is None else _PREVENTED
    findings = [(name, *found.get(name, unchecked)) for name in CHECKS]
    findings += [("advice", True, text) for text in advice]
    return [{"name": name, "ok": ok, "detail": options.as_set(app, detail)} for name, ok, detail in findings], is_away


def _about_beats(locks: Locks) -> list[str]:
    with suppress(ConfigurationError, StoreError):
        leads, last = last_leader_of(locks.app, locks.store)
        if last is not None and not leads:
            seen = datetime.fromtimestamp(last.sent / 1_000_000, UTC)
            who = f"the last leader, {last.entry}, was seen at {seen:%Y-%m-%d %H:%M:%S} UTC"
            return [f"no beat leads, so nothing of the schedule is sent; {who}. Start a beat"]
    return []


def _about_caches(locks: Locks, timeout: float) -> list[str]:
    django = getattr(sys.modules.get("django.conf"), "settings", None)
    caches = django.CACHES if django is not None and django.configured else {}
    found = []
    with suppress(StoreError):
        ours = locks.inventory.databases(timeout)
        for name, cache in sorted(caches.items()):
            location = cache.get("LOCATION")
            first = location if isinstance(location, str) else next(iter(location or ()), None)
            given = cache.get("OPTIONS") or {}
            access = {name: given[name] for name in ("db", "username", "password") if name in given}
            with suppress(ConfigurationError, StoreError), closing(store_from_url(str(first), access)) as store:
                found += [name] if ours & Inventory(store).databases(timeout) else []
    return [f"{_CACHES}: {a_few(found)}"] if found else []


def _about_clocks(ahead: float, workers: Mapping[str, Worker]) -> Found:
    aheads = {"this machine's": ahead}
    aheads |= {f"that of {name}": worker.store.get("ahead", 0.0) for name, worker in sorted(workers.items())}
    wrong = [
        f"the store's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} {whose}: {_CLOCK_WRONG}"
        for whose, ahead in aheads.items()
        if abs(ahead) > _CLOCKS_DIFFER_BY
    ]
    return not wrong, "; ".join(wrong) or f"the store and this machine agree within {_CLOCKS_DIFFER_BY:g} s"


def _about_use(locks: Locks, timeout: float) -> dict[str, Found]:
    found = dict[str, Found]()
    try:
        checks.try_store(locks.app, timeout)
        found["locking"] = True, "a lock was acquired, renewed, waited for and released, and its waiter woken"
    except (ConfigurationError, StoreError) as error:
        found["locking"] = False, str(error)
    try:
        reports = locks.inventory.about_servers(timeout)
        looks = zip(_OF_SERVERS, (_version, _eviction, _persistence, _connections), strict=True)
        return found | {name: _of_all(look, reports) for name, look in looks}
    except StoreError as error:
        return found | {"server": (None, str(error))}


def _of_all(look: Callable[[Mapping[str, str]], tuple[bool, str]], reports: Mapping[str, Mapping[str, str]]) -> Found:
    """One finding about all servers. If they differ, it names the faulty servers, or all if none is faulty."""
    found = [(where, *look(report)) for where, report in sorted(reports.items())]
    is_well = all(ok for _, ok, _ in found)
    if len({detail for *_, detail in found}) == 1:
        return found[0][1:]
    return is_well, "; ".join(f"{where}: {detail}" for where, ok, detail in found if ok == is_well)


def _version(report: Mapping[str, str]) -> tuple[bool, str]:
    version = report.get("redis_version", "")
    name = f"Valkey {report['valkey_version']}" if "valkey_version" in report else f"Redis {version}"
    if int(version.partition(".")[0] or _OLDEST) < _OLDEST:
        return False, f"{name}: the scripts need Redis {_OLDEST}.0 or newer, or Valkey"
    if report.get("role", "master") != "master":
        return False, f"{name}, a replica: let singleton_lock_url name the master, or use sentinel://"
    return True, f"{name}, a master, up for {duration(float(report.get('uptime_in_seconds', '0')))}"


def _eviction(report: Mapping[str, str]) -> tuple[bool, str]:
    limit, policy, evicted = (report.get(name, "0") for name in ("maxmemory", "maxmemory_policy", "evicted_keys"))
    if limit != "0" and policy != "noeviction":
        return False, (
            f"maxmemory-policy {policy} evicts locks once {limit} bytes are in use, because every lock has an expiry; "
            "set it to noeviction, or give the locks a server of their own"
        )
    used = report.get("used_memory", "0")
    full = f"{used} of {limit} bytes are in use ({int(used) / max(1, int(limit)):.0%})"
    if limit != "0" and int(used) >= int(limit):
        return False, f"the server is full and refuses to write: {full}; raise maxmemory, or remove keys"
    if evicted != "0":
        return False, (
            f"{evicted} keys were evicted, and locks may have been among them; once the cause is fixed, "
            "CONFIG RESETSTAT resets the count"
        )
    return True, "maxmemory is not set" if limit == "0" else f"noeviction, so it refuses when it is full: {full}"


def _persistence(report: Mapping[str, str]) -> tuple[bool, str]:
    has_file = report.get("aof_enabled") == "1"
    replicas = int(report.get("connected_slaves", "0"))
    if has_file and report.get("aof_last_write_status") != "ok":
        return False, "the append-only file cannot be written, so the server refuses to write; check its disk"
    parts = [] if has_file else ["there is no append-only file, so a restart can grant twice"]
    if replicas:
        parts.append(f"replicas ({replicas}) get a lease a moment later, so a failover can grant twice")
    return True, f"{'; '.join(parts)}: use the fence" if parts else "an append-only file"


def _connections(report: Mapping[str, str]) -> tuple[bool, str]:
    used = int(report.get("connected_clients", "0"))
    most = int(report.get("maxclients", "0"))
    if most and used > _NEARLY_ALL * most:
        return False, f"{used} of {most} are in use; raise maxclients, or have fewer processes"
    return True, f"{used} of {most or 'any number'} are in use"


@contextmanager
def _lock_held(locks: Locks | None, timeout: float) -> Iterator[str]:
    """Hold a key while the workers are asked: a worker with the same store sees it. Empty if it cannot be held."""
    if locks is None:
        yield ""
        return
    try:
        claim = Claim(checks.trial_key(locks.app), new_token(), _longest_asking(timeout))
        locks.store.acquire(claim)
    except (ConfigurationError, StoreError):
        yield ""
        return
    try:
        yield claim.key
    finally:
        with suppress(StoreError):
            locks.store.release(claim, 1)


def _longest_asking(timeout: float) -> float:
    # With a single connection to the broker, the questions follow each other.
    return len(_QUESTIONS) * timeout + _TO_CONNECT


def _ask_workers(app: Celery, timeout: float, held: str) -> tuple[dict[str, Worker], str | None]:
    """The workers that answered, by name; or why none could be asked."""
    answers = dict[str, Any]()
    arguments = {"singleton_store": {"held": held}}
    problems = list[str]()

    def ask(question: str) -> None:
        try:
            # `inspect` has public methods for Celery's own requests only.
            inspect = app.control.inspect(timeout=timeout)
            answers[question] = inspect._request(question, **arguments.get(question, {})) or {}  # noqa: SLF001
        except Exception as error:  # noqa: BLE001 (whatever the transport raises)
            problems.append(f"{type(error).__name__}: {error}".partition("\n")[0])

    # Daemons, because a silent broker must not keep this process from ending.
    asking = [threading.Thread(target=ask, args=(question,), daemon=True) for question in _QUESTIONS]
    for thread in asking:
        thread.start()
    give_up_at = clock() + _longest_asking(timeout)
    for thread in asking:
        thread.join(max(0.0, give_up_at - clock()))
    if len(answers) < len(_QUESTIONS):
        return {}, problems[0] if problems else "the broker does not answer"
    names = answers["stats"]
    return {name: _worker_in(*(answers[question].get(name) for question in _QUESTIONS)) for name in names}, None


def _worker_in(stats: Any, active: Any, queues: Any, store: Any) -> Worker:
    # After an error, the answer of a worker is the text of that error.
    named = None
    if isinstance(queues, list):
        # A route may name a queue's alias, or the exchange of a broadcast.
        named = {str(each[word]) for each in queues for word in ("name", "alias") if each.get(word)}
        named |= {each["exchange"]["name"] for each in queues if each["exchange"]["type"] == "fanout"}
    kind = str(stats.get("pool", {}).get("implementation")).partition(":")[0]
    return Worker(
        kind if kind.startswith("celery.concurrency.") else None,
        slots=int(stats.get("pool", {}).get("max-concurrency") or 1),
        queues=named,
        active={call["id"] for call in active} if isinstance(active, list) else None,
        store=store if isinstance(store, dict) else {},
    )


def _about_workers(app: Celery, workers: Mapping[str, Worker], silence: str | None, rows: Iterable[Row]) -> Found:
    if silence is not None:
        return None, f"the workers could not be asked: {silence}"
    if not workers:
        if not (app.conf.worker_enable_remote_control and app.connection_for_write().supports_exchange_type("fanout")):
            why = "their broker, such as SQS, has no broadcasts, or worker_enable_remote_control is off"
            return None, f"the workers could not be asked: {why}"
        is_well = None if app.conf.task_always_eager or not options.lockable(app) else False
        return is_well, "no worker has answered: start one; a solo worker cannot answer while it runs a task"
    faults = []
    ours = {checks.queue_of(app, task) for task in options.lockable(app)}
    for name, worker in sorted(workers.items()):
        if worker.pool is not None:
            faults += [f"{name}: {fault}" for fault in checks.faults_with(app, worker.pool, worker.queues or set())]
        if "problem" in worker.store:
            faults.append(f"{name} cannot use the store: {worker.store['problem']}")
        if worker.store.get("sees") is False and not ours.isdisjoint(worker.queues or ()):
            faults.append(f"{name} {_ELSEWHERE}")
    faults += _not_taken(app, rows, workers)
    parts = a_few([f"{name} ({workers[name].slots} at once)" for name in sorted(workers)])
    return not faults, "; ".join(faults) or f"{parts}: each can run the tasks of its queues"


def _not_taken(app: Celery, rows: Iterable[Row], workers: Mapping[str, Worker]) -> list[str]:
    """A fault for each queue that gets calls and that no worker takes."""
    taken = set[str]()
    for worker in workers.values():
        if worker.queues is None:
            return []
        taken |= worker.queues
    found = defaultdict[str, set[str]](set)
    goes = [(checks.queue_of(app, task), task.name) for task in options.lockable(app)]
    for queue, name in (*goes, *((row.about.queue, row.name) for row in rows)):
        if queue is not None:
            found[queue].add(name)
    return [
        f"no worker that has answered takes the queue {queue!r}, to which calls of {', '.join(sorted(names))} go: "
        f"start one with -Q {queue}, or correct the route"
        for queue, names in sorted(found.items())
        if queue not in taken
    ]


def _about_holders(locks: Locks, before: list[LockState], workers: Mapping[str, Worker]) -> Found:
    asked_about = {holder.token for survey in before for holder in survey.holders}
    found = defaultdict[str, list[str]](list)
    try:
        for survey in locks.surveys_of([survey.key for survey in before]):
            for holder in survey.holders:
                if holder.token in asked_about:
                    found[_state_of(holder, survey, workers)].append(_UNTIL.format(holder))
    except StoreError as error:
        return None, str(error)
    parts = [f"{len(found[state])} {state}" for state in (_ALIVE, _NO_TASK) if state in found]
    parts += [f"{state}: {a_few(found[state])}" for state in (_SILENT, _IDLE, _OF_ANOTHER) if state in found]
    is_well = None if _SILENT in found else True
    return False if _OF_ANOTHER in found else is_well, "; ".join(parts) or "nobody holds a lock"


def _state_of(holder: Holder, survey: LockState, workers: Mapping[str, Worker]) -> str:
    if holder.task_id is None:
        return _NO_TASK
    worker = workers.get(holder.hostname or "")
    if worker is None or worker.active is None:
        return _SILENT
    if holder.task_id in worker.active:
        return _ALIVE
    age = survey.at / 1_000_000 - holder.acquired_at.timestamp()
    is_renewed = age + holder.expires_in > _RENEWED * holder.ttl > 0 and not holder.is_unrenewed
    return _OF_ANOTHER if is_renewed else _IDLE


_ENDLESS = "no time limit, so a body that hangs keeps its lock for ever"
_WAITING = "lock_on_conflict='wait' occupies a pool slot, and there are {} of them; consider 'reschedule'"
_OF_OTHERS = (
    "locks that no task of this app has, so they belong to a Lock, or to another app with the same "
    "singleton_lock_prefix"
)
_QUEUED = (
    "calls are queued for more than a minute, although a worker is idle. Perhaps a rate_limit keeps them, or a busy "
    "worker has reserved them. If their worker was killed, the broker delivers them again, perhaps only after its "
    "visibility timeout. If their messages are lost, `singleton break --marks PATTERN` drops their marks"
)
_LONG = (
    "lock_ttl, in seconds, is long. A lease is renewed while its body runs, so a long lock_ttl only keeps the lock "
    "longer if the process dies; 30 is usual"
)
_NO_EFFECT = "options that have no effect with the other options of their task"
_CACHES = (
    "caches of Django are in the database of the locks, where cache.clear() (FLUSHDB) frees all locks, even of bodies "
    "that run; let singleton_lock_url name another database"
)
_PASSWORD = (
    "the password in singleton_lock_url is printed by `celery report`, `inspect conf` and Flower; give it in "
    "singleton_lock_client_options={'username': ..., 'password': ...}, whose values Celery masks"
)
_UNTOLD = (
    "broker_transport_options has predefined_queues and no visibility_timeout, so only SQS knows when it delivers a "
    "message again: after 30 seconds, unless that was changed. A message that waits in a worker for longer may come "
    "twice; give visibility_timeout the value of the queues"
)


def _advice(app: Celery, rows: list[Row], workers: Mapping[str, Worker]) -> list[str]:
    known = tasks_by_lock(app)
    others = {row.name for row in rows if not (row.lock.problem or row.name.startswith(f"{keys.BEAT}."))}
    idle = [each for each in workers.values() if each.active is not None and len(each.active) < each.slots]
    late = Counter[str]()
    for row in rows:
        if (row.queued_for or 0.0) > _QUEUED_LONG and not row.lock.holders:
            late[row.name] += any(each.queues is None or row.about.queue in (None, *each.queues) for each in idle)
    queued = [f"{name} ({count})" for name, count in late.most_common() if count]
    pieces = {
        **_about_tasks(app, sum(worker.slots for worker in workers.values())),
        _OF_OTHERS: sorted(others - known.keys()),
        _QUEUED: queued,
    }
    texts = [f"{text}: {a_few(names)}" for text, names in pieces.items() if names]
    if app.conf.task_always_eager and known:
        texts.append("task_always_eager: calls run where they are made, one after the other, and no message is sent")
    # Celery masks settings by their names, and does not mask this one.
    if re.search(r"://[^/@;]*:[^/@;]+@|[?&]password=", str(options.setting(app, "singleton_lock_url"))):
        texts.append(_PASSWORD)
    of_broker = app.conf.broker_transport_options or {}
    if of_broker.get("predefined_queues") and "visibility_timeout" not in of_broker:
        texts.append(_UNTOLD)
    return texts


def _about_tasks(app: Celery, slots: int) -> dict[str, list[str]]:
    waiting = _WAITING.format(slots)
    found: dict[str, list[str]] = {_ENDLESS: [], waiting: [], _LONG: [], _NO_EFFECT: []}
    by_default = app.conf.task_time_limit or app.conf.task_soft_time_limit
    for task in options.lockable(app):
        if not (task.time_limit or task.soft_time_limit or by_default):
            found[_ENDLESS].append(task.name)
        with suppress(ConfigurationError):
            chosen = task.lock_options
            if chosen.on_conflict == "wait" and 0 < slots <= _FEW_SLOTS:
                found[waiting].append(task.name)
            if chosen.ttl > _LONG_TTL:
                found[_LONG].append(f"{task.name} ({chosen.ttl:g} s)")
            if nothing := checks.without_effect(task):
                found[_NO_EFFECT].append(f"{task.name} ({', '.join(nothing)})")
    return found
