"""Debian's chromium, driven through a pair of pipes by the protocol that its own tools speak: no driver, no port."""

import fcntl
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.waiting import until

USUAL = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
)
BOUND = 120


class Browser:
    def __init__(self, send: int, hear: int) -> None:
        self._send, self._hear = send, hear
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def look_like(self, *, colour: str, width: int, height: int) -> None:
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colour}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.ask("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)
        until(lambda: self.told("document.readyState") == "complete", "the page is there", timeout=BOUND)

    def told(self, expression: str) -> Any:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        question = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._send, json.dumps(question).encode() + b"\0")
        deadline = time.monotonic() + BOUND
        while (said := self._next(deadline)).get("id") != self._number:
            pass
        assert "error" not in said, said
        return said["result"]

    def _next(self, deadline: float) -> Any:
        while b"\0" not in self._rest:
            assert select.select([self._hear], [], [], max(0.0, deadline - time.monotonic()))[0], (
                "the browser is silent"
            )
            piece = os.read(self._hear, 65536)
            assert piece, "the browser has ended"
            self._rest += piece
        said, _, self._rest = self._rest.partition(b"\0")
        return json.loads(said)


@contextmanager
def browsing(chromium: str, folder: Path) -> Iterator[Browser]:
    pipes = [*os.pipe(), *os.pipe()]
    # Out of the way of 3 and 4, by which a browser hears and speaks.
    hears, send, hear, speaks = ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipes]
    for end in pipes:
        os.close(end)
    arguments = [*USUAL, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" 3<&{hears} 4>&{speaks}', chromium, *arguments],
        pass_fds=(hears, speaks),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield Browser(send, hear)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(BOUND)
        for end in ends:
            os.close(end)
