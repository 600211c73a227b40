"""Tasks: what the values of a label mean. One file each; this is the one list of them.

    binary        1 or 0; its probability is predicted
    regression    a number; its mean is predicted

A task of your own derives from `Task` and is listed by `Task.add` (docs/guides/extending.md).
"""

from __future__ import annotations

from ziggurat.features.tasks.binary import Binary
from ziggurat.features.tasks.regression import Regression
from ziggurat.features.tasks.task import Task

USUAL = Task.add(Binary())  # the task of a label that names none
OF_NUMBERS = Task.add(Regression())  # any finite number is one of its labels

__all__ = ["OF_NUMBERS", "USUAL", "Task"]
