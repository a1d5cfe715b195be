"""The commands of operators: `celery -A proj singleton`."""
