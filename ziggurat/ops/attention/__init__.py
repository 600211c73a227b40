"""Attention over jagged sequences of events: what it is (`problem`), its definition (`reference`), its kernels."""
