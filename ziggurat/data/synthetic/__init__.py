"""A synthetic data set whose best possible metrics are known."""
