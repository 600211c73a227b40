"""Searches for plans: greedy rules, beam search, annealing, coordinate descent, and an exact one for small cases."""
