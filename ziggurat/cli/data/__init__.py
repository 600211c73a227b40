"""Verbs about data: look at files, bring them into shape, fetch, prepare."""
