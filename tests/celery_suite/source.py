"""Celery's own integration tests, from its source distribution on PyPI: they are in no wheel."""

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

KEPT = Path(__file__).parents[2] / "build" / "celery-suite"
# The tests, and what they import. Not Celery itself: the installed one is tried.
WANTED = ("t/__init__.py", "t/canvas_helpers.py", "t/integration/")


def fetch() -> None:
    """Download the source distribution of the Celery that is installed, unless it is there."""
    if not _archive().exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--no-binary", ":all:", "--dest", str(KEPT)]
        done = subprocess.run(
            [*pip, *options, f"celery=={version('celery')}"], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr


def unpack(directory: Path) -> None:
    """Its tests, as a package `t` in this folder."""
    with tarfile.open(_archive()) as archive:
        for member in archive.getmembers():
            inside = member.name.partition("/")[2]
            if inside.startswith(WANTED):
                member.name = inside
                archive.extract(member, directory, filter="data")


def _archive() -> Path:
    return KEPT / f"celery-{version('celery')}.tar.gz"
