"""The contestants that are not ours; each module is a worker process (`python -m benchmarks.peers.NAME`)."""
