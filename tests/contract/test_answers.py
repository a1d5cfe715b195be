"""What the scripts answer, and what they write."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract.test_lua import FILES, PARTS, SCRIPTS, header_of
from tests.servers import Server

KEY, OTHER_KEY = "singleton:v2:{shop.tasks.sync:00}", "singleton:v2:{shop.tasks.sync:11}"
MARKER = f"{KEY}:done:id-of-a"


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with server.client() as client:
        yield client


def documented_answers(text: str) -> set[int]:
    returns = header_of(text).partition("-- Returns  ")[2]
    return {int(number) for number in re.findall(r"(?:^|\| |\{|-- +)(-?\d)(?= |,)", returns, re.MULTILINE)}


def documented_fields() -> str:
    """What lua/parts say is in the hash of a lock."""
    return "\n".join(line for text in PARTS.values() for line in text.splitlines() if line.startswith("--   "))


class Scripts:
    """The scripts, run as they are."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def acquire(
        self,
        token: str,
        *,
        limit: int = 1,
        words: str = "",
        attempt: int = 0,
        copy: bool = False,
        task: str = "",
        merges: str = "",
    ) -> Any:
        task_id = task or f"id-of-{token}"
        rest = [f"7 {attempt} 1000", task_id, "host", "", merges]
        return self._run("acquire", [KEY, MARKER] if copy else [KEY], [token, 30_000, f"{limit} {words}", *rest])

    def renew(self, *leases: tuple[str, str]) -> Any:
        return self._run("renew", [key for key, _ in leases], [30_000, *[token for _, token in leases]])

    def release(self, token: str, *, outcome: str = "") -> Any:
        keys, ending = ([KEY, MARKER], [f"0 {outcome} 60000 1"]) if outcome else ([KEY], [])
        return self._run("release", keys, [token, 0, "0 0", *ending])

    def mark_queued(self, task_id: str) -> Any:
        return self._run("mark_queued", [KEY], [task_id, 30_000, 0, 60_000])

    def claim(self, due: int, sent: int) -> Any:
        return self._run("claim_slot", [KEY], ["entry", due, 1, sent, 1000])

    def succeed(self, task_id: str, policy: str, *, asked: int = 0, arguments: str = "", task_name: str = "t") -> Any:
        return self._run("succeed", [KEY], [task_id, task_name, policy, 0, asked, arguments, 60_000, ""])

    def unmark(self, task_id: str, words: str = "quiet") -> Any:
        return self._run("unmark", [KEY], [task_id, words])

    def break_lock(self, by: str) -> Any:
        return self._run("break", [KEY], ["", by, ""])

    def look(self) -> Any:
        return self._run("look", [KEY], [])

    def mark_done(self, attempt: int, outcome: str) -> Any:
        return self._run("mark_done", [MARKER], [attempt, outcome, 60_000])

    def _run(self, verb: str, keys: list[str], arguments: list[Any]) -> Any:
        return self._client.eval(SCRIPTS[verb].text, len(keys), *keys, *arguments)


@pytest.fixture
def scripts(client: Any) -> Scripts:
    return Scripts(client)


def test_every_documented_answer_of_acquire_is_reached_in_its_shape(scripts: Scripts) -> None:
    usual, again = scripts.acquire("a"), scripts.acquire("a")
    held, queued = scripts.acquire("b"), scripts.acquire("c", words="waits")
    own = scripts.acquire("d", copy=True, task="id-of-a")
    scripts.release("a", outcome="ended")
    done = scripts.acquire("d", copy=True, task="id-of-a")
    replies = [again, held, queued, own, done]

    assert {reply[0] for reply in replies} == documented_answers(FILES["acquire"])
    assert all(isinstance(reply[1], int) for reply in replies)
    _, now, place, fence, took_over, since, arguments = again
    assert (place, took_over, arguments) == (1, 0, "")
    assert usual == fence == since <= now
    for _, _, crowd, successor, holders in (held, own):
        assert (crowd, successor) == (0, "")
        assert [holders[0], holders[1], *holders[4:]] == [1, "a", "id-of-a", "host", ""]
        assert re.fullmatch(rf"{since} 0 30000 7 0 1000", holders[3])
    _, _, wait = queued
    assert 0 < wait <= 30_000_000
    assert done[2:] == [0, "ended"]


def test_every_documented_answer_of_renew_is_reached(scripts: Scripts) -> None:
    scripts.acquire("a")
    *answers, now = scripts.renew((KEY, "a"), (KEY, "b"), (OTHER_KEY, "a"))
    scripts.succeed("id-of-b", "replace", asked=1)
    replaced, _ = scripts.renew((KEY, "a"))
    scripts.break_lock("alice")
    broken, later = scripts.renew((KEY, "a"))
    answers += [replaced, broken]

    assert answers == [1, 0, -1, 2, 4]
    assert 0 < now <= later
    assert set(answers) == documented_answers(FILES["renew"])


def test_every_documented_answer_of_release_is_reached(scripts: Scripts) -> None:
    scripts.acquire("a")
    answers = [scripts.release("b"), scripts.release("a"), scripts.release("a")]
    scripts.acquire("a")
    answers += [scripts.release("a", outcome="stored")]

    assert answers == [0, 1, -1, 3]
    assert set(answers) == documented_answers(FILES["release"])


def test_a_release_that_finds_only_waiters_that_are_gone_asks_to_be_asked_again(scripts: Scripts, client: Any) -> None:
    scripts.acquire("a")
    for number in range(115):
        scripts.acquire(f"w{number}", words="waits")

    answers = [scripts.release("a"), scripts.release("a"), scripts.release("a")]

    assert answers == [[1], [0], 0]
    assert not client.exists(KEY)


def test_a_release_gets_past_any_number_of_waiters_whose_time_has_passed(scripts: Scripts, client: Any) -> None:
    scripts.acquire("a")
    for number in range(1, 451):
        scripts.acquire(f"w{number}", words="waits")
        client.hset(KEY, f"q{number}", f"1 w{number} 1 id-of-w{number}")

    answers = [scripts.release("a"), scripts.release("a"), scripts.release("a")]

    assert answers == [[1], [0], 0]
    assert not client.exists(KEY)


def test_every_documented_answer_of_look_is_reached(scripts: Scripts, client: Any) -> None:
    scripts.acquire("a")
    scripts.acquire("b", words="waits")
    scripts.acquire("c", words="crowds")
    scripts.succeed("id-of-c", "rerun")
    before = client.hgetall(KEY)

    verdict, _, crowd, successor, holders = scripts.look()

    assert {verdict} == documented_answers(FILES["look"])
    assert (crowd, successor, holders[:2], len(holders)) == (1, "id-of-c", [1, "a"], 7)
    assert client.hgetall(KEY) == before


def test_every_documented_answer_of_succeed_is_reached(scripts: Scripts) -> None:
    scripts.acquire("a")

    replies = [
        scripts.succeed("id-of-b", "rerun"),
        scripts.succeed("id-of-c", "rerun"),
        scripts.succeed("id-of-c", "rerun", arguments="of c"),
        scripts.succeed("id-of-d", "rerun", task_name="other"),
    ]

    assert [reply[0] for reply in replies] == [1, 3, 0, 2]
    assert {reply[0] for reply in replies} == documented_answers(FILES["succeed"])
    assert replies[2][2] == "id-of-b"


def test_every_documented_answer_of_unmark_is_reached(scripts: Scripts, client: Any) -> None:
    scripts.acquire("a")
    scripts.succeed("id-of-b", "rerun")
    scripts.succeed("id-of-c", "rerun", arguments="of c")

    answers = [scripts.unmark("id-of-b", "unless_merged"), scripts.unmark("id-of-b"), scripts.unmark("id-of-b")]

    assert answers == [0, 1, 1]
    assert set(answers) == documented_answers(FILES["unmark"])
    assert not {"next", "next:by"} & set(client.hkeys(KEY))


def test_every_documented_answer_of_mark_queued_is_reached(scripts: Scripts, client: Any) -> None:
    queued, refused, again = scripts.mark_queued("a"), scripts.mark_queued("b"), scripts.mark_queued("a")

    verdict, now, crowd, successor, holders = refused
    assert (queued, verdict, again) == (1, 0, 1)
    assert {queued, verdict} == documented_answers(FILES["mark_queued"])
    assert now > 0
    assert (crowd, successor, holders[0], holders[4]) == (0, "", "", "a")
    assert set(client.hkeys(KEY)) == {"queued", "quiet"}
    assert 0 < client.pttl(KEY) <= 60_000


def test_every_documented_answer_of_mark_done_is_reached(scripts: Scripts, client: Any) -> None:
    answers = [scripts.mark_done(1, "ended"), scripts.mark_done(1, "stored"), scripts.mark_done(0, "stored")]

    assert set(answers) == documented_answers(FILES["mark_done"])
    assert re.fullmatch(r"1 stored \d+", client.get(MARKER))
    assert 0 < client.pttl(MARKER) <= 60_000


def test_every_documented_answer_of_claim_slot_is_reached(scripts: Scripts) -> None:
    answers = [scripts.claim(1, 0), scripts.claim(1, 2), scripts.claim(1, 0)]

    assert answers == [1, 1, 0]
    assert set(answers) == documented_answers(FILES["claim_slot"])


# What is in the hash.


def new_fields(client: Any, step: Callable[[], Any]) -> dict[str, str]:
    """Those that *step* adds."""
    before = set(client.hkeys(KEY))
    step()
    return {field: value for field, value in client.hgetall(KEY).items() if field not in before}


def test_the_usual_acquire_writes_what_the_other_one_writes(scripts: Scripts, client: Any) -> None:
    usual = new_fields(client, lambda: scripts.acquire("a"))
    scripts.mark_queued("q")
    scripts.release("a")

    unusual = new_fields(client, lambda: scripts.acquire("a"))

    assert set(usual) == {"1", "a", "fence", "1:", "1:i", "1:h"}
    assert set(unusual) == set(usual) - {"fence"}
    assert re.fullmatch(r"\d+ 0 30000 7 0 1000", usual["1:"])
    assert re.fullmatch(r"\d+ 0 30000 7 0 1000", unusual["1:"])


def test_every_field_is_one_that_the_parts_tell_of(scripts: Scripts, client: Any) -> None:
    told = {
        "fence": ("fence", r"\d+"),
        "places": ("places", "2"),
        "<place>": (r"\d", r"[ae]"),
        "<place>:": (r"\d:", r"\d+ 0 30000 7 0 1000"),
        "<place>:i": (r"\d:i", r"id-of-\w"),
        "<place>:c": ("1:c", "1"),
        "<token>": ("e", r"\d+"),
        "!<token>": ("!a", r"\+?\d+"),
        "first, last": ("first|last", r"\d+"),
        "q<ticket>": (r"q\d+", r"\d+ [wz] [12] id-of-[wz]"),
        "w<token>": (r"w[wz]", r"\d+"),
        "turn:<task id>": (r"turn:id-of-[wz]", r"\d+ 0"),
        "queued": ("queued", r"\d+ q"),
        "quiet": ("quiet", r"\d+ q"),
        "joined": ("joined", r"\d+ j"),
        "next": ("next", r"\d+ id-of-p"),
        "next:by": ("next:by", r"\d+ replace t"),
        "<place>:h": (r"\d:h", "host"),
        "with:<id>": ("with:id-of-[mp]", "1"),
        "over:<id>": ("over:id-of-o", r"\d+ id-of-p"),
        "merged:<task name>": ("merged:t", "of n"),
        "merged_at:<task name>": ("merged_at:t", r"\d+ 60000"),
        "merged_by:<task name>": ("merged_by:t", "e"),
        "<place>:a": (r"\d:a", "t"),
        "crowd": ("crowd", "1"),
        "crowd:<id>": ("crowd:id-of-c", "1"),
    }
    scripts.acquire("a")
    scripts.mark_queued("j")
    scripts.acquire("j", words="joins", task="j")
    client.hset(KEY, "queued", client.hget(KEY, "joined").replace(" j", " q"))
    client.hset(KEY, "quiet", client.hget(KEY, "queued"))
    scripts.succeed("id-of-m", "rerun")
    scripts.succeed("id-of-n", "rerun", arguments="of n")
    scripts.succeed("id-of-o", "replace")
    scripts.succeed("id-of-p", "replace", asked=1)
    scripts.acquire("c", words="crowds")
    scripts.acquire("d", copy=True, task="id-of-a")
    scripts.acquire("e", limit=3, merges="t")
    scripts.acquire("w", words="waits")
    scripts.acquire("z", limit=2, words="waits")

    reached = set()
    for field, value in client.hgetall(KEY).items():
        (name,) = [name for name, (pattern, _) in told.items() if re.fullmatch(pattern, field)]
        assert re.fullmatch(told[name][1], value), (field, value)
        reached.add(name)

    assert reached == set(told)
    assert all(name in documented_fields() for name in told if name not in {"<place>:i", "<place>:h"})
