"""Complete runs as functions."""
