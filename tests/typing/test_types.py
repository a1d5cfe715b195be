"""Code of users, seen by two type checkers with the types of the package celery-types."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_singleton_lock
from celery_singleton_lock import testing

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAME = celery_singleton_lock.__name__
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = ("README.md", "docs/how-to/migrate.md", "docs/how-to/topologies.md")
"""Pages whose examples stand each by itself."""
OF_FILES = ("docs/how-to/frameworks.md",)
"""Pages whose examples are parts of files, which they name."""
PROGRAMS = sorted(
    name
    for page in (ROOT / "docs").rglob("*.md")
    if PYTHON.search(page.read_text(encoding="utf-8"))
    and (name := str(page.relative_to(ROOT))) not in (*PAGES, *OF_FILES)
)
"""All others: their examples go on from one to the next."""
FILES = sorted({file for page in OF_FILES for file in re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / page).read_text())})
PLACES = (ROOT, ROOT / "tests" / "testing_kit" / "shop")
"""From which those files import."""

UNKNOWN = "reportAttributeAccessIssue reportUnknownMemberType"
OF_OTHERS: dict[str, tuple[str, str]] = {
    # Celery's classes of tasks have parameters for a type checker, and before Celery 5.7 not while a program runs.
    "tests_frameworks_flask_shop.py": ("type-arg", "reportMissingTypeArgument reportUnknownVariableType"),
    # Django and its packages publish no types.
    "several_beats.py": ("import-untyped misc", "reportMissingTypeStubs"),
    "tests_frameworks_django_shop_settings.py": ("", "reportConstantRedefinition"),
    "tests_frameworks_django_shop_tasks.py": ("", UNKNOWN),
    "tests_frameworks_django_shop_urls.py": (
        "import-untyped",
        f"reportMissingTypeStubs reportGeneralTypeIssues reportUnknownArgumentType {UNKNOWN}",
    ),
    # Flask's documentation has it so.
    "page_and_metrics.py": ("method-assign", ""),
}
"""Complaints of mypy and pyright about examples, by file, that are about other packages."""

Complaint = tuple[str, int, str]

MYPY = """\
[mypy]
strict = true
# As it is done with packages that are installed.
[mypy-celery_singleton_lock.*,tests.*,shop,conftest]
follow_imports = silent
"""


def snippets(page: str) -> list[str]:
    return PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))


def expected() -> Iterator[tuple[str, int, str, str]]:
    for number, line in enumerate((HERE / "wrong.py").read_text(encoding="utf-8").splitlines(), start=1):
        if words := re.search(r"  # ([\w-]+)((?: report\w+)+)$", line):
            yield from (("wrong.py", number, words[1], word) for word in words[2].split())


def without_others(complaints: set[Complaint], checker: int) -> tuple[set[Complaint], set[tuple[str, str]]]:
    known = {(file, word) for file, words in OF_OTHERS.items() for word in words[checker].split()}
    of_others = {(file, word) for file, _, word in complaints} & known
    return {each for each in complaints if (each[0], each[2]) not in known}, known - of_others


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that is to be checked, each example in a file of its own."""
    desk = tmp_path_factory.mktemp("types")
    for name in ("given.py", "right.py", "wrong.py"):
        shutil.copy(HERE / name, desk)
    for file in FILES:
        shutil.copy(ROOT / file, desk / file.replace("/", "_"))
    for page in PAGES:
        for number, snippet in enumerate(snippets(page), start=1):
            (desk / f"{Path(page).stem.lower()}_{number}.py").write_text(f"from given import *\n\n{snippet}")
    for page in PROGRAMS:
        (desk / f"{Path(page).stem.replace('-', '_')}.py").write_text("\n".join(snippets(page)))
    return desk


def run(desk: Path, *arguments: str, **of_env: str) -> str:
    places = os.pathsep.join(map(str, PLACES))
    env = {**os.environ, "MYPYPATH": places, "PYTHONPATH": str(ROOT), **of_env}
    ran = subprocess.run([sys.executable, "-m", *arguments], cwd=desk, env=env, capture_output=True, text=True)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def of_mypy(desk: Path) -> set[Complaint]:
    (desk / "mypy.ini").write_text(MYPY)
    told = run(desk, "mypy", "--config-file", "mypy.ini", *(path.name for path in desk.glob("*.py")))
    complaints = re.findall(r"^(\S+):(\d+): error: .*\[(.+)\]$", told, re.MULTILINE)
    return {(file, int(line), word) for file, line, word in complaints}


@pytest.fixture(scope="module")
def of_pyright(desk: Path) -> set[Complaint]:
    """By the package basedpyright, which brings its own Node.js, with the rules of pyright."""
    rules = {"include": ["."], "extraPaths": [str(place) for place in PLACES], "typeCheckingMode": "strict"}
    (desk / "pyrightconfig.json").write_text(json.dumps(rules))
    told = json.loads(run(desk, "basedpyright", "--outputjson", "--pythonpath", sys.executable))
    assert told["summary"]["filesAnalyzed"] == len([*desk.glob("*.py")])
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each.get("rule", each["message"]))
        for each in told["generalDiagnostics"]
        if each["severity"] == "error"
    }


def test_there_is_something_to_check(desk: Path) -> None:
    assert len([*desk.glob("readme_*.py")]) == 1
    assert (desk / "use_the_fence.py").read_text().count("@app.task") == 2
    assert len([*desk.glob("migrate_*.py")]) == 1
    assert {"docs/how-to/results.md", "docs/tutorial.md", "docs/how-to/several-beats.md"} <= {*PROGRAMS}
    assert "tests/frameworks/flask_shop.py" in FILES
    assert len([*expected()]) >= 10


def test_mypy_refuses_what_is_wrong_and_nothing_else(of_mypy: set[Complaint]) -> None:
    ours, unsaid = without_others(of_mypy, 0)

    assert ours == {(file, line, word) for file, line, word, _ in expected()}
    assert unsaid == set()


def test_pyright_refuses_what_is_wrong_and_nothing_else(of_pyright: set[Complaint]) -> None:
    ours, unsaid = without_others(of_pyright, 1)

    assert ours == {(file, line, word) for file, line, _, word in expected()}
    assert unsaid == set()


def test_what_is_public_is_typed_to_the_end(tmp_path: Path) -> None:
    # Where pyright finds it as what is installed.
    venv.create(tmp_path, with_pip=False)
    (packages,) = tmp_path.glob("lib/*/site-packages")
    shutil.copytree(ROOT / NAME, packages / NAME)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])

    told = json.loads(
        run(tmp_path, "basedpyright", "--verifytypes", NAME, "--ignoreexternal", "--outputjson", PATH=path)
    )

    is_known = {each["name"]: each["isTypeKnown"] for each in told["typeCompleteness"]["symbols"]}
    public = [f"{module.__name__}.{name}" for module in (celery_singleton_lock, testing) for name in module.__all__]
    classes = [name for name in public if name in is_known]
    assert len(classes) > 15
    assert [name for name in classes if not is_known[name]] == []
    assert [name for name, known in is_known.items() if name.startswith(f"{NAME}.signals.") and not known] == []
