"""The benchmark of kernels, tiny on the CPU: searches are written one by one, and nothing stands beside the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kernels_gpu
from ziggurat.testing.pretend_cuda import pretend_cuda


def _search(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> None:
    command = ["kernels_gpu", "--out", str(out), "--one", "search", "--tiny", *more]
    monkeypatch.setattr(sys, "argv", command)
    kernels_gpu.main()


def test_searches_are_written_and_the_folder_holds_their_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "kernels.json"
    _search(monkeypatch, out)
    found = json.loads(out.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.json"]
    assert {"search_build", "search_1", "search_3", "search_masked_1", "search_masked_3"} == set(found)
    # Clusters by plain k-means: a draw of 2,000 vectors among 1,000 centres.
    assert found["search_3"]["recall_at_100"] > 0.5
    assert found["search_3"]["same_bits"]


def test_what_only_compiles_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "kernels.json"
    _search(monkeypatch, out, "--only-compile")
    assert not list(tmp_path.iterdir())


def test_an_index_is_built_of_clusters_that_a_gpu_found(tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(0)
    vectors = torch.randn(500, 8, generator=drawn)
    found = []
    with pretend_cuda() as gpu:
        run = kernels_gpu.Run(tmp_path / "kernels.json", size=16, device=torch.device("cpu"))
        for device in (torch.device("cpu"), gpu):
            run.device = device
            # An operation of tensors of both devices would raise.
            found.append(kernels_gpu._index_of(run, vectors).stored_order.cpu())
    assert torch.equal(found[0], found[1])
    assert sorted(found[0].tolist()) == list(range(500))
