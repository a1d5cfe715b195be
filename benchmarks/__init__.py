"""The costs of the library, beside its peers: `python -m benchmarks.locks`."""
