"""Benchmarks: one script a claim, each a ratio against a peer measured in the same interleaved run (README.md)."""
