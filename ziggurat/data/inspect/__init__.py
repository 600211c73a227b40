"""Guesses a schema from a table, with a reason for each guess."""
