"""Reports: what a person reads before, during and after a run."""
