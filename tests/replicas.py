"""A real master and its replicas on the loopback, without a Sentinel."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.servers import Server, running
from tests.waiting import until


@contextmanager
def replicated(kind: str, number: int, *arguments: str) -> Iterator[tuple[Server, list[Server]]]:
    """A master that is started with *arguments*, and *number* replicas that are up to date."""
    with ExitStack() as cleanup:
        master = cleanup.enter_context(running(kind, "--repl-diskless-sync-delay", "0", *arguments))
        follow = ("--replicaof", "127.0.0.1", str(master.port))
        replicas = [cleanup.enter_context(running(kind, *follow)) for _ in range(number)]
        cleanup.callback(lambda: [go_on(replica) for replica in replicas])
        for replica in replicas:
            with replica.client() as client:
                until(lambda client=client: client.info("replication")["master_link_status"] == "up", "it has all")
        yield master, replicas


def wait_until_replicated(master: Server, number: int) -> None:
    """Wait until *number* replicas have everything that was written until now.

    The command WAIT waits only for the writes of its own connection.
    """
    with master.client() as client:
        written = client.info("replication")["master_repl_offset"]

        def have_it() -> bool:
            told = client.info("replication")
            replicas = [told[f"slave{place}"] for place in range(told["connected_slaves"])]
            return sum(replica["offset"] >= written for replica in replicas) == number

        until(have_it, f"{number} replicas have it")


def halt(server: Server) -> None:
    """Stop a replica: it acknowledges nothing, and keeps its data."""
    os.kill(server.pid, signal.SIGSTOP)


def go_on(server: Server) -> None:
    os.kill(server.pid, signal.SIGCONT)
