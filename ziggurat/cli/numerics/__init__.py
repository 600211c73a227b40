"""Verbs of number formats."""
