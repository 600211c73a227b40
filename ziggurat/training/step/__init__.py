"""One training step: loss, guard, clip, update, rates and averages."""
