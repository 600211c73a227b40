"""Ziggurat: topology-aware recommendation models in PyTorch."""

__version__ = "0.1.0"
