"""For whoever operates it: `celery -A proj singleton`."""
