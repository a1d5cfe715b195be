"""The one run that comes after the present one, and the arguments it runs with."""

import dataclasses
from typing import Any

from celery_singleton_lock.policies.base import Policy
from celery_singleton_lock.policies.reschedule import come_again, is_out_of_patience
from celery_singleton_lock.policies.skip import refuse
from celery_singleton_lock.runs.arguments import pack
from celery_singleton_lock.runs.message import kept
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict, Needed, Succession, Turn


class Succeed(Policy):
    """To run next, or to let another call run next."""

    comes_again = True
    kind: Succession

    def settle(self, run: Run, conflict: Conflict) -> Any:
        """Come again as the successor, or end like a skipped run that names it."""
        if is_out_of_patience(run, conflict) and self._gives_up(run, conflict):
            # Before the call asks, because otherwise a holder would end for a successor that never comes.
            refuse(run, conflict.first)
        if run.hands_over:
            # A later attempt of a run that has begun is not merged into another call, and replaces no holder.
            come_again(run, conflict)
        turn, other = self._succession(run)
        if turn is not Turn.MERGED:
            come_again(run, conflict, asked=turn is Turn.MINE or run.notes.asked)
        run.is_merged = True
        successor = dataclasses.replace(conflict.first, task_id=other)
        run.tell(successor, "merged")
        return run.skip(f"lock key={run.key}: task_id={other} runs in place of this one", "merged", other)

    def _gives_up(self, run: Run, conflict: Conflict) -> bool:
        # It does not give up if other calls end in its favour, because they would be lost, or if a run was
        # cancelled for it, because that run would have ended for nothing. But a `Lock`, or a run that is only warned,
        # may go on for any time.
        is_cancelled = conflict.first.task_id is not None and run.options.on_lost != "warn"
        needed_as: tuple[Needed, ...] = ("merged", "heard") if is_cancelled else ("merged",)
        return run.store.unmark(run.key, run.task_id, unless=needed_as)

    def _succession(self, run: Run) -> tuple[Turn, str | None]:
        # A run that carries merged arguments may die, and its message be delivered again.
        memory, name = max(run.options.queue_ttl, kept(run.task)), run.task.name
        answer = run.store.succeed(run.claim, self.kind, name, "", memory)
        # Only now, because they may be large.
        return answer or run.store.succeed(run.claim, self.kind, name, pack(run), memory) or (Turn.OTHER_TASK, None)


class Rerun(Succeed):
    """`rerun`: one more run after the present one, with the newest arguments."""

    kind = "rerun"


class Replace(Succeed):
    """`replace`: the holder is asked to end, and the newest call takes over."""

    kind = "replace"
