"""Serving: an exported folder answers requests, in Python, in bulk and over HTTP."""
