"""The shop's own tests are run as their users do: by a pytest of their own."""

collect_ignore = ["shop"]
