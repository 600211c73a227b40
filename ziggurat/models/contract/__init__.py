"""The contract of a model: what every model gives, the base of the built-in ones, and losses."""
