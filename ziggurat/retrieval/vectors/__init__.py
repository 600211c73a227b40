"""Vectors: k-means clusters of INT8 rows, searched with masks, as a module."""

from ziggurat.retrieval.vectors.best import recall_of
from ziggurat.retrieval.vectors.index import Kept, VectorIndex, VectorIndexConfig
from ziggurat.retrieval.vectors.row_block import RowBlock

__all__ = ["Kept", "RowBlock", "VectorIndex", "VectorIndexConfig", "recall_of"]
