"""What the workers under fire write down can be found again by the task ids that the checker knows."""

import json
import os
import subprocess
import sys
from pathlib import Path

# Nothing listens where this app looks for its locks.
STARMAP = """
from tests.fire.app import TASKS
print(TASKS["raise"].starmap([("k", 0.0)]).apply(task_id="map").state)
"""


def test_an_item_that_gave_up_is_found_by_the_id_of_its_map(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    command = [sys.executable, "-c", STARMAP]
    done = subprocess.run(
        command, env={**os.environ, "FIRE_RECORD": str(record)}, capture_output=True, text=True, timeout=60
    )

    assert done.stdout.strip() == "FAILURE", done.stderr
    told = [event for event in map(json.loads, record.read_text().splitlines()) if event["name"] == "unanswered"]
    assert [event["facts"]["task_id"] for event in told] == ["map"]
