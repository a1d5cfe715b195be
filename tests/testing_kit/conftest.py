"""Runs the shop's own tests in a pytest of their own, as users do."""

collect_ignore = ["shop"]
