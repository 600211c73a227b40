"""Pooling: how the embeddings of a list become one vector."""

from __future__ import annotations

from enum import StrEnum


class Pooling(StrEnum):
    """Ways to pool the embeddings of a list into one."""

    SUM = "sum"
    MEAN = "mean"
    NONE = "none"  # not at all: a model that reads sequences gets one vector for each row
