"""Balance: what a sample costs, which rank gets it, and how many samples fill a budget of tokens."""
