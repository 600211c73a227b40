"""What can be chosen of a two-tower model beside its encoders: temperature, correction, and whose vector is whose."""

from __future__ import annotations

from enum import StrEnum


class Temperature(StrEnum):
    """Choices of whether τ is a setting or a weight."""

    FIXED = "fixed"
    LEARNED = "learned"  # ln τ is a weight that starts at the setting


class UserVectors(StrEnum):
    """Choices of whether all tasks (labels) share the vector of a user."""

    SHARED = "shared"
    PER_TASK = "per_task"  # one for each label, over the same item vectors


class Correction(StrEnum):
    """Choices of whether scores are corrected for how often an item is drawn."""

    LOG_Q = "log_q"
    NONE = "none"  # popular items are then pushed down: the model learns p(item | user) / p(item)
