"""The time of one training step of a plan on a cluster, as a timeline."""
