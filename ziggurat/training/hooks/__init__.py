"""Hooks: what takes part in training at fixed moments; ours, and those of a user."""
