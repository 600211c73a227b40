"""What the tables of a run take and how they are used: touched rows, bytes by tier, hits of caches, rungs."""
