"""A process with many threads that wait for one lock, and give it back as soon as they have it."""

import sys
import threading

from celery_singleton_lock import Lock, SingletonLockError

_PATIENCE = 240


def main(url: str, number: int) -> None:
    lock = Lock("crowd", url=url)

    def waits() -> None:
        try:
            lease = lock.acquire(timeout=_PATIENCE)
            if lease is not None:
                lease.release()
            say("too late" if lease is None else "served")
        except SingletonLockError as error:
            say(type(error).__name__)

    # The default of 8 MB each is more than some machines give to one process.
    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=waits) for _ in range(number)]
    for thread in threads:
        thread.start()
    say("all wait")
    for thread in threads:
        thread.join()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
