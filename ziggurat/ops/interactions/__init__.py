"""Interactions of the fields of a sample: dot products, cross layers, linear combinations, maps by field, norms."""
