"""The tests of a shop, written as its developers would, in a pytest of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHOP = HERE / "shop"


def played(*arguments: str, cwd: Path = SHOP, **env: str) -> "subprocess.CompletedProcess[str]":
    # The package pytest-celery, if it is installed, has other fixtures by the names of Celery's own.
    command = [sys.executable, "-m", "pytest", "-p", "no:celery", "-p", "no:cacheprovider", *arguments]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # The shop is not installed, and this library may be installed from elsewhere.
    mine["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SHOP)])
    return subprocess.run(command, cwd=cwd, env={**mine, **env}, capture_output=True, text=True, timeout=300)


FILES_OF_THE_PAGE = re.compile(r'^```python title="(\S+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)


@pytest.mark.prove
def test_the_files_of_the_page_are_all_that_it_needs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "testing.md").read_text(encoding="utf-8")
    files = dict(FILES_OF_THE_PAGE.findall(page))
    for name, code in files.items():
        (tmp_path / name).write_text(code)

    ran = played("-Werror", cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{sum(code.count('def test_') for code in files.values())} passed" in ran.stdout


SESSION = """
@pytest.fixture(scope="session")
def celery_session_app():
    app.loader.import_task_module("celery.contrib.testing.tasks")
    return app
"""
USES_IT = """
from shop import import_catalogue

def test_it_runs(singleton_locks, celery_session_worker):
    assert import_catalogue.delay(7).get(timeout=20) == "imported 7"
    assert len(singleton_locks.acquired) == 1
"""


@pytest.mark.parametrize("line", ['app.conf.singleton_lock_url = "memory://"\n', ""], ids=["with it", "without"])
def test_a_worker_of_the_session_starts_before_the_locks_are_in_memory(tmp_path: Path, line: str) -> None:
    page = (ROOT / "docs" / "how-to" / "testing.md").read_text(encoding="utf-8")
    files = dict(FILES_OF_THE_PAGE.findall(page))
    # Where no server is.
    (tmp_path / "shop.py").write_text(files["shop.py"].replace(":6379", ":1"))
    (tmp_path / "conftest.py").write_text(files["conftest.py"] + line + SESSION)
    (tmp_path / "test_session.py").write_text(USES_IT)

    ran = played(cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")

    assert ("1 passed" in ran.stdout and "store_unreachable" not in ran.stdout) == bool(line), ran.stdout + ran.stderr


def passes(*arguments: str, **env: str) -> None:
    ran = played(*arguments, **env)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_with_a_worker_of_processes(valkey: Server) -> None:
    passes("test_prefork.py", SHOP_REDIS=valkey.url)


EMBEDDED = [
    "celery_session_worker",
    *[pytest.param(kind, marks=pytest.mark.prove) for kind in ("celery_worker", "worker_of_the_application")],
]


@pytest.mark.parametrize("kind", EMBEDDED)
def test_with_a_worker_inside_the_process_of_the_test(kind: str) -> None:
    # One kind a process: a worker of Celery that ends here ends every other one.
    passes("test_embedded.py", "-k", kind)


@pytest.mark.prove
def test_while_others_move_the_clock() -> None:
    passes("test_time.py")


def test_by_unittest() -> None:
    mine = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "unittest", "unittests"]
    ran = subprocess.run(command, cwd=SHOP, env=mine, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "Ran 1 test" in ran.stderr


def in_a_suite_of_its_own(folder: Path, code: str, conftest: str = "") -> str:
    (folder / "conftest.py").write_text(f'pytest_plugins = ["celery_singleton_lock.testing"]\n{conftest}')
    (folder / "test_it.py").write_text(code)
    return played("-Werror", cwd=folder).stdout


LEAVES = """
from celery_singleton_lock import Lock
from shop import app

def test_it(singleton_locks):
    global lease
    lease = Lock("stock", app=app).acquire()

def test_next(singleton_locks):
    assert singleton_locks.store.held() == []
    with Lock("stock", app=app):
        pass
"""


@pytest.mark.prove
def test_a_lock_that_is_left_held_fails_its_test_and_no_other(tmp_path: Path) -> None:
    told = in_a_suite_of_its_own(tmp_path, LEAVES)

    assert "2 passed, 1 error" in told
    assert "ERROR at teardown of test_it " in told
    assert "the test has left a lock held: key=singleton:" in told


@pytest.mark.prove
def test_a_test_without_an_app_is_told_how_to_name_it(tmp_path: Path) -> None:
    told = in_a_suite_of_its_own(tmp_path, "def test_it(singleton_locks):\n    pass\n")

    assert "define a fixture singleton_lock_app in conftest.py" in told


@pytest.mark.parametrize("module", ["celery_singleton_lock", "celery_singleton_lock.beat"])
def test_the_library_does_without_the_kit(module: str) -> None:
    code = f"import sys, {module}; assert not [name for name in sys.modules if name.endswith('.testing')], sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_kit_does_without_pytest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'pytest' else find(name, *rest)\n"
        "from celery_singleton_lock.testing import disabled, expire, hold, memory_store, recorded\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
