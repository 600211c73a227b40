"""Attacks: damage and nonsense, tried in bounded time and counted."""
