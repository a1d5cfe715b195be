"""A message becomes a run."""
