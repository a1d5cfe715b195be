"""The one run that comes after the present one, and the arguments it runs with."""

import dataclasses
from typing import Any

from celery_singleton_lock.policies.base import Policy
from celery_singleton_lock.policies.reschedule import come_again, is_out_of_patience
from celery_singleton_lock.policies.skip import refuse
from celery_singleton_lock.runs.arguments import pack
from celery_singleton_lock.runs.message import kept
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict, Succession, Turn


class Succeed(Policy):
    """To run next, or leave that to another call."""

    comes_again = True
    kind: Succession

    def settle(self, run: Run, conflict: Conflict) -> Any:
        """Come again as the successor, or end like a skipped run that names it."""
        if is_out_of_patience(run, conflict) and self._gives_up(run):
            # Before it asks, because a holder would end for a successor that never comes.
            refuse(run, conflict.first)
        if run.hands_over:
            # A later attempt at a run that has begun is no call that could be merged, and none that replaces.
            come_again(run, conflict)
        turn, other = self._succession(run)
        if turn is not Turn.MERGED:
            come_again(run, conflict, asked=turn is Turn.MINE or run.notes.asked)
        successor = dataclasses.replace(conflict.first, task_id=other)
        run.tell(successor, "merged")
        return run.skip(f"lock key={run.key}: task_id={other} runs in place of this one")

    def _succession(self, run: Run) -> tuple[Turn, str | None]:
        # A run that carries merged arguments may die, and its message be delivered again.
        memory, name = max(run.options.queue_ttl, kept(run.task)), run.task.name
        answer = run.store.succeed(run.claim, self.kind, name, "", memory)
        # Only now, because they may be large.
        return answer or run.store.succeed(run.claim, self.kind, name, pack(run), memory) or (Turn.OTHER_TASK, None)

    def _gives_up(self, run: Run) -> bool:  # noqa: ARG002
        return True


class Rerun(Succeed):
    """`rerun`: one more run after the present one, with the newest arguments."""

    kind = "rerun"
    merges = True

    def _gives_up(self, run: Run) -> bool:
        # Calls that were merged into this one would be lost with it.
        return run.store.unmark(run.key, run.task_id, unless_merged=True)


class Replace(Succeed):
    """`replace`: the holder is asked to end, and the newest call takes over."""

    kind = "replace"
