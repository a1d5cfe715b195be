"""A small shop whose tasks must not run twice at once."""
