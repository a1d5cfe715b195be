"""A visit to a shop, in a process of its own, because a framework configures its process for good."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

_PROGRAM = """
import json
{first}
from {module} import {name}
print(json.dumps({name}()))
"""


def manage(env: dict[str, str], *arguments: str, code: int = 0) -> str:
    settings = {"DJANGO_SETTINGS_MODULE": "tests.frameworks.django_shop.settings", "PYTHONPATH": "."}
    command = [sys.executable, "-m", "django", *arguments]
    done = subprocess.run(command, env={**os.environ, **env, **settings}, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def make_tables(env: dict[str, str]) -> None:
    shutil.copy(_tables(), env["SHOP_DATABASE"])


@cache
def _tables() -> str:
    path = f"{tempfile.mkdtemp(prefix='shop-')}/shop.sqlite3"
    manage({"SHOP_DATABASE": path}, "migrate", "--run-syncdb", "--verbosity=0")
    return path


def visited(visit: Callable[[], Any], env: dict[str, str], first: str = "") -> Any:
    program = _PROGRAM.format(first=first, module=visit.__module__, name=visit.__name__)
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
