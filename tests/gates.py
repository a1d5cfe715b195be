"""Gates at which the bodies of the tests' tasks wait, so that a test decides when a run goes on."""

from tests.recorder import Recorder
from tests.waiting import until

# Longer than any test keeps one shut, and no longer than a pool can do without the process.
_PATIENCE = 180.0


def wait_at(recorder: Recorder, gate: str) -> None:
    until(lambda: recorder._client.exists(f"gate:{gate}"), f"the gate {gate} opens", timeout=_PATIENCE)


def open_gate(recorder: Recorder, gate: str) -> None:
    recorder._client.set(f"gate:{gate}", "open")
