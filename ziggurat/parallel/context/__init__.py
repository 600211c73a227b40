"""Context parallelism: histories that are too long for one rank lie on several, and attention reaches across them."""
