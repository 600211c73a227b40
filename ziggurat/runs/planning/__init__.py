"""Planning of a run: what a planner must know of it, the plan, its growth, towers and the probe."""
