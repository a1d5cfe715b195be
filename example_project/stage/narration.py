"""The story of a shop in sentences, from what was told and from what happened."""

from collections.abc import Iterator

from example_project.stage.history import History, Lane, Run

Sentence = tuple[float, str]


def narrate(history: History) -> list[Sentence]:
    """The events of a shop in order, each with its moment."""
    deaths = [_death(at, worker, history) for at, worker in history.kills]
    lives = [sentence for key, run in history.victims() for sentence in _life_after(key, run, history)]
    return sorted([*history.told, *deaths, *lives])


def _death(at: float, worker: str, history: History) -> Sentence:
    keys = [key for key, run in history.victims() if run.worker == worker]
    return at, f"Worker {worker} is killed (SIGKILL) in {' and '.join(keys) or 'its sleep'}."


def _life_after(key: str, run: Run, history: History) -> Iterator[Sentence]:
    lane = history.lanes[key]
    freed = lane.freed_after(run)
    if history.locked and freed:
        yield freed, f"The key of {key} comes free, {freed - run.end:.1f} s later."
    successor, again = lane.after(run), _second_try(run, lane)
    if successor and successor is not again:
        yield successor.start, f"The next {key} runs, on worker {successor.worker}."
    if again:
        yield again.start, f"The killed {key} runs again: acks_late kept its message."


def _second_try(run: Run, lane: Lane) -> Run | None:
    return next((other for other in lane.runs if other.task_id == run.task_id and other.start > run.end), None)
