"""Leases and the heartbeat. They import the stores of locks, and nothing of Celery.

`docs/glossary.md` explains the words.
"""
