"""The ledger of guards: each is taken out in a copy of the package, and a test has to go red.

A guard whose absence nobody notices is either not needed or not tested.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "celery_singleton_lock"


@dataclass(frozen=True)
class Mutant:
    """One guard taken out.

    Attributes:
        guard: What it is for.
        file: Where it is, in the package.
        old: Its text, which stands there exactly once.
        new: What stands there without it.
        tests: What must go red, as arguments of pytest.
    """

    guard: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    Mutant(
        "token check on release",
        "stores/redis/lua/release.lua",
        "each.token == token and (ARGV[2]",
        "(ARGV[2]",
        ("tests/contract/test_stores.py", "-k", "stranger"),
    ),
    Mutant(
        "token check on the usual release",
        "stores/redis/lua/parts/usual_release.lua",
        " and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1",
        "",
        ("tests/contract/test_stores.py", "-k", "stranger"),
    ),
    Mutant(
        "nothing else is known at the usual release",
        "stores/redis/lua/parts/usual_release.lua",
        "redis.call('HLEN', KEYS[1]) == tonumber(ARGV[3]) and ",
        "ARGV[3] ~= '0' and ",
        ("tests/contract/test_stores.py", "-k", "successor or newest or survives"),
    ),
    Mutant(
        "token check on renew",
        "stores/redis/lua/renew.lua",
        "if call('HSET', key, ARGV[i + 1], deadline) == 0 then",
        "if call('HSET', key, ARGV[i + 1], deadline) >= 0 then",
        ("tests/contract/test_stores.py", "-k", "stranger or gone"),
    ),
    Mutant(
        "idempotent acquire",
        "stores/redis/lua/acquire.lua",
        "  if each.token == token then",
        "  if false then",
        ("tests/contract/test_stores.py", "-k", "token or again"),
    ),
    Mutant(
        "deadline from send time",
        "leases/pulse.py",
        "                renewal.renewed(sent_at)",
        "                renewal.renewed(clock())",
        ("tests/unit/test_heartbeat.py", "-k", "sent"),
    ),
    Mutant(
        "heartbeat stopped before release",
        "leases/lease.py",
        "            self._heartbeat.forget(self._renewal)\n",
        "",
        ("tests/unit/test_heartbeat.py", "-k", "under_way_has_ended"),
    ),
    Mutant(
        "time-seeded fence",
        "stores/redis/lua/acquire.lua",
        "math.max(tonumber(known[1] or 0) + 1, now)",
        "tonumber(known[1] or 0) + 1",
        ("tests/contract/test_stores.py", "-k", "fence"),
    ),
    Mutant(
        "a fence that grows though the clock is set back",
        "stores/redis/lua/acquire.lua",
        "math.max(tonumber(known[1] or 0) + 1, now)",
        "now",
        ("tests/contract/test_stores.py", "-k", "gone_back"),
    ),
    Mutant(
        "deadline of each holder",
        "stores/redis/lua/parts/places.lua",
        "local alive = token and deadline > now",
        "local alive = token",
        ("tests/contract/test_stores.py", "-k", "deadline or took_over or died"),
    ),
    Mutant(
        "turn of the waiters",
        "stores/redis/lua/acquire.lua",
        "if first and free > #before then",
        "if false then",
        ("tests/contract/test_stores.py", "-k", "overtake"),
    ),
    Mutant(
        "the limit is the asker's",
        "stores/redis/lua/acquire.lua",
        "local free, before = limit - held, {}",
        "local free, before = math.min(limit, known[1] and highest or limit) - held, {}",
        ("tests/contract/test_stores.py", "-k", "asker"),
    ),
    Mutant(
        "dead waiter passed over",
        "stores/redis/lua/release.lua",
        "'free') == 0 then",
        "'free') < 0 then",
        ("tests/contract/test_stores.py", "-k", "nobody_hears"),
    ),
    Mutant(
        "a walk past the dead ends",
        "stores/redis/lua/release.lua",
        " or dead == MOST_DEAD then",
        " then",
        ("tests/contract/test_answers.py", "-k", "asked_again"),
    ),
    Mutant(
        "a walk past the dead gets somewhere",
        "stores/redis/lua/parts/queue.lua",
        "return front or stop + 1, stop < last",
        "return front or first, stop < last",
        ("tests/contract/test_answers.py", "-k", "gets_past"),
    ),
    Mutant(
        "a living waiter behind many dead ones is woken",
        "stores/redis/store.py",
        "            self._wake_the_rest(claim, bound)\n",
        "            pass\n",
        ("tests/load/test_one_key_store.py", "-k", "vanished"),
    ),
    Mutant(
        "few wake at the next deadline",
        "stores/redis/lua/acquire.lua",
        "if turn - (first or turn) >= NEAR then",
        "if false then",
        ("tests/contract/test_stores.py", "-k", "few_wake"),
    ),
    Mutant(
        "a waiter that comes near is told",
        "stores/redis/lua/parts/queue.lua",
        "redis.pcall('PUBLISH', key .. ':' .. waiter.token, 'near')",
        "local _ = nil",
        ("tests/contract/test_stores.py", "-k", "come_near"),
    ),
    Mutant(
        "renewal when the server is out of memory",
        "stores/redis/lua/renew.lua",
        "call('HDEL', KEYS[1], '')\n",
        "",
        ("tests/contract/test_lua_on_servers.py", "-k", "memory"),
    ),
    Mutant(
        "release when the server is out of memory",
        "stores/redis/lua/release.lua",
        "if redis.call('HDEL', key, 'w' .. token) == 1 then",
        "if ticket then",
        ("tests/contract/test_lua_on_servers.py", "-k", "memory"),
    ),
    Mutant(
        "a lost grant when the server is out of memory",
        "stores/redis/lua/acquire.lua",
        "  expire_after(key, 2000 * ttl)\n  redis.call('HSET'",
        "  redis.call('HSET'",
        ("tests/contract/test_lua_on_servers.py", "-k", "memory"),
    ),
    Mutant(
        "a conflict when the server is out of memory",
        "stores/redis/lua/parts/marks.lua",
        "redis.pcall('HSETNX'",
        "redis.call('HSETNX'",
        ("tests/contract/test_lua_on_servers.py", "-k", "memory"),
    ),
    Mutant(
        "expiry of every usual key",
        "stores/redis/lua/parts/usual_grant.lua",
        "  redis.call('PEXPIRE', KEYS[1], 2 * ARGV[2])\n",
        "",
        ("tests/contract/test_stores.py", "-k", "expir"),
    ),
    Mutant(
        "expiry of every key",
        "stores/redis/lua/parts/clock.lua",
        "  if redis.call('PEXPIRE', key, milliseconds, 'NX') == 0 then",
        "  if true then",
        ("tests/contract/test_stores.py", "-k", "expiry"),
    ),
    Mutant(
        "nobody's key is shortened",
        "stores/redis/lua/parts/clock.lua",
        "milliseconds, 'GT')",
        "milliseconds)",
        ("tests/contract/test_stores.py", "-k", "shorten or outlive"),
    ),
    Mutant(
        "nothing left of a dead holder",
        "stores/redis/lua/acquire.lua",
        "    empty_place(key, place, corpse)\n",
        "",
        ("tests/contract/test_stores.py", "-k", "successor"),
    ),
    Mutant(
        "a server clock that was set back",
        "stores/redis/lua/parts/places.lua",
        "    if each.deadline > latest then",
        "    if false then",
        ("tests/contract/test_stores.py", "-k", "set_back"),
    ),
    Mutant(
        "a large hash is a table",
        "stores/redis/lua/parts/places.lua",
        "highest > SEARCHABLE and",
        "false and",
        ("tests/contract/test_stores.py", "-k", "many_places"),
    ),
    Mutant(
        "a refusal tells of a few",
        "stores/redis/lua/parts/described.lua",
        "math.min(#alive, most)",
        "#alive",
        ("tests/contract/test_stores.py", "-k", "few_holders"),
    ),
    Mutant(
        "among them the first to end",
        "stores/redis/lua/parts/described.lua",
        "if each.deadline < alive[1].deadline then",
        "if false then",
        ("tests/contract/test_stores.py", "-k", "few_holders"),
    ),
    Mutant(
        "a free place is the successor's",
        "stores/redis/lua/acquire.lua",
        "if successor and successor.task_id ~= task_id and not is_queued and not says('waits') then",
        "if false then",
        ("tests/contract/test_stores.py", "-k", "newest_arguments"),
    ),
    Mutant(
        "one that waits yields to no successor",
        "stores/redis/lua/acquire.lua",
        "if successor and successor.task_id ~= task_id and not is_queued and not says('waits') then",
        "if successor and successor.task_id ~= task_id and not is_queued then",
        ("tests/contract/test_stores.py", "-k", "yields"),
    ),
    Mutant(
        "nor to a call that is queued",
        "stores/redis/lua/acquire.lua",
        " and says('heeds') and not says('waits') then",
        " and says('heeds') then",
        ("tests/contract/test_stores.py", "-k", "yields"),
    ),
    Mutant(
        "a retry heeds no call that is queued",
        "stores/redis/lua/acquire.lua",
        " and says('heeds') and not",
        " and not",
        ("tests/contract/test_stores.py", "-k", "does_not_heed"),
    ),
    Mutant(
        "what is known outlives the release",
        "stores/redis/lua/parts/idle.lua",
        "if redis.call('HLEN', key) == silent then",
        "if true then",
        ("tests/contract/test_stores.py", "-k", "newest_arguments"),
    ),
    Mutant(
        "a queued call outlives the release of another",
        "stores/redis/lua/parts/idle.lua",
        "(mark and not mark_of(mark) and 1 or 0)",
        "(mark and 1 or 0)",
        ("tests/contract/test_stores.py", "-k", "queued_call_survives"),
    ),
    Mutant(
        "a run shortens nobody's quiet",
        "stores/redis/lua/acquire.lua",
        "  if redis.call('HLEN', key) == #fields / 2 + (known[2] and place <= highest and 1 or 0) then",
        "  if true then",
        ("tests/contract/test_stores.py", "-k", "mark_outlives"),
    ),
    Mutant(
        "a copy of a run that lives gets nothing",
        "stores/redis/lua/acquire.lua",
        "is_done() or is_held_by_itself()",
        "is_done()",
        ("tests/contract/test_stores.py", "-k", "copy"),
    ),
    Mutant(
        "a copy of a run that has ended is dropped",
        "stores/redis/lua/acquire.lua",
        "is_done() or is_held_by_itself()",
        "is_held_by_itself()",
        ("tests/contract/test_stores.py", "-k", "ending or marker"),
    ),
    Mutant(
        "a later attempt is no copy",
        "stores/redis/lua/acquire.lua",
        "if tonumber(attempt) <= past and",
        "if past >= 0 and",
        ("tests/contract/test_stores.py", "-k", "attempt"),
    ),
    Mutant(
        "a run that stored no result is not done",
        "stores/redis/lua/acquire.lua",
        "(outcome ~= 'ended' or now - at < RESULT_GRACE)",
        "true",
        ("tests/contract/test_stores.py", "-k", "not_stored"),
    ),
    Mutant(
        "its own cool-down keeps no later attempt out",
        "stores/redis/lua/acquire.lua",
        "        each.alive, place = false, each.place\n",
        "",
        ("tests/contract/test_stores.py", "-k", "cool_down"),
    ),
    Mutant(
        "a copy that has come is noted",
        "stores/redis/lua/acquire.lua",
        "redis.pcall('HSET', key, each.place .. ':c', 1)",
        "local _ = nil",
        ("tests/contract/test_stores.py", "-k", "copy_has_met"),
    ),
    Mutant(
        "a marker only where it is needed",
        "stores/redis/lua/release.lua",
        "if KEYS[2] and (answer < 1 or copy_has_come or ARGV[8] == '1') then",
        "if KEYS[2] then",
        ("tests/contract/test_stores.py", "-k", "no_marker"),
    ),
    Mutant(
        "an ending of a lost place",
        "stores/redis/lua/release.lua",
        "answer < 1 or copy_has_come",
        "copy_has_come",
        ("tests/contract/test_stores.py", "-k", "lost_its_place"),
    ),
    Mutant(
        "the last word on an attempt",
        "stores/redis/lua/parts/done.lua",
        "  if latest < attempt or (latest == attempt and its_outcome == 'ended') then",
        "  if true then",
        ("tests/contract/test_stores.py", "-k", "last_word or later_attempt_stays"),
    ),
    Mutant(
        "a lost reply loses no ending",
        "stores/redis/store.py",
        "Answer.DONE if ending is None else Answer.MARKED",
        "Answer.DONE",
        ("tests/contract/test_lua_on_servers.py", "-k", "reply_was_lost"),
    ),
    Mutant(
        "newer arguments of its own",
        "stores/redis/lua/acquire.lua",
        "tonumber(at) > tonumber(published) and text or ''",
        "text",
        ("tests/contract/test_stores.py", "-k", "keeps_them"),
    ),
    Mutant(
        "arguments of one task",
        "stores/redis/lua/succeed.lua",
        "its_task == task_name and merge()",
        "merge()",
        ("tests/contract/test_stores.py", "-k", "another_task"),
    ),
    Mutant(
        "merged is not lost",
        "stores/redis/lua/unmark.lua",
        "if says('unless_merged') and",
        "if false and",
        ("tests/contract/test_stores.py", "-k", "cannot_just_end"),
    ),
    Mutant(
        "nobody old replaces a newer successor",
        "stores/redis/lua/succeed.lua",
        "  elseif successor and successor.task_id ~= mine and tonumber(its_publication) >= published then",
        "  elseif false then",
        ("tests/contract/test_stores.py", "-k", "last_who"),
    ),
    Mutant(
        "nobody old replaces a newer run",
        "stores/redis/lua/succeed.lua",
        "  local newer = holder_published_after(published)\n",
        "  local newer = nil\n",
        ("tests/contract/test_stores.py", "-k", "older_call"),
    ),
    Mutant(
        "a replaced successor is remembered",
        "stores/redis/lua/succeed.lua",
        "    set_mark(key, 'over:' .. latest, memory, mine)\n",
        "",
        ("tests/contract/test_stores.py", "-k", "is_told"),
    ),
    Mutant(
        "and told when it comes",
        "stores/redis/lua/acquire.lua",
        "if overtaken_by then",
        "if false then",
        ("tests/contract/test_stores.py", "-k", "is_told"),
    ),
    Mutant(
        "a holder makes way for one that is safe in the broker",
        "stores/redis/lua/succeed.lua",
        "  if has_asked then\n    ask_oldest",
        "  if true then\n    ask_oldest",
        ("tests/contract/test_stores.py", "-k", "make_way_only"),
    ),
    Mutant(
        "the oldest holder makes way",
        "stores/redis/lua/succeed.lua",
        "each.grant.since < oldest.grant.since then",
        "each.grant.since > oldest.grant.since then",
        ("tests/contract/test_stores.py", "-k", "one_holder"),
    ),
    Mutant(
        "runs in the way of a call that is queued",
        "stores/redis/lua/mark_queued.lua",
        "if limit > 0 and held >= limit then",
        "if false then",
        ("tests/contract/test_stores.py", "-k", "as_many_run"),
    ),
    Mutant(
        "each counts once",
        "stores/redis/lua/parts/marks.lua",
        "redis.pcall('HSETNX', key, 'crowd:' .. task_id, 1) == 1",
        "redis.pcall('HSETNX', key, 'crowd:' .. task_id, 1)",
        ("tests/contract/test_stores.py", "-k", "counts_once"),
    ),
    Mutant(
        "a crowd that is gone is forgotten",
        "stores/redis/lua/parts/marks.lua",
        "redis.call('HINCRBY', key, 'crowd', -1) <= 0",
        "redis.call('HINCRBY', key, 'crowd', -1) < 0",
        ("tests/contract/test_stores.py", "-k", "leaves_nothing"),
    ),
    Mutant(
        "a former leader sends nothing",
        "stores/redis/lua/claim_slot.lua",
        "tonumber(fence) > tonumber(ARGV[3]) or ",
        "",
        ("tests/contract/test_stores.py", "-k", "led_before"),
    ),
    Mutant(
        "scripts told again",
        "stores/redis/wire.py",
        "        except exceptions.NoScriptError:\n            # After",
        "        except ZeroDivisionError:\n            # After",
        ("tests/contract/test_lua_on_servers.py", "-k", "forgotten"),
    ),
    Mutant(
        "a connection with a reply under way is dropped",
        "stores/redis/wire.py",
        "answer to another question.\n            connection.disconnect()\n",
        "answer to another question.\n            self._idle.append(connection)\n",
        ("tests/contract/test_replies.py", "-k", "not_taken_for"),
    ),
    Mutant(
        "deadline from send time",
        "leases/pulse.py",
        "renewal.renewed(sent_at)",
        "renewal.renewed(clock())",
        ("tests/unit/test_heartbeat.py", "-k", "sent"),
    ),
    Mutant(
        "heartbeat stopped before release",
        "leases/lease.py",
        "            self._heartbeat.forget(self._renewal)\n",
        "",
        ("tests/unit/test_heartbeat.py", "-k", "under_way_has_ended"),
    ),
    Mutant(
        "a forked child holds nothing",
        "leases/lease.py",
        "        return self._asked and self._pid == os.getpid()\n",
        "        return self._asked\n",
        ("tests/integration/test_lock.py", "-k", "forked"),
    ),
    Mutant(
        "a copy of a live run is parked",
        "admission.py",
        "if isinstance(answer, Done) or _is_own(run, answer):",
        "if isinstance(answer, Done):",
        ("tests/acceptance/test_crash.py", "-k", "before_its_body_has_ended"),
    ),
    Mutant(
        "release in a finally",
        "runs/run.py",
        "            if not isinstance(sys.exception(), Retry):\n                self.give_back()\n",
        "            pass\n",
        ("tests/integration/test_task.py", "-k", "next_step"),
    ),
    Mutant(
        "a delivery that may be a copy asks as one",
        "runs/run.py",
        "may_be_copy=self.is_copy or (",
        "may_be_copy=(",
        ("tests/acceptance/test_redelivery.py", "-k", "longer_than_the_visibility_timeout"),
    ),
    Mutant(
        "who makes way keeps its lease until it has",
        "leases/pulse.py",
        'if reason != "replaced"',
        "if True",
        ("tests/unit/test_heartbeat.py", "-k", "make_way"),
    ),
    Mutant(
        "a failed publish leaves no mark",
        "publish.py",
        '            store_of(task.app).unmark(key, options["task_id"])\n',
        "            pass\n",
        ("tests/acceptance/test_queue.py", "-k", "could_not_be_published"),
    ),
    Mutant(
        "a lock is held until RETRY is stored",
        "runs/run.py",
        "            if not isinstance(sys.exception(), Retry):\n",
        "            if True:\n",
        ("tests/acceptance/test_store_outage.py", "-k", "slow_release"),
    ),
    Mutant(
        "the publishing of a retry is not broken off",
        "task.py",
        "        with run.interrupt.held_back():\n",
        "        if True:\n",
        ("tests/integration/test_task.py", "-k", "loses_no_retry"),
    ),
    Mutant(
        "an interrupt is sent until it is heard",
        "leases/interrupt.py",
        "                if self._thread is None or self not in _sent:\n",
        "                if True:\n",
        ("tests/unit/test_interrupt.py", "-k", "sent_again"),
    ),
    Mutant(
        "members of a canvas are always sent",
        "publish.py",
        '    if options.get("task_id") and DUE_HEADER not in (headers or {}):\n',
        "    if False:\n",
        ("tests/acceptance/test_queue.py", "-k", "equal_members"),
    ),
    Mutant(
        "release for a child that is dead",
        "request.py",
        "        if isinstance(error, WorkerLostError | Terminated):\n",
        "        if False:\n",
        ("tests/endings/test_dead_children.py", "-k", "killed"),
    ),
    Mutant(
        "no release for a child that still runs",
        "request.py",
        "lambda: _state_of(pid) in _DEAD)",
        "lambda: True)",
        ("tests/endings/test_dead_children.py", "-k", "refuses"),
    ),
    Mutant(
        "the main process renews for a child that cannot",
        "request.py",
        "                keepalive.start(store_of(self.task.app), self.task.lock_options.ttl)\n",
        "                pass\n",
        ("tests/endings/test_lost.py", "-k", "holds_the_gil"),
    ),
    Mutant(
        "nobody renews for a child that is stopped",
        "request.py",
        "not in (*_DEAD, *_STOPPED)",
        "not in _DEAD",
        ("tests/acceptance/test_crash.py", "-k", "release_after_expiry"),
    ),
    Mutant(
        "a native thread renews for greenlets",
        "leases/heartbeat.py",
        "            self._keepalive.start(renewal.store, renewal.ttl)\n",
        "            pass\n",
        ("tests/endings/test_lost.py", "-k", "without_a_pause and gevent"),
    ),
    Mutant(
        "a timer that kills at the deadline",
        "leases/renewal.py",
        "            self._deadman.arm(self.deadline)\n",
        "            pass\n",
        ("tests/endings/test_lost.py", "-k", "stands_still and signal"),
    ),
    Mutant(
        "no timer after the end",
        "leases/renewal.py",
        "            self._deadman.disarm()\n",
        "            pass\n",
        ("tests/endings/test_dead_children.py", "-k", "leave_no_timer"),
    ),
    Mutant(
        "a late beat asks before it gives up",
        "leases/pulse.py",
        "if renewal.is_unsure and renewal.deadline <= now",
        "if renewal.deadline <= now",
        ("tests/unit/test_heartbeat.py", "-k", "asks_before"),
    ),
    Mutant(
        "nor after a lease that was left behind",
        "leases/deadman.py",
        "    __del__ = disarm\n",
        "",
        ("tests/endings/test_dead_children.py", "-k", "left_behind"),
    ),
    Mutant(
        "a release that was broken off before it began is still to be done",
        "lock.py",
        "            if lease in leases[:-1] or not lease.unreleased:\n",
        "            if True:\n",
        ("tests/unit/test_interrupted.py", "-k", "lock_that_is_kept"),
    ),
    Mutant(
        "what a signal has broken off is given back",
        "lock.py",
        "            # A signal may raise after it was acquired and before the block begins.\n"
        "            self._give_back(before)\n",
        "",
        ("tests/unit/test_interrupted.py", "-k", "lock_that_is_kept"),
    ),
    Mutant(
        "the inner release of a lease that was re-entered",
        "lock.py",
        "is_done = lease not in leases[:-1] and lease.release()",
        "is_done = lease.release()",
        ("tests/integration/test_lock.py", "-k", "reentrant_lock_is_free"),
    ),
    Mutant(
        "a lease that was released is not re-entered",
        "lock.py",
        "if self._reentrant and leases and leases[-1].held:",
        "if self._reentrant and leases:",
        ("tests/integration/test_lock.py", "-k", "not_re_entered"),
    ),
    Mutant(
        "the turn is given back when the patience is over",
        "lock.py",
        "            if lease.unreleased and lease not in leases[:before]:\n",
        "            if lease.granted and lease not in leases[:before]:\n",
        ("tests/integration/test_lock.py", "-k", "no_turn_behind"),
    ),
    Mutant(
        "the end of a block in the wrong thread says so",
        "lock.py",
        "if not leases or leases[-1].unreleased:",
        "if leases[-1].unreleased:",
        ("tests/integration/test_lock.py", "-k", "block_that_ends_where"),
    ),
    Mutant(
        "a release that a signal has broken off is done again",
        "leases/lease.py",
        "                leftovers.add(Unreleased(self.store, self.claim, self._place, ending))\n",
        "                pass\n",
        ("tests/unit/test_interrupted.py", "-k", "lock_that_is_kept"),
    ),
]


def mutated(mutant: Mutant, directory: Path) -> Path:
    """A copy of the checkout's tests and package with the guard taken out."""
    for name in ("celery_singleton_lock", "tests", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, directory / name)
    path = directory / "celery_singleton_lock" / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"the ledger is out of date: {mutant.guard}"
    path.write_text(text.replace(mutant.old, mutant.new))
    return directory


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.guard)
def test_without_this_guard_a_test_goes_red(mutant: Mutant, tmp_path: Path) -> None:
    directory = mutated(mutant, tmp_path)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    # 1: tests ran and failed. Anything else, such as 5 for none selected, proves nothing.
    assert done.returncode == 1, done.stdout[-2000:]
