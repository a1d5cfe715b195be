"""A message becomes a run. `docs/glossary.md` explains the words: mark, marker, place, turn, rank, copy, joiner."""
