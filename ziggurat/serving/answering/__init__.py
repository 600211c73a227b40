"""From a request to scores: items, encoders, the ranker, and the chain of them."""
