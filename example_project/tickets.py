"""Ten tickets, fifty buyers, one at a time at the counter: `python -m example_project.tickets`.

Each buyer looks how many are left, thinks for a moment, and takes one. Without
the lock all look at once, and more tickets are sold than there are.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console

from celery_singleton_lock import Lock
from example_project.demo import server

TICKETS = 10
BUYERS = 50
_THOUGHT = 0.005


class Counter:
    """Where the tickets are, and who took one."""

    def __init__(self) -> None:
        self.left = TICKETS
        self.sold: list[int] = []

    def buy(self, buyer: int) -> None:
        left = self.left
        if left > 0:
            time.sleep(_THOUGHT)
            self.left = left - 1
            self.sold.append(buyer)


def sell(guard: Callable[[], AbstractContextManager[object]]) -> int:
    """How many tickets are sold when all buyers come at once, each with a guard."""
    counter = Counter()

    def come(buyer: int) -> None:
        with guard():
            counter.buy(buyer)

    buyers = [threading.Thread(target=come, args=(number,)) for number in range(BUYERS)]
    for buyer in buyers:
        buyer.start()
    for buyer in buyers:
        buyer.join()
    return len(counter.sold)


def main() -> int:
    console = Console()
    with server() as url:
        locked = sell(lambda: Lock("tickets", url=url))
    unlocked = sell(nullcontext)
    console.print(f"{BUYERS} buyers, {TICKETS} tickets. With the lock: {locked} sold. Without it: {unlocked} sold.")
    return 0 if locked == TICKETS else 1


if __name__ == "__main__":
    sys.exit(main())
