"""Logged scores of teachers beside the rows of a data set: the side table, and the join with raw rows."""
