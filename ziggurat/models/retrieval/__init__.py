"""Models that give users and items a vector each, so that the best of all items can be found by inner products."""
