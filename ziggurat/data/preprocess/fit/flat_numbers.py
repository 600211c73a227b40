"""Numbers that tell a model nothing: the same in all rows, or so close together that 32 bits hardly tell them apart.

    unix seconds of an hour under log1p      21.2534…        between the least and the largest: 1 or 2 floats of 32 bits
    the same, standardised                   −1.7 … 1.7      in 64 bits, before they are rounded: 28 million

A model computes in FP32, so a transformed number comes to it in 32 bits. A transform that leaves a large mean in it
(`identity`, `log1p`) spends the digits on the mean: of numbers around 1e9 the multiples of 64 are left. Nothing fails
and nothing is learned, so it is said where the training rows are fitted.

Cost: one pass over the dense features of at most four row groups.
"""

from __future__ import annotations

import numpy as np

from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.preprocess.fit.leaks import sampled_rows
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.numeric import to_floats
from ziggurat.features.kinds import FittedNumbers

_FEW_STEPS = 4096  # between the least and the largest number; 12 bits of 24
_NUM_GROUPS = 4


def find_flat_numbers(train: EncodedDataset, preprocessing: Preprocessing) -> list[str]:
    """Return sentences on dense features that are constant, or that collapse in 32 bits; empty if all is well.

    Args:
        train: encoded training rows.
        preprocessing: what encoded them.
    """
    inputs = preprocessing.inputs
    features = [each.fitted_numbers for each in preprocessing.schema.features if each.name in inputs.dense]
    if not features or train.num_rows < 2:
        return []
    rows = sampled_rows(train, num_groups=_NUM_GROUPS)
    lines = [_line(each, rows[each.name].to_numpy(), preprocessing) for each in features if each is not None]
    return [line for line in lines if line]


def _line(feature: FittedNumbers, numbers: np.ndarray, preprocessing: Preprocessing) -> str:
    """Say what is wrong with the numbers of a feature; "" where nothing is."""
    in_place_of_missing = to_floats(np.array([np.nan]), feature, preprocessing.numbers[feature.name])[0]
    there = numbers[numbers != in_place_of_missing]
    there = there if len(there) else numbers
    least = there.min()
    largest = there.max()
    if least == largest and len(there) == len(numbers):
        return (
            f"feature {feature.name!r} is the same number in all {len(numbers):,} training rows looked at, after "
            f"transform = {feature.transform.value!r}: nothing can be learned from it{_way_out(feature)}"
        )
    steps = float(largest - least) / float(np.spacing(max(abs(least), abs(largest))))
    if feature.transform.standardised is None or steps >= _FEW_STEPS:
        return ""
    if least == largest and not _rounds_whole_numbers(feature, float(largest)):
        return ""  # one number or nothing: whether it is there may be what the feature says
    return (
        f"feature {feature.name!r} has {len(np.unique(there)):,} different numbers in {len(there):,} training rows, "
        f"all from {least:.8g} to {largest:.8g} after transform = {feature.transform.value!r}: 32 bits, in which a "
        f"model computes, hardly tell them apart{_way_out(feature)}"
    )


def _rounds_whole_numbers(feature: FittedNumbers, number: float) -> bool:
    """Return whether 32 bits after the transform do not tell a whole number of this size from the next one."""
    step = float(np.spacing(np.float32(abs(number))))
    return feature.transform.raw_step(number, step=step) >= 1.0


def _way_out(feature: FittedNumbers) -> str:
    better = feature.transform.standardised
    if better is None:
        return "; take it out of the schema"
    return f"; set transform = {better.value!r}, which is computed in 64 bits, or take a constant out of the schema"
