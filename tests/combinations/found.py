"""What was found once, as the programs that showed it: they are played before any others."""

FOUND = {
    "a skipped call leaves its mark": (
        '{"stage": {}, "tasks": [{"mode": "until_and_while_executing"}], "calls": [{"seconds": 1.2}, {"number": 1, '
        '"at": 0.4}]}'
    ),
    "a copy replaces its own run": (
        '{"stage": {"redelivers": true}, "tasks": [{"policy": "replace", "late": true}], "calls": [{"seconds": 4.5}]}'
    ),
    "a copy becomes its own successor": (
        '{"stage": {"redelivers": true}, "tasks": [{"policy": "rerun", "late": true}], "calls": [{"seconds": 4.5}, '
        '{"number": 1, "at": 6.0, "seconds": 0.5}]}'
    ),
    "a copy takes the second place": (
        '{"stage": {"redelivers": true}, "tasks": [{"policy": "reschedule", "limit": 2, "late": true}], "calls": '
        '[{"seconds": 4.5}]}'
    ),
    "a run waits in the only slot for who is queued": (
        '{"stage": {"pool": "solo"}, "tasks": [{"mode": "until_executed", "policy": "wait"}], "calls": [{"seconds": '
        '0.5, "timing": "countdown", "route": "send_task"}, {"number": 1, "at": 0.1, "seconds": 0.5, "timing": '
        '"eta"}]}'
    ),
    "a retry with other arguments runs under the old key": (
        '{"stage": {}, "tasks": [{"mode": "until_and_while_executing", "policy": "reschedule"}], "calls": '
        '[{"seconds": 1.2, "retries": "other arguments"}, {"number": 1, "at": 1.6, "seconds": 1.2, "other": true}]}'
    ),
    "a retry is taken for a new call": (
        '{"stage": {}, "tasks": [{"mode": "until_and_while_executing"}], "calls": [{"retries": "countdown"}, '
        '{"number": 1, "at": 0.5, "timing": "eta"}]}'
    ),
    "a duplicate is sent during a retry": (
        '{"stage": {}, "tasks": [{"mode": "until_executed"}], "calls": [{"retries": "countdown"}, {"number": 1, "at": '
        "0.6}]}"
    ),
    "a retry replaces a newer call": (
        '{"stage": {}, "tasks": [{"policy": "replace"}], "calls": [{"retries": "countdown"}, {"number": 1, "at": 0.9, '
        '"seconds": 4}]}'
    ),
    "two calls replace each other": (
        '{"stage": {}, "tasks": [{"policy": "replace", "autoretry": true}], "calls": [{"seconds": 2.5}, {"number": 1, '
        '"at": 0.4, "seconds": 2.5}]}'
    ),
    "a successor gives up": (
        '{"stage": {}, "tasks": [{"policy": "rerun", "wait_timeout": 3}], "calls": [{"seconds": 6}, {"number": 1, '
        '"at": 0.4}, {"number": 2, "at": 1.6}]}'
    ),
    "a group after a skipped call hangs": (
        '{"stage": {}, "tasks": [{}], "calls": [{"seconds": 1.2}, {"number": 1, "at": 0.4, "place": "before a group"}]}'
    ),
    "a chain after a skipped call that ignores its result hangs": (
        '{"stage": {}, "tasks": [{"ignore": true}], "calls": [{"seconds": 1.2}, {"number": 1, "at": 0.4, "place": '
        '"first of a chain"}]}'
    ),
    "a pickled call cannot come again": (
        '{"stage": {}, "tasks": [{"policy": "reschedule"}], "calls": [{"seconds": 1.2}, {"number": 1, "at": 0.4, '
        '"serializer": "pickle"}]}'
    ),
    "a deploy that changes the limit fails calls": (
        '{"stage": {}, "tasks": [{"policy": "reschedule"}, {"policy": "reschedule", "limit": 2}], "calls": '
        '[{"seconds": 1.2}, {"task": 1, "number": 1, "at": 0.4}]}'
    ),
    "delayed delivery wants whole seconds": (
        '{"stage": {"broker": "quorum"}, "tasks": [{"policy": "reschedule"}], "calls": [{"seconds": 1.2}, {"number": '
        '1, "at": 0.4}]}'
    ),
    "a tracked copy of a failed run runs again": (
        '{"stage": {"track": true, "redelivers": true}, "tasks": [{"late": true}], "calls": [{"seconds": 4.5, '
        '"ending": "raise"}]}'
    ),
    "a copy runs again where the result was forgotten": (
        '{"stage": {"results": "forgotten", "redelivers": true}, "tasks": [{"late": true}], "calls": [{"seconds": '
        "4.5}]}"
    ),
    "chunks take no lock": ('{"stage": {}, "tasks": [{}], "calls": [{"seconds": 0.5, "place": "chunks"}]}'),
    "the newest call is lost with the process that runs it": (
        '{"stage": {}, "tasks": [{"policy": "rerun", "late": true}], "calls": [{"seconds": 1.2}, {"number": 1, "at": '
        '0.4, "seconds": 0.5}, {"number": 2, "at": 0.9, "seconds": 0.5, "ending": "kill"}]}'
    ),
    "an older call replaces a newer one": (
        '{"stage": {}, "tasks": [{"policy": "replace"}], "calls": [{"timing": "countdown"}, {"number": 1, "at": 0.2, '
        '"seconds": 4}]}'
    ),
    "a pickled call cannot be the next run": (
        '{"stage": {}, "tasks": [{"policy": "rerun"}], "calls": [{"seconds": 2.5, "serializer": "pickle"}, {"number": '
        '1, "at": 0.4, "serializer": "pickle"}, {"number": 2, "at": 0.9, "serializer": "pickle"}]}'
    ),
    "a copy of a message without notes runs again": (
        '{"stage": {"redelivers": true}, "tasks": [{"late": true}], "calls": [{"seconds": 4.5, "route": "send_task"}]}'
    ),
    "a rerun that was overtaken by a replace never comes": (
        '{"stage": {}, "tasks": [{"policy": "replace"}, {"policy": "rerun"}], "calls": [{"seconds": 2.5}, {"task": 1, '
        '"number": 1, "at": 0.4, "seconds": 0.5}, {"task": 1, "number": 2, "at": 0.7, "seconds": 0.5}, {"number": 3, '
        '"at": 0.9, "seconds": 0.5}]}'
    ),
    "a copy asks for results where there are none": (
        '{"stage": {"results": "none", "track": true}, "tasks": [{"late": true}], "calls": [{"timing": "eta"}]}'
    ),
    "a replacement waits in vain for the limit of its task": (
        '{"stage": {"results": "none"}, "tasks": [{"autoretry": true}], "calls": [{"retries": "replace", "ending": '
        '"soft limit"}]}'
    ),
    "who joins a run that leaves no result in a later attempt waits for one": (
        '{"stage": {}, "tasks": [{"policy": "join"}], "calls": [{"seconds": 1.2, "retries": "countdown", "ending": '
        '"ignore"}, {"number": 1, "at": 2.6}]}'
    ),
    "an item of a map keeps its lease where it asks for a retry": (
        '{"stage": {}, "tasks": [{}], "calls": [{"place": "starmap", "retries": "countdown"}]}'
    ),
    "a call that comes again has a key of its own": (
        '{"stage": {}, "tasks": [{"policy": "reschedule", "keys": "by code"}], "calls": [{"seconds": 4}, {"number": '
        '1, "at": 0.4, "seconds": 1.2}]}'
    ),
    "a holder is cancelled for a successor that runs already": (
        '{"stage": {}, "tasks": [{"policy": "replace", "limit": 2}], "calls": [{"seconds": 2.5}, {"number": 1, "at": '
        '0.1, "place": "chord body"}, {"number": 2, "at": 0.1, "seconds": 0.5}]}'
    ),
    "a revoked call keeps another one out": (
        '{"stage": {}, "tasks": [{"mode": "until_executed"}], "calls": [{"ending": "revoke", "timing": "eta"}, '
        '{"number": 1, "at": 1.7}]}'
    ),
    "what replaces a run passes for the newest call": (
        '{"stage": {}, "tasks": [{"policy": "replace"}], "calls": [{"seconds": 0.8, "retries": "replace"}, {"number": '
        '1, "at": 0.5, "seconds": 0.5}, {"number": 2, "at": 0.6, "seconds": 0.5}]}'
    ),
}
