"""Two ways in which Celery's tests were played, test by test."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tests.celery_suite.play import Outcome


@dataclass(frozen=True)
class Difference:
    """A test that ended in another way than it should."""

    test: str
    plain: list[Outcome]
    locked: list[Outcome]

    def __str__(self) -> str:
        sides = (("plain", self.plain), ("locked", self.locked))
        told = [f"  {side}: {some.outcome}\n{some.why}" for side, outcomes in sides for some in outcomes]
        return "\n".join([self.test, *told])


def differences(
    plain: Sequence[Outcome], locked: Sequence[Outcome], different: Collection[str] = ()
) -> list[Difference]:
    """The tests that did not end alike, but for those that must end differently, which did not."""
    one, other = _by_test(plain), _by_test(locked)
    return [
        Difference(test, one.get(test, []), other.get(test, []))
        for test in sorted(one.keys() | other.keys())
        if _alike(one.get(test, []), other.get(test, [])) is (test in different)
    ]


def _by_test(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """A test has several if it has parts."""
    found: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.test].append(outcome)
    return found


def _alike(one: Sequence[Outcome], other: Sequence[Outcome]) -> bool:
    return [each.outcome for each in one] == [each.outcome for each in other]
