"""Verbs about clusters: where tables lie, what a step costs there, which features form towers."""
