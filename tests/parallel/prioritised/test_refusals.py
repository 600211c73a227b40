"""What the prioritised exchange refuses, in four parts, on every rank; and weights that are read too early."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parallel.test_parity import inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.errors import ConfigError
from ziggurat.models import DLRMConfig, MLPConfig, build_model
from ziggurat.parallel.exchange.wire import Rounding, WireConfig, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.prioritised.cells import NOTHING, NOW, WAITS, num_packed, pack_codes, unpack_codes
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

AHEAD = Exchange.PRIORITISED_ALWAYS
HALF = WireFormat.BF16
MODEL = DLRMConfig(
    embedding_dim=8,
    embedding=EmbeddingConfig(dim=8),
    bottom=MLPConfig(hidden_dims=(4,)),
    top=MLPConfig(hidden_dims=(4,)),
)


def refused(rank: int, cases: list[tuple[Any, Any]]) -> list[str]:
    """What each configuration is refused with."""
    del rank
    found = []
    for plan_json, config_json in cases:
        plan = from_json(Plan, plan_json, where="test")
        model = build_model(MODEL, inputs(), seed=3)
        topology = Topology.create(tower_size=plan.ranks_per_group, hosts=(0, 0, 1, 1))
        try:
            parallelize(model, plan, topology, config=from_json(ParallelConfig, config_json, where="test"))
            found.append("")
        except ConfigError as error:
            found.append(f"{error.found}; {error.ways_out[-1]}")
    return found


def test_settings_that_would_not_be_exact_are_refused_on_every_rank():
    row_wise = to_json(placed(4, Placement.ROW_WISE))
    wires = (
        WireConfig(between_towers=HALF, backward_rounding=Rounding.STOCHASTIC),
        WireConfig(between_towers=WireFormat.INT8),
        WireConfig(between_towers=WireFormat.MX9),
    )
    cases = [
        (row_wise, to_json(ParallelConfig(exchange=AHEAD))),
        (row_wise, to_json(ParallelConfig(exchange=AHEAD, num_parts=2))),
        *((row_wise, to_json(ParallelConfig(exchange=AHEAD, wire=wire))) for wire in wires),
    ]
    found = run_ranks(refused, 4, cases)
    plain = "--parallel.exchange plain"
    wanted = [
        "",
        f"num_parts = 2; {plain}",
        f"backward_rounding = stochastic; {plain}",
        f"int8; {plain}",
        f"mx9; {plain}",
    ]
    assert found == [wanted] * 4


def reads_too_early(rank: int) -> list[str]:
    """What reading weights says between two halves of an update, and after it."""
    plan = placed(2, Placement.ROW_WISE)
    model = build_model(MODEL, inputs(), seed=3)
    parallel = parallelize(model, plan, Topology.create(), config=ParallelConfig(exchange=AHEAD))
    step = TrainStep(model, TrainingConfig(precision=Precision.FP32), parallel=parallel)
    batches = [random_batch(inputs(), 8, seed=10 * number + rank) for number in range(4)]
    for number in range(3):
        step(batches[number], upcoming=batches[number + 1])
    found = []
    for read in (model.state_dict, step.table_optimizer.state_dict):  # type: ignore[union-attr]
        try:
            read()
            found.append("read")
        except ConfigError as error:
            found.append(error.found)
    step.settle()
    model.state_dict()
    model.embeddings.drain()
    return found


def test_weights_that_are_not_complete_cannot_be_read():
    found = run_ranks(reads_too_early, 2)
    assert found == [["gradients of the last step that are still on their way"] * 2] * 2


def test_codes_survive_their_way():
    generator = torch.Generator().manual_seed(1)
    for rows, fields in ((0, 3), (1, 1), (5, 3), (8, 4)):
        codes: Tensor = torch.randint(NOTHING, WAITS + 1, (rows, fields), generator=generator, dtype=torch.uint8)
        packed = pack_codes(codes)
        assert packed.numel() == num_packed(rows, fields)
        assert torch.equal(unpack_codes(packed, num_rows=rows, num_fields=fields), codes)
    assert {NOTHING, NOW, WAITS} == {0, 1, 2}
