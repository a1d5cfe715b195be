"""Celery's own integration tests, played with the lock and without it."""
