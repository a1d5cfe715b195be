"""The outcome of the demo: the timeline, the overlaps, and whether all is well."""

from collections.abc import Sequence

from rich.console import Console

from example_project.stage.history import History
from example_project.stage.timeline import Timeline


def report(histories: Sequence[History], console: Console, *, kill: bool = False) -> int:
    """Print the result and return the exit code: 1 if the first shop did not do as it should."""
    console.print(Timeline(histories, whole=True))
    for history in histories:
        console.print(score(history), soft_wrap=True)
    problems = complaints(histories[0], kill=kill)
    for problem in problems:
        console.print(f"failed: {problem}", soft_wrap=True)
    return 1 if problems else 0


def score(history: History) -> str:
    """The result of one shop, in one line."""
    facts = [f"runs: {len(history.runs)}"]
    if history.ending:
        facts.append("lamps: {lamps} of {delivered}, invoices: {mails}, index: {index}".format(**history.ending))
    return f"{history.title}: overlaps: {history.overlaps} ({', '.join(facts)})"


def complaints(history: History, *, kill: bool = False) -> list[str]:
    """The faults that were found; none in the usual case.

    Arguments:
        history: The shop with the lock.
        kill: Whether a worker was to be killed during a run.
    """
    found = [f"{key} overlapped" for key, lane in history.lanes.items() if lane.overlaps]
    found += [f"{key} never ran" for key, lane in history.lanes.items() if not lane.runs]
    if history.ending is None:
        found.append("the story did not come to its end")
    if kill:
        found += _about_the_kill(history)
    return found


def _about_the_kill(history: History) -> list[str]:
    victims = history.victims()
    if not victims:
        return ["no run was killed"]
    return [f"after the killed run nobody ran {key}" for key, run in victims if history.lanes[key].after(run) is None]
