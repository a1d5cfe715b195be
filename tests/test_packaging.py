"""The wheel, installed where there is no source folder: it has all it needs and it locks."""

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import celery_singleton_lock
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.servers import Server

SOURCE = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)\s]+)")

# Run by the Python of the fresh environment. It prints what it saw, as JSON.
PROGRAM = """
import json
import sys

import celery_singleton_lock
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery_singleton_lock import SingletonTask, current_lease

app = Celery("shop", broker=sys.argv[1], backend=sys.argv[1])
app.conf.broker_connection_retry_on_startup = True


@app.task(base=SingletonTask, bind=True, name="shop.sync")
def sync(self, x):
    lease = current_lease()
    return {
        "same": lease is self.lock,
        "remaining": lease.remaining(),
        "holders": [[holder.task_id, holder.fence == lease.fence] for holder in self.lock_holders(x)],
        "task_id": self.request.id,
    }


with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=30):
    seen = sync.delay(1).get(timeout=30)

print(json.dumps({
    "file": celery_singleton_lock.__file__,
    "path": sys.path,
    "seen": seen,
    "left": [holder.task_id for holder in sync.lock_holders(1)],
}))
"""


def run(*command: object, cwd: Path) -> str:
    """The output of *command*, which knows nothing of the environment of the tests."""
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
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, SOURCE, cwd=folder)
    (built,) = folder.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel and nothing of the source folder."""
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


def urls_of(facts: Any) -> dict[str, str]:
    return dict(url.split(", ") for url in facts.get_all("Project-URL"))


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
    assert optional == {
        "celery",
        "fakeredis",
        "flask",
        "flask-wtf",
        "hiredis",
        "opentelemetry-api",
        "prometheus-client",
    }


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    facts = metadata(wheel)

    assert facts["Name"] == "celery-singleton-lock"
    assert facts["Requires-Python"] == ">=3.11"
    assert facts["License-Expression"] == "BSD-3-Clause"
    assert facts["Version"] == celery_singleton_lock.__version__
    assert set(urls_of(facts)) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}


def test_every_link_of_the_description_leads_somewhere_on_the_page_of_the_package(wheel: Path) -> None:
    readme = (SOURCE / "README.md").read_text(encoding="utf-8")
    home = urls_of(metadata(wheel))["Homepage"]
    targets = LINK.findall(metadata(wheel).get_payload())
    files = [re.sub(f"{re.escape(home)}/(blob|raw)/main/", "", target).partition("#")[0] for target in targets]

    assert len(targets) == len(LINK.findall(readme)) > 10
    assert all(target.startswith(("#", f"{home}/")) for target in targets)
    assert all((SOURCE / file).exists() for file in files)
    assert f"{home}/raw/main/docs/costs.svg" in targets


def test_the_source_archive_has_what_the_description_links_to(sdist: Path) -> None:
    linked = {target.partition("#")[0] for target in LINK.findall((SOURCE / "README.md").read_text(encoding="utf-8"))}

    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}

    assert linked - {""} <= packed


def test_a_build_of_the_same_files_has_the_same_bytes(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    unpacked = tmp_path / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (copy,) = unpacked.iterdir()
    for path in copy.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))

    run(sys.executable, "-m", "build", "--outdir", tmp_path / "again", copy, cwd=tmp_path)

    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == {
        path.name: path.read_bytes() for path in (wheel, sdist)
    }


@pytest.mark.parametrize(
    ("tag", "heading", "complaint"),
    [
        ("v1.2.3", "1.2.3 (2026-11-30)", ""),
        ("v1.2.4", "1.2.4 (2026-11-30)", "tag v1.2.3, or change it"),
        ("v1.2.3", "1.2.3 (unreleased)", "no heading '## 1.2.3 ("),
        ("v1.2.3", "1.203 (2026-11-30)", "no heading '## 1.2.3 ("),
    ],
)
def test_a_tag_is_released_if_version_and_changelog_have_it(
    tag: str, heading: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "celery_singleton_lock").mkdir()
    (tmp_path / "celery_singleton_lock" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n")

    asked = subprocess.run([SOURCE / ".ci" / "tag", tag], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert asked.returncode == bool(complaint)
    assert complaint in asked.stderr


def test_the_changelog_has_the_version() -> None:
    changelog = (SOURCE / "CHANGELOG.md").read_text(encoding="utf-8")

    assert re.search(rf"^## {re.escape(celery_singleton_lock.__version__)} \(", changelog, re.MULTILINE)


# After the example of the README: somebody else holds the key of supplier 7.
BESIDE_THE_EXAMPLE = """
import sys

from celery.contrib.testing.worker import start_worker
from celery_singleton_lock import CallRevoked
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Claim, Facts

app.conf.broker_connection_retry_on_startup = True
held = Claim(import_catalogue.lock_key_for(7), "a", 60.0, facts=Facts(task_id="the first"))
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


def test_a_task_of_the_installed_wheel_holds_its_lock(python: Path, valkey: Server, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    told = json.loads(run(python, program, valkey.url, cwd=tmp_path).splitlines()[-1])

    assert Path(told["file"]).is_relative_to(python.parent.parent)
    assert not any(Path(entry).is_relative_to(SOURCE) for entry in told["path"] if entry)
    assert told["seen"]["same"]
    assert told["seen"]["remaining"] > 20
    assert told["seen"]["holders"] == [[told["seen"]["task_id"], True]]
    assert told["left"] == []


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
    store = RedisStore(valkey.url, {})
    store.acquire(Claim("singleton:v3:{shop.sync:00}", "a", 30.0))
    store.close()

    listed = run(*celery, "list", "--json", cwd=tmp_path)
    listed_with_an_option = run(*celery, "--site", "blue", "list", "--json", cwd=tmp_path)

    assert [row["key"] for row in json.loads(listed)] == ["singleton:v3:{shop.sync:00}"]
    assert [row["key"] for row in json.loads(listed_with_an_option)] == ["singleton:v3:{shop.sync:00}"]
