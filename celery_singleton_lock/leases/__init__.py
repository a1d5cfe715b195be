"""Leases and the heartbeat; they know stores of locks, and no tasks of Celery."""
