"""What the docs say of names that stand only inside the package; the rebuilding will ask the commands instead."""

import json
import re
from datetime import UTC, datetime
from inspect import getdoc
from pathlib import Path
from typing import Any, get_args

import pytest

from celery_singleton_lock import LockHeld, SingletonTask, options
from celery_singleton_lock.operations.breaking import Broken
from celery_singleton_lock.operations.doctor import OTHERS, Finding
from celery_singleton_lock.operations.inventory import HEAD, Call, Row, lock_as_json
from celery_singleton_lock.operations.watch import Change, Event
from celery_singleton_lock.runs.endings import Reason
from celery_singleton_lock.stores.inventory import Survey

ROOT = Path(__file__).parents[2]
OPTIONS = (ROOT / "docs" / "reference" / "options.md").read_text(encoding="utf-8")
SIGNALS = (ROOT / "docs" / "reference" / "signals.md").read_text(encoding="utf-8")
RULES = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
LOG = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
PAIRS = (ROOT / "docs" / "modes-and-policies.md").read_text(encoding="utf-8")
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(path for path in (ROOT / "tests").rglob("*.md") if "out" not in path.parts),
]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def rows_of(table: str) -> list[list[str]]:
    """The cells of each row of a table, without its head."""
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def section(page: str, heading: str) -> str:
    """What stands below *heading*, as far as the next one of the same level."""
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


# The rules.


# Modes and policies.


# Options, outcomes and names, and the docstring of the task.


def test_the_docstring_of_the_task_has_every_option() -> None:
    told = re.findall(r"^    lock_(\w+):", getdoc(SingletonTask) or "", re.MULTILINE)

    assert {*told} == {*options.OPTIONS, "key", "name", "skip_result"}


def test_every_option_is_in_the_table_with_its_default() -> None:
    told = dict(re.findall(r"^\| `lock_(\w+)` \*? ?\| (.*?) \|", OPTIONS, re.MULTILINE))
    without_a_table = {"key": None, "name": "the task's name", "skip_result": "unset"}

    assert set(told) == {*options.OPTIONS, *without_a_table}
    for name, option in options.OPTIONS.items():
        assert told[name].strip("`") == str(option.default).join('""' if isinstance(option.default, str) else ["", ""])


def test_the_options_that_an_app_can_set_have_a_star() -> None:
    starred = set(re.findall(r"^\| `lock_(\w+)` \* \|", OPTIONS, re.MULTILINE))

    assert starred == {name for name, option in options.OPTIONS.items() if option.app_wide}


def test_every_reason_is_told() -> None:
    told = re.findall(r"^\| (?:`\w+`)? ?\| .*?\| `(\w+)` \| ", RESULTS, re.MULTILINE)

    assert told == [LockHeld.reason, *get_args(Reason)]


# The site, and what plays the code of its pages.


PLAYED = {
    "README.md": "tests/pages/test_readme.py",
    "docs/tutorial.md": "tests/pages/test_tutorial.py",
    "docs/frameworks.md": "tests/frameworks",
    "docs/migrate.md": "tests/unit/test_migrate.py",
    "docs/results.md": "tests/integration/test_results.py",
    "docs/testing.md": "tests/testing_kit",
    "docs/how-to/several-beats.md": "tests/acceptance/django_app.py",
}
"""By what the code of each page is played; that of the other how-tos by tests/pages/test_how_to.py."""


# Pages whose code is played.

FRAMEWORKS = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")


# The page for who operates it.

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_the_output_that_is_shown_has_the_form_of_today() -> None:
    head = "  ".join(HEAD).split()
    shown = re.search(r"^\[.*\]$", OPERATIONS, re.MULTILINE)
    empty = Row("singleton:v3:{a:00}", "held", 0, 0.0)

    heads = [line.split() for line in OPERATIONS.splitlines() if line.startswith("LOCK ")]
    assert len(heads) >= 2
    assert all(each in (head, [head[0], "LABEL", *head[1:]]) for each in heads)
    assert shown is not None
    assert [*json.loads(shown[0])[0]] == [*empty.as_json()]
    assert _said(lock_as_json(Survey("k", 0, None, (), (), 0), None)) in OPERATIONS
    assert _said(Call("id", None).as_json()) in OPERATIONS
    assert _said(Broken("k", [], []).as_json()) in OPERATIONS


def test_what_is_shown_of_the_doctor_has_all_checks_in_their_order() -> None:
    shown = OPERATIONS.split("$ celery -A proj singleton doctor\n")[1:]

    assert shown
    for output in shown:
        lines = [line.split(maxsplit=2) for line in re.split(r"^[`$]", output, flags=re.MULTILINE)[0].splitlines()]
        named = [detail.partition(": ")[0].split(", ") if name == "others" else [name] for _, name, detail in lines]
        told = [name for names in named for name in names if name != "advice"]
        assert told == CHECKS or ("others" in output and sorted(told) == sorted(CHECKS))
        assert {verdict for verdict, *_ in lines} <= {"ok", "NO", "-"}


def test_every_event_of_a_watch_is_told() -> None:
    events = [row[0].strip("`") for row in rows_of(OPERATIONS[OPERATIONS.index("| event |") :].partition("\n\n")[0])]
    change = Change(datetime.now(UTC), "acquired", "k").as_json()

    assert sorted(events) == sorted(get_args(Event))
    assert next([*json.loads(line)] for line in OPERATIONS.splitlines() if line.startswith('{"at"')) == [*change]


SYMPTOMS = ["Stuck", "Skipped too often", "Waiting too long", "Lost leases", "The store is away"]


CHECKS = ["store", *OTHERS, "tasks", "workers", "holders"]


def test_each_check_of_the_doctor_is_told() -> None:
    told = [row[0].strip("`") for row in rows_of(OPERATIONS[OPERATIONS.index("| check |") :].partition("\n\n")[0])]

    assert told == [*CHECKS, "advice"]
    assert _said(Finding("store", True, "").as_json()) in OPERATIONS


def _said(facts: dict[str, Any]) -> str:
    return "{" + ", ".join(f'"{name}"' for name in facts) + "}"


# CONTRIBUTING.


# All pages.


# The log.

ABOUT_NO_LOCK = (
    "lock.clock ",
    "lock.failover ",
    "lock.heartbeat ",
    "lock.misconfigured:",
    "lock.moved ",
    "lock.no_base:",
    "lock.unready ",
    "lock.uncounted ",
    "lock.unchecked:",
    "lock.signal_failed:",
    "lock.unsure: the store ",
)
"""What docs/reference/signals.md says concerns a store or a process as a whole."""


LEVELS = {name: name.upper() for name in ("debug", "info", "warning", "error", "critical")} | {"exception": "ERROR"}
