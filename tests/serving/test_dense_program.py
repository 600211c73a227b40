"""The dense network of every built-in model becomes a program of torch.export that computes the same logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat as zg
from tests.embeddings.embedding_inputs import MIXED, make_batch
from ziggurat.features.inputs import LabelSpec, VectorSpec
from ziggurat.models import MODEL_CONFIGS, build_model
from ziggurat.serving.export.dense_program import compile_program, export_program, inputs_of, program_bytes

TABLES = tuple(dataclasses.replace(table, embedding_dim=0) for table in MIXED.tables)
INPUTS = dataclasses.replace(
    MIXED, dense=("a", "b"), tables=TABLES, labels=(LabelSpec(name="like"), LabelSpec(name="buy"))
)


def batch_of(size: int, seed: int, *, inputs: Any = INPUTS) -> zg.Batch:
    draw = torch.Generator().manual_seed(seed)
    vectors = {spec.name: torch.randn(size, spec.dim, generator=draw) for spec in inputs.vectors}
    batch = make_batch(inputs, size=size, seed=seed)
    return dataclasses.replace(batch, dense=torch.randn(size, 2, generator=draw), vectors=vectors)


def check(config: Any, path: Path, *, inputs: Any = INPUTS) -> None:
    model = build_model(config, inputs, seed=0).eval()
    batches = (batch_of(7, 0, inputs=inputs), batch_of(4, 1, inputs=inputs))
    path.write_bytes(program_bytes(export_program(model, batches)))
    program = torch.export.load(path).module()
    for size in (2, 33):
        batch = batch_of(size, size, inputs=inputs)
        with torch.no_grad():
            torch.testing.assert_close(program(**inputs_of(model.embed(batch))), model(batch), rtol=1e-5, atol=1e-5)


def test_a_program_computes_the_logits(tmp_path: Path) -> None:
    inputs = dataclasses.replace(INPUTS, vectors=(VectorSpec(name="look", dim=3),))
    check(zg.DCNv2Config(deep=zg.MLPConfig(hidden_dims=(8,))), tmp_path / "dense.pt2", inputs=inputs)


@pytest.mark.parametrize(
    "config",
    [each for each in MODEL_CONFIGS if each().kind not in ("two_tower", "lightgcn", "next_item", "sequence_ranker")],
)
def test_every_model_becomes_a_program(config: Any, tmp_path: Path) -> None:
    check(config(), tmp_path / "dense.pt2")


@pytest.mark.slow
def test_a_compiled_program_computes_the_logits(tmp_path: Path) -> None:
    config = zg.DCNv2Config(deep=zg.MLPConfig(hidden_dims=(8,)))
    model, other = (build_model(config, INPUTS, seed=seed).eval() for seed in (0, 1))
    program = export_program(model, (batch_of(7, 0), batch_of(4, 1)))
    compile_program(program, tmp_path / "compiled.pt2", model=model, batch=batch_of(33, 2))
    assert (tmp_path / "compiled.pt2").stat().st_size > 1000
    with pytest.raises(AssertionError):
        compile_program(program, tmp_path / "other.pt2", model=other, batch=batch_of(33, 2))
