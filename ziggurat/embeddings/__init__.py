"""Embedding tables, their exact optimizers, and the choice of kernel."""
