"""Exchanges between ranks: collectives, wire formats, blocks of vectors, and what is counted and measured of them."""
