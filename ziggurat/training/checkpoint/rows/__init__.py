"""Rows of tables on a disk in checkpoints: those that were changed, in files that later checkpoints share."""
