"""Single values: cells as they are written, times, numbers, and ids with their vocabularies."""
