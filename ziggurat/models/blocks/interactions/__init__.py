"""Interactions: the parts that let fields act on each other, one idea a file, shared by models and tower modules."""
