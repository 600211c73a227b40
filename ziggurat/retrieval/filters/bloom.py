"""Bloom planes: which items may have a value, from a few bits an item, whatever the number of values.

A value sets k of the b bits of each item that has it. An item may have the value only if all k bits are set, so k
planes (one bit of all items) are read, 64 items a word, and no item that has the value is missed. Others pass by
chance. The k bits of a value are a subset of b drawn by a hash, without repetition; an item with t values has the union
of t such subsets, and by inclusion and exclusion the probability that it covers the k bits of a value that it lacks is

    p(t) = Σ_j (−1)^j C(k, j) · [C(b − j, k) / C(b, k)]^t            p(1) = 1 / C(b, k)

averaged over the items of the attribute. `width_for` takes the smallest b that keeps the average below a target.

Sources: Bloom, "Space/time trade-offs in hash coding with allowable errors", CACM 1970; planes that are read by word as
in the index of SilverTorch (arXiv:2511.14881, section 4), here for each attribute, with survivors verified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt64

from ziggurat.data.mixing import splitmix64

MAX_PLANES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FalsePositives:
    """The rate at which the Bloom planes of an attribute give "perhaps" for an item that does not have the value.

    Args:
        attribute: its name.
        planes: bits an item.
        hashes: bits a value.
        predicted: by the formula, from the number of values that items have.
        measured: over `probes` values and all items that do not have them.
        probes: the number of values that were tried.
    """

    attribute: str
    planes: int
    hashes: int
    predicted: float
    measured: float
    probes: int


def predicted_rate(lengths: Int64[np.ndarray, "T"], *, width: int, hashes: int) -> float:
    """The expected share of items that pass by chance.

    Args:
        lengths: how many items have 0, 1, 2, … values in the planes.
        width: planes.
        hashes: planes of a value.
    """
    passing = np.zeros(len(lengths))
    for j in range(hashes + 1):
        # Inclusion and exclusion over j planes that no value of the item sets: one value misses them so often.
        avoids = math.comb(width - j, hashes) / math.comb(width, hashes)
        passing += (-1) ** j * math.comb(hashes, j) * avoids ** np.arange(len(lengths))
    return float((passing.clip(0, 1) * lengths).sum() / max(lengths.sum(), 1))


def width_for(lengths: Int64[np.ndarray, "T"], *, hashes: int, rate: float) -> int:
    """The number of planes that keeps the expected rate below `rate`, if `MAX_PLANES` do."""
    low = hashes
    high = MAX_PLANES
    while low < high:
        middle = (low + high) // 2
        if predicted_rate(lengths, width=middle, hashes=hashes) <= rate:
            high = middle
        else:
            low = middle + 1
    return low


def planes_of(codes: Int64[np.ndarray, "V"], *, width: int, hashes: int) -> Int64[np.ndarray, "V K"]:
    """The planes of each value, counted from the attribute's first: `hashes` different ones, by Floyd's algorithm.

    Args:
        codes: numbers of the values.
        width: planes of the attribute.
        hashes: planes of a value.
    """
    draws = _draws(codes, hashes)
    chosen = np.empty((len(codes), hashes), dtype=np.int64)
    for number in range(hashes):
        last = width - hashes + number
        drawn = (draws[:, number] % np.uint64(last + 1)).astype(np.int64)
        is_taken = (chosen[:, :number] == drawn[:, None]).any(axis=1)
        chosen[:, number] = np.where(is_taken, last, drawn)
    return chosen


def planes_of_one(code: int, *, width: int, hashes: int) -> list[int]:
    """Return what `planes_of` gives for one value, several times faster."""
    chosen: list[int] = []
    for last, draw in enumerate(_draws(np.array([code]), hashes)[0].tolist(), start=width - hashes):
        drawn = draw % (last + 1)
        chosen.append(last if drawn in chosen else drawn)
    return chosen


def _draws(codes: Int64[np.ndarray, "V"], hashes: int) -> UInt64[np.ndarray, "V K"]:
    # Every draw of every value has a number of its own.
    numbers = (codes[:, None] * hashes + np.arange(hashes)).reshape(-1)
    return splitmix64(numbers).reshape(-1, hashes)
