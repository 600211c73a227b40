"""Encoded data on disk, and how it is read: shuffled streams, batches, the ledger of trained rows."""
