"""Keys, leases and the heartbeat; knows stores of locks, does not know Celery."""
