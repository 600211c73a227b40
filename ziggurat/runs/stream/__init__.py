"""Streams: test, then train, window after window of rows in order of time."""
