"""Streams: raw rows cut into windows of time, as they arrive, each of which is read once."""
