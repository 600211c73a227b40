"""Label states: what is known of a label when its row is trained, of streams whose labels are known later than rows.

A batch of such a stream has the number of each row's state in `extras[LABEL_STATE]`. When which state comes about is
said in `data/streams/label_delay.py`, what a loss makes of it in `training/delayed_feedback.py`.
"""

from __future__ import annotations

from enum import StrEnum

LABEL_STATE = "label.state"
"""Name in `Batch.extras` of the number of the state of each row; no extra of a schema may have a dot."""


class LabelState(StrEnum):
    """States of a label, when its row is trained."""

    KNOWN = "known"  # it is the label
    ASSUMED = "assumed"  # it is not known yet, and counts as a negative
    CORRECTED = "corrected"  # it was assumed to be a negative, and is a positive
    CONFIRMED = "confirmed"  # it was assumed to be a negative, and is one

    @property
    def number(self) -> int:
        """Number of the state in batches, and in row ids."""
        return list(LabelState).index(self)
