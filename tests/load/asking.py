"""A crowd that waits for one lock in a few round trips: the command of one of them, sent for each."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import Waiter

SCRATCH, TOKEN = "singleton:v3:{example:00}", "the-one-that-was-heard"


def ask_at_once(client: Any, claims: list[Claim]) -> None:
    pipeline = client.pipeline(transaction=False)
    for command in _asked(client, claims):
        pipeline.execute_command(*command)
    pipeline.execute()


def _asked(client: Any, claims: list[Claim]) -> Iterator[list[str]]:
    """The commands by which they ask; the server knows the script by now."""
    example = replace(claims[0], key=SCRATCH, token=TOKEN, task_id=f"id-of-{TOKEN}")
    store = Store(f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0", {})
    # The first of a new connection may send the script as well.
    store.acquire(replace(example, token="holder"))
    with client.monitor() as monitor:
        with Waiter(store, example) as waiter:
            waiter.ask()
        line = ""
        while f'"{TOKEN}"' not in line or '"EVALSHA"' not in line:
            line = str(monitor.connection.read_response())
    client.delete(SCRATCH)
    store.close()
    # Nothing in it is escaped.
    command = re.findall(r'"([^"]*)"', line)
    for claim in claims:
        yield [part.replace(SCRATCH, claim.key).replace(TOKEN, claim.token) for part in command]
