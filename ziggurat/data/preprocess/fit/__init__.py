"""What the training rows teach: shards read into drafts, states that merge, units of work that outlive a kill."""
