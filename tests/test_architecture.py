"""The floors and the budget: what may know of what, and how large it may grow."""

import ast
import inspect
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import celery_singleton_lock
from celery_singleton_lock import testing

PACKAGE = Path(celery_singleton_lock.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
NAME = PACKAGE.name

FLOORS = (
    {"errors", "log", "signals", "stores"},
    {"leases"},
    {"definition"},
    {"runs"},
    {
        *("__init__", "task", "publish", "lock", "receivers", "checks", "worker", "waiting", "beat", "command"),
        *("operations", "web", "contrib", "testing", "otel"),
    },
)
"""From the ground to the roof: stores, leases, runs, and what users call. Each may know those below it, and its own."""

LINES, FILES_AT_MOST = 13_900, 76
"""Of the whole package, Lua, HTML and CSS included; the aim is 13,900 lines in 76 files."""
LONGEST_FILE = 500
LONGEST_FUNCTION = 40

Function = ast.FunctionDef | ast.AsyncFunctionDef
Arrow = tuple[str, str]


def imports(tree: ast.AST, name: str = "") -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def split(source: str) -> tuple[ast.Module, ast.Module]:
    """The code that runs, and what stands under `if TYPE_CHECKING`."""
    tree, for_types = ast.parse(source), ast.Module(body=[], type_ignores=[])
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            for_types.body += node.body
            node.body = []
    return tree, for_types


def file_of(imported: str) -> str | None:
    parts = imported.split(".")
    if parts[0] != NAME:
        return None
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[1:end])
        for name in (f"{path}.py", f"{path}/__init__.py".removeprefix("/")):
            if name in FILES:
                return name
    raise AssertionError(f"{imported} is nowhere")


def arrows(*, for_types: bool = False) -> set[Arrow]:
    found = set()
    for name, path in FILES.items():
        tree = split(path.read_text())[for_types]
        found |= {(name, file) for each in imports(tree, name) if (file := file_of(each)) is not None}
    return found


def room(name: str) -> str:
    return name.partition("/")[0].removesuffix(".py")


def height(name: str) -> int:
    (floor,) = [number for number, rooms in enumerate(FLOORS) if room(name) in rooms]
    return floor


def runs_up(arrow: Arrow) -> bool:
    importer, imported = arrow
    return height(importer) < height(imported)


def circle(found: set[Arrow]) -> list[str]:
    """Files that import one another in the end, if there are such."""
    graph: dict[str, set[str]] = {}
    for importer, imported in found:
        graph.setdefault(importer, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def packages(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imports(ast.parse(path.read_text()))}


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            yield node


def body_length(function: Function) -> int:
    """Lines of the body, without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_no_arrow_runs_up() -> None:
    assert all(0 <= height(name) < len(FLOORS) for name in FILES)
    assert {arrow for arrow in arrows() if runs_up(arrow)} == set()


def test_no_files_go_round_in_a_circle() -> None:
    assert circle(arrows()) == []


@pytest.mark.parametrize(
    ("package", "where"), [("pytest", "testing/"), ("redis", "stores/"), ("django", "contrib/django/")]
)
def test_one_folder_alone_knows_this_package(package: str, where: str) -> None:
    knowing = {name for name, path in FILES.items() if package in packages(path)}

    assert knowing
    assert [name for name in knowing if not name.startswith(where)] == []


def test_below_the_definition_of_a_task_nothing_knows_celery() -> None:
    below = [name for name in FILES if name.startswith(("leases/", "stores/", "errors"))]

    assert [name for name in below if packages(FILES[name]) & {"celery", "billiard", "kombu"}] == []


def test_nothing_knows_the_part_for_django() -> None:
    assert {room(importer) for importer, imported in arrows() if room(imported) == "contrib"} == {"contrib"}


def test_the_package_fits_in_its_budget() -> None:
    texts = [path.read_text() for path in PACKAGE.rglob("*") if path.suffix in (".py", ".lua", ".html", ".css")]

    assert sum(len(text.splitlines()) for text in texts) <= LINES
    assert len(texts) <= FILES_AT_MOST


def test_a_file_fits_in_one_sitting() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}

    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_a_function_fits_on_a_screen() -> None:
    found = ((name, each.name, body_length(each)) for name, path in FILES.items() for each in functions(path))

    assert [each for each in found if each[2] > LONGEST_FUNCTION] == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for module in (celery_singleton_lock, testing)
        for name in module.__all__
        if name != "HELD_BY_TEST"
    ],
)
def test_a_public_name_exists_and_explains_itself(module: ModuleType, name: str) -> None:
    thing = getattr(module, name)

    assert inspect.getdoc(thing)
    assert thing.__doc__, f"{name} has only the docstring it inherits"
