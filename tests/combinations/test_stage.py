"""What a worker says of its end tells Celery's own faults from others."""

import pytest

from tests.combinations.stage import is_half_a_message

_DIED = """[2026-11-22 22:21:08,083: CRITICAL/MainProcess] Unrecoverable error: {error}
Traceback (most recent call last):
  File "celery/worker/loops.py", line 130, in asynloop
    next(loop)
  File "{place}
"""
_IN_CELERY = 'celery/concurrency/asynpool.py", line 330, in _recv_message'


@pytest.mark.parametrize(
    "error", ["""UnpicklingError("invalid load key, '\\x00'.")""", """UnicodeDecodeError('utf-8', b'x\\n', 619)"""]
)
def test_a_main_process_that_has_read_half_a_message_is_celerys_own(error: str) -> None:
    assert is_half_a_message(_DIED.format(error=error, place=_IN_CELERY))


def test_every_other_end_of_a_worker_is_not() -> None:
    assert not is_half_a_message(_DIED.format(error="KeyError('lock')", place=_IN_CELERY))
    assert not is_half_a_message(_DIED.format(error="UnpicklingError()", place='x.py", line 1, in read'))
    assert not is_half_a_message("")
