"""What was found once and has no test of its own, as the programs that showed it: they are played before any others."""

FOUND = {
    "a retry is taken for a new call": (
        '{"stage": {}, "tasks": [{"mode": "until_and_while_executing"}], "calls": [{"retries": "countdown"}, '
        '{"number": 1, "at": 0.5, "timing": "eta"}]}'
    ),
    "a duplicate is sent during a retry": (
        '{"stage": {}, "tasks": [{"mode": "until_executed"}], "calls": [{"retries": "countdown"}, {"number": 1, "at": '
        "0.6}]}"
    ),
    "a tracked copy of a failed run runs again": (
        '{"stage": {"track": true, "redelivers": true}, "tasks": [{"late": true}], "calls": [{"seconds": 4.5, '
        '"ending": "raise"}]}'
    ),
    "a copy runs again where the result was forgotten": (
        '{"stage": {"results": "forgotten", "redelivers": true}, "tasks": [{"late": true}], "calls": [{"seconds": '
        "4.5}]}"
    ),
    "an older call replaces a newer one": (
        '{"stage": {}, "tasks": [{"policy": "replace"}], "calls": [{"timing": "countdown"}, {"number": 1, "at": 0.2, '
        '"seconds": 4}]}'
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
    "a call that is requeued has a key of its own": (
        '{"stage": {}, "tasks": [{"policy": "reschedule", "keys": "by code"}], "calls": [{"seconds": 4}, {"number": '
        '1, "at": 0.4, "seconds": 1.2}]}'
    ),
    "a holder is cancelled for a successor that runs already": (
        '{"stage": {}, "tasks": [{"policy": "replace", "limit": 2}], "calls": [{"seconds": 2.5}, {"number": 1, "at": '
        '0.1, "place": "chord body"}, {"number": 2, "at": 0.1, "seconds": 0.5}]}'
    ),
    "what replaces a run passes for the newest call": (
        '{"stage": {}, "tasks": [{"policy": "replace"}], "calls": [{"seconds": 0.8, "retries": "replace"}, {"number": '
        '1, "at": 0.5, "seconds": 0.5}, {"number": 2, "at": 0.6, "seconds": 0.5}]}'
    ),
    "a successor that has waited for lock_wait_timeout asks again without a pause": (
        '{"stage": {}, "tasks": [{"policy": "rerun", "wait_timeout": 3}], "calls": [{"seconds": 4.5}, {"number": 1, '
        '"at": 0.4}]}'
    ),
    "a parked copy of a successor is called again and again": (
        '{"stage": {"redelivers": true}, "tasks": [{"mode": "until_and_while_executing", "policy": "rerun", "late": '
        'true}], "calls": [{"seconds": 4.5}, {"number": 1, "at": 0.4, "seconds": 4.5}]}'
    ),
    "a retry that counts as queued and a message that waits for it wait for each other": (
        '{"stage": {"results": "forgotten", "redelivers": true}, "tasks": [{"mode": "until_executed", "policy'
        '": "reschedule", "ignore": true, "min_hold": 2, "autoretry": true, "keys": "by code"}], "calls": [{"'
        'seconds": 2.5}, {"number": 1, "at": 0.9, "seconds": 0.5}, {"number": 2, "at": 1.3, "seconds": 4.5, "'
        'retries": "countdown", "ending": "kill", "place": "chord header", "timing": "countdown"}]}'
    ),
}
