"""Ziggurat inside other frameworks. Each bridge is optional, and nothing else of the package imports it."""
