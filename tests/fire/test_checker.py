"""The checker sees each kind of wrong history, and none in a right one."""

import dataclasses
from typing import Any

import pytest

from tests.fire.checker import PROMPT, Call, History, Remains, check, unaccounted
from tests.fire.kinds import KINDS
from tests.recorder import Event

TTL = KINDS["reschedule_late"].ttl
LABEL = KINDS["reschedule_late"].label("k")


class Story:
    """A history that is told event by event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[Call] = []
        self._runs = 0

    def at(self, moment: float, name: str, key: str = "", run: str = "", pid: int = 0, **facts: Any) -> None:
        self.events.append(Event(name, key, run, moment, pid, facts))

    def call(
        self, task_id: str, state: str = "SUCCESS", error: str = "", task: str = "reschedule_late", members: str = ""
    ) -> None:
        self.calls.append(Call(task_id, task, state, error, members=tuple(members)))

    def run(
        self,
        since: float,
        until: float | None,
        task_id: str = "a",
        pid: int = 1,
        fence: int | None = None,
        task: str = "reschedule_late",
        began: float | None = None,
        outcome: str = "returned",
    ) -> None:
        """One body; without an end if *until* is None."""
        self._runs += 1
        run, label = f"{pid}-{self._runs}", KINDS[task].label("k")
        began = since if began is None else began
        self.at(began, "began", run=run, pid=pid, task=task, task_id=task_id, retries=0)
        self.at(since, "enter", label, run, pid, fence=int(since * 1000) if fence is None else fence, seconds=1)
        if until is not None:
            self.at(until, "leave", label, run, pid)
            self.at(until, "ended", "", run, pid, outcome=outcome)

    def history(self, **more: Any) -> History:
        return History(sorted(self.events, key=lambda event: event.at), self.calls, **more)

    def promises(self, **more: Any) -> list[str]:
        return sorted({finding.promise for finding in check(self.history(**more)).findings})


@pytest.fixture
def story() -> Story:
    return Story()


def test_one_after_another_is_good(story: Story) -> None:
    story.run(1, 2, "a")
    story.run(2, 3, "b", pid=2)
    story.call("a")
    story.call("b")

    verdict = check(story.history())

    assert verdict.good
    assert verdict.fates == {"ran": 2}


def test_nothing_is_not_good(story: Story) -> None:
    assert story.promises() == ["bite"]


# One at a time.


def test_two_at_once_are_seen(story: Story) -> None:
    story.run(1, 3)
    story.run(2, 4, "b", pid=2)

    findings = check(story.history()).findings

    assert [(finding.promise, finding.key, finding.at) for finding in findings] == [("one at a time", LABEL, 2)]


def test_a_run_that_never_ends_is_in_the_way_of_all_after_it(story: Story) -> None:
    story.run(1, None)
    story.run(50, 51, "b", pid=2)

    assert story.promises() == ["one at a time"]


def test_as_many_as_the_limit_are_allowed_and_no_more(story: Story) -> None:
    for number in range(3):
        story.run(1 + number / 10, 5, f"{number}", pid=number, task="gates")
    assert check(story.history()).good

    story.run(4, 5, "one too many", pid=9, task="gates")

    assert story.promises() == ["one at a time"]


def test_tasks_that_share_a_lock_exclude_one_another(story: Story) -> None:
    story.run(1, 3, task="skip")
    story.run(2, 4, "b", pid=2, task="wait")

    assert story.promises() == ["one at a time"]


def test_what_is_unique_in_the_queue_only_may_run_at_once(story: Story) -> None:
    story.run(1, 3, task="until_executing", fence=0)
    story.run(2, 4, "b", pid=2, task="until_executing", fence=0)

    assert check(story.history()).good


def test_a_dead_process_runs_nothing_more(story: Story) -> None:
    story.run(1, None)
    story.at(2, "died", victim=1, alive_at=1.9)
    story.run(2, 3, "b", pid=2)

    assert check(story.history()).good


def test_before_its_death_it_did(story: Story) -> None:
    story.run(1, None)
    story.run(2, 3, "b", pid=2)
    story.at(2.5, "died", victim=1, alive_at=2.4)

    assert story.promises() == ["one at a time"]


def test_while_it_is_stopped_beyond_its_lease_another_may_run(story: Story) -> None:
    story.run(1, 6.5, outcome="LockLost")
    story.at(6, "stopped", pids=[1], since=1.5)
    story.run(5, 7, "b", pid=2)
    story.at(6.2, "lost", pid=1, task_id="a", reason="taken")

    verdict = check(story.history())

    assert verdict.good
    assert verdict.excused == {"stopped beyond its lease": 1}


def test_who_is_thawed_and_not_told_is_seen(story: Story) -> None:
    story.run(1, 6 + PROMPT + 1)
    story.at(6, "stopped", pids=[1], since=1.5)
    story.run(5, 20, "b", pid=2)

    assert story.promises() == ["one at a time"]


def test_a_stop_that_is_shorter_than_the_lease_excuses_nothing(story: Story) -> None:
    story.run(1, 4)
    story.at(2.5, "stopped", pids=[1], since=2)
    story.run(2.2, 3, "b", pid=2)

    assert story.promises() == ["one at a time"]


def test_a_store_that_lost_its_data_may_grant_twice_for_one_ttl(story: Story) -> None:
    story.run(1, 4, outcome="LockLost")
    story.at(2.5, "emptied", down=2.0)
    story.run(3, 5, "b", pid=2)

    assert check(story.history()).excused == {"the store lost its data": 1}
    assert check(story.history()).good


def test_after_that_it_may_not(story: Story) -> None:
    story.run(1, 2.5 + TTL + PROMPT + 1)
    story.at(2.5, "emptied", down=2.0)
    story.run(3, 20, "b", pid=2)

    assert story.promises() == ["one at a time"]


def test_what_was_granted_after_the_loss_is_not_excused_by_it(story: Story) -> None:
    story.at(2.5, "emptied", down=2.0)
    story.run(2.6, 4)
    story.run(3, 5, "b", pid=2)

    assert story.promises() == ["one at a time"]


# Told.


def test_who_was_told_and_goes_on_is_seen(story: Story) -> None:
    story.run(1, 3 + PROMPT)
    story.at(2, "lost", pid=1, task_id="a", reason="unreachable")

    assert story.promises() == ["told"]


def test_who_was_told_and_comes_to_its_end_all_the_same_is_seen(story: Story) -> None:
    story.run(1, 3)
    story.at(2, "lost", pid=1, task_id="a", reason="unreachable")

    assert story.promises() == ["told"]


def test_who_was_told_while_it_published_its_retry_may_end_that(story: Story) -> None:
    story.run(1, 3 + PROMPT, task="retrying", outcome="Retry")
    story.run(4 + PROMPT, 5 + PROMPT, task="retrying")
    story.call("a", task="retrying")
    story.at(2, "lost", pid=1, task_id="a", reason="unreachable")

    assert story.promises() == []


def test_a_stop_before_it_was_told_is_no_excuse_for_going_on(story: Story) -> None:
    story.run(1, 6.2 + PROMPT + 0.5, outcome="LockLost")
    story.at(6, "stopped", pids=[1], since=1.5)
    story.at(6.2, "lost", pid=1, task_id="a", reason="taken")

    assert story.promises() == ["told"]


def test_who_makes_way_still_has_its_lease(story: Story) -> None:
    story.run(1, 4)
    story.at(2, "lost", pid=1, task_id="a", reason="replaced")
    story.run(3, 5, "b", pid=2)

    assert story.promises() == ["one at a time"]


# Fenced.


def test_a_fence_that_does_not_grow_is_seen(story: Story) -> None:
    story.run(1, 2, fence=7)
    story.run(3, 4, "b", pid=2, fence=6)

    assert story.promises() == ["fenced"]


def test_a_fence_that_was_given_before_is_seen(story: Story) -> None:
    story.run(1, 2, fence=7)
    story.run(3, 4, "b", pid=2, fence=7)

    assert story.promises() == ["fenced"]


def test_a_fence_has_to_grow_across_a_loss_of_data_too(story: Story) -> None:
    story.run(1, 2, fence=7)
    story.at(2.5, "emptied", down=2.2)
    story.run(3, 4, "b", pid=2, fence=1)

    assert story.promises() == ["fenced"]


def test_a_body_without_a_lease_is_seen(story: Story) -> None:
    story.run(1, 2, fence=0)

    assert story.promises() == ["fenced"]


def test_who_asked_first_and_was_stopped_before_its_body_may_have_the_lower_fence(story: Story) -> None:
    story.run(6, 6.1, fence=7, began=1)
    story.at(5.9, "stopped", pids=[1], since=1.5)
    story.run(5, 5.5, "b", pid=2, fence=8)

    assert check(story.history()).good


# Nothing lost.


@pytest.mark.parametrize("state", ["PENDING", "RETRY", "STARTED"])
def test_a_retry_that_celery_could_not_publish_is_told_apart_from_a_call_that_is_lost(story: Story, state: str) -> None:
    story.run(1, 2, task="retrying", outcome="Reject")
    story.call("a", state, task="retrying")

    assert check(story.history()).fates == {"its retry could not be published": 1}


@pytest.mark.parametrize("state", ["PENDING", "RETRY", "STARTED"])
def test_a_call_without_an_end_is_seen(story: Story, state: str) -> None:
    story.run(1, 2, "another")
    story.call("a", state)

    assert story.promises() == ["nothing lost"]
    assert [call.task_id for call in unaccounted(story.history())] == ["a"]


def test_an_end_over_which_an_earlier_attempt_without_a_lease_has_stored_its_retry_is_counted(story: Story) -> None:
    story.run(1, 3.2, task="failing_at_first", outcome="Retry", pid=1)
    story.call("a", "RETRY", task="failing_at_first")
    story.run(3.1, 3.2, task="failing_at_first", pid=2)
    assert "nothing lost" in story.promises()

    story.at(3, "lost", pid=1, task_id="a", reason="taken")

    assert check(story.history()).fates == {"ended, and RETRY was stored over that": 1}


@pytest.mark.parametrize(
    ("how", "began", "died"),
    [
        ("cold shutdown", 2.1, 4.1),
        ("soft shutdown", 1.9, 4.1),
        # It got cold, and hung.
        ("soft shutdown", 1.8, 17.0),
    ],
)
def test_an_end_over_which_a_cold_shutdown_has_stored_a_retry_is_counted(
    story: Story, how: str, began: float, died: float
) -> None:
    story.run(1, 2, task="skip", outcome="Revoked")
    story.call("a", "RETRY", task="skip")
    story.at(died, "died", victim=1, alive_at=died)
    assert "nothing lost" in story.promises()

    story.at(began, "fault", what=f"{how} of worker 1")
    story.at(died + 1, "healed", what=f"{how} of worker 1")

    assert check(story.history()).fates == {"ended, and RETRY was stored over that": 1}


@pytest.mark.parametrize(
    ("began", "healed", "died"),
    [
        pytest.param(5, 6, 5.5, id="its worker had read of the end long before"),
        pytest.param(1.5, 2.5, 4, id="another worker was shut down"),
        pytest.param(0.5, 0.9, 5, id="it ended after the shutdown"),
    ],
)
def test_a_shutdown_that_cannot_have_stored_a_retry_excuses_none(
    story: Story, began: float, healed: float, died: float
) -> None:
    story.run(1, 2, task="skip", outcome="Revoked")
    story.call("a", "RETRY", task="skip")
    story.at(died, "died", victim=1, alive_at=died)
    story.at(began, "fault", what="soft shutdown of worker 1")
    story.at(healed, "healed", what="soft shutdown of worker 1")

    assert "nothing lost" in story.promises()


def test_a_call_that_died_with_its_worker_after_an_early_ack_is_counted(story: Story) -> None:
    story.run(1, None, task="skip")
    story.at(2, "died", victim=1, alive_at=1.9)
    story.call("a", "PENDING", task="skip")

    verdict = check(story.history())

    assert verdict.good
    assert verdict.fates == {"killed after an early ack": 1}


def test_one_that_died_before_its_result_was_stored_is_counted_as_well(story: Story) -> None:
    story.run(1, 2, task="skip")
    story.at(2.1, "died", victim=1, alive_at=2.05)
    story.call("a", "PENDING", task="skip")

    assert check(story.history()).fates == {"killed after an early ack": 1}


def test_what_comes_again_does_not_die_with_the_process_that_sent_it(story: Story) -> None:
    story.run(1, 2, task="reschedule", outcome="Retry")
    story.at(2.1, "died", victim=1, alive_at=2.05)
    story.call("a", "RETRY", task="reschedule")

    assert story.promises() == ["nothing lost"]


def test_with_a_late_ack_it_must_not_be_lost(story: Story) -> None:
    story.run(1, None)
    story.at(2, "died", victim=1, alive_at=1.9)
    story.call("a", "PENDING")

    assert story.promises() == ["nothing lost"]


def test_the_body_of_a_chord_may_be_lost_with_the_process_that_has_counted_its_last_part(story: Story) -> None:
    story.run(1, 2)
    story.call("body", "PENDING", task="gather", members="a")
    assert story.promises() == ["nothing lost"]

    story.at(2.5, "died", victim=1, alive_at=2.4)
    story.run(5, 6, pid=2)

    assert check(story.history()).fates == {"its chord has counted a part twice": 1}
    assert check(story.history()).good


def test_a_chain_fails_if_its_next_step_cannot_be_published(story: Story) -> None:
    story.run(1, 2)
    story.call("a", "FAILURE", "OperationalError")
    assert story.promises() == ["nothing lost"]

    story.calls = [dataclasses.replace(story.calls[0], alone=False)]

    assert check(story.history()).fates == {"what comes after it could not be published": 1}


def test_what_a_forgetful_broker_loses_is_counted(story: Story) -> None:
    story.run(1, 2, "another")
    story.call("a", "PENDING")

    verdict = check(story.history(forgetful=True))

    assert verdict.good
    assert verdict.fates == {"lost by the broker": 1}


def test_a_success_without_a_run_is_seen(story: Story) -> None:
    story.run(1, 2, "another")
    story.call("a", "SUCCESS")

    assert story.promises() == ["nothing lost"]


@pytest.mark.parametrize(
    ("state", "error", "outcome"),
    [("REVOKED", "", "skipped"), ("FAILURE", "LockHeld", "raised"), ("SUCCESS", "", "joined")],
)
def test_an_end_by_policy_is_one_that_the_policy_told_of(story: Story, state: str, error: str, outcome: str) -> None:
    story.run(1, 2, "another")
    story.call("a", state, error)
    assert story.promises() == ["nothing lost"]

    story.at(1.5, "conflict", pid=3, task="skip", task_id="a", outcome=outcome, holder="another")

    assert check(story.history()).fates == {outcome: 1}
    assert check(story.history()).good


def test_a_call_may_give_up_on_a_store_that_gave_no_answer(story: Story) -> None:
    story.run(1, 2, "another")
    story.call("a", "FAILURE", "StoreError")
    assert story.promises() == ["nothing lost"]

    story.at(1.5, "unanswered", pid=3, task="skip", task_id="a", outcome="raised")

    assert check(story.history()).fates == {"gave up": 1}
    assert check(story.history()).good


def test_a_call_may_fail_with_the_one_that_it_joined_and_that_gave_up(story: Story) -> None:
    story.run(1, 2, "another")
    story.call("a", "FAILURE", "StoreError")
    assert story.promises() == ["nothing lost"]

    story.at(1.5, "conflict", pid=3, task="join", task_id="a", outcome="joined", holder="another")

    assert check(story.history()).fates == {"failed with another": 1}
    assert check(story.history()).good


def test_a_step_may_fail_with_the_one_before_it_that_gave_up(story: Story) -> None:
    story.run(1, 2, "another")
    story.calls.append(Call("a", "reschedule_late", "FAILURE", "StoreError", alone=False))

    assert check(story.history()).fates == {"failed with another": 1}
    assert check(story.history()).good


def test_an_error_that_nobody_expects_is_seen(story: Story) -> None:
    story.run(1, 2, outcome="AttributeError")
    story.call("a", "FAILURE", "AttributeError")

    assert story.promises() == ["nothing lost"]


def test_a_call_may_fail_by_the_signal_that_struck_its_own_run(story: Story) -> None:
    story.run(1, 2, outcome="StruckError")
    story.call("a", "FAILURE", "StruckError")

    assert check(story.history()).fates == {"struck": 1}
    assert story.promises() == []

    story.run(3, 4, "another")
    story.call("another", "FAILURE", "StruckError")

    assert story.promises() == ["nothing lost"]


# What is left.


@pytest.mark.parametrize(
    ("left", "promise"),
    [
        (Remains(drained=False), "drains"),
        (Remains(messages=1), "drains"),
        (Remains(holders=["k by a"]), "drains"),
        (Remains(troubles=["worker 1 has ended by itself"]), "drains"),
        (Remains(without_expiry=["k"]), "no key without expiry"),
    ],
)
def test_what_is_left_is_seen(story: Story, left: Remains, promise: str) -> None:
    story.run(1, 2)

    assert story.promises(remains=left) == [promise]
