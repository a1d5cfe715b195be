"""The docs name what there is: files, tests, options, outcomes, every pair of mode and policy."""

import ast
import inspect
import json
import logging
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from inspect import getdoc
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from celery import Celery
from celery.utils.dispatch import Signal

import celery_singleton_lock
from celery_singleton_lock import ConfigurationError, Lock, LockHeld, SingletonTask
from celery_singleton_lock.definition import options
from celery_singleton_lock.leases import holding
from celery_singleton_lock.operations.cli import singleton
from celery_singleton_lock.operations.doctor import CHECKS
from celery_singleton_lock.operations.rows import Row, table
from celery_singleton_lock.runs import run
from celery_singleton_lock.runs.endings import Reason
from celery_singleton_lock.signals import ConflictOutcome, UnansweredOutcome
from celery_singleton_lock.stores.records import Holder, HolderState, LockState
from tests import turn

ROOT = Path(__file__).parents[2]
MODES = ("while_executing", "until_executing", "until_executed", "until_and_while_executing")
POLICIES = ("skip", "raise", "reschedule", "wait", "join", "rerun", "replace")
OPTIONS = (ROOT / "docs" / "reference" / "options.md").read_text(encoding="utf-8")
SIGNALS = (ROOT / "docs" / "reference" / "log.md").read_text(encoding="utf-8")
RULES = (ROOT / "tests" / "rules.md").read_text(encoding="utf-8")
LINES = re.findall(r"^- (`(?:lock|beat)\.\w+`) ([A-Z]+)((?: `\w+`)*): (.*)$", SIGNALS, re.MULTILINE)
RESULTS = (ROOT / "docs" / "how-to" / "results.md").read_text(encoding="utf-8")
PAIRS = (ROOT / "docs" / "reference" / "modes-and-policies.md").read_text(encoding="utf-8")
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(path for path in (ROOT / "tests").rglob("*.md") if "out" not in path.parts),
]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@cache
def anchors_of(page: Path) -> set[str]:
    """The fragments that GitHub makes of the headings of *page*."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def rows_of(table: str) -> list[list[str]]:
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def section(page: str, heading: str) -> str:
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("row", rows_of(RULES), ids=lambda row: row[0].strip("* "))
def test_a_rule_has_a_home_and_tests_that_exist(row: list[str]) -> None:
    _, rule, home, tests = row
    homes = re.findall(r"`([^`]+)`", home)
    ids = [test.split("::") for test in re.findall(r"`([^`]+)`", tests)]

    assert rule.startswith("**")
    assert homes
    assert [path for path in homes if not (ROOT / path).is_file()] == []
    assert ids
    assert [name for file, name in ids if name not in functions_in(file)] == []


def nothing() -> None: ...


@pytest.mark.parametrize(("mode", "policy"), list(product(MODES, POLICIES)))
def test_every_pair_of_mode_and_policy_is_described_or_refused(mode: str, policy: str) -> None:
    define = Celery(set_as_current=False).task(
        base=SingletonTask, name="task", lazy=False, shared=False, lock_mode=mode, lock_on_conflict=policy
    )
    (goes_with,) = [row[-1] for row in rows_of(section(PAIRS, "Modes")) if row[0].startswith(f"`{mode}`")]
    if f"`{policy}`" not in goes_with:
        with pytest.raises(ConfigurationError, match="does not go with"):
            define(nothing)
        return

    define(nothing)
    # How it meets a run, and in a queue mode a queued call.
    cells = next(row[1:] for row in rows_of(section(PAIRS, "What the caller sees")) if row[0].startswith(f"`{policy}`"))
    assert cells[0]
    assert cells[1] or mode == "while_executing"


def test_every_option_is_told_with_its_default() -> None:
    of_the_task = re.findall(r"^    lock_(\w+):", getdoc(SingletonTask) or "", re.MULTILINE)
    rows = re.findall(r"^\| `lock_(\w+)` (\*?) ?\| (.*?) \|", OPTIONS, re.MULTILINE)
    defaults = {name: default.strip('`"') for name, _, default in rows}

    assert {*of_the_task} == {*defaults} == {*options.OPTIONS, "key", "name", "skip_result"}
    assert {name for name, star, _ in rows if star} == {n for n, each in options.OPTIONS.items() if each.app_wide}
    assert [name for name, each in options.OPTIONS.items() if defaults[name] != str(each.default)] == []


def test_every_reason_is_told() -> None:
    told = re.findall(r"^\| (?:`\w+`)? ?\| .*?\| `(\w+)` \| ", RESULTS, re.MULTILINE)

    assert told == [LockHeld.reason, *get_args(Reason)]


def test_every_outcome_is_told() -> None:
    told = section(SIGNALS, "Outcomes")
    outcomes = {*get_args(ConflictOutcome), *get_args(UnansweredOutcome)}

    assert [outcome for outcome in sorted(outcomes) if f"`{outcome}`" not in told] == []


def test_every_name_that_can_be_imported_is_told() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    told = re.findall(r"^::: celery_singleton_lock\.(\w+)$", page, re.MULTILINE)

    assert sorted(told) == sorted(celery_singleton_lock.__all__)


API = ROOT / "docs" / "reference" / "api.md"
WRITTEN = "<!-- written by `WRITE_DOCS=1 pytest tests/unit/test_docs.py` -->"


def called(name: str, thing: Any) -> str:
    signature = inspect.signature(thing)
    parameters = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    returned = signature.return_annotation
    text = returned if isinstance(returned, str) else inspect.formatannotation(returned)
    text = re.sub(r"\b[a-z_]+\.(?:[a-z_]+\.)*", "", text)
    text = "" if isinstance(thing, type) or text in ("None", "_empty", "Signature.empty") else f" -> {text}"
    return f"`{name}{inspect.Signature(bare)}{text}`"


def told_of(name: str, page: str) -> str:
    """The line of a name that can be imported: how it is called, and what it has."""
    thing = getattr(celery_singleton_lock, name)
    if name == "signals":
        sent = {each: signal for each, signal in vars(thing).items() if isinstance(signal, Signal)}
        return f"- `signals`: {', '.join(f'`{each}`' for each in sent)}"
    if not isinstance(thing, type):
        return f"- {called(name, thing)}"
    chosen = re.search(
        rf"^::: celery_singleton_lock\.{name}\n    options:\n      members: \[(.*)\]", page, re.MULTILINE
    )
    public = [each for each in vars(thing) if not each.startswith("_")]
    members = re.findall(r"\w+", chosen[1]) if chosen else public
    _, _, attributes = (getdoc(thing) or "").partition("\nAttributes:\n")
    named = re.findall(r"^    (\w+): ", attributes, re.MULTILINE)
    named += [each.name for each in fields(thing)] if is_dataclass(thing) else []
    # Options are on a page of their own.
    has = [f"`{each}`" for each in dict.fromkeys(named) if each not in options.NAMES]
    for each in members:
        member = inspect.getattr_static(thing, each, None)
        text = called(each, getattr(thing, each)) if callable(getattr(thing, each, None)) else f"`{each}`"
        has += [text] if member is not None and text not in has else []
    # A lease is made by the library, and what has fields only tells.
    is_made = "__init__" in vars(thing) and not is_dataclass(thing) and name not in ("Lease", "SingletonTask")
    how = called(name, thing) if is_made else f"`{name}`"
    return f"- {how}: {', '.join(has)}" if has else f"- {how}"


def test_the_reference_says_what_there_is_also_where_nobody_has_built_the_site() -> None:
    page = API.read_text(encoding="utf-8")
    before, _, rest = page.partition(WRITTEN)
    _, _, after = rest.partition(WRITTEN)
    lines = "\n".join(told_of(name, page) for name in sorted(celery_singleton_lock.__all__))
    written = f"{before}{WRITTEN}\n\n{lines}\n\n{WRITTEN}{after}"
    if os.environ.get("WRITE_DOCS"):
        API.write_text(written, encoding="utf-8")

    assert page == written, "run `WRITE_DOCS=1 pytest tests/unit/test_docs.py`"


def named(states: Any, leads_to: Any) -> dict[str, list[str]]:
    return {state.name: [other.name for other in others] for state, others in zip(states, leads_to, strict=True)}


@pytest.mark.parametrize(
    ("first", "leads_to"),
    [
        ("ASKING", named(run.Phase, run._LEADS_TO)),
        ("NEW", named(holding.State, holding._LEADS_TO)),
        ("COMING", turn.LEADS_TO),
    ],
    ids=["run", "lease", "turn"],
)
def test_a_life_that_is_drawn_is_that_of_the_code(first: str, leads_to: dict[str, list[str]]) -> None:
    page = (ROOT / "docs" / "explanation" / "how-it-works.md").read_text(encoding="utf-8")
    (drawn,) = re.findall(rf"^stateDiagram-v2\n(    {first} .*?)^```", page, re.MULTILINE | re.DOTALL)

    arrows = [(state, other) for state, others in leads_to.items() for other in others]
    assert sorted(re.findall(r"^    (\w+) --> (\w+) : ", drawn, re.MULTILINE)) == sorted(arrows)


def test_every_script_is_told_and_the_version_of_the_key() -> None:
    page = (ROOT / "docs" / "reference" / "keys-and-scripts.md").read_text(encoding="utf-8")
    scripts = {path.name for path in (ROOT / "celery_singleton_lock").rglob("lua/*.lua")}
    (version,) = set(re.findall(r"`singleton:(v\d+):", page))

    assert set(re.findall(r"`(\w+\.lua)`", page)) == scripts
    assert Lock("name", url="memory://").key.startswith(f"singleton:{version}:{{name:")
    assert f"`{version}` is the version of the key" in page


def test_every_extra_is_told() -> None:
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    told = [row[0].strip("`") for row in rows_of(section(page, "Extras"))]

    assert told == [f"{project['name']}[{extra}]" for extra in project["optional-dependencies"]]


def test_each_page_is_on_the_site_and_on_its_first_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    first = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}

    assert set(re.findall(r"[\w/-]+\.md", site.partition("\nnav:\n")[2])) == pages
    assert [page for page in sorted(pages - {"index.md"}) if f"]({page})" not in first] == []


PLAYED = {
    "docs/how-to/frameworks.md": "tests/frameworks",
    "docs/how-to/migrate.md": "tests/unit/test_migrate.py",
    "docs/how-to/testing.md": "tests/testing_kit",
    "docs/how-to/several-beats.md": "tests/acceptance/django_app.py",
}
"""By what the code of each page is played; that of all others by tests/pages/test_how_to.py."""


@every_page
def test_the_code_of_each_page_is_played(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    player = ROOT / PLAYED.get(name, "tests/pages/test_how_to.py")

    if "```python" in page.read_text(encoding="utf-8"):
        assert player.exists()
        assert name in PLAYED or f'"{name}"' in player.read_text(encoding="utf-8")


FRAMEWORKS = (ROOT / "docs" / "how-to" / "frameworks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("told", FRAMEWORKS.split("```\n")[:-1])
def test_code_of_a_page_is_in_the_file_it_names(told: str) -> None:
    text, _, snippet = told.partition("```python\n")
    file = re.findall(r"`(tests/[\w/]+\.py)`", text)[-1]
    # The reader's project is a package at the top.
    code = (ROOT / file).read_text(encoding="utf-8").replace("tests.frameworks.django_shop", "shop")
    lines = iter(code.splitlines())

    assert [line for line in snippet.splitlines() if line and line not in lines] == []


COMMANDS = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(singleton.commands))
def test_every_command_and_its_options_are_told(name: str) -> None:
    options = [each.opts for each in singleton.commands[name].params if each.opts[0].startswith("-")]

    assert re.search(rf"^\$ celery -A proj singleton {name}\b", COMMANDS, re.MULTILINE)
    assert [names for names in options if not any(re.search(rf"[` ]{name}\b", COMMANDS) for name in names)] == []


def test_every_check_is_told() -> None:
    table_of_checks = COMMANDS[COMMANDS.index("| check |") :].partition("\n\n")[0]

    assert [row[0].strip("`") for row in rows_of(table_of_checks)] == [*CHECKS, "advice"]


def test_the_output_that_is_shown_has_the_form_of_today() -> None:
    key = "singleton:v3:{a:00}"
    row = Row(LockState(key), Holder(key, "", HolderState.QUEUED, datetime.now(UTC), 1.0))
    head: list[Any] = table([row.cells]).splitlines()[0].split()
    heads = [line.split() for line in COMMANDS.splitlines() if line.startswith("LOCK ")]
    (shown,) = re.findall(r"^\[.*\]$", COMMANDS, re.MULTILINE)[:1]

    assert heads
    assert all(each in (head, [head[0], "LABEL", *head[1:]]) for each in heads)
    assert [*json.loads(shown)[0]] == [*row.as_json()]


def test_each_folder_of_tests_has_its_line() -> None:
    told = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}

    assert {folder for folder in folders if f"`{folder}/`" not in told} == set()


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        other = (page.parent / path).resolve() if path else page
        if not other.exists() or (anchor and anchor not in anchors_of(other)):
            dead.append(target)

    assert dead == []


@every_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"`((?:celery_singleton_lock|tests|docs|benchmarks)/[\w/.*-]+\.(?:py|lua|md))", page.read_text())

    assert [name for name in named if not list(ROOT.glob(name))] == []


ABOUT_NO_LOCK = {
    *("lock.clock", "lock.bug", "lock.not_subscribed", "lock.misconfigured"),
    *("lock.moved", "lock.async_body", "lock.no_base", "lock.unmarked", "lock.store_unreachable"),
    *("lock.counters_failed", "lock.check_failed"),
}
"""They concern a store or a process as a whole, or, like `lock.unmarked`, a call without a key."""


class Line(NamedTuple):
    event: str
    level: str | None
    """None if it is chosen as the line is written."""
    fields: tuple[str, ...]


def fields_of(values: ast.expr, dicts: dict[str, ast.Dict]) -> Iterator[str]:
    of = dicts[values.id] if isinstance(values, ast.Name) else values
    assert isinstance(of, ast.Dict)
    for key, value in zip(of.keys, of.values, strict=True):
        if key is None:
            yield from fields_of(value, dicts)
        else:
            yield str(ast.literal_eval(key))


def lines_in(function: ast.FunctionDef) -> Iterator[Line]:
    dicts = dict[str, ast.Dict]()
    for node in ast.walk(function):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(value, ast.Dict) and isinstance(target, ast.Name):
            dicts[target.id] = value
    for node in ast.walk(function):
        texts = (
            [each.value for each in node.args if isinstance(each, ast.Constant)] if isinstance(node, ast.Call) else []
        )
        if texts and re.fullmatch(r"(lock|beat)\.\w+", str(texts[0])) and isinstance(node, ast.Call):
            written = [getattr(each, "attr", "").upper() for each in (node.func, *node.args)]
            level = next((name for name in written if name in logging.getLevelNamesMapping()), None)
            fields = list[str]()
            for each in node.keywords:
                fields += [each.arg] if each.arg else fields_of(each.value, dicts)
            yield Line(str(texts[0]), level, tuple(name for name in fields if name != "exc_info"))


@cache
def lines_of_the_log() -> list[Line]:
    files = (ROOT / "celery_singleton_lock").rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    return [line for node in nodes if isinstance(node, ast.FunctionDef) for line in lines_in(node)]


def test_the_table_of_the_log_has_every_line() -> None:
    told = [Line(event.strip("`"), level, tuple(re.findall(r"\w+", fields))) for event, level, fields, _ in LINES]
    lines = lines_of_the_log()

    assert len(told) == len(set(told))
    assert {(line.event, line.fields) for line in told} == {(line.event, line.fields) for line in lines}
    assert len([line for line in lines if line.level]) > 30
    assert {line for line in lines if line.level} <= set(told)


def test_every_line_of_the_log_has_a_meaning_and_says_what_to_do() -> None:
    wrong = ("WARNING", "ERROR", "CRITICAL")
    assert [said for _, level, _, said in LINES if not re.search(r"\.( \*.*\.\*)?$", said)] == []
    assert [said for _, level, _, said in LINES if level in wrong and not said.endswith(".*")] == []


def test_every_line_about_a_lock_begins_with_its_key_and_its_call() -> None:
    about_a_lock = [
        line
        for line in lines_of_the_log()
        if line.event.startswith("lock.") and line.fields and line.event not in ABOUT_NO_LOCK
    ]

    assert [line for line in about_a_lock if line.fields[:2] != ("key", "task_id")] == []
    assert {line.event for line in lines_of_the_log()} >= ABOUT_NO_LOCK
