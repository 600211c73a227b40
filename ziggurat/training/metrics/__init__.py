"""Metrics: what is computed of scores and labels, by group too, exactly and over all ranks."""
