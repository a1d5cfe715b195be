"""The tasks under fire: what each declares, which is what it is judged by."""

import signal
from dataclasses import dataclass

# Raises in a pool process.
STRIKE = signal.SIGRTMIN + 3


@dataclass(frozen=True)
class Kind:
    name: str
    policy: str = "reschedule"
    mode: str = "while_executing"
    limit: int = 1
    ttl: float = 2.0
    lock: str = ""
    late: bool = False
    how: str = "work"

    @property
    def exclusive(self) -> bool:
        return self.mode != "until_executing"

    def label(self, key: str) -> str:
        """The name of a lock in the record: at most `limit` of its bodies may run at once."""
        return f"{self.lock or self.name} {key}"


POLICIES = ("skip", "raise", "reschedule", "wait", "join", "rerun", "replace")
MODES = ("until_executing", "until_executed", "until_and_while_executing")
SHARED = ("skip", "raise", "reschedule", "wait", "replace")
KINDS = {
    kind.name: kind
    for kind in (
        *[Kind(policy, policy, lock="till" if policy in SHARED else "") for policy in POLICIES],
        *[Kind(f"{policy}_late", policy, late=True, ttl=3.0) for policy in POLICIES],
        *[Kind(mode, "skip", mode) for mode in MODES],
        *[Kind(f"{mode}_late", "reschedule", mode, late=True) for mode in MODES],
        Kind("gates", "reschedule", limit=3),
        Kind("gates_skip", "skip", limit=2, ttl=3.0),
        Kind("gates_wait_late", "wait", limit=3, late=True),
        Kind("retrying", "reschedule", how="retry"),
        Kind("retrying_skip_late", "skip", late=True, how="retry"),
        Kind("failing_at_first", "skip", how="fail"),
        Kind("failing_at_first_late", "reschedule", late=True, how="fail"),
    )
}
