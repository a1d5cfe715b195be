"""Programs are drawn from a seed, cover what they claim to, and are shrunk to what matters."""

import dataclasses
import json
from collections.abc import Sequence

import pytest

from tests.combinations.cover import KEPT, covered, digest, rows
from tests.combinations.factors import FACTORS, why_not
from tests.combinations.program import MOST_CALLS, Call, Program, bare_task, draw, read
from tests.combinations.shrink import shrink, simpler

STAGE = {"broker": "redis", "results": "redis", "pool": "prefork", "track": False, "redelivers": False}


def test_the_rows_cover_every_pair_and_every_triple_of_mode_policy_and_event() -> None:
    all_of_it = covered(rows())

    assert all_of_it.pairs == all_of_it.of_pairs
    assert all_of_it.triples == all_of_it.of_triples


def test_the_rows_that_are_kept_are_of_these_factors() -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))["of"]

    assert kept == digest(), "python -m tests.combinations.cover makes them anew"


def test_no_row_is_one_that_is_left_out() -> None:
    assert [why_not(row) for row in rows() if why_not(row)] == []


def test_what_an_older_celery_lacks_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not({**STAGE, "broker": "quorum"}) is None

    monkeypatch.setattr("celery.VERSION", (5, 4, 0, "", ""))

    assert why_not({**STAGE, "broker": "quorum"}) == "before 5.5 Celery consumes from no quorum queue"
    assert why_not(STAGE) is None


def test_every_value_of_every_factor_is_in_some_row() -> None:
    for name, values in FACTORS.items():
        assert {row[name] for row in rows()} == set(values)


def test_a_seed_draws_the_same_programs_again() -> None:
    assert draw(3, 60) == draw(3, 60)
    assert draw(3, 60) != draw(4, 60)


def test_a_program_is_a_handful_of_calls_of_a_few_tasks() -> None:
    for program in draw(5, 200):
        assert 2 <= len(program.calls) <= MOST_CALLS
        assert 1 <= len(program.tasks) <= 3
        assert [call.number for call in program.calls] == list(range(len(program.calls)))


def test_no_call_combines_what_is_left_out() -> None:
    for program in draw(6, 300):
        for call in program.calls:
            row = {**program.stage, **program.tasks[call.task], **dataclasses.asdict(call)}
            assert why_not(row) is None, program.line()


def test_as_many_programs_as_are_asked_for_are_drawn() -> None:
    assert len(draw(7, 1000)) == 1000


@pytest.mark.parametrize("seed", range(5))
def test_a_line_is_read_as_the_program_it_was(seed: int) -> None:
    for program in draw(seed, 40):
        again = read(program.line())
        assert (again.stage, again.tasks, again.calls) == (program.stage, program.tasks, program.calls)


def test_a_program_is_shrunk_to_what_makes_it_fail() -> None:
    tasks = ({**bare_task(), "policy": "wait", "late": True, "limit": 2}, {**bare_task(), "policy": "join"})
    calls = (
        Call(0, 0, ending="raise", serializer="pickle"),
        Call(1, 1, at=0.1, retries="countdown", place="group"),
        Call(0, 2, at=0.5, timing="eta", seconds=1.2),
    )

    def fails(programs: Sequence[Program]) -> list[bool]:
        return [
            any(task["late"] for task in some.tasks) and any(call.retries == "countdown" for call in some.calls)
            for some in programs
        ]

    shrunk = shrink(Program(STAGE, tasks, calls), fails, rounds=9)

    assert shrunk.tasks == ({**bare_task(), "late": True},)
    assert [dataclasses.replace(call, at=0) for call in shrunk.calls] == [Call(0, 0, retries="countdown")]


def test_a_program_that_fails_only_as_it_is_stays_as_it_is() -> None:
    program = Program(STAGE, (bare_task(),), (Call(), Call(number=1, ending="raise")))

    assert shrink(program, lambda programs: [False for _ in programs]) == program


def test_what_is_simpler_has_its_calls_numbered_anew() -> None:
    program = Program(STAGE, (bare_task(),), (Call(), Call(number=1), Call(number=2)))

    for some in simpler(program):
        assert [call.number for call in some.calls] == list(range(len(some.calls)))
