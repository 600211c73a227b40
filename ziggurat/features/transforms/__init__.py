"""Numeric transforms: what becomes of a number before it reaches a model. This is the one list of them.

    identity            x
    log1p               sign(x)·ln(1 + |x|)
    standardise         (x − mean) / sd                       after log1p for log1p_standardise
    quantile            rank in the training data, in [0, 1]  linear between 1,001 quantiles; ties get the middle rank
    quantile_buckets    row 3 + number of bucket edges <= x   edges at the i/num_buckets quantiles
    criteo_buckets      ⌊ln(x)²⌋ for x > 2, else x cut to an integer; an id like any other, with a vocabulary

A transform of your own derives from `NumericTransform` and is listed by `NumericTransform.add`
(docs/guides/extending.md).
"""

from __future__ import annotations

from ziggurat.features.transforms.criteo_buckets import CriteoBuckets
from ziggurat.features.transforms.log1p import Log1p, Log1pStandardise
from ziggurat.features.transforms.plain import Identity, Standardise
from ziggurat.features.transforms.quantile import Quantile
from ziggurat.features.transforms.quantile_buckets import QuantileBuckets
from ziggurat.features.transforms.transform import Learned, Learns, Logarithms, NumericTransform

NumericTransform.add(Identity())
NumericTransform.add(Log1p())
OF_LABELS = NumericTransform.add(Standardise())  # of labels that are numbers: networks compute in their deviations
USUAL = NumericTransform.add(Log1pStandardise())  # of a feature that names none
NumericTransform.add(Quantile())
NumericTransform.add(QuantileBuckets())
NumericTransform.add(CriteoBuckets())

__all__ = ["OF_LABELS", "USUAL", "Learned", "Learns", "Logarithms", "NumericTransform"]
