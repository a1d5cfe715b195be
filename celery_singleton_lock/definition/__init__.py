"""What a task is: its options, its keys, and the store of its locks."""
