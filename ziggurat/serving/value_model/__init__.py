"""The value model: a formula over the scores of the tasks, checked and computed as data."""
