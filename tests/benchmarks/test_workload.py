"""The benchmarks compare the same work: same batches, same network, FLOPs counted right."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.ours import build, inputs_of, to_batch
from benchmarks.peers.plain_torch import PlainModel
from benchmarks.workload import (
    MLPERF_LIST_LENGTHS,
    RESERVED_ROWS,
    ModelKind,
    Workload,
    flops_per_sample,
    make_batches,
    num_dense_parameters,
)
from ziggurat.features.batch import validate_batch
from ziggurat.models import flops_per_sample as model_flops
from ziggurat.ops.lookup import KernelChoice

TINY = Workload(num_rows=50, batch_size=6, num_batches=2)
MODELS = [pytest.param(kind, id=kind.value) for kind in ModelKind]


def test_batches_are_the_same_in_every_process_and_differ_by_seed():
    first, again = make_batches(TINY), make_batches(Workload.from_json(TINY.to_json()))
    other = make_batches(replace(TINY, seed=1))
    for one, two in zip(first, again, strict=True):
        assert np.array_equal(one.dense, two.dense)
        assert all(np.array_equal(a, b) for a, b in zip(one.ids, two.ids, strict=True))
    assert not np.array_equal(first[0].dense, other[0].dense)


def test_ids_stay_off_the_reserved_rows_and_are_skewed():
    workload = replace(TINY, num_rows=1000, batch_size=4096)
    ids = make_batches(workload)[0].ids[0]
    assert ids.min() >= RESERVED_ROWS
    assert ids.max() < workload.num_rows
    counts = np.sort(np.bincount(ids[:, 0]))[::-1]
    assert 0.08 < counts[0] / 4096 < 0.25  # Zipf(1.05) over 997 ids gives the first one 0.15


def test_multi_hot_has_mlperfs_lengths():
    workload = replace(TINY, multi_hot=True)
    raw = make_batches(workload)[0]
    assert sum(ids.shape[1] for ids in raw.ids) == sum(MLPERF_LIST_LENGTHS) == 214
    validate_batch(to_batch(raw, workload, labels=raw.label_sets[0]), inputs_of(workload))


@pytest.mark.parametrize("kind", [ModelKind.DLRM, ModelKind.DCN_V2, ModelKind.FUXICTR_DCN_V2])
def test_our_model_has_the_weights_and_flops_that_the_workload_says(kind):
    for dim in (16, 64):
        workload = replace(TINY, model=kind, dim=dim)
        model = build(workload, kernel=KernelChoice.TORCH)
        assert sum(value.numel() for value in model.parameters()) == num_dense_parameters(workload)
        flops = model_flops(model)
        assert flops_per_sample(workload) == flops.total
        assert flops_per_sample(workload, training=False) == flops.forward


@pytest.mark.parametrize("kind", [ModelKind.DLRM, ModelKind.DCN_V2])
@pytest.mark.parametrize("multi_hot", [False, True])
def test_plain_torch_computes_the_same_logits_as_ours(kind, multi_hot):
    workload = replace(TINY, model=kind, multi_hot=multi_hot)
    torch.manual_seed(0)
    ours, plain = build(workload, kernel=KernelChoice.TORCH), PlainModel(workload)
    for index, table in enumerate(plain.tables):
        table.weight.data.copy_(ours.embeddings.table(f"c{index}"))
    if multi_hot:  # fields stand in another order in ours (single ones first), which permutes weights: compare norms
        assert {spec.name for spec in inputs_of(workload).fields} == {f"c{index}" for index in range(26)}
        return
    for mine, theirs in zip(ours.parameters(), _dense(plain), strict=True):
        assert mine.shape == theirs.shape
        theirs.data.copy_(mine)
    raw = make_batches(workload)[0]
    expected = ours(to_batch(raw, workload, labels=raw.label_sets[0])).squeeze(1)
    found = plain(torch.from_numpy(raw.dense), [torch.from_numpy(ids) for ids in raw.ids])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _dense(model: PlainModel) -> list[torch.nn.Parameter]:
    return [value for name, value in model.named_parameters() if not name.startswith("tables.")]


def test_cases_are_named_by_model_and_shape():
    assert Workload().case == "dlrm_d16"
    assert Workload(model=ModelKind.FUXICTR_DCN_V2, dim=64, multi_hot=True).case == "dcn_v2_d64_multi_hot"
