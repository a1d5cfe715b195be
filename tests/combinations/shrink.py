"""A program that fails is made simpler, as long as it fails in the same way."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tests.combinations.factors import STAGE, why_not
from tests.combinations.program import Call, Program, bare_task

# Which of the programs fail like the one that is shrunk.
Fails = Callable[[Sequence[Program]], list[bool]]
ROUNDS = 5
# Tried in a round, all of them at the same time.
MOST_TRIED = 24

_LEFT_ALONE = ("number", "at", "task")


def shrink(program: Program, fails: Fails, rounds: int = ROUNDS) -> Program:
    """The simplest that was found in so many rounds. *fails* is asked about many programs at a time."""
    for _ in range(rounds):
        tried = list(dict.fromkeys(simpler(program)))[:MOST_TRIED]
        failing = [some for some, failed in zip(tried, fails(tried), strict=True) if failed] if tried else []
        if not failing:
            return program
        # What does no harm alone does mostly none together.
        merged = _merged(program, failing)
        both = [merged] if merged not in failing and fails([merged])[0] else []
        program = min([*both, *failing], key=size)
    return program


def size(program: Program) -> tuple[int, int]:
    """How much there is to read."""
    return len(program.calls), len(program.line())


def simpler(program: Program) -> Iterator[Program]:
    """Programs with a call less, a task less, or one thing plainer."""
    for index in range(len(program.calls)):
        if len(program.calls) > 1:
            yield replaced(program, calls=program.calls[:index] + program.calls[index + 1 :])
    if len(program.tasks) > 1:
        for task in program.tasks:
            calls = tuple(dataclasses.replace(call, task=0) for call in program.calls)
            yield replaced(program, tasks=(task,), calls=calls)
    bare = bare_task()
    for name, value in bare.items():
        plainer = tuple({**task, name: value} for task in program.tasks)
        # All tasks of a program have the same mode, and so on: they share its keys.
        if plainer != program.tasks:
            yield replaced(program, tasks=plainer)
    for index, call in enumerate(program.calls):
        for field in dataclasses.fields(Call):
            if field.name not in _LEFT_ALONE and getattr(call, field.name) != field.default:
                plain = dataclasses.replace(call, **{field.name: field.default})
                yield replaced(program, calls=(*program.calls[:index], plain, *program.calls[index + 1 :]))


def plainer_stages(program: Program) -> Iterator[Program]:
    """The same on stages that are plainer by one factor, or altogether."""
    plain = {name: values[0] for name, values in STAGE.items()}
    for stage in (plain, *({**program.stage, name: value} for name, value in plain.items())):
        rows = [{**stage, **task, **dataclasses.asdict(call)} for task in program.tasks for call in program.calls]
        if stage != program.stage and not any(why_not(row) for row in rows):
            yield dataclasses.replace(program, stage=stage)


def replaced(program: Program, calls: Sequence[Call] | None = None, tasks: Sequence[dict] | None = None) -> Program:
    """The program with other calls, numbered anew, or tasks."""
    calls = program.calls if calls is None else calls
    numbered = tuple(dataclasses.replace(call, number=number) for number, call in enumerate(calls))
    return dataclasses.replace(program, calls=numbered, tasks=program.tasks if tasks is None else tuple(tasks))


def _merged(program: Program, failing: Sequence[Program]) -> Program:
    """All that was made plainer at once, of the programs that have kept the number of calls and tasks."""
    calls, tasks = list(program.calls), list(program.tasks)
    for some in failing:
        if len(some.calls) != len(calls) or len(some.tasks) != len(tasks):
            continue
        for index, (before, after) in enumerate(zip(program.calls, some.calls, strict=True)):
            changed = {
                field.name: getattr(after, field.name)
                for field in dataclasses.fields(Call)
                if getattr(after, field.name) != getattr(before, field.name)
            }
            calls[index] = dataclasses.replace(calls[index], **changed)
        for index, (task_before, task_after) in enumerate(zip(program.tasks, some.tasks, strict=True)):
            tasks[index] = {
                name: value if value != task_before[name] else tasks[index][name] for name, value in task_after.items()
            }
    return replaced(program, calls, tasks)
