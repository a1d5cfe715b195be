"""Done markers in memory; lua/parts/done.lua does the same for Redis."""

from dataclasses import dataclass

from celery_singleton_lock.stores.records import Claim, Done, Outcome

_RESULT_GRACE = 5.0


@dataclass(frozen=True)
class _Marker:
    attempt: int
    outcome: Outcome
    at: float
    expiry: float


class Markers:
    """The markers of messages whose runs have ended."""

    def __init__(self) -> None:
        self._known: dict[str, _Marker] = {}

    def note(self, marker: str, attempt: int, outcome: Outcome, seconds: float, now: float) -> None:
        """Note an ending, unless more is known already."""
        self._known = {name: each for name, each in self._known.items() if each.expiry > now}
        latest = self._known.get(marker)
        is_news = latest is None or latest.attempt < attempt
        if is_news or (latest is not None and latest.attempt == attempt and latest.outcome == "ended"):
            self._known[marker] = _Marker(attempt, outcome, now, now + seconds)

    def done(self, claim: Claim, now: float) -> Done | None:
        """The facts for a later delivery; a run that has stored no result for long has died before it could."""
        known = self._known.get(claim.marker)
        if known is None or known.expiry <= now or known.attempt < claim.facts.attempt:
            return None
        if known.outcome == "ended" and now - known.at >= _RESULT_GRACE:
            return None
        return Done(known.attempt, known.outcome)

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
