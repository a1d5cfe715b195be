"""The docs name what there is: files, tests, options, outcomes, every pair of mode and policy."""

import ast
import re
import runpy
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from celery.utils.dispatch import Signal

import celery_singleton_lock
from celery_singleton_lock import ConfigurationError, Lock, signals
from celery_singleton_lock.operations.cli import singleton
from celery_singleton_lock.options import check_pair
from celery_singleton_lock.signals import ConflictOutcome, UnansweredOutcome
from celery_singleton_lock.stores.inventory import MarkState

ROOT = Path(__file__).parents[2]
MODES = ("while_executing", "until_executing", "until_executed", "until_and_while_executing")
POLICIES = ("skip", "raise", "reschedule", "wait", "join", "rerun", "replace")
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
    """The cells of each row of a table, without its head."""
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def section(page: str, heading: str) -> str:
    """What stands below *heading*, as far as the next one of the same level."""
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


# The rules.


def test_the_rules_are_numbered() -> None:
    numbers = [row[0].strip("* ") for row in rows_of(RULES)]

    assert numbers == [f"R{number}" for number in range(1, 15)]


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


# Modes and policies.


def test_the_modes_are_described_in_their_order() -> None:
    described = re.findall(r"^## `(\w+)`$", PAIRS, re.MULTILINE)

    assert tuple(described) == MODES


@pytest.mark.parametrize(("mode", "policy"), list(product(MODES, POLICIES)))
def test_every_pair_of_mode_and_policy_is_described_or_refused(mode: str, policy: str) -> None:
    described = [row[1:] for row in rows_of(section(PAIRS, f"`{mode}`")) if row[0] == f"`{policy}`"]
    if not described:
        with pytest.raises(ConfigurationError, match="does not go with"):
            check_pair(SimpleNamespace(name="a task", lock_on_conflict=policy), mode, policy)
        return

    (cells,) = described
    check_pair(SimpleNamespace(name="a task", lock_on_conflict=policy), mode, policy)
    assert len(cells) == 2
    assert all(cell.endswith(".") for cell in cells)


# Options, outcomes and names, and the docstring of the task.


def test_every_outcome_is_told() -> None:
    told = section(SIGNALS, "Outcomes")
    outcomes = {*get_args(ConflictOutcome), *get_args(UnansweredOutcome)}

    assert [outcome for outcome in sorted(outcomes) if f"`{outcome}`" not in told] == []


def test_every_signal_is_told() -> None:
    told = [row[0].strip("`") for row in rows_of(section(SIGNALS, "Signals"))]

    assert told == [name for name, value in vars(signals).items() if isinstance(value, Signal)]


def test_every_name_that_can_be_imported_is_told() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    told = {row[0].strip("`") for row in rows_of(page.partition("\n## ")[0])}

    assert told == set(celery_singleton_lock.__all__)


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


# The site, and what plays the code of its pages.


def test_each_page_is_on_the_site_and_on_its_first_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    first = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}

    assert set(re.findall(r"[\w/-]+\.md", site.partition("\nnav:\n")[2])) == pages
    assert [page for page in sorted(pages - {"index.md"}) if f"]({page})" not in first] == []


def test_a_link_that_leaves_the_docs_leads_to_the_repository() -> None:
    place = ROOT / "docs" / "links_to_the_repository.py"
    hook = runpy.run_path(str(place))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(ROOT / "docs" / "reference" / "start.md")))
    config = SimpleNamespace(docs_dir=str(ROOT / "docs"), repo_url="https://example.com/lock/")
    links = "[a](../../README.md#install) [b](../../tests/fire) [c](../log.md#x) [d](../../nothing.md)"

    assert hook(links, page=page, config=config) == (
        "[a](https://example.com/lock/blob/main/README.md#install) [b](https://example.com/lock/tree/main/tests/fire) "
        "[c](../log.md#x) [d](../../nothing.md)"
    )


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


@every_page
def test_the_code_of_each_page_is_played(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    player = ROOT / PLAYED.get(name, "tests/pages/test_how_to.py")

    if "```python" in page.read_text(encoding="utf-8"):
        assert player.exists()
        assert name in PLAYED or f'"{name}"' in player.read_text(encoding="utf-8")


def test_the_beat_of_the_page_is_the_one_that_is_played() -> None:
    page = (ROOT / "docs" / "how-to" / "several-beats.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)    pass\n```", page, re.DOTALL)
    played = (ROOT / PLAYED["docs/how-to/several-beats.md"]).read_text(encoding="utf-8")

    assert [line for line in snippet.splitlines() if line not in played] == []


# Pages whose code is played.

FRAMEWORKS = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("told", FRAMEWORKS.split("```\n")[:-1])
def test_code_of_a_page_is_in_the_file_it_names(told: str) -> None:
    text, _, snippet = told.partition("```python\n")
    file = re.findall(r"`(tests/[\w/]+\.py)`", text)[-1]
    lines = iter((ROOT / file).read_text(encoding="utf-8").splitlines())

    assert [line for line in snippet.splitlines() if line and line not in lines] == []


# The page for who operates it.

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(singleton.commands))
def test_every_command_and_its_options_are_told(name: str) -> None:
    options = [each.opts for each in singleton.commands[name].params if each.opts[0].startswith("-")]

    assert re.search(rf"^\$ celery -A proj singleton {name}\b", OPERATIONS, re.MULTILINE)
    assert [names for names in options if not any(re.search(rf"[` ]{name}\b", OPERATIONS) for name in names)] == []


def test_every_state_of_a_row_is_told() -> None:
    states = [row[0].strip("`") for row in rows_of(OPERATIONS[OPERATIONS.index("| state |") :].partition("\n\n")[0])]

    assert ["held", *get_args(MarkState)] == states


SYMPTOMS = ["Stuck", "Skipped too often", "Waiting too long", "Lost leases", "The store is away"]


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_each_symptom_has_a_command_its_output_and_a_remedy(symptom: str) -> None:
    told = section(OPERATIONS, symptom)
    command, _, output = told.partition("```console\n")[2].partition("```")[0].partition("\n")

    assert re.fullmatch(rf"\$ celery -A proj singleton ({'|'.join(singleton.commands)})\b.*", command)
    assert output
    assert f"(#{symptom.lower().replace(' ', '-')})" in OPERATIONS.partition("\n## ")[0]
    assert re.search(r"\| do \||^- ", told, re.MULTILINE) or "make the key narrower" in told


# CONTRIBUTING.


def test_each_folder_of_tests_has_its_line() -> None:
    told = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}

    assert {folder for folder in folders if f"`{folder}/`" not in told} == set()


# All pages.


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


def lines_of_the_log() -> list[str]:
    """What the package writes to the log of locks, as it is written in the code."""
    files = (ROOT / "celery_singleton_lock").rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in texts if re.match(r"(lock|beat)\.\w+[ :]", text)]


@pytest.mark.parametrize("line", [line for line in lines_of_the_log() if line.startswith("lock.")])
def test_every_line_about_a_lock_names_its_key_and_its_task(line: str) -> None:
    assert line.startswith(ABOUT_NO_LOCK) or re.match(r"lock\.\w+ key=%s task_id=(%s|None)([ :]|$)", line)


LEVELS = {name: name.upper() for name in ("debug", "info", "warning", "error", "critical")} | {"exception": "ERROR"}


def texts_logged() -> Iterator[tuple[str, str]]:
    """The level and the text of each call of a logger, also if it is handed on by `partial`."""
    for file in (ROOT / "celery_singleton_lock").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            constants = {
                target.id: node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    called, *arguments = [node.func, *node.args]
                    if isinstance(called, ast.Name) and called.id == "partial":
                        called, *arguments = arguments
                    if is_of_the_logger(called):
                        levels, (text, *_) = levels_of(called, arguments, constants)
                        text = constants[text.id] if isinstance(text, ast.Name) else text
                        yield from ((level, ast.literal_eval(text)) for level in levels)


def is_of_the_logger(node: ast.AST) -> bool:
    """`logger.info`, `logger.log` and the like."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "logger"
        and (node.attr in LEVELS or node.attr == "log")
    )


def levels_of(
    called: ast.Attribute, arguments: list[ast.expr], constants: dict[str, ast.expr]
) -> tuple[list[str], list[ast.expr]]:
    """The levels that the line may have, and the other arguments."""
    if called.attr in LEVELS:
        return [LEVELS[called.attr]], arguments
    level, *rest = arguments
    # Of a parameter nothing is known; the same line stands elsewhere.
    named = constants.get(level.id) if isinstance(level, ast.Name) else level
    either = [named.body, named.orelse] if isinstance(named, ast.IfExp) else [named]
    return [each.attr for each in either if isinstance(each, ast.Attribute)], rest


def line_of(level: str, text: str) -> tuple[str, str, str]:
    """Event, level and fields, as the table has them."""
    event, *fields = text.partition(": ")[0].split()
    names = [field.partition("=")[0] for field in fields if "=" in field]
    return f"`{event.rstrip(':')}`", level, " ".join(f"`{name}`" for name in names) or "—"


def test_the_table_of_the_log_has_every_line() -> None:
    in_the_code = {line_of(level, text) for level, text in texts_logged()}
    told = [(event, level, fields) for event, level, fields, *_ in rows_of(LOG)]

    assert len(told) == len(set(told))
    assert set(told) == in_the_code


def test_every_line_of_the_log_has_a_meaning_and_says_what_to_do() -> None:
    assert all(meaning.endswith(".") and advice.endswith(".") for *_, meaning, advice in rows_of(LOG))


def test_no_line_of_the_log_is_overlooked() -> None:
    found = {text for _, text in texts_logged()}

    assert {*lines_of_the_log()} <= found


def test_the_page_names_the_lines_that_are_about_no_lock() -> None:
    said = section(SIGNALS, "The log")

    assert all(f"`{line.partition(' ')[0].rstrip(':')}`" in said for line in ABOUT_NO_LOCK)
    assert all(any(line.startswith(start) for line in lines_of_the_log()) for start in ABOUT_NO_LOCK)
