"""The store in memory, as a process without a server uses it."""

import subprocess
import sys


def test_without_its_extra_one_line_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['{}'] = None\nfrom celery_singleton_lock import Lock\nLock('stock', url='memory://')"
    )
    for package in ("fakeredis", "lupa"):
        ran = subprocess.run(
            [sys.executable, "-c", program.format(package)], capture_output=True, text=True, timeout=30
        )

        *_, said = ran.stderr.splitlines()
        assert "ConfigurationError: memory:// needs more packages" in said
        assert said.endswith('pip install "celery-singleton-lock[testing]"')
