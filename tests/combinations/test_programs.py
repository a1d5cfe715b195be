"""Programs are drawn from a seed, and combine what they claim to."""

import dataclasses

import pytest

from tests.combinations.factors import CALL, STAGE, TASK, why_not
from tests.combinations.program import MOST_CALLS, draw, read

PLAIN = {name: values[0] for name, values in STAGE.items()}


def test_a_seed_draws_the_same_programs_again_and_each_line_is_read_as_the_program_it_was() -> None:
    drawn = draw(3, 40)

    assert drawn == draw(3, 40) != draw(4, 40)
    assert [read(program.line()) for program in drawn] == drawn


def test_two_hundred_programs_have_every_value_and_nothing_that_is_left_out() -> None:
    seen = set()
    for program in draw(6, 200):
        assert [call.number for call in program.calls] == list(range(len(program.calls)))
        assert 2 <= len(program.calls) <= MOST_CALLS
        assert 1 <= len(program.tasks) <= 3
        for call in program.calls:
            row = {**program.stage, **program.tasks[call.task], **dataclasses.asdict(call)}
            assert why_not(row) is None
            seen |= row.items()

    assert seen >= {
        (name, value) for name, values in (STAGE | TASK | CALL).items() if name != "limit" for value in values
    }


def test_what_an_older_celery_lacks_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not({**PLAIN, "broker": "quorum"}) is None

    monkeypatch.setattr("celery.VERSION", (5, 4, 0, "", ""))

    assert why_not({**PLAIN, "broker": "quorum"}) == "before 5.5 Celery consumes from no quorum queue"
