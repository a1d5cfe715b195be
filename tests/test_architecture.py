"""Three storeys and their budgets: what may know of what, and how large it may grow."""

import ast
import inspect
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_singleton_lock

PACKAGE = Path(celery_singleton_lock.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
BELOW_CELERY = [name for name in FILES if name.startswith(("leases/", "stores/"))] + ["errors.py"]
MAY_KNOW_KOMBU = {"leases/key.py"}

LONGEST_FILE = 300
LONGEST_FUNCTION = 40
LONGEST_MEDIAN = 9

Function = ast.FunctionDef | ast.AsyncFunctionDef


def storey(module: str) -> str:
    """`stores`, `leases`, or `top` for all that knows Celery."""
    part = module.split(".")[1] if "." in module else ""
    if part in ("leases", "stores"):
        return part
    return "errors" if part == "errors" else "top"


def imports(path: Path) -> Iterator[str]:
    """What *path* imports, anywhere in it, under its full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """The storeys of this package that *path* imports from."""
    return {storey(name) for name in imports(path) if name.split(".")[0] == "celery_singleton_lock"}


def packages(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imports(path)}


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            yield node


def body_length(function: Function) -> int:
    """Lines of the body, without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


every_file = pytest.mark.parametrize("name", FILES)


# Who knows whom.


@pytest.mark.parametrize("name", BELOW_CELERY)
def test_below_the_top_storey_nothing_knows_celery(name: str) -> None:
    strangers = {"celery", "billiard"} | ({"kombu"} if name not in MAY_KNOW_KOMBU else set())

    assert packages(FILES[name]) & strangers == set()


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("stores/")])
def test_stores_know_neither_the_core_nor_the_top_storey(name: str) -> None:
    assert own_imports(FILES[name]) <= {"stores", "errors"}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("leases/")])
def test_the_core_does_not_know_the_top_storey(name: str) -> None:
    assert own_imports(FILES[name]) <= {"leases", "stores", "errors"}


def test_errors_know_nobody() -> None:
    assert own_imports(FILES["errors.py"]) == set()


def test_only_the_store_in_redis_and_its_connections_know_redis() -> None:
    knowing = [name for name, path in FILES.items() if "redis" in packages(path)]

    assert knowing == ["stores/redis/store.py", "stores/redis/waiter.py", "stores/redis/wire.py"]


def test_the_walk_sees_imports_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from celery_singleton_lock import signals\n"
        "def late():\n"
        "    import celery.app\n"
        "    from celery_singleton_lock.leases.key import KeyMaker\n"
        "    from celery_singleton_lock.stores import base\n"
    )

    assert packages(path) == {"celery", "celery_singleton_lock"}
    assert own_imports(path) == {"top", "leases", "stores"}


# Budgets.


@every_file
def test_a_file_fits_in_one_sitting(name: str) -> None:
    assert len(FILES[name].read_text().splitlines()) <= LONGEST_FILE


@every_file
def test_a_function_fits_on_a_screen(name: str) -> None:
    lengths = {function.name: body_length(function) for function in functions(FILES[name])}

    assert {function: length for function, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_most_functions_are_small() -> None:
    lengths = [body_length(function) for path in FILES.values() for function in functions(path)]

    assert len(lengths) > 50
    assert statistics.median(lengths) <= LONGEST_MEDIAN


@every_file
def test_a_module_is_named_after_what_it_is_about(name: str) -> None:
    words = set(Path(name).with_suffix("").parts)

    assert words & {"utils", "util", "helpers", "helper", "common", "manager", "misc", "tools"} == set()


# What is public.


@pytest.mark.parametrize("name", celery_singleton_lock.__all__)
def test_a_public_name_exists_and_explains_itself(name: str) -> None:
    thing = getattr(celery_singleton_lock, name)

    assert inspect.getdoc(thing)
    assert thing.__doc__, f"{name} has only the docstring it inherits"


def test_the_public_names_are_sorted_and_complete() -> None:
    public = {name for name, value in vars(celery_singleton_lock).items() if isinstance(value, type)}

    assert celery_singleton_lock.__all__ == sorted(celery_singleton_lock.__all__)
    assert public <= set(celery_singleton_lock.__all__)


@every_file
def test_a_module_opens_with_a_sentence(name: str) -> None:
    docstring = ast.get_docstring(ast.parse(FILES[name].read_text()))

    assert docstring
    assert docstring[0].isupper() or docstring[0] == "`"
