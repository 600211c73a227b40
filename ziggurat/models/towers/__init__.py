"""Towers on one device: the layer that groups features, and the modules that make them smaller."""
