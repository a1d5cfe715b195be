"""The ledger of findings: the mend of each is taken out in a copy of the package, and a program has to go red.

What the mutants of `tests/model` are for each guard, this is for what a review once found by combining options.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.combinations.found import FOUND

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "celery_singleton_lock"
# Each has servers and workers of its own.
ABREAST = 3
# Programs that are timed against each other on a busy machine may need another try.
TRIES = 2
_LONGEST = 240


@dataclass(frozen=True)
class Entry:
    """The mend of one finding taken out.

    Attributes:
        finding: Its number in the review, and what it was.
        file: Where its mend is, in the package.
        old: Its text, which stands there exactly once.
        new: What stands there without it.
        program: The name in `found.py` of the one that must go red.
        rule: Of the checker, the one that must say so.
    """

    finding: str
    file: str
    old: str
    new: str
    program: str
    rule: str


LEDGER = (
    Entry(
        "Q1 the mark of a call that was skipped stays",
        "runs/run.py",
        "        if not (self.lease.granted or self._goes_on):\n",
        "        if False:\n",
        "a skipped call leaves its mark",
        "nothing is left",
    ),
    Entry(
        "Q2 a copy makes its own run make way",
        "admission.py",
        "    return run.can_come_again and (conflict.is_own or is_another_message or is_continued)\n",
        "    return False\n",
        "a copy replaces its own run",
        "who does not run names who does",
    ),
    Entry(
        "Q3 a copy becomes its own successor",
        "admission.py",
        "    return run.can_come_again and (conflict.is_own or is_another_message or is_continued)\n",
        "    return False\n",
        "a copy becomes its own successor",
        "the newest runs",
    ),
    Entry(
        "Q4 a copy takes the second place",
        "stores/redis/lua/acquire.lua",
        "past_run(KEYS[2], tonumber(attempt)) or is_held_by_itself()",
        "past_run(KEYS[2], tonumber(attempt))",
        "a copy takes the second place",
        "one body of a message",
    ),
    Entry(
        "Q5 a copy runs beside its run until_executing",
        "runs/run.py",
        "may_be_copy=self.is_copy or (self.hands_over and not self.is_broadcast)",
        "may_be_copy=False",
        "a copy runs beside its run until_executing",
        "one body of a message",
    ),
    Entry(
        "Q7 a retry with other arguments runs under the old key",
        "publish.py",
        "    return run.key if run is not None and _has_arguments(run, args, kwargs) else None\n",
        "    return notes.key or None\n",
        "a retry with other arguments runs under the old key",
        "one at a time",
    ),
    Entry(
        "Q9 a duplicate is sent while the first waits for its retry",
        "publish.py",
        "bool(wanted.mode == UNTIL_EXECUTED if is_retry else wanted.unique_in_queue)",
        "bool(wanted.unique_in_queue and not is_retry)",
        "a duplicate is sent during a retry",
        "a duplicate is not sent",
    ),
    Entry(
        "Q11 an older call throws out a newer one",
        "stores/redis/lua/succeed.lua",
        "  local newer = holder_published_after(published)\n",
        "  local newer\n",
        "an older call replaces a newer one",
        "the newest runs",
    ),
    Entry(
        "Q12 two calls throw each other out",
        "runs/run.py",
        "        return self.interrupt.was_sent and self.lease.lost_reason in MAKES_WAY\n",
        "        return False\n",
        "two calls replace each other",
        "who was replaced is over",
    ),
    Entry(
        "Q14 a successor gives up, and those merged into it are lost",
        "policies/succeed.py",
        "        return run.store.unmark(run.key, run.task_id, unless=needed_as)\n",
        "        return True\n",
        "a successor that gives up takes others along",
        "what was merged runs",
    ),
    Entry(
        "Q15 a group after a skipped step hangs",
        "runs/revoked.py",
        'in ("group", "chain"):',
        'in ("chain",):',
        "a group after a skipped call hangs",
        "every call ends",
    ),
    Entry(
        "Q15 a chain after a skipped step that ignores its result hangs",
        "runs/revoked.py",
        "if not request.is_eager:\n",
        "if not (request.is_eager or task.ignore_result):\n",
        "a chain after a skipped call that ignores its result hangs",
        "every call ends",
    ),
    Entry(
        "Q16 a pickled call cannot come again",
        "runs/message.py",
        '{"serializer": serializer, ',
        '{"serializer": None, ',
        "a pickled call cannot come again",
        "it fails for what it does",
    ),
    Entry(
        "Q16 a pickled call cannot be merged",
        "runs/arguments.py",
        "registry.type_to_name.get(delivery_of(run.request).content_type) or run.task.serializer",
        "run.task.serializer",
        "a pickled call cannot be merged",
        "it fails for what it does",
    ),
    Entry(
        "Q19 an eager replacement meets the run that it continues",
        "task.py",
        "        if request.is_eager and self._continues(held_here(key)):\n",
        "        if False:\n",
        "an eager replacement meets the run that it continues",
        "who does not run names who does",
    ),
    Entry(
        "Q23 delayed delivery of RabbitMQ refuses fractions of a second",
        "runs/message.py",
        "    return max(1, round(delay)) if detect",
        "    return delay if detect",
        "delayed delivery wants whole seconds",
        "it fails for what it does",
    ),
    Entry(
        "Q24 siblings of a message to all are sent again to all",
        "runs/message.py",
        '    return any(queue.exchange.type == "fanout" and',
        "    return any(False and",
        "siblings are parked to all",
        "no flood",
    ),
    Entry(
        "Q25 a copy of a failed run runs again",
        "runs/redelivery.py",
        "    if error is not None and stays_unacknowledged:\n",
        "    if error is not None:\n",
        "a tracked copy of a failed run runs again",
        "an attempt is completed once",
    ),
    Entry(
        "Q26 a copy runs again where the result cannot be read",
        "runs/redelivery.py",
        '    return _ending(run, "ended")\n',
        '    return _ending(run, "ended") if error is not None else None\n',
        "a copy runs again where the result was forgotten",
        "an attempt is completed once",
    ),
    Entry(
        "Q27 items take no lock",
        "task.py",
        "        if self._is_item(request):\n",
        "        if False:\n",
        "chunks take no lock",
        "fences grow",
    ),
    Entry(
        "Q28 an id that is used again is taken for a copy",
        "runs/message.py",
        "{0 if notes.is_bare else notes.published}",
        "0",
        "an id that is used again is taken for a copy",
        "an id can be used again",
    ),
    Entry(
        "merged arguments are lost with the process that carries them",
        "stores/redis/lua/acquire.lua",
        "  redis.call('HSET', key, 'merged_by:' .. merges, token)\n",
        "  forget_merged(key, merges)\n",
        "merged arguments are lost with the process that carries them",
        "the newest runs",
    ),
    Entry(
        "a copy of a message without notes runs after its run",
        "runs/message.py",
        "{0 if notes.is_bare else notes.published}",
        "{notes.published}",
        "a copy of a message without notes runs again",
        "an attempt is completed once",
    ),
    Entry(
        "who joins a run that leaves no result in a later attempt waits for one",
        "policies/join.py",
        "0 < run.notes.joins_fence <= fence_handed_on(run.task, joins)",
        "0 < fence_handed_on(run.task, joins)",
        "who joins a run that leaves no result in a later attempt waits for one",
        "every call ends",
    ),
    Entry(
        "a re-entrant Lock that is asked to make way waits for itself",
        "leases/lease.py",
        "return self.held or (self.lost_reason in MAKES_WAY and",
        "return self.held or (False and",
        "a re-entrant Lock in a body waits for itself once it is asked to make way",
        "every call ends",
    ),
    Entry(
        "merged arguments are lost with the policy that has merged them",
        "admission.py",
        "    if run.notes.asked and policy.kind is None:\n",
        "    if False:\n",
        "merged arguments are lost once their task has another policy than rerun",
        "what was merged runs",
    ),
    Entry(
        "an item that asks for a retry keeps its lease",
        "runs/run.py",
        "if self.is_item or not isinstance(error, Retry)",
        "if not isinstance(error, Retry)",
        "an item of a map keeps its lease where it asks for a retry",
        "nothing is left",
    ),
    Entry(
        "a call takes the key that its headers have from another",
        "runs/message.py",
        "return cls() if task_id is not None and notes.task_id not in",
        "return cls() if False and notes.task_id not in",
        "a call has the key of the one whose headers it was handed",
        "one at a time",
    ),
    Entry(
        "13 what comes again has the key that its worker makes",
        "publish.py",
        "    if notes.tries:\n        return notes.key or None\n",
        "",
        "a call that comes again has a key of its own",
        "one at a time",
    ),
    Entry(
        "13 a mark belongs to the mode of the task",
        "runs/run.py",
        "        if self.notes.left_something or self.is_in_crowd:\n",
        "        if self.options.unique_in_queue or self.notes.asked or self.is_in_crowd:\n",
        "the mark of a call stays whose task has another mode by then",
        "nothing is left",
    ),
    Entry(
        "a call takes the age that its headers have from another",
        "runs/message.py",
        "return cls() if task_id is not None and notes.task_id not in",
        "return cls() if False and notes.task_id not in",
        "a call has the age of the one whose headers it was handed",
        "the newest runs",
    ),
    Entry(
        "a queued call whose result says REVOKED counts until its message comes",
        "publish.py",
        "is_queued and end_of(",
        "False and end_of(",
        "a revoked call keeps another one out",
        "a revoked call keeps no other out",
    ),
    Entry(
        "a holder makes way for a successor that runs in another place",
        "stores/redis/lua/acquire.lua",
        "    let_holders_stay(key, places)\n",
        "",
        "a holder is cancelled for a successor that runs already",
        "who does not run names who does",
    ),
    Entry(
        "S2 what replaces a run passes for the newest call",
        "runs/run.py",
        "self.notes.continues_from or self.notes.published",
        "self.notes.published",
        "what replaces a run passes for the newest call",
        "the newest runs",
    ),
    Entry(
        "S1 each process makes another key of a set",
        "leases/sets.py",
        "    return sorted(written, key=text) if isinstance(value, set | frozenset) else written\n",
        "    return written\n",
        "each process makes another key of a set",
        "one at a time",
    ),
)


@dataclass(frozen=True)
class Seen:
    """What came of one entry."""

    entry: Entry
    is_red: bool
    output: str

    def __str__(self) -> str:
        return f"{'red' if self.is_red else 'NOT RED'}: {self.entry.finding} ({self.entry.rule})"


def tell(wanted: str = "") -> int:
    """Play the program of each entry whose finding has *wanted* in it; 1 if one did not go red."""
    entries = [entry for entry in LEDGER if wanted in entry.finding]
    missed = 0
    for seen in _all_seen(entries):
        missed += not seen.is_red
        lines = [str(seen)] if seen.is_red else [str(seen), seen.output]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(entries)} entries, {missed} not red, one program each\n")
    return 1 if missed else 0


def _all_seen(entries: Sequence[Entry]) -> Iterator[Seen]:
    with ThreadPoolExecutor(ABREAST) as pool:
        yield from pool.map(_seen, entries)


def _seen(entry: Entry) -> Seen:
    output = ""
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="singleton-lock-ledger-") as directory:
            output = _played(_without(entry, Path(directory)), FOUND[entry.program])
        if re.search(rf"^  {entry.rule}: ", output, re.MULTILINE):
            return Seen(entry, True, output)
    return Seen(entry, False, output)


def _played(checkout: Path, program: str) -> str:
    command = [sys.executable, "-m", "tests.combinations", "--shrink", "0", "--replay", program]
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=_LONGEST)
    return done.stdout + done.stderr


def _without(entry: Entry, directory: Path) -> Path:
    """A copy of the package and the tests in which the mend is taken out."""
    left_out = shutil.ignore_patterns("__pycache__", "stage-*")
    for name in (PACKAGE, "tests"):
        shutil.copytree(ROOT / name, directory / name, ignore=left_out)
    path = directory / PACKAGE / entry.file
    path.write_text(taken_out(entry, path.read_text(encoding="utf-8")), encoding="utf-8")
    return directory


def taken_out(entry: Entry, text: str) -> str:
    """The text of its file without the mend."""
    assert text.count(entry.old) == 1, f"the ledger is out of date: {entry.finding}"
    return text.replace(entry.old, entry.new)
