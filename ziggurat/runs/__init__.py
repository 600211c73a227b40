"""One run, on one rank or many: execute, load, verify, plan, probe."""
