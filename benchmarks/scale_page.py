"""`docs/reference/scale.md`, written from what was counted."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import text

PAGE = "reference/scale.md"
BEGIN, END = "<!-- written by `make compare` -->", "<!-- end of what `make compare` writes -->"
SERVERS = ("broker", "backend", "store")
OWNED = {"bytes": "memory, MB", "threads": "threads", "descriptors": "descriptors"}
MEGABYTE = 1_000_000

KINDS = ("plain", "singleton")
ASKED_BY = {"plain": SERVERS[:2], "singleton": SERVERS, "reschedule": SERVERS}
ALL = "in all"
WAITS_FOR_ITS_TURN = ("reschedule", "join", "wait")

OWNED_BY_A_WORKER = "A worker, main process and pool together, has this after {few:,} tasks, and after {many:,}."
DEPLOYED = (
    "Two workers with four pool processes each, a beat, and four web processes that wait for results: the most that a "
    "process of each kind has, and the most that all have at a time. A pool process that requeues calls publishes "
    "them, as one that retries does. For that kombu has two connections to a Redis broker."
)
WAITING = (
    "100 or 1,000 calls of one key go to {processes} pool processes while one call holds it, with a `lock_ttl` of "
    "30 s. Counted for {counted} s, for each message, without the holder's costs."
)

Found = Mapping[str, Any]


def section(found: Found) -> str:
    """All of it, as Markdown."""
    return "\n\n".join(
        [
            _leases(found["leases"]),
            *_tasks(found["tasks"], found["plan"]),
            *_connections(found["connections"]),
            *_waiting(found),
            _seen(found),
        ]
    )


def in_page(page: str, found: Found) -> str:
    """The page with the section as it should be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{section(found)}\n\n{END}{after}"


def _leases(found: Found) -> str:
    rows = [
        ["leases in one process", f"{found['leases']:,}, with a `ttl` of {text(found['ttl'])} s"],
        ["lost", text(found["lost"])],
        ["longest renewal", f"under {_bound(found['longest renewal'] / found['ttl'])} of the `ttl`"],
        ["connections, and threads", f"{text(found['sockets'])}, {text(found['threads'])}"],
        ["memory of a lease with its `Lock`", f"{text(found['bytes of a lease'] / 1000)} kB"],
        ["processor time", f"{text(100 * found['processor'])} % of one core"],
    ]
    return "## Leases of one process\n\n" + _table(["", "seen"], rows)


def _bound(share: float) -> str:
    return next(f"{limit} %" for limit in (1, 2, 5, 10, 20, 50, 100, 1000) if 100 * share < limit)


def _tasks(found: Found, plan: Found) -> list[str]:
    few, many = plan["few"], plan["tasks"]
    rows = []
    for what, words in OWNED.items():
        unit = MEGABYTE if what == "bytes" else 1
        had = [[text(found[kind][f"{what} after {number}"] / unit) for number in (few, many)] for kind in KINDS]
        rows.append([words, *(f"{first}, {last}" for first, last in had)])
    return [
        "## Tasks of one worker",
        OWNED_BY_A_WORKER.format(few=few, many=many),
        _table(["", "plain Celery", "this library"], rows),
    ]


def _connections(found: Found) -> list[str]:
    # In the order in which they begin to work; all together is the last.
    names = [*(name for name in found["plain"] if name != ALL), ALL]
    rows = [[name, *(_to_each(found[kind][name], servers) for kind, servers in ASKED_BY.items())] for name in names]
    return [
        "## Connections of a deployment",
        DEPLOYED,
        _table(["to broker, backend, store", "plain Celery", "this library", "calls that are requeued"], rows),
    ]


def _to_each(found: Found, servers: Sequence[str]) -> str:
    return ", ".join(text(found.get(each, 0)) for each in servers)


def _waiting(found: Found) -> list[str]:
    plan = found["plan"]
    return [
        "## What a waiting message costs",
        WAITING.format(counted=text(plan["counted"]), processes=next(iter(found["waiting"].values()))["processes"]),
        _table(
            ["`lock_on_conflict`", "wait", *(f"{name}, commands/min" for name in SERVERS), "cores, in all"],
            [
                _share(policy, seen["crowds"][sent])
                for policy, seen in found["waiting"].items()
                # With some policies one call waits, however many are sent.
                for sent in (seen["crowds"] if policy in WAITS_FOR_ITS_TURN else [*seen["crowds"]][-1:])
            ],
        ),
    ]


def _share(policy: str, seen: Found) -> list[str]:
    waiting, rates = max(1, seen["waiting"]), seen["rates"]
    commands = [_rate(60 * rates[name]["commands"] / waiting) for name in SERVERS]
    return [f"`{policy}`", str(seen["waiting"]), *commands, _rate(rates["worker"]["processor"])]


def _rate(number: float) -> str:
    return text(number) if number >= 0.05 else "0"


def _seen(found: Found) -> str:
    names = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    where = f"with Python {found['python']}, {names}, on {found['cores']} cores"
    return f"Seen on {found['date']} {where}. `make scale` does it again."


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *lines = [f"| {' | '.join(row)} |" for row in (heading, *rows)]
    return "\n".join([head, f"|{'-|' * len(heading)}", *lines])
