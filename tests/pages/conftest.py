"""Pages of the docs as programs: all Python blocks of a page are one module."""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kombu import pools

from tests.servers import Server
from tests.workers import Worker

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

Program = Callable[[str], Any]
StartWorker = Callable[..., Worker]


def programs_of(page: str) -> list[str]:
    return PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))


def program_of(page: str) -> str:
    return "\n".join(programs_of(page))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def shop(folder: Path, valkey: Server) -> Iterator[Program]:
    """Write the program of a page, with the URL of the test's server, and import it."""
    with ExitStack() as stack:

        def write(page: str) -> ModuleType:
            program = program_of(page)
            assert '"redis://"' in program
            (folder / "shop.py").write_text(program.replace('"redis://"', repr(valkey.url)), encoding="utf-8")
            stack.callback(sys.modules.pop, "shop", None)
            module = importlib.import_module("shop")
            if hasattr(module, "app"):
                stack.callback(pools.reset)
                stack.callback(module.app.close)
            return module

        yield write


@pytest.fixture
def worker(folder: Path) -> Iterator[StartWorker]:
    with ExitStack() as stack:

        def start(**options: Any) -> Worker:
            path = os.pathsep.join([str(folder), str(ROOT)])
            started = Worker("shop", {"PYTHONPATH": path}, **options)
            stack.callback(started.close)
            return started.start().ready()

        yield start
