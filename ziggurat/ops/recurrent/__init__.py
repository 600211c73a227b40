"""Recurrences over jagged sequences."""
