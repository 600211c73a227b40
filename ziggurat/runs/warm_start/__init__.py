"""Begin a run from the weights of another one; `take.py` says how."""
