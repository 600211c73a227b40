"""Tables spread over ranks: who holds which shard, how ids and vectors travel, and how shards are updated."""
