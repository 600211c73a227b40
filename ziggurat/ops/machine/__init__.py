"""The machine below: how much memory it has left, what it keeps of what is freed, how fast it multiplies and copies."""
