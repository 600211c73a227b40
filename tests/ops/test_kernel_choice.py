"""Functions that torch.compile takes for constants, without its import."""

from __future__ import annotations

import torch

from ziggurat.ops.kernel_choice import constant_when_compiled


def test_a_function_is_marked_as_constant_as_torch_marks_it() -> None:
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert constant_when_compiled(ours) is ours
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}
