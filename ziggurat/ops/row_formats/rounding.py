"""Rounding: how an update is rounded to what a row format can hold."""

from __future__ import annotations

from enum import StrEnum


class Rounding(StrEnum):
    """Ways to round an update to what a row format can hold."""

    # Up or down at random, right on average: many small updates add up. Not so, in a row of codes, for numbers within
    # one step of FP16 of an end of their row: they are cut off where the end is rounded inwards.
    STOCHASTIC = "stochastic"
    NEAREST = "nearest"  # updates below half a step of the format are lost
