"""The scripts: their headers, what they answer, and what they cost and survive on a server."""

import re
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores import redis as redis_store
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Answer, Claim, Grant
from celery_singleton_lock.stores.redis.store import RedisStore, Script
from tests.servers import Server

KEY, OTHER_KEY = "singleton:v1:{shop.tasks.sync:00}", "singleton:v1:{shop.tasks.sync:11}"
MINE = Claim(KEY, "a", 30.0, 1, {"task_id": "id-of-a"})

FILES = {file.name: file.read_text() for file in resources.files(redis_store.__package__).joinpath("lua").iterdir()}
every_file = pytest.mark.parametrize("name", sorted(FILES))


@pytest.fixture
def store(server: Server) -> Iterator[RedisStore]:
    store = RedisStore(server.url, {})
    yield store
    store.close()


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with server.client() as client:
        yield client


# The files.


def header_of(text: str) -> str:
    return text[: text.index("\n\n")]


def code_of(text: str) -> str:
    return re.sub(r"--[^\n]*", "", text[text.index("\n\n") :])


def documented_arguments(text: str) -> set[str]:
    return set(re.findall(r"^-- ((?:KEYS|ARGV)\[[^]]+\])  ", header_of(text), re.MULTILINE))


def used_arguments(text: str) -> set[str]:
    """`KEYS[1]`, `ARGV[3i-1]`, ...; of a loop over the rest of ARGV only where it begins."""
    code = code_of(text)
    used = {re.sub(r"[ *]", "", argument) for argument in re.findall(r"(?:KEYS|ARGV)\[[^]]+\]", code)}
    for start in re.findall(r"for i = (\d+), #ARGV", code):
        used = used - {"ARGV[i]", "ARGV[i+1]"} | {f"ARGV[{start}]"}
    if "ipairs(KEYS)" in code:
        used = used - {"KEYS[1]"} | {"KEYS[i]"}
    return used


def documented_answers(text: str) -> set[int]:
    returns = header_of(text).partition("-- Returns  ")[2]
    return {int(number) for number in re.findall(r"(?:^|\| |\{|-- +)(-?\d)(?= |,)", returns, re.MULTILINE)}


def test_there_is_one_file_per_verb() -> None:
    assert set(FILES) == {"acquire.lua", "renew.lua", "release.lua", "mark_queued.lua", "unmark.lua", "claim_slot.lua"}


@every_file
def test_the_header_names_the_arguments_that_the_code_uses(name: str) -> None:
    assert documented_arguments(FILES[name]) == used_arguments(FILES[name])


@every_file
def test_the_header_opens_with_a_sentence_and_has_all_its_parts(name: str) -> None:
    header = header_of(FILES[name])

    assert re.match(r"-- [A-Z][^\n]*\.\n--\n", header)
    assert all(part in header for part in ("-- KEYS[", "-- ARGV[", "-- Returns  "))
    assert all(line.startswith("--") for line in header.splitlines())


@every_file
def test_the_script_is_a_plain_one_without_flags(name: str) -> None:
    # A script with a shebang is refused altogether when the server is out of memory.
    assert not FILES[name].startswith("#!")


@every_file
def test_the_script_touches_no_key_but_those_it_was_given(name: str) -> None:
    calls = re.findall(r"\bcall\('(\w+)'(?:, ([\w[\]]+))?", code_of(FILES[name]))

    assert calls
    assert {key for command, key in calls if command != "TIME"} <= {"key", "KEYS[1]"}


# What they answer.


class Scripts:
    """The three scripts, run as they are."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def acquire(self, token: str, *, limit: int = 1, policy: str = "skip", arguments: str = "") -> Any:
        task_id = f"id-of-{token}"
        rest = [policy, task_id, arguments, 0, 0, "task_id", task_id]
        return self._run("acquire", [KEY], [token, 30_000, limit, *rest])

    def renew(self, *leases: tuple[str, str]) -> Any:
        return self._run("renew", [key for key, _ in leases], [30_000, *[token for _, token in leases]])

    def release(self, token: str) -> Any:
        return self._run("release", [KEY], [token, 1, 1, 0])

    def publish(self, task_id: str) -> Any:
        return self._run("mark_queued", [KEY], [task_id, 30_000, 0, 60_000])

    def claim(self, due: int, sent: int) -> Any:
        return self._run("claim_slot", [KEY], ["entry", due, 1, sent, 1000])

    def withdraw(self, task_id: str) -> Any:
        return self._run("unmark", [KEY], [task_id, 0])

    def _run(self, verb: str, keys: list[str], arguments: list[Any]) -> Any:
        return self._client.eval(Script(verb).text, len(keys), *keys, *arguments)


@pytest.fixture
def scripts(client: Any) -> Scripts:
    return Scripts(client)


def test_every_documented_answer_of_acquire_is_reached_in_its_shape(scripts: Scripts) -> None:
    granted = scripts.acquire("a")
    held = scripts.acquire("b")
    queued = scripts.acquire("c", policy="queue")
    other_limit = scripts.acquire("b", limit=2)

    replies = [granted, queued, held, other_limit]
    assert {reply[0] for reply in replies} == documented_answers(FILES["acquire.lua"])
    assert all(isinstance(reply[1], int) for reply in replies)
    _, now, place, fence, took_over, since, arguments = granted
    assert (place, took_over, arguments) == (1, 0, "")
    assert fence >= now == since
    _, _, fields = held
    hash_as_it_is = dict(zip(fields[::2], fields[1::2], strict=True))
    assert (hash_as_it_is["1"], hash_as_it_is["1:task_id"]) == ("a", "id-of-a")
    _, _, wait = queued
    assert 0 < wait <= 30_000_000
    _, _, limit = other_limit
    assert limit == 1


def test_every_documented_answer_of_renew_is_reached(scripts: Scripts) -> None:
    scripts.acquire("a")
    answers = scripts.renew((KEY, "a"), (KEY, "b"), (OTHER_KEY, "a"))
    scripts.acquire("b", policy="replace")
    answers += scripts.renew((KEY, "a"))

    assert answers == [1, 0, -1, 2]
    assert set(answers) == documented_answers(FILES["renew.lua"])


def test_every_documented_answer_of_release_is_reached(scripts: Scripts) -> None:
    scripts.acquire("a")

    answers = [scripts.release("b"), scripts.release("a"), scripts.release("a")]

    assert answers == [0, 1, -1]
    assert set(answers) == documented_answers(FILES["release.lua"])


def test_every_documented_answer_of_unmark_is_reached(scripts: Scripts, client: Any) -> None:
    scripts.acquire("a")
    scripts.acquire("b", policy="rerun", arguments="of b")

    answers = [scripts.withdraw("id-of-c"), scripts.withdraw("id-of-b"), scripts.withdraw("id-of-b")]

    assert answers == [0, 1, 0]
    assert set(answers) == documented_answers(FILES["unmark.lua"])
    assert not {"next", "next:args"} & set(client.hkeys(KEY))


def test_every_documented_answer_of_mark_queued_is_reached(scripts: Scripts, client: Any) -> None:
    queued, (verdict, now, fields), again = scripts.publish("a"), scripts.publish("b"), scripts.publish("a")

    assert (queued, verdict, again) == (1, 0, 1)
    assert {queued, verdict} == documented_answers(FILES["mark_queued.lua"])
    assert now > 0
    assert set(fields[::2]) == {"queued", "quiet"}
    assert set(client.hkeys(KEY)) == {"queued", "quiet"}
    assert all(f"--   {field}  " in header_of(FILES["acquire.lua"]) for field in ["queued", "quiet"])
    assert 0 < client.pttl(KEY) <= 60_000


def test_every_documented_answer_of_claim_slot_is_reached(scripts: Scripts) -> None:
    answers = [scripts.claim(1, 0), scripts.claim(1, 2), scripts.claim(1, 0)]

    assert answers == [1, 1, 0]
    assert set(answers) == documented_answers(FILES["claim_slot.lua"])


def test_the_hash_has_the_fields_that_the_header_of_acquire_tells(scripts: Scripts, client: Any) -> None:
    scripts.acquire("a")

    header, fields = header_of(FILES["acquire.lua"]), set(client.hkeys(KEY))
    of_the_place = {field.removeprefix("1:") for field in fields if field.startswith("1:")}
    assert {field for field in fields if not field.startswith("1:")} == {"limit", "fence", "1", "a"}
    assert {"fence", "since", "task_id"} <= of_the_place
    assert all(f"--   {field}  " in header for field in ["limit, fence", "<place>", "<token>"])
    (line,) = re.findall(r"--   <place>:<name>  .*", header)
    assert all(name in line for name in of_the_place - {"task_id"})


def test_a_waiter_has_the_fields_that_the_header_of_acquire_tells(scripts: Scripts, client: Any) -> None:
    scripts.acquire("a")
    without = set(client.hkeys(KEY))

    scripts.acquire("b", policy="queue")

    assert set(client.hkeys(KEY)) - without == {"first", "last", "q1"}
    assert re.fullmatch(r"\d+ b id-of-b", client.hget(KEY, "q1"))
    assert all(f"--   {field}  " in header_of(FILES["acquire.lua"]) for field in ["first, last", "q<ticket>"])


def test_a_successor_has_the_fields_that_the_header_of_acquire_tells(scripts: Scripts, client: Any) -> None:
    scripts.acquire("a")
    without = set(client.hkeys(KEY))

    scripts.acquire("b", policy="rerun", arguments="of b")
    assert set(client.hkeys(KEY)) - without == {"next", "next:args"}
    assert re.fullmatch(r"\d+ id-of-b", client.hget(KEY, "next"))
    scripts.acquire("c", policy="replace")
    assert {"!a"} <= set(client.hkeys(KEY))
    assert "a" not in client.hkeys(KEY)
    assert all(text in header_of(FILES["acquire.lua"]) for text in ["--   next, next:args  ", "!<token>"])


# What they cost.

VERBS: dict[str, Callable[[RedisStore], Any]] = {
    "acquire": lambda store: store.acquire(MINE),
    "a refused acquire": lambda store: store.acquire(Claim(KEY, "b", 30.0)),
    "renew": lambda store: store.renew([MINE, Claim(OTHER_KEY, "a", 30.0)], 1.0),
    "release": lambda store: store.release(MINE, 1),
}


def warmed_up(store: RedisStore) -> RedisStore:
    """With open connections and loaded scripts."""
    store.acquire(MINE)
    store.renew([MINE], 1.0)
    store.release(MINE, 1)
    return store


def commands_of(server: Server, body: Callable[[], Any]) -> list[str]:
    """What clients sent to the server during *body*; a script's own commands are not sent."""
    sent = []
    with server.client() as client, server.client() as other:
        other.ping()
        with client.monitor() as monitor:
            body()
            other.echo("that is all")
            while (event := monitor.next_command())["command"] != "ECHO that is all":
                if event["client_type"] != "lua":
                    sent.append(event["command"])
    return sent


def test_each_verb_is_one_round_trip(server: Server, store: RedisStore) -> None:
    warmed_up(store)

    sent = {name: commands_of(server, lambda verb=verb: verb(store)) for name, verb in VERBS.items()}

    assert {name: len(commands) for name, commands in sent.items()} == dict.fromkeys(VERBS, 1)
    assert all(commands[0].startswith("EVALSHA ") for commands in sent.values())


def test_a_large_renewal_goes_in_parts(server: Server, store: RedisStore) -> None:
    warmed_up(store)
    claims = [Claim(f"k{number}", "a", 30.0) for number in range(220)]

    sent = commands_of(server, lambda: store.renew(claims, 1.0))

    assert [len(re.findall(r" k\d+", command)) for command in sent] == [50, 50, 50, 50, 20]


def test_renewals_have_a_connection_of_their_own(server: Server, client: Any) -> None:
    store = warmed_up(RedisStore(server.url, {"client_name": "the-store"}))

    store.renew([MINE], 1.0)
    store.acquire(MINE)
    store.release(MINE, 1)

    own = [event["cmd"] for event in client.client_list() if event["name"] == "the-store"]
    assert own == ["evalsha", "evalsha"]
    store.close()


# What they survive.


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_server_that_has_forgotten_the_scripts_is_told_them_again(
    store: RedisStore, client: Any, verb: Callable[[RedisStore], Any]
) -> None:
    warmed_up(store)
    store.acquire(MINE)

    client.script_flush()

    assert verb(store)
    assert (
        client.script_exists(Script("acquire").digest, Script("renew").digest, Script("release").digest).count(True)
        == 1
    )


@pytest.fixture
def out_of_memory(client: Any) -> Iterator[Callable[[], object]]:
    """Let the server be out of memory from now on."""
    client.config_set("maxmemory-policy", "noeviction")
    yield lambda: client.config_set("maxmemory", 1)
    client.config_set("maxmemory", 0)


def test_a_server_out_of_memory_grants_nothing(store: RedisStore, out_of_memory: Callable[[], object]) -> None:
    warmed_up(store)

    out_of_memory()

    with pytest.raises(StoreError, match="maxmemory"):
        store.acquire(MINE)


def test_a_lock_is_renewed_by_a_server_out_of_memory(
    store: RedisStore, client: Any, out_of_memory: Callable[[], object]
) -> None:
    store.acquire(Claim(KEY, "a", 5.0))

    out_of_memory()

    assert store.renew([MINE], 1.0) == [Answer.DONE]
    assert store.holders(KEY)[0].expires_in > 5
    assert client.pttl(KEY) > 10_000


def test_a_lock_whose_key_needs_no_later_expiry_is_renewed_by_a_server_out_of_memory(
    store: RedisStore, out_of_memory: Callable[[], object]
) -> None:
    store.acquire(Claim(KEY, "long", 600.0, 2))
    store.acquire(Claim(KEY, "a", 5.0, 2))

    out_of_memory()

    assert store.renew([Claim(KEY, "a", 30.0, 2)], 1.0) == [Answer.DONE]
    assert store.holders(KEY)[0].expires_in > 5


def test_a_lock_is_released_by_a_server_out_of_memory(
    store: RedisStore, client: Any, out_of_memory: Callable[[], object]
) -> None:
    store.acquire(MINE)

    out_of_memory()

    assert store.release(MINE, 1) is Answer.DONE
    assert not client.exists(KEY)


def test_one_of_several_holders_is_released_by_a_server_out_of_memory(
    store: RedisStore, out_of_memory: Callable[[], object]
) -> None:
    for token in "ab":
        store.acquire(Claim(KEY, token, 30.0, 2))

    out_of_memory()

    assert store.release(Claim(KEY, "a", 30.0, 2), 1) is Answer.DONE
    assert [holder.token for holder in store.holders(KEY)] == ["b"]


def test_a_grant_whose_reply_was_lost_is_recognised_by_a_server_out_of_memory(
    store: RedisStore, out_of_memory: Callable[[], object]
) -> None:
    first = store.acquire(MINE)

    out_of_memory()
    again = store.acquire(MINE)

    assert isinstance(first, Grant)
    assert isinstance(again, Grant)
    assert again.fence == first.fence


def test_a_lock_that_stays_taken_is_released_by_a_server_out_of_memory(
    store: RedisStore, out_of_memory: Callable[[], object]
) -> None:
    mine = Claim(KEY, "a", 30.0, min_hold=10.0)
    store.acquire(mine)

    out_of_memory()

    assert store.release(mine, 1) is Answer.DONE
    assert store.renew([mine], 1.0) == [Answer.TAKEN]


def test_a_lock_that_somebody_waits_for_is_released_by_a_server_out_of_memory(
    store: RedisStore, out_of_memory: Callable[[], object]
) -> None:
    store.acquire(MINE)
    with store.waiter(Claim(KEY, "w", 30.0)) as waiter:
        waiter.ask()

        out_of_memory()

        released = store.release(MINE, 1)
        asleep_at = clock()
        waiter.sleep(20)

    assert released is Answer.DONE
    assert clock() - asleep_at < 15
