"""The states of a turn, read from the docstring of leases/line.py."""

import re
from collections import defaultdict

from celery_singleton_lock.leases import line

LEADS_TO = defaultdict[str, list[str]](list)
for state, becomes in re.findall(r"^    ([A-Z]+) +\S.*? {2,}([A-Z]+)\b", str(line.__doc__), re.MULTILINE):
    LEADS_TO[state].append(becomes)
