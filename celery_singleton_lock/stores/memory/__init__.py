"""Locks in the memory of one process."""
