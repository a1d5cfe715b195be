"""A real master and its replicas on the loopback, without anybody who watches them."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.servers import Server, running
from tests.waiting import until


@contextmanager
def replicated(kind: str, number: int, *arguments: str) -> Iterator[tuple[Server, list[Server]]]:
    """A master that is started with *arguments*, and so many replicas that are up to date."""
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
    """Wait until so many replicas have everything that was written until now.

    WAIT on a connection without a write of its own waits for nothing.
    """
    with master.client() as client:
        written = client.info("replication")["master_repl_offset"]

        def have_it() -> bool:
            told = client.info("replication")
            replicas = [told[f"slave{place}"] for place in range(told["connected_slaves"])]
            return sum(replica["offset"] >= written for replica in replicas) == number

        until(have_it, f"{number} replicas have it")


def halt(server: Server) -> None:
    """From now on the replica acknowledges nothing, and loses nothing."""
    os.kill(server.pid, signal.SIGSTOP)


def go_on(server: Server) -> None:
    os.kill(server.pid, signal.SIGCONT)
