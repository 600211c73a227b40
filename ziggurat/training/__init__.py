"""Trainer, step, metrics, checkpoints and reports. Losses belong to models (`models/contract/losses.py`)."""
