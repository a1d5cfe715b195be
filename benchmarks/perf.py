"""Instructions, which repeat within a few percent where time does not: counted by Linux's `perf stat`, where it can."""

import os
import select
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

# Without the kernel's own, which an ordinary user may not count everywhere.
EVENT = "instructions:u"
_PATIENCE = 20


@cache
def problem(event: str = EVENT) -> str | None:
    """Why nothing can be counted here; None if it can."""
    command = ["perf", "stat", "--field-separator", ",", "--event", event, "true"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)  # noqa: S603
    except FileNotFoundError:
        return "perf is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"perf does not run: {error}"
    return None if _counted(found.stderr) else "this machine's processor, or its owner, does not let perf count"


class Counter:
    """Counts the event in some processes, and in what they start, from `begin` to `end`.

    Arguments:
        pids: The processes; they may be running.
        event: As `perf list` calls it.
    """

    def __init__(self, pids: Sequence[int], event: str = EVENT) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        command = ["perf", "stat", "--field-separator", ",", "--event", event, "--pid", ",".join(map(str, pids))]
        self._process = subprocess.Popen(  # noqa: S603 (of our own words)
            # Attached, but counting nothing until it is told to.
            [*command, "--delay", "-1", "--control", f"fd:{orders},{answers}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(orders, answers),
        )
        os.close(orders)
        os.close(answers)

    def begin(self) -> None:
        """Returns when it counts."""
        self._tell("enable")

    def end(self) -> float:
        """The number since `begin`; NaN without one."""
        self._tell("disable")
        # Otherwise perf waits for the processes to end.
        self._process.send_signal(signal.SIGINT)
        counted = None
        with suppress(subprocess.TimeoutExpired):
            counted = _counted(self._process.communicate(timeout=_PATIENCE)[1])
        return float("nan") if counted is None else counted

    def close(self) -> None:
        """Leave nothing behind."""
        self._process.kill()
        self._process.communicate()
        os.close(self._orders)
        os.close(self._answers)

    def _tell(self, order: str) -> None:
        """A perf that has ended says nothing, and its answer reads as empty."""
        with suppress(BrokenPipeError):
            os.write(self._orders, f"{order}\n".encode())
            if select.select([self._answers], [], [], _PATIENCE)[0]:
                os.read(self._answers, 16)


@contextmanager
def counters(*groups: Sequence[int], event: str = EVENT) -> Iterator[list[Counter]]:
    """One for each group of processes; none is left behind."""
    started = [Counter(group, event) for group in groups]
    try:
        for counter in started:
            counter.begin()
        yield started
    finally:
        for counter in started:
            counter.close()


def _counted(output: str) -> float | None:
    """The count of one event: `123456,,instructions:u,...`, or `<not supported>,,...`."""
    for line in output.splitlines():
        number = line.split(",")[0]
        if number.isdigit():
            return float(number)
    return None
