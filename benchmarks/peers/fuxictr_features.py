"""The workload's features in FuxiCTR's own words, for every FuxiCTR contestant."""

from __future__ import annotations

import tempfile
from collections import OrderedDict

from benchmarks.workload import Workload


def fuxictr_features(workload: Workload) -> object:
    """A `FeatureMap` of numbers n0, n1 … and ids c0, c1 …, and the label "click"."""
    from fuxictr.features import FeatureMap

    features = FeatureMap("benchmark", tempfile.mkdtemp())
    numbers = {f"n{index}": {"source": "", "type": "numeric"} for index in range(workload.num_dense)}
    categories = {
        f"c{index}": {"source": "", "type": "categorical", "padding_idx": 0, "vocab_size": workload.num_rows}
        for index in range(len(workload.lengths))
    }
    features.features = OrderedDict({**numbers, **categories})
    features.labels = ["click"]
    features.default_emb_dim = workload.dim
    features.num_fields = features.get_num_fields()
    features.set_column_index()
    return features
