"""The checker sees each kind of wrong history, and nothing in a right one."""

import dataclasses
from typing import Any

import celery
import pytest

from tests.combinations import checker
from tests.combinations.checker import MOST_DELIVERIES, check
from tests.combinations.history import Answer, History
from tests.combinations.program import Call, Program, bare_task
from tests.recorder import Event


class Story:
    """A program with two calls, and its history told event by event."""

    def __init__(self) -> None:
        self.tasks = [bare_task()]
        self.calls = [Call(number=0), Call(number=1)]
        self.stage = {"broker": "redis", "results": "redis", "pool": "prefork", "track": False, "redelivers": False}
        self.events: list[Event] = []
        self.answers: list[Answer] = []
        self._runs = 0

    def declare(self, **options: Any) -> None:
        self.tasks = [{**self.tasks[0], **options}]

    def call(self, number: int, **facts: Any) -> None:
        self.calls[number] = dataclasses.replace(self.calls[number], **facts)

    def at(self, moment: float, name: str, run: str = "", key: str = "k", **facts: Any) -> None:
        self.events.append(Event(name, key, run, moment, facts.pop("pid", 1), facts))

    def body(
        self,
        since: float,
        until: float | None,
        task_id: str = "aaa",
        outcome: str = "returned",
        number: int = 0,
        attempt: int = 0,
        fence: int | None = None,
        pid: int = 1,
        item: bool = False,
        again: bool = False,
    ) -> None:
        """One body; without an end if *until* is None; the second try of the one before if *again*."""
        self._runs += 1
        run, again_of = str(self._runs), str(self._runs - 1) if again else ""
        facts = {"task_id": task_id, "attempt": attempt, "host": "w", "pid": pid, "item": item}
        if not again:
            self.at(since - 0.01, "began", run, **facts)
        fence = round(since * 1000) if fence is None else fence
        self.at(since, "enter", run, number=number, fence=fence, again_of=again_of, **facts)
        if until is not None:
            self.at(until, "leave", run, outcome=outcome, task_id=task_id, pid=pid)

    def lock(self, asked: float, since: float, until: float | None, key: str = "k other") -> None:
        """A `Lock` in the latest body; never given back if *until* is None."""
        moments = {"asks": asked, "locked": since, "unlocked": until}
        for name, moment in moments.items():
            if moment is not None:
                self.at(moment, name, str(self._runs), key)

    def refused(self, moment: float, task_id: str, outcome: str, holder: str | None, key: str = "k") -> None:
        self.at(moment, "conflict", key=key, task_id=task_id, outcome=outcome, holder=holder)

    def answer(self, number: int, task_id: str = "aaa", state: str = "SUCCESS", **facts: Any) -> None:
        self.answers.append(Answer(number, task_id, state=state, **facts))

    def rules(self, **more: Any) -> set[str]:
        program = Program(self.stage, tuple(self.tasks), tuple(self.calls))
        return {finding.rule for finding in check(History(program, self.events, self.answers, **more))}


@pytest.fixture
def story() -> Story:
    return Story()


def test_two_calls_one_after_another_are_right(story: Story) -> None:
    story.body(1, 2)
    story.body(3, 4, "bbb", number=1)
    story.answer(0)
    story.answer(1, "bbb")

    assert story.rules() == set()


def test_two_bodies_at_once_are_too_many(story: Story) -> None:
    story.body(1, 3)
    story.body(2, 4, "bbb", number=1)

    assert story.rules() == {"one at a time"}


def test_a_limit_of_two_allows_two(story: Story) -> None:
    story.declare(limit=2)
    story.body(1, 3)
    story.body(2, 4, "bbb", number=1)

    assert story.rules() == set()


def test_a_killed_body_ends_when_its_process_dies(story: Story) -> None:
    story.body(1, None, pid=7)
    story.at(2, "died", victim=7, alive_at=2.0)
    story.body(2.5, 3, "bbb", number=1)

    assert story.rules() == set()


def test_a_body_that_never_leaves_is_beside_all_that_follow(story: Story) -> None:
    story.body(1, None)
    story.body(9, 10, "bbb", number=1)

    assert story.rules() == {"one at a time"}


def test_bodies_until_executing_may_overlap_but_not_those_of_one_message(story: Story) -> None:
    story.declare(mode="until_executing")
    story.body(1, 3)
    story.body(2, 4, "bbb", number=1)
    assert story.rules() == set()

    story.body(3.5, 5, "bbb", number=1)
    assert story.rules() == {"one body of a message", "an attempt is completed once"}


def test_siblings_of_a_message_to_all_are_no_copies(story: Story) -> None:
    story.stage["broker"] = "broadcast"
    story.declare(mode="until_executing")
    story.body(1, 3)
    story.body(2, 4, pid=2)

    assert story.rules() == set()


def test_a_body_without_a_lease_is_seen(story: Story) -> None:
    story.body(1, 2, fence=0)

    assert story.rules() == {"fences grow"}


def test_what_replaces_an_eager_run_goes_on_under_its_lease(story: Story) -> None:
    story.stage["pool"] = "eager"
    story.declare(limit=2)
    story.body(1, 6, fence=5)
    story.body(2, 3, "bbb", number=1, fence=6)
    story.body(4, 5, fence=5)

    assert "fences grow" not in story.rules()


def test_a_fence_that_falls_is_seen(story: Story) -> None:
    story.body(1, 2, fence=5)
    story.body(3, 4, "bbb", number=1, fence=5)

    assert story.rules() == {"fences grow"}


@pytest.mark.parametrize("state", ["HUNG", "PENDING", "RETRY"])
def test_a_call_without_an_end_is_seen(story: Story, state: str) -> None:
    story.answer(0, state=state)

    assert story.rules() == {"every call ends"}


def test_a_canvas_without_an_end_is_seen(story: Story) -> None:
    story.body(1, 2)
    story.answer(0, canvas="HUNG")

    assert story.rules() == {"every call ends"}


def test_a_body_that_runs_on_is_seen(story: Story) -> None:
    assert story.rules(open=["number 0 still runs"]) == {"every call ends"}


def test_an_ignored_call_may_hang(story: Story) -> None:
    story.call(0, ending="ignore")
    story.answer(0, state="HUNG")

    assert story.rules() == set()


def test_a_call_that_cannot_be_sent_is_seen(story: Story) -> None:
    story.answer(0, "", "UNSENT", error="TypeError")

    assert story.rules() == {"every call can be sent"}


def test_a_duplicate_may_be_refused_where_it_is_sent(story: Story) -> None:
    story.declare(mode="until_executed", policy="raise")
    story.body(1, 2)
    story.answer(0)
    story.answer(1, "", "UNSENT", error="LockHeld", text="held by aaa")

    assert story.rules() == set()


def test_an_error_that_is_in_no_program_is_seen(story: Story) -> None:
    story.answer(0, state="FAILURE", error="ConfigurationError")

    assert story.rules() == {"it fails for what it does"}


def test_an_error_of_the_body_is_right(story: Story) -> None:
    story.call(0, ending="raise")
    story.body(1, 2, outcome="ValueError")
    story.answer(0, state="FAILURE", error="ValueError")

    assert story.rules() == set()


def test_a_skipped_call_names_who_ran(story: Story) -> None:
    story.body(1, 2)
    story.answer(0)
    story.answer(1, "bbb", "REVOKED", text="held by task_id=aaa")

    assert story.rules() == set()


@pytest.mark.parametrize("text", ["held by nobody", "made way for bbb"])
def test_a_skipped_call_that_names_nobody_else_is_seen(story: Story, text: str) -> None:
    story.body(1, 2)
    story.answer(0)
    story.answer(1, "bbb", "REVOKED", text=text)

    assert story.rules() == {"who does not run names who does"}


def test_a_skipped_call_that_names_one_which_never_ran_is_seen(story: Story) -> None:
    story.answer(0, "aaa", "REVOKED", text="held by bbb")
    story.answer(1, "bbb", "REVOKED", text="held by aaa")

    assert story.rules() == {"who does not run names who does"}


def test_who_was_refused_may_be_named_though_nobody_read_its_error(story: Story) -> None:
    story.declare(mode="until_and_while_executing", policy="raise")
    story.calls.append(Call(number=2))
    story.body(1, 2)
    story.answer(0, sent=0.9)
    story.answer(1, "bbb", "", sent=1.5)
    story.answer(2, "", "UNSENT", error="LockHeld", text="held by bbb")
    assert story.rules() == {"who does not run names who does"}

    story.at(1.6, "conflict", task_id="bbb", outcome="raised", holder="aaa")
    assert story.rules() == set()


def test_who_joins_may_be_named_though_it_has_no_body(story: Story) -> None:
    story.declare(mode="until_and_while_executing", policy="join")
    story.calls.append(Call(number=2))
    story.body(1, 2)
    story.answer(0, sent=0.9)
    story.answer(1, "bbb", sent=1.5)
    story.answer(2, "", "UNSENT", error="LockHeld", text="held by bbb")
    assert "who does not run names who does" in story.rules()

    story.at(1.6, "conflict", task_id="bbb", outcome="joined", holder="aaa")
    assert "who does not run names who does" not in story.rules()


def test_who_joins_one_that_rejects_has_nothing_to_join(story: Story) -> None:
    story.declare(policy="wait", deploy="join")
    story.body(1, 2, outcome="Reject")
    story.at(2, "ended", outcome="Reject", task_id="aaa")
    story.answer(0, state="HUNG")
    story.answer(1, "bbb", state="HUNG")
    assert story.rules() == {"every call ends"}

    story.at(1.5, "conflict", task_id="bbb", outcome="joined", holder="aaa")
    assert story.rules() == set()


@pytest.mark.parametrize("stores_it_first", [True, False], ids=["from 5.7 on", "before 5.7"])
def test_a_retry_that_is_revoked_before_celery_has_stored_it_is_left_by_celery(
    story: Story, monkeypatch: pytest.MonkeyPatch, stores_it_first: bool
) -> None:
    monkeypatch.setattr(checker, "LEAVES_RETRY_TO_US", stores_it_first)
    story.call(0, retries="countdown", ending="revoke")
    story.body(1, 2, outcome="Retry")
    story.answer(0, state="HUNG")
    assert story.rules() == {"every call ends"}

    story.at(1.9, "revoked", task_id="aaa")
    assert story.rules() == ({"every call ends"} if stores_it_first else set())


def test_a_success_without_a_body_is_seen(story: Story) -> None:
    story.answer(0)

    assert story.rules() == {"who succeeds has run"}


def test_all_items_of_a_map_run_or_are_skipped(story: Story) -> None:
    story.call(0, place="starmap")
    story.body(1, 2, item=True)
    story.answer(0)
    assert story.rules() == {"who succeeds has run"}

    story.refused(3, "aaa", "skipped", "bbb")
    assert story.rules() == set()


def test_chunks_have_run_under_the_ids_of_their_messages(story: Story) -> None:
    story.call(0, place="chunks")
    story.body(1, 2, "a1", item=True)
    story.body(3, 4, "a2", item=True)
    story.answer(0, parts=("a1", "a2"))

    assert story.rules() == set()


def test_items_of_one_map_are_no_copies_of_each_other(story: Story) -> None:
    story.call(0, place="starmap")
    story.body(1, 2, item=True)
    story.body(3, 4, item=True)
    story.answer(0)
    assert story.rules() == set()

    story.body(5, 6, item=True)
    assert story.rules() == {"an attempt is completed once"}


def test_items_of_one_map_do_not_run_at_once(story: Story) -> None:
    story.declare(mode="until_executing")
    story.call(0, place="starmap")
    story.body(1, 3, item=True)
    story.body(2, 4, item=True)
    story.answer(0)

    assert story.rules() == {"one body of a message"}


def test_a_call_that_was_skipped_for_an_item_names_its_map(story: Story) -> None:
    story.call(0, place="chunks")
    story.body(1, 2, "a1", item=True)
    story.answer(1, "bbb", "REVOKED", text="held by a1")

    assert story.rules() == set()


def test_who_is_refused_may_name_one_that_was_refused_itself(story: Story) -> None:
    story.declare(mode="until_and_while_executing", policy="raise")
    story.calls.append(Call(number=2))
    story.body(1, 2)
    story.answer(0, sent=0.9)
    story.answer(1, "bbb", "FAILURE", error="LockHeld", text="held by aaa", sent=1.5)
    story.answer(2, "", "UNSENT", error="LockHeld", text="held by bbb")

    assert story.rules() == set()


def test_a_map_may_hang_once_an_item_has_asked_for_a_retry(story: Story) -> None:
    story.call(0, place="starmap", retries="countdown")
    story.body(1, 2, outcome="Retry", item=True)
    story.answer(0, state="HUNG")

    assert story.rules() == set()


def test_a_map_that_hangs_before_an_item_has_asked_for_a_retry_is_found(story: Story) -> None:
    story.call(0, place="starmap", retries="countdown")
    story.body(1, 2, item=True)
    story.answer(0, state="HUNG")

    assert story.rules() == {"every call ends"}


def test_an_item_fails_with_what_celery_would_retry_a_message_for(story: Story) -> None:
    story.declare(autoretry=True)
    story.call(0, place="starmap")
    story.body(1, 2, outcome="AgainError", item=True)
    story.answer(0, state="FAILURE", error="AgainError")

    assert story.rules() == set()
    story.call(0, place="single")
    assert story.rules() == {"it fails for what it does"}


def test_a_group_waits_for_ever_after_a_step_that_is_refused(story: Story) -> None:
    story.declare(policy="raise")
    story.call(1, place="before a group")
    story.body(1, 2)
    story.answer(0)
    story.answer(1, "bbb", "FAILURE", error="LockHeld", text="held by aaa", canvas="HUNG")
    assert story.rules() == {"every call ends"}

    story.at(3, "failed", task_id="bbb")
    assert story.rules() == set()


def test_who_joins_succeeds_without_a_body(story: Story) -> None:
    story.declare(policy="join")
    story.answer(0)

    assert story.rules() == set()


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_a_newest_call_that_never_ran_is_seen(story: Story, policy: str) -> None:
    story.declare(policy=policy)
    story.body(1, 2)
    story.answer(0)
    story.answer(1, "bbb", "REVOKED", text="aaa runs in place of this one")
    assert story.rules() == {"the newest runs"}

    story.body(3, 4, number=1, attempt=1)
    assert story.rules() == set()


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_an_older_call_that_runs_while_a_newer_one_waits_is_seen(story: Story, policy: str) -> None:
    story.declare(policy=policy)
    story.answer(0, sent=0.1)
    story.answer(1, "bbb", sent=0.9)
    story.body(3, 4)
    story.body(5, 6, "bbb", number=1)
    assert story.rules() == set()

    story.at(1, "began", task_id="bbb")
    assert story.rules() == {"nobody older runs while a newer one waits"}


def test_a_newest_call_that_is_lost_with_its_process_is_seen(story: Story) -> None:
    story.declare(policy="rerun", late=True)
    story.call(1, ending="kill")
    story.body(1, None, "bbb", number=1, pid=7)
    story.at(2, "died", victim=7, alive_at=2.0)
    story.answer(1, "bbb", sent=0.9)
    assert story.rules() == {"the newest runs", "who succeeds has run"}

    story.body(3, 4, "bbb", number=1)
    assert story.rules() == set()


def test_an_attempt_that_is_completed_twice_is_seen(story: Story) -> None:
    story.body(1, 2)
    story.body(9, 10)

    assert story.rules() == {"an attempt is completed once"}


def test_an_id_that_is_used_again_is_another_call(story: Story) -> None:
    story.call(0, route="id again")
    story.body(1, 2)
    story.body(9, 10)
    story.answer(0, ran_again=True)

    assert story.rules() == set()


def test_an_id_that_cannot_be_used_again_is_seen(story: Story) -> None:
    story.body(1, 2)
    story.answer(0, ran_again=False)

    assert story.rules() == {"an id can be used again"}


@pytest.mark.parametrize("outcome", ["ValueError", "SoftTimeLimitExceeded"])
def test_a_second_try_after_an_error_is_right(story: Story, outcome: str) -> None:
    story.declare(again="with success")
    story.body(1, 2, outcome=outcome)
    story.body(3, 4, again=True)
    story.answer(0)

    assert story.rules() == set()


@pytest.mark.parametrize("outcome", ["returned", "Ignore", "Reject", "Retry", "AgainError", "LockLost"])
def test_a_second_try_after_the_end_of_a_call_is_seen(story: Story, outcome: str) -> None:
    story.declare(again="with success")
    story.body(1, 2, outcome=outcome)
    story.body(3, 4, again=True)

    assert story.rules() == {"a second try follows an error"}


def test_a_second_try_of_an_item_that_would_retry_is_right(story: Story) -> None:
    story.declare(again="with success")
    story.call(0, place="starmap", retries="countdown")
    story.body(1, 2, outcome="Retry", item=True)
    story.body(3, 4, outcome="Retry", item=True, again=True)
    story.answer(0, state="HUNG")

    assert story.rules() == set()


def test_a_second_try_beside_the_first_is_seen(story: Story) -> None:
    story.declare(again="in vain")
    story.body(1, 3, outcome="ValueError")
    story.body(2, 4, outcome="ValueError", again=True)

    assert story.rules() == {"one body of a message", "one at a time"}


def test_a_second_try_under_the_lease_of_the_first_is_seen(story: Story) -> None:
    story.declare(again="in vain")
    story.body(1, 2, outcome="ValueError", fence=5)
    story.body(3, 4, outcome="ValueError", fence=5, again=True)

    assert story.rules() == {"fences grow"}


def test_a_second_try_that_is_completed_twice_is_seen(story: Story) -> None:
    story.declare(again="in vain")
    for since in (1, 9):
        story.body(since, since + 1, outcome="ValueError")
        story.body(since + 2, since + 3, outcome="ValueError", again=True)

    assert story.rules() == {"an attempt is completed once"}


def test_two_tries_of_an_item_are_one_item(story: Story) -> None:
    story.declare(again="with success")
    story.call(0, place="starmap", ending="raise")
    story.body(1, 2, outcome="ValueError", item=True)
    story.body(3, 4, item=True, again=True)
    story.answer(0)
    assert story.rules() == {"who succeeds has run"}

    story.body(5, 6, item=True)
    assert story.rules() == set()


@pytest.mark.parametrize(("min_hold", "wrong"), [(2, False), (0, True)])
def test_only_its_own_cool_down_may_keep_a_second_try_out(story: Story, min_hold: int, wrong: bool) -> None:
    story.declare(again="in vain", min_hold=min_hold)
    story.body(1, 2, outcome="ValueError")
    story.answer(0, state="REVOKED", text="held by task_id=aaa")

    assert story.rules() == ({"who does not run names who does"} if wrong else set())


@pytest.mark.parametrize(("sent", "wrong"), [(1.5, True), (2.5, False), (3.5, True)])
def test_between_two_tries_a_call_is_no_duplicate(story: Story, sent: float, wrong: bool) -> None:
    story.declare(mode="until_executed", again="with success")
    story.body(1, 2, outcome="ValueError")
    story.body(3, 4, again=True)
    story.body(5, 6, "bbb", number=1)
    story.answer(0, sent=0.9)
    story.answer(1, "bbb", sent=sent)

    assert story.rules() == ({"a duplicate is not sent"} if wrong else set())


@pytest.mark.parametrize(("state", "link"), [("SUCCESS", "link"), ("FAILURE", "link_error")])
def test_a_link_that_is_never_called_is_seen(story: Story, state: str, link: str) -> None:
    story.call(0, link="both", ending="raise")
    story.body(1, 2)
    story.answer(0, state=state, error="ValueError")
    assert story.rules() == {"what is linked is called"}

    story.at(3, "linked", number=0, link=link)
    assert story.rules() == set()


@pytest.mark.parametrize(("state", "link"), [("SUCCESS", "link_error"), ("REVOKED", "link")])
def test_a_link_of_another_end_is_seen(story: Story, state: str, link: str) -> None:
    story.call(0, link=link)
    story.body(1, 2)
    story.body(3, 4, "bbb", number=1)
    story.answer(0, state=state, text="held by bbb")
    assert story.rules() == set()

    story.at(3, "linked", number=0, link=link)
    assert story.rules() == {"what is linked is called for one end"}
    story.call(0, ending="revoke")
    assert story.rules() == set()


@pytest.mark.parametrize(("redelivers", "wrong"), [(False, True), (True, False)])
def test_a_link_that_is_called_twice_is_seen(story: Story, redelivers: bool, wrong: bool) -> None:
    story.stage["redelivers"] = redelivers
    story.call(0, link="link")
    story.body(1, 2)
    story.answer(0)
    story.at(3, "linked", number=0, link="link")
    story.at(4, "linked", number=0, link="link")

    assert story.rules() == ({"what is linked is called for one end"} if wrong else set())


def test_a_call_with_a_link_that_is_not_sent_is_seen(story: Story) -> None:
    story.declare(mode="until_executed", policy="raise")
    story.body(1, 2)
    story.answer(0, sent=0.9)
    story.answer(1, sent=1.5, merged=True)
    assert story.rules() == set()

    story.call(1, link="link_error")
    assert story.rules() == {"a call with a link is sent"}
    story.answers[1] = dataclasses.replace(story.answers[1], task_id="", merged=False, state="UNSENT")
    story.answers[1] = dataclasses.replace(story.answers[1], error="LockHeld", text="held by aaa")
    assert story.rules() == {"a call with a link is sent"}


def test_a_call_with_a_link_is_sent_beside_another_one(story: Story) -> None:
    story.declare(mode="until_executed")
    story.call(1, link="link_error")
    story.body(1, 2)
    story.body(3, 4, "bbb", number=1)
    story.answer(0, sent=0.9)
    story.answer(1, "bbb", sent=1.5)

    assert story.rules() == set()


def test_a_replaced_run_that_comes_again_is_seen(story: Story) -> None:
    story.declare(policy="replace")
    story.body(1, 2, outcome="LockLost")
    story.body(3, 4, "bbb", number=1)
    story.body(5, 6, attempt=1)

    assert story.rules() == {"who was replaced is over"}


def test_a_retry_that_is_skipped_though_nobody_runs_is_seen(story: Story) -> None:
    story.body(1, 2, outcome="Retry")
    story.refused(5, "aaa", "skipped", "bbb")
    story.body(9, 10, "bbb", number=1)
    story.answer(0, state="REVOKED", text="held by bbb")

    assert story.rules() == {"a retry makes way for nobody absent"}


@pytest.mark.parametrize(("mode", "sent", "wrong"), [("until_executed", 1.5, True), ("until_executing", 1.5, False)])
def test_a_duplicate_that_is_sent_is_seen(story: Story, mode: str, sent: float, wrong: bool) -> None:
    story.declare(mode=mode)
    story.body(1, 2)
    story.body(3, 4, "bbb", number=1)
    story.answer(0, sent=0.9)
    story.answer(1, "bbb", sent=sent)

    assert story.rules() == ({"a duplicate is not sent"} if wrong else set())


def test_a_duplicate_of_a_queued_call_is_seen(story: Story) -> None:
    story.declare(mode="until_executing")
    story.body(3, 4)
    story.body(5, 6, "bbb", number=1)
    story.answer(0, sent=0.9)
    story.answer(1, "bbb", sent=1.5)

    assert story.rules() == {"a duplicate is not sent"}


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="the result says so only when the message comes")
def test_a_revoked_call_that_keeps_another_one_out_is_seen(story: Story) -> None:
    story.call(0, ending="revoke", timing="eta")
    story.answer(0, state="REVOKED", sent=0.0, published=0.1)
    story.answer(1, sent=0.9, merged=True)
    assert story.rules() == set()

    story.answers[1] = dataclasses.replace(story.answers[1], sent=1.2)
    assert story.rules() == {"a revoked call keeps no other out"}


def test_a_flood_is_seen(story: Story) -> None:
    for number in range(2 * MOST_DELIVERIES):
        story.at(number / 100, "began", str(number), task_id="aaa")

    assert story.rules() == {"no flood"}


def test_who_comes_again_now_and_then_for_long_is_no_flood(story: Story) -> None:
    for number in range(2 * MOST_DELIVERIES):
        story.at(number, "began", str(number), task_id="aaa")

    assert story.rules() == set()


def test_a_message_to_all_comes_once_more_to_a_worker_whose_process_has_died(story: Story) -> None:
    story.stage["broker"] = "broadcast"
    story.call(0, ending="kill")
    story.declare(limit=2, late=True)
    story.body(1, None, pid=7)
    story.body(1, 1.5)
    story.at(1.2, "died", victim=7, alive_at=1.2)
    story.body(5, 5.5, pid=8)
    assert story.rules() == set()

    story.body(6, 6.5, pid=8)
    assert story.rules() == {"no flood"}


def test_a_key_that_is_left_is_seen(story: Story) -> None:
    assert story.rules(left=["singleton:v3:{combined:1}"]) == {"nothing is left"}


def test_two_locks_of_a_key_at_once_are_too_many(story: Story) -> None:
    story.declare(mode="until_executing")
    story.body(1, 4)
    story.lock(1.1, 1.2, 3)
    story.body(1.5, 6, "bbb", number=1)
    story.lock(1.6, 3.1, 5)
    assert story.rules() == set()

    story.body(4, 7, "ccc", number=1)
    story.lock(4.1, 4.2, 6)
    assert story.rules() == {"a lock in a body is held by one"}


@pytest.mark.parametrize("entered", [1.5, 0.5])
def test_a_lock_beside_a_run_of_its_key_is_one_too_many(story: Story, entered: float) -> None:
    story.body(1, 4)
    story.lock(1.1, 1.2, 3)
    story.at(entered, "enter", "other", "k other", task_id="bbb", number=1, attempt=0, host="w", fence=7, item=False)
    story.at(3.5, "leave", "other", "k other", outcome="returned", task_id="bbb")
    assert story.rules() == {"a lock in a body is held by one"}

    story.declare(limit=2)
    assert story.rules() == set()


def test_a_lock_of_a_body_that_was_killed_ends_with_its_process(story: Story) -> None:
    story.body(1, None, pid=7)
    story.lock(1.1, 1.2, None)
    story.at(2, "died", victim=7, alive_at=2.0)
    story.body(3, 8, "bbb", number=1)
    story.lock(3.1, 6, 7)

    assert story.rules() == set()


@pytest.mark.parametrize(("moment", "wrong"), [(1.15, False), (2, False), (5, True)])
def test_a_call_that_a_lock_has_kept_out_has_nobody_to_name(story: Story, moment: float, wrong: bool) -> None:
    story.call(1, other=True)
    story.body(1, 4)
    story.lock(1.1, 1.2, 3)
    story.answer(0)
    story.answer(1, "bbb", "REVOKED", text="held by task_id=None")
    story.refused(moment, "bbb", "skipped", None, "k other")

    assert story.rules() == ({"who does not run names who does"} if wrong else set())


@pytest.mark.parametrize(("sent", "wrong"), [(1.5, False), (5, True)])
def test_a_duplicate_is_refused_where_it_is_sent_while_a_lock_has_its_key(
    story: Story, sent: float, wrong: bool
) -> None:
    story.declare(mode="until_executed")
    story.body(1, 4)
    story.lock(1.1, 1.2, 3)
    story.answer(0)
    story.answer(1, "", "UNSENT", error="LockHeld", text="held by task_id=None", sent=sent)

    assert ("every call can be sent" in story.rules()) is wrong


@pytest.mark.parametrize(("sent", "began", "wrong"), [(1, 1, True), (1, 5, False), (6, 6, False)])
def test_who_fails_as_the_new_policy_does_has_met_it(story: Story, sent: float, began: float, wrong: bool) -> None:
    story.declare(policy="reschedule", deploy="raise")
    story.body(0.5, 7)
    story.at(began, "began", "again", task_id="bbb")
    story.answer(0)
    story.answer(1, "bbb", "FAILURE", error="LockHeld", text="held by aaa", sent=sent)

    assert story.rules(deployed=4) == ({"it fails for what it does"} if wrong else set())


@pytest.mark.parametrize(("sent", "wrong"), [(1, False), (6, True)])
def test_who_ends_as_the_old_policy_does_has_met_it(story: Story, sent: float, wrong: bool) -> None:
    story.declare(policy="join", deploy="skip")
    story.answer(1, "bbb", sent=sent)

    assert story.rules(deployed=4) == ({"who succeeds has run"} if wrong else set())


def test_a_step_counts_as_published_when_the_one_before_it_has_run(story: Story) -> None:
    story.declare(policy="replace")
    story.call(0, place="middle of a chain", timing="eta")
    story.at(1, "step", task_id="zzz", number=0)
    story.at(3.4, "began", "superseded", task_id="aaa")
    story.refused(3.4, "aaa", "superseded", "bbb")
    story.body(3.5, 3.6, "bbb", number=1)
    story.answer(0, state="REVOKED", sent=0.9, text="bbb runs in place of this one")
    story.answer(1, "bbb", sent=1.1)
    assert story.rules() == set()

    story.answers[1] = dataclasses.replace(story.answers[1], sent=0.5)
    assert story.rules() == {"who is superseded is run for"}


@pytest.mark.parametrize(("came", "rules"), [(3.4, set()), (1.2, {"the newest runs"})])
def test_a_step_may_be_published_until_it_comes(story: Story, came: float, rules: set[str]) -> None:
    story.declare(policy="replace")
    story.call(0, place="chord body")
    story.at(1, "step", task_id="zzz", number=0)
    story.at(came, "began", task_id="aaa")
    story.body(3.5, 3.6)
    story.answer(0, sent=0.9)
    story.answer(1, "bbb", "REVOKED", sent=1.5, text="aaa runs in place of this one")

    assert story.rules() == rules


def test_a_successor_from_before_a_deploy_that_never_ran_is_seen(story: Story) -> None:
    story.declare(policy="rerun", deploy="skip")
    story.calls.append(Call(number=2))
    story.body(1, 4)
    story.refused(3, "bbb", "superseded", "ccc")
    story.answer(0, sent=0.9)
    story.answer(1, "bbb", "REVOKED", text="ccc runs in place of this one", sent=1.5)
    story.answer(2, "ccc", "REVOKED", text="held by aaa", sent=2.9)
    assert story.rules(deployed=4) == {"who is superseded is run for"}

    story.body(7, 8, "ccc", number=2)
    assert story.rules(deployed=4) == set()
