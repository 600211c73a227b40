"""Retrieval: which items pass a filter, and which of those have the largest inner products with a query."""
