"""Trainer, metrics, losses, checkpoints and reports."""
