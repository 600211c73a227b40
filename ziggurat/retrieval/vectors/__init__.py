"""Vectors: k-means clusters of INT8 rows, searched with masks, as a module."""

from ziggurat.retrieval.vectors.best import recall_of
from ziggurat.retrieval.vectors.config import FirstPass, Kept, VectorIndexConfig
from ziggurat.retrieval.vectors.index import VectorIndex
from ziggurat.retrieval.vectors.row_block import RowBlock, search_blocks

__all__ = ["FirstPass", "Kept", "RowBlock", "VectorIndex", "VectorIndexConfig", "recall_of", "search_blocks"]
