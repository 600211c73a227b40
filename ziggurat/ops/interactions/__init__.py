"""Interactions of the fields of a sample: dot products, linear combinations, maps for each field, norms of products."""
