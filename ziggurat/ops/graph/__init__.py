"""Graphs in CSR form: weighted sums over neighbours, averages over layers of them, and edges that are sampled."""
