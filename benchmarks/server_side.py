"""Figures that only the server knows: commands received, bytes kept, and how long a script blocked it."""

import ast
import re
from collections.abc import Callable

from redis import Redis

from benchmarks.candidates import Candidate, client_of

# Commands inside a script are quicker than that, so none of them is logged at the script's expense.
_SCRIPTS_ONLY = 20
_AT_MOST = 1000
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def commands(url: str, action: Callable[[], object]) -> int:
    """How many commands clients send in one *action*; those a script runs are not theirs."""
    action()
    return len(sent(url, action))


def sent(url: str, action: Callable[[], object]) -> list[list[str]]:
    """The commands of clients to that database in one *action*; brokers and workers never rest in theirs."""
    client, observer = client_of(url), client_of(url)
    from_a_client = re.compile(rf"\S+ \[{client.connection_pool.connection_kwargs['db']} (?!lua\])")
    client.ping()
    found: list[list[str]] = []
    with observer.monitor() as monitor:
        action()
        client.echo("over")
        while (command := _words(line := str(monitor.connection.read_response()))) != ["ECHO", "over"]:
            # Every five seconds a process sends its counts, whatever else it does.
            if from_a_client.match(line) and not (len(command) > 1 and command[1].endswith(":stats")):
                found.append(command)
    return found


def _words(line: str) -> list[str]:
    """The words of a command in a line of MONITOR, which has the time, the origin, and each word in quotes."""
    return [ast.literal_eval(word) for word in _QUOTED.findall(line)]


def round_trips(url: str, action: Callable[[], object]) -> int:
    """How often clients send something and wait, in one *action*; commands that are sent in one go count once."""
    client = client_of(url)
    action()

    def reads() -> int:
        before = client.info("stats")["total_reads_processed"]
        action()
        # The second question has been read when it is answered, and so has the first.
        return int(client.info("stats")["total_reads_processed"] - before - 1)

    # Every five seconds a process sends its counts, so one of three reads may see more.
    return min(reads() for _ in range(3))


def memory(url: str, candidate: Candidate, name: str) -> int:
    """Bytes of one held lock, key and facts included."""
    lock = candidate.lock(name)
    lock.acquire()
    try:
        return int(client_of(url).memory_usage(candidate.stored_as(name), samples=0))
    finally:
        lock.release()


def memory_of_all(url: str) -> int:
    """Bytes of all keys of that database, but for what all processes have counted, which is no task's."""
    client = client_of(url)
    keys = [key for key in client.scan_iter() if not key.endswith(":stats")]
    return sum(int(client.memory_usage(key, samples=0) or 0) for key in keys)


def longest_scripts(url: str, action: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of the longest script in each of so many *action*s; 0 where all were too short to tell."""
    client = client_of(url)
    settings = client.config_get("slowlog-*")
    client.config_set("slowlog-log-slower-than", _SCRIPTS_ONLY)
    client.config_set("slowlog-max-len", _AT_MOST)
    try:
        return [_longest_script(client, action) for _ in range(times)]
    finally:
        for name, value in settings.items():
            client.config_set(name, value)


def _longest_script(client: Redis, action: Callable[[], object]) -> float:
    client.slowlog_reset()
    action()
    scripts = [entry for entry in client.slowlog_get(_AT_MOST) if entry["command"].startswith(b"EVALSHA")]
    return max((entry["duration"] / 1000 for entry in scripts), default=0.0)


def busy_turn(url: str, action: Callable[[], object], times: int) -> float | None:
    """Milliseconds for which nobody else is served during *action*, on average; None where the server does not say.

    A server runs all that it has read from one client before it turns to the
    next, so scripts sent in one go block it for longer than each of them does.
    """
    client = client_of(url)
    before = client.info("stats")
    for _ in range(times):
        action()
    after = client.info("stats")
    if "eventloop_cycles" not in after:
        return None
    turns, busy = (after[name] - before[name] for name in ("eventloop_cycles", "eventloop_duration_cmd_sum"))
    return float(busy / turns / 1000)
