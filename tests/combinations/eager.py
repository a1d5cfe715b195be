"""Programs without a worker: `apply()` in threads of a process of its own, which is killed if it does not end."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.combinations.app import OTHER, make_app, name_of
from tests.combinations.history import Answer
from tests.combinations.program import Program, read
from tests.combinations.stage import Stage
from tests.fire.record import now


def eagerly(stage: Stage, program: Program, key: str, bound: float) -> tuple[dict[int, Answer], list[str]]:
    """What each call ended with, and what should not have happened besides."""
    command = [sys.executable, "-m", "tests.combinations.eager", program.line(), key]
    process = subprocess.Popen(command, env={**os.environ, **stage.env}, stdout=subprocess.PIPE, text=True)
    try:
        told, _ = process.communicate(timeout=bound)
    except subprocess.TimeoutExpired:
        process.kill()
        told, _ = process.communicate()
    found = [Answer(**json.loads(line)) for line in told.splitlines() if line.startswith("{")]
    answers = {call.number: Answer(call.number, state="HUNG") for call in program.calls}
    answers |= {answer.call: answer for answer in found}
    with stage.servers.valkey.client(0) as client:
        published = client.llen(stage.queue)
        client.delete(stage.queue)
    return answers, [f"{published} messages were published by eager calls"] if published else []


def _main(line: str, key: str) -> None:
    program = read(line)
    app = make_app(json.loads(Path(os.environ["COMBINATIONS_SETTING"]).read_text(encoding="utf-8")))
    app.set_current()
    began = time.monotonic()

    def apply(call: Any) -> None:
        time.sleep(max(0.0, began + call.at - time.monotonic()))
        task, sent = app.tasks[name_of(program.tasks[call.task])], now()
        label = key + OTHER if call.other else key
        try:
            result = task.apply((label, call.number, call.script, *task.more))
            error = result.result if isinstance(result.result, BaseException) else None
            answer = Answer(call.number, result.id, sent, state=result.state)
        except Exception as raised:  # noqa: BLE001 (whatever it is, the checker judges it)
            error, answer = raised, Answer(call.number, sent=sent, state="UNSENT")
        if error is not None:
            answer = dataclasses.replace(answer, error=type(error).__name__, text=str(error))
        sys.stdout.write(json.dumps(dataclasses.asdict(answer)) + "\n")
        sys.stdout.flush()

    threads = [threading.Thread(target=apply, args=(call,)) for call in program.calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    _main(*sys.argv[1:])
