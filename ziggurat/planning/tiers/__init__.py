"""Tiers of embedding tables: how often rows are touched again, what a cache of them hits, and which rung each takes."""
