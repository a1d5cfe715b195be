"""The definition of a task: its options, its keys, and the store of its locks."""
