"""What runs on event logs do with logs of other events."""
