"""CUDA graphs of the dense network: asked for, taken on a GPU alone, and the report says which."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ziggurat.training.config import Compile
from ziggurat.training.report.startup import _compile_line
from ziggurat.training.step.compiled import compiled_dense


@pytest.mark.parametrize(
    ("mode", "device", "wanted"),
    [
        (Compile.DEFAULT, "cuda", None),
        (Compile.MAX_AUTOTUNE, "cuda", "max-autotune-no-cudagraphs"),
        (Compile.CUDA_GRAPHS, "cuda", "reduce-overhead"),
        (Compile.CUDA_GRAPHS, "cpu", None),
    ],
)
def test_graphs_are_for_gpus(mode: Compile, device: str, wanted: str | None) -> None:
    begun = mock.Mock()
    with (
        mock.patch("torch.compile", side_effect=lambda forward, **kwargs: forward) as compile_,
        mock.patch("torch.compiler.cudagraph_mark_step_begin", begun),
    ):
        forward = compiled_dense(mock.Mock(return_value="logits"), mode, device=torch.device(device))
        assert forward(mock.Mock()) == "logits"
    assert compile_.call_args.kwargs["mode"] == wanted
    assert begun.called is (wanted == "reduce-overhead")  # else a step would read what the next one has written


def test_the_report_says_whether_graphs_are_taken() -> None:
    step = mock.Mock()
    step.config.compile, step.model.towers, step.device = Compile.CUDA_GRAPHS, None, torch.device("cpu")
    assert _compile_line(step) == "cuda_graphs (without CUDA graphs: the run computes on cpu)"
    step.device = torch.device("cuda", 0)
    assert _compile_line(step) == "cuda_graphs (full batches as CUDA graphs, others eagerly)"
    step.config.compile = Compile.DEFAULT
    assert _compile_line(step) == "default"
