"""Evaluation: one pass over a data set, a look at it beforehand, and ranking of all items."""
