"""Verbs from a run to answers: export, recommend, search, serve."""
