"""Ranking models, each written for one device."""
