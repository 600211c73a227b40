"""The prioritised exchange: what the present step does not touch travels while it computes."""
