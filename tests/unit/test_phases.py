"""A run goes forward only."""

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
from celery.app.task import Context

from celery_singleton_lock.runs.run import Phase, Run

FORWARD = {
    Phase.ASKING: {Phase.RUNNING, Phase.UNLOCKED, Phase.OVER},
    Phase.RUNNING: {Phase.ENDED, Phase.OVER},
    Phase.UNLOCKED: {Phase.ENDED, Phase.OVER},
    Phase.ENDED: {Phase.OVER},
    Phase.OVER: set(),
}


@pytest.mark.parametrize(("before", "after"), list(product(Phase, Phase)), ids=lambda phase: phase.name)
def test_a_phase_leads_forward_or_nowhere(before: Phase, after: Phase) -> None:
    run: Any = SimpleNamespace(phase=before, key="the key", request=Context())

    if after in FORWARD[before]:
        Run.go_to(cast(Run, run), after)
        assert run.phase is after
    else:
        with pytest.raises(RuntimeError, match=f"cannot go from {before.name} to {after.name}"):
            Run.go_to(cast(Run, run), after)
        assert run.phase is before
