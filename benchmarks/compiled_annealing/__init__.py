"""Annealing as compiled code, for cost models that are small networks, as the published benchmark's is."""
