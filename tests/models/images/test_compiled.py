"""A compiled backbone gives the backbone's vectors, by one shape for each resolution."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.models.images.tiny import TinyBackbone
from ziggurat.errors import ConfigError
from ziggurat.models.images.compiled import CompiledBackbone


def pictures(num: int, resolution: int) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    return torch.randint(0, 256, (num, resolution, resolution, 3), generator=generator, dtype=torch.uint8)


def test_each_resolution_is_compiled_once_whatever_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    compiled: list[object] = []

    def compiling(function: Callable[[Tensor], Tensor], *, dynamic: bool) -> Callable[[Tensor], Tensor]:
        compiled.append(dynamic)

        def kernels(pixels: Tensor) -> Tensor:
            shapes.append(tuple(pixels.shape))
            return function(pixels)

        return kernels

    monkeypatch.setattr(torch, "compile", compiling)
    backbone = TinyBackbone()
    fast = CompiledBackbone(backbone, batch_size=4)
    for num, resolution in ((4, 48), (1, 48), (3, 32), (4, 32)):
        batch = pictures(num, resolution)
        torch.testing.assert_close(fast(batch), backbone(batch), rtol=1e-5, atol=1e-6)
    assert compiled == [False, False]
    assert shapes == [(4, 48, 48, 3), (4, 48, 48, 3), (4, 32, 32, 3), (4, 32, 32, 3)]


def test_what_cannot_be_compiled_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(pixels: Tensor) -> Tensor:
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: failing)
    with pytest.raises(ConfigError, match=r"no working C\+\+ compiler[\s\S]*leave --compile out"):
        CompiledBackbone(TinyBackbone(), batch_size=4)(pictures(2, 32))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_compiled_vectors_are_those_of_the_backbone() -> None:
    backbone = TinyBackbone()
    fast = CompiledBackbone(backbone, batch_size=4)
    for num, resolution in ((4, 48), (2, 48), (3, 64)):
        batch = pictures(num, resolution)
        torch.testing.assert_close(fast(batch), backbone(batch), rtol=1e-4, atol=1e-5)
