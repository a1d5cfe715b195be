"""The wheel, installed where there is no source folder: it has all it needs and it locks."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.store import Store
from tests.servers import Server

SOURCE = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)\s]+)")


def run(*command: object, cwd: Path) -> str:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "CELERY"))
    }
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, SOURCE, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
    run(*pip, f"celery-singleton-lock[redis] @ {wheel.as_uri()}", cwd=folder)
    return python


def metadata(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    package = SOURCE / "celery_singleton_lock"
    files = {
        str(path.relative_to(SOURCE))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert packed == files
    assert "celery_singleton_lock/py.typed" in packed


def test_the_wheel_needs_celery_kombu_and_redis_and_nothing_else(wheel: Path) -> None:
    requirements = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist")]

    needed = {requirement.name for requirement in requirements if requirement.marker is None}
    optional = {requirement.name for requirement in requirements if requirement.marker is not None}

    assert needed == {"celery", "kombu", "redis"}
    assert all("extra ==" in str(requirement.marker) for requirement in requirements if requirement.marker)
    assert optional == {"celery", "fakeredis", "flask", "hiredis", "opentelemetry-api", "prometheus-client"}


def test_every_link_of_the_description_leads_somewhere_on_the_page_of_the_package(wheel: Path) -> None:
    readme = (SOURCE / "README.md").read_text(encoding="utf-8")
    home = dict(url.split(", ") for url in metadata(wheel).get_all("Project-URL"))["Homepage"]
    targets = LINK.findall(metadata(wheel).get_payload())
    files = [re.sub(f"{re.escape(home)}/(blob|raw)/main/", "", target).partition("#")[0] for target in targets]

    assert len(targets) == len(LINK.findall(readme)) > 10
    assert all(target.startswith(("#", f"{home}/")) for target in targets)
    assert all((SOURCE / file).exists() for file in files)
    assert f"{home}/raw/main/docs/timeline.svg" in targets


# After the example of the README: somebody else holds the key of supplier 7.
BESIDE_THE_EXAMPLE = """
import sys

from celery.contrib.testing.worker import start_worker
from celery_singleton_lock import CallRevoked
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim

app.conf.broker_connection_retry_on_startup = True
held = Claim(import_catalogue.lock_key_for(7), "a", 60.0, task_id="the first")
grant = store_of(app).acquire(held)

with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=30):
    print("eight:", import_catalogue.delay(8).get(timeout=30))
    try:
        import_catalogue.delay(7, full=True).get(timeout=30)
    except CallRevoked as revoked:
        print("seven:", revoked.holder_task_id)
    store_of(app).release(held, grant.place)
    print("seven again:", import_catalogue.delay(7).get(timeout=30))
"""


def test_the_example_of_the_readme_runs_where_the_wheel_is_installed(
    python: Path, valkey: Server, tmp_path: Path
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (SOURCE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(example.replace('"redis://"', repr(valkey.url)) + BESIDE_THE_EXAMPLE)

    told = run(python, program, cwd=tmp_path).splitlines()

    assert told == ["eight: None", "seven: the first", "seven again: None"]


SHOP = """
import sys

from celery import Celery
from celery.bin.base import CeleryOption
from celery_singleton_lock import SingletonTask

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.singleton_lock_url = STORE
app.user_options["preload"].add(CeleryOption(["--site"], help="An option of the user's own."))


@app.task(base=SingletonTask, name="shop.sync")
def sync(x):
    pass
"""


def test_celery_finds_the_commands_of_the_installed_wheel(python: Path, valkey: Server, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP.replace("STORE", repr(valkey.url)))
    celery = (python, "-m", "celery", "-A", "shop", "singleton")
    store = Store(valkey.url, {})
    store.acquire(Claim("singleton:v3:{shop.sync:00}", "a", 30.0))
    store.close()

    for option in ([], ["--site", "blue"]):
        listed = run(*celery, *option, "list", "--json", cwd=tmp_path)
        assert [row["key"] for row in json.loads(listed)] == ["singleton:v3:{shop.sync:00}"]
