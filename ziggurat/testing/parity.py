"""assert_same_as_single_device: the sentence "parallelize changes no number" as a test that runs on any model.

    def check(rank: int) -> None:                                    # at the top level of a module
        assert_same_as_single_device(build, plan, batch=batch)

    run_ranks(check, 4)

Every rank builds the model twice, makes one parallel, and takes one optimizer step with both: the one on the whole
batch, the other on its rows of it (cut unevenly). Compared are the fields below the interaction, the logits, the
gradients of the dense network, the weights of every table and of the dense network after the step; and all of it once
more in a second step, which depends on the optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ziggurat.embeddings import TableOptimizer
from ziggurat.features.batch import Batch
from ziggurat.models import Model, Outputs
from ziggurat.parallel.context.history_exchange import HistoryExchange
from ziggurat.parallel.parallelize import Parallel, ParallelConfig, parallelize
from ziggurat.parallel.pipeline import Pipeline
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Plan

_LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest difference allowed between two numbers.

    Args:
        fields: what the interaction sees in the first forward pass; 0 asks for the same bits.
        others: logits (matrix products round differently for other batch sizes), gradients, weights after the step.
    """

    fields: float = 1e-6
    others: float = 1e-6


def assert_same_as_single_device(
    build: Callable[[], Model],
    plan: Plan,
    *,
    batch: Batch,
    config: ParallelConfig | None = None,
    tolerance: Tolerance | None = None,
    cuts: Sequence[int] | None = None,
    num_parts: int = 1,
    ranks_per_host: int = 0,
    hosts: Sequence[int] = (),
    order: Sequence[int] = (),
    context: int = 1,
) -> None:
    """Raise AssertionError unless the parallel model does what one device does; collective over all ranks.

    Args:
        build: makes the model, the same each time (fixed seed).
        plan: what to execute.
        batch: a global batch; the ranks take slices of it where it has some, one device takes every sample.
        config: dense parallelism and wire formats.
        tolerance: how exact; by default to FP32 rounding.
        cuts: where the batch is cut, one row number between two ranks; by default unevenly, the last rank's part empty,
            and between blocks of `Model.coupled_in`.
        num_parts: parts of a batch in the pipeline.
        ranks_per_host: of emulated hosts; 0: all ranks share one.
        hosts: the host of every rank, in place of `ranks_per_host`.
        order: the launcher's rank at every place; () puts host after host.
        context: ranks that divide the histories of their samples; fields and logits, which are those of pieces, are
            then not compared.
    """
    tolerance = tolerance or Tolerance()
    whole = batch.expanded()
    places = {"ranks_per_host": ranks_per_host, "hosts": hosts, "order": order, "context_size": context}
    topology = Topology.create(tower_size=plan.ranks_per_group, **places)
    single = build()
    many = build()
    if cuts is None:
        block = single.coupled_in(batch)
        cuts = [cut // block * block for cut in _uneven(batch.batch_size, topology.world_size)]
    bounds = [0, *cuts, batch.batch_size]
    local = batch.rows(bounds[topology.rank], bounds[topology.rank + 1])
    parallel = parallelize(many, plan, topology, config=config)
    if context > 1:
        local = HistoryExchange(many, topology=topology, traffic=parallel.traffic)(local)
    single_tables = TableOptimizer(single.embeddings)
    many_tables = parallel.table_optimizer(many)
    # As groups, which may be empty: a model may have no weights but its tables.
    single_dense = torch.optim.SGD([{"params": list(single.parameters())}], lr=_LEARNING_RATE)
    many_dense = torch.optim.SGD([{"params": list(many.parameters())}], lr=_LEARNING_RATE)
    pipeline = Pipeline(many, parallel, num_parts=num_parts)
    weight = many.loss_weight(local)
    if topology.world.process_group is not None:
        dist.all_reduce(weight)

    def share_of_loss(outputs: Outputs, samples: Batch) -> Tensor:
        return many.loss(outputs, samples).mean(weight)

    for step in range(2):
        mine = slice(bounds[topology.rank], bounds[topology.rank + 1])
        with torch.no_grad():
            limit = tolerance.fields if step == 0 else tolerance.others
            if context == 1:
                _same(f"fields of step {step + 1}", many.fields(local), single.fields(whole)[mine], limit)
        wanted = single.forward_dense(single.embed(whole))
        single.loss(wanted, whole).mean().backward()
        with torch.no_grad():
            if context == 1:
                # Answers with answers: what a step draws at random is no part of them.
                _same(f"logits of step {step + 1}", many(local), single(whole)[mine], tolerance.others)
        pipeline.step(local, loss_of=share_of_loss)
        _compare_dense(single, many, tolerance.others, gradients=True)
        single_dense.step()
        many_dense.step()
        single_tables.step(_LEARNING_RATE)
        many_tables.step(_LEARNING_RATE)
        single_dense.zero_grad()
        many_dense.zero_grad()
        _compare_dense(single, many, tolerance.others, gradients=False)
        _compare_tables(single, parallel, tolerance.others)
        _compare_copies(parallel)
    topology.close()


def assert_same_sequences(
    build: Callable[[], Model],
    plan: Plan,
    *,
    batch: Batch,
    names: Sequence[str],
    cuts: Sequence[int] | None = None,
    ranks_per_host: int = 0,
) -> None:
    """Raise AssertionError unless un-pooled lists are those of one device; collective over all ranks.

    Compared are vectors and masks (the same bits), and the weights of every table after each of two steps whose loss
    is a random weighted sum of the vectors of all `names` and of the pooled fields.

    Args:
        build: makes the model, the same each time (fixed seed).
        plan: what to execute.
        batch: a global batch.
        names: list features to read as sequences.
        cuts: where the batch is cut; see `assert_same_as_single_device`.
        ranks_per_host: of emulated hosts; 0: all ranks share one.
    """
    topology = Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=ranks_per_host)
    bounds = [0, *(cuts if cuts is not None else _uneven(batch.batch_size, topology.world_size)), batch.batch_size]
    first = bounds[topology.rank]
    last = bounds[topology.rank + 1]
    local = batch.rows(first, last)
    single = build()
    many = build()
    parallel = parallelize(many, plan, topology)
    optimizers = [TableOptimizer(single.embeddings), parallel.table_optimizer(many)]
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        losses = [torch.zeros(()), torch.zeros(())]
        for name in names:
            wanted_BLD, wanted_BL = single.embeddings.sequence(batch, name)
            found_BLD, found_BL = many.embeddings.sequence(local, name)
            longest = found_BL.shape[1]
            assert torch.equal(found_BL, wanted_BL[first:last, :longest]), f"mask of {name!r}"
            limit = 0.0 if step == 0 else 1e-6
            _same(f"sequence {name!r}, step {step + 1}", found_BLD, wanted_BLD[first:last, :longest], limit)
            factors_BLD = torch.randn(wanted_BLD.shape, generator=generator)
            losses[0] = losses[0] + (wanted_BLD * factors_BLD).sum()
            losses[1] = losses[1] + (found_BLD * factors_BLD[first:last, :longest]).sum()
        pooled = [single.fields(batch), many.fields(local)]
        factors_BX = torch.randn(pooled[0].shape, generator=generator)
        losses[0] = losses[0] + (pooled[0] * factors_BX).sum()
        losses[1] = losses[1] + (pooled[1] * factors_BX[first:last]).sum()
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step(_LEARNING_RATE)
        _compare_tables(single, parallel, 1e-5)
        _compare_copies(parallel)
    topology.close()


def _uneven(size: int, world_size: int) -> list[int]:
    """Cuts into parts that shrink to nothing."""
    if world_size == 1:
        return []
    weights = list(range(world_size - 1, -1, -1))
    return [size * sum(weights[: rank + 1]) // sum(weights) for rank in range(world_size - 1)]


def _compare_dense(single: Model, many: Model, limit: float, *, gradients: bool) -> None:
    wanted = dict(single.named_parameters())
    for name, parameter in many.named_parameters():
        value = parameter.grad if gradients else parameter.detach()
        target = wanted[name].grad if gradients else wanted[name].detach()
        if value is None or target is None:
            given = target if value is None else value
            assert given is None or not bool(given.any()), f"{name}: a gradient on one side only"
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        _same(f"{'gradient of ' if gradients else ''}{name}", whole, target, limit)


def _compare_tables(single: Model, parallel: Parallel, limit: float) -> None:
    tables = parallel.spread.tables
    for group in tables.mine.groups:
        for shard in group.shards:
            wanted = single.embeddings.tables.view(shard.table)[shard.rows, shard.columns]
            _same(f"table {shard.table}", tables.part(shard), wanted, limit)


def _compare_copies(parallel: Parallel) -> None:
    """Tables that several ranks have a copy of are the same bits on all of them."""
    tables = parallel.spread.tables
    group = parallel.topology.tower.process_group
    for shard in tables.mine.copies.shards:
        part = tables.part(shard).clone()
        if group is not None:
            first = part.clone()
            dist.broadcast(first, group=group, group_src=0)
            assert torch.equal(first, part), f"copies of table {shard.table} differ from rank to rank"


def _same(what: str, found: Tensor, wanted: Tensor, limit: float) -> None:
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, one device has {tuple(wanted.shape)}"
    if found.numel() == 0:
        return
    difference = float((found.detach().double() - wanted.detach().double()).abs().max())
    scale = max(1.0, float(wanted.detach().abs().max()))
    assert difference <= limit * scale, f"{what}: differs by {difference:.2e}, more than {limit * scale:.2e}"
