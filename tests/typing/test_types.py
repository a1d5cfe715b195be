"""What users write, seen by two type checkers with the types of the package celery-types."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = ("README.md", "docs/migrate.md")
PROGRAMS = ("docs/tutorial.md", *sorted(f"docs/how-to/{page.name}" for page in (ROOT / "docs" / "how-to").glob("*.md")))
"""Pages whose examples go on from one to the next."""
MADE_OF_UNTYPED_PARTS = "import DatabaseScheduler"

Complaint = tuple[str, int, str]

MYPY = """\
[mypy]
strict = true
# As it is done with a package that is installed.
[mypy-celery_singleton_lock.*]
follow_imports = silent
"""


def snippets(page: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return [snippet for snippet in found if MADE_OF_UNTYPED_PARTS not in snippet]


def expected() -> Iterator[tuple[str, int, str, str]]:
    """File, line, mypy's word and pyright's for each complaint that there has to be."""
    for number, line in enumerate((HERE / "wrong.py").read_text(encoding="utf-8").splitlines(), start=1):
        if words := re.search(r"  # ([\w-]+) (report\w+)$", line):
            yield "wrong.py", number, words[1], words[2]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that is to be checked, each example in a file of its own."""
    desk = tmp_path_factory.mktemp("types")
    for name in ("shop.py", "right.py", "wrong.py"):
        shutil.copy(HERE / name, desk)
    for page in PAGES:
        for number, snippet in enumerate(snippets(page), start=1):
            (desk / f"{Path(page).stem.lower()}_{number}.py").write_text(f"from shop import *\n\n{snippet}")
    for page in PROGRAMS:
        (desk / f"{Path(page).stem.replace('-', '_')}.py").write_text("\n".join(snippets(page)))
    return desk


def run(desk: Path, *arguments: str) -> str:
    env = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
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
    rules = {"include": ["."], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
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
    assert len([*desk.glob("migrate_*.py")]) == 5
    assert len([*expected()]) >= 10


def test_mypy_refuses_what_is_wrong_and_nothing_else(of_mypy: set[Complaint]) -> None:
    assert of_mypy == {(file, line, word) for file, line, word, _ in expected()}


def test_pyright_refuses_what_is_wrong_and_nothing_else(of_pyright: set[Complaint]) -> None:
    assert of_pyright == {(file, line, word) for file, line, _, word in expected()}
