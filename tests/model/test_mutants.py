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
        "if known[4] == token and known[1] == '1'",
        "if known[1] == '1'",
        ("tests/contract/test_stores.py", "-k", "stranger"),
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
        "if holder == token then",
        "if false then",
        ("tests/contract/test_stores.py", "-k", "token or again"),
    ),
    Mutant(
        "deadline from send time",
        "leases/heartbeat.py",
        "                lease.renewed(sent_at)",
        "                lease.renewed(clock())",
        ("tests/unit/test_heartbeat.py", "-k", "sent"),
    ),
    Mutant(
        "heartbeat stopped before release",
        "leases/lease.py",
        "        self._heartbeat.forget(self)\n",
        "",
        ("tests/unit/test_heartbeat.py", "-k", "under_way_has_ended"),
    ),
    Mutant(
        "time-seeded fence",
        "stores/redis/lua/acquire.lua",
        "local fence = math.max(tonumber(known[2] or 0) + 1, now)",
        "local fence = tonumber(known[2] or 0) + 1",
        ("tests/contract/test_stores.py", "-k", "fence"),
    ),
    Mutant(
        "deadline of each holder",
        "stores/redis/lua/acquire.lua",
        "  elseif holder and deadline > now then",
        "  elseif holder then",
        ("tests/contract/test_stores.py", "-k", "deadline or took_over or died"),
    ),
    Mutant(
        "turn of the waiters",
        "stores/redis/lua/acquire.lua",
        "elseif ahead >= free then",
        "elseif free == 0 then",
        ("tests/integration/test_lock.py", "-k", "overtake"),
    ),
    Mutant(
        "dead waiter passed over",
        "stores/redis/lua/release.lua",
        "redis.call('PUBLISH', key .. ':' .. whose, 'free') == 0 then",
        "redis.call('PUBLISH', key .. ':' .. whose, 'free') < 0 then",
        ("tests/contract/test_stores.py", "-k", "nobody_hears"),
    ),
    Mutant(
        "renewal when the server is out of memory",
        "stores/redis/lua/renew.lua",
        "call('HDEL', KEYS[1], '')\n",
        "",
        ("tests/contract/test_lua.py", "-k", "memory"),
    ),
    Mutant(
        "expiry of every key",
        "stores/redis/lua/acquire.lua",
        "  redis.call('PEXPIRE', key, 2 * ttl)\n",
        "",
        ("tests/contract/test_stores.py", "-k", "expiry"),
    ),
    Mutant(
        "nothing left of a dead holder",
        "stores/redis/lua/acquire.lua",
        "    if string.match(field, '^(%d+):') == tostring(place) then",
        "    if false then",
        ("tests/contract/test_stores.py", "-k", "successor"),
    ),
    Mutant(
        "a server clock that was set back",
        "stores/redis/lua/acquire.lua",
        "  if deadline > latest and",
        "  if false and",
        ("tests/faults/test_store_faults.py", "-k", "set_back"),
    ),
    Mutant(
        "scripts told again",
        "stores/redis/wire.py",
        "        except exceptions.NoScriptError:\n            # After",
        "        except ZeroDivisionError:\n            # After",
        ("tests/contract/test_lua.py", "-k", "forgotten"),
    ),
    Mutant(
        "a connection with a reply under way is dropped",
        "stores/redis/wire.py",
        "answer to another question.\n            connection.disconnect()\n",
        "answer to another question.\n            self._idle.append(connection)\n",
        ("tests/contract/test_bounds.py", "-k", "not_taken_for"),
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
        "conflict.py",
        "        if holder.task_id is not None and holder.task_id == task.request.id and holder.fence:\n",
        "        if False:\n",
        ("tests/acceptance/test_crash.py", "-k", "before_its_body_has_ended"),
    ),
    Mutant(
        "release in a finally",
        "task.py",
        "            if not isinstance(sys.exception(), Retry):\n                self._give_back(lease)\n",
        "            pass\n",
        ("tests/integration/test_task.py", "-k", "next_step"),
    ),
    Mutant(
        "a copy of a run that has ended is dropped",
        "copies.py",
        '    raise Ignore("a run of this message has ended already")\n',
        "",
        ("tests/acceptance/test_redelivery.py", "-k", "redis_delivers"),
    ),
    Mutant(
        "before it asks for anything",
        "task.py",
        "        try:\n            drop_copy(self, lease.key)\n",
        "        try:\n",
        ("tests/integration/test_task.py", "-k", "asks_nobody"),
    ),
    Mutant(
        "and once more when it has asked",
        "task.py",
        "has perhaps ended meanwhile.\n            drop_copy(self, lease.key)\n",
        "has perhaps ended meanwhile.\n",
        ("tests/integration/test_task.py", "-k", "while_it_asks"),
    ),
    Mutant(
        "a free place is the successor's",
        "stores/redis/lua/acquire.lua",
        "      ahead = ahead + 1\n      soonest = free",
        "      soonest = free",
        ("tests/contract/test_stores.py", "-k", "newest_arguments"),
    ),
    Mutant(
        "the newest arguments outlive the release",
        "stores/redis/lua/release.lua",
        "elseif taken == 0 and not awaited and ",
        "elseif taken == 0 and ",
        ("tests/contract/test_stores.py", "-k", "newest_arguments"),
    ),
    Mutant(
        "nobody old replaces somebody new",
        "stores/redis/lua/acquire.lua",
        "    if has_asked and somebody_newer_runs() then",
        "    if false then",
        ("tests/contract/test_stores.py", "-k", "last_who_replaces"),
    ),
    Mutant(
        "who makes way keeps its lease until it has",
        "leases/heartbeat.py",
        'if reason != "replaced"',
        "if True",
        ("tests/unit/test_heartbeat.py", "-k", "make_way"),
    ),
    Mutant(
        "a failed publish leaves no mark",
        "publish.py",
        "            store_of(task.app).withdraw(key, task_id, afresh=True)\n",
        "            pass\n",
        ("tests/acceptance/test_queue.py", "-k", "could_not_be_published"),
    ),
    Mutant(
        "a queued call outlives the release of another",
        "stores/redis/lua/release.lua",
        " and not lies_ahead(known[6])",
        "",
        ("tests/contract/test_stores.py", "-k", "queued_call_survives"),
    ),
    Mutant(
        "a lock is held until RETRY is stored",
        "task.py",
        "            if not isinstance(sys.exception(), Retry):\n",
        "            if True:\n",
        ("tests/acceptance/test_store_outage.py", "-k", "slow_release"),
    ),
    Mutant(
        "the publishing of a retry is not broken off",
        "task.py",
        "        with interrupt.held_back():\n",
        "        with suppress():\n",
        ("tests/integration/test_task.py", "-k", "loses_no_retry"),
    ),
    Mutant(
        "an interrupt is sent until it is heard",
        "leases/interrupt.py",
        "                if self._thread is None or self not in _sent:\n",
        "                if True:\n",
        ("tests/unit/test_interrupt.py", "-k", "about_to_begin"),
    ),
    Mutant(
        "a run shortens nobody's quiet",
        "stores/redis/lua/acquire.lua",
        " and not known[7] then",
        " then",
        ("tests/contract/test_stores.py", "-k", "mark_outlives"),
    ),
    Mutant(
        "members of a canvas are always sent",
        "task.py",
        "rest or is_awaited(options) or",
        "rest or",
        ("tests/acceptance/test_queue.py", "-k", "equal_members"),
    ),
    Mutant(
        "a former leader sends nothing",
        "stores/redis/lua/claim_slot.lua",
        "tonumber(fence) > tonumber(ARGV[3]) or ",
        "",
        ("tests/contract/test_stores.py", "-k", "who_led_before"),
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
        "                keepalive.start(self.task.lock_options.ttl)\n",
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
        "            self._keepalive.start(lease.ttl)\n",
        "            pass\n",
        ("tests/endings/test_lost.py", "-k", "without_a_pause and gevent"),
    ),
    Mutant(
        "a timer that kills at the deadline",
        "leases/lease.py",
        "            self._deadman.arm(self._deadline)\n",
        "            pass\n",
        ("tests/endings/test_lost.py", "-k", "stands_still and signal"),
    ),
    Mutant(
        "no timer after the end",
        "leases/lease.py",
        "            self._deadman.disarm()\n",
        "            pass\n",
        ("tests/endings/test_dead_children.py", "-k", "outlives"),
    ),
    Mutant(
        "a late beat asks before it gives up",
        "leases/heartbeat.py",
        "if lease.is_unsure and lease.deadline <= now",
        "if lease.deadline <= now",
        ("tests/unit/test_heartbeat.py", "-k", "asks_before"),
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
