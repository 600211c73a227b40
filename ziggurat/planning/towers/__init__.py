"""The tower partitioner: which features share a tower; from affinities and loads to `ziggurat.plan.Towers`."""
