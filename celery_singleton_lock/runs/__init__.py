"""A message becomes a run: its lease, its body, its end, and what happens if the lock is held."""
