"""Tables in few bits: exact rules on decoded rows, rounded once; split BF16 is FP32; checkpoints go on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.embeddings.embedding_inputs import MIXED, make_batch, some_loss
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer
from ziggurat.embeddings.faults import RowFaults
from ziggurat.embeddings.storage import LowPrecision, LowPrecisionStorage, MemoryStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.ops.row_formats import Rounding, RowFormat, RowNoise, RowOrigin
from ziggurat.testing.pretend_cuda import pretend_cuda
from ziggurat.testing.pretend_queues import record_waits
from ziggurat.training.checkpoint import CheckpointStore

RULES = [TableOptimizerKind.ROWWISE_ADAGRAD, TableOptimizerKind.SGD, TableOptimizerKind.SPARSE_ADAM]
LOW = [RowFormat.BF16, RowFormat.SPLIT_BF16, RowFormat.INT8, RowFormat.INT4]


def make(
    row_format: RowFormat,
    kind: TableOptimizerKind = TableOptimizerKind.ROWWISE_ADAGRAD,
    *,
    rounding: Rounding = Rounding.STOCHASTIC,
    seed: int | None = 5,
) -> EmbeddingTables:
    config = EmbeddingConfig(dim=16, optimizer=kind, kernel=KernelChoice.TORCH, weight_decay=0.01, initial_sum=0.1)
    made = TablesConfig(weights=row_format, rounding=rounding).make_storage(seed=7)
    return EmbeddingTables(MIXED, config, seed=seed, make_storage=made)


def train(tables: EmbeddingTables, optimizer: TableOptimizer, *, steps: range = range(4)) -> list[torch.Tensor]:
    outputs = []
    for step in steps:
        pooled = tables(make_batch(MIXED, size=25, seed=step))
        some_loss(pooled, seed=step).backward()
        optimizer.step(0.05)
        outputs.append(pooled.detach())
    return outputs


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.INT8, RowFormat.INT4])
def test_an_update_is_the_rule_on_decoded_rows_rounded_once(row_format: RowFormat, kind: TableOptimizerKind) -> None:
    few, exact = make(row_format, kind), make(RowFormat.FP32, kind)
    exact.load_state_dict(few.state_dict())  # the same numbers, in FP32
    optimizers = [TableOptimizer(few), TableOptimizer(exact)]
    origins = [RowOrigin(table=name, first_row=0, num_rows=place.num_rows) for name, place in few.tables.places.items()]
    for step in range(3):
        before = {name: few.table(name).clone() for name in few.tables.places}
        found, wanted = (
            train(*each, steps=range(step, step + 1)) for each in zip((few, exact), optimizers, strict=True)
        )
        assert torch.equal(found[0], wanted[0]), "lookups read the numbers that rows decode to"
        for origin in origins:
            name, place = origin.table, few.tables.places[origin.table]
            rows = torch.arange(place.num_rows)
            words = RowNoise([origin], seed=7).words(rows, step=step + 1)
            rounded = row_format.decode(row_format.encode(exact.table(name), words_N=words), dim=place.dim)
            narrow = isinstance(few.tables.storage(place.storage), MemoryStorage)  # INT8 of 4 columns saves nothing
            touched = (exact.table(name) != before[name]).any(dim=1, keepdim=True)
            wanted_rows = exact.table(name) if narrow else torch.where(touched, rounded, before[name])
            assert torch.equal(few.table(name), wanted_rows), (step, name)
            exact.table(name).copy_(few.table(name))
        for key, value in optimizers[1].state_dict().items():
            assert torch.equal(optimizers[0].state_dict()[key], value), key


@pytest.mark.parametrize("kind", RULES)
def test_updates_of_split_rows_are_those_of_fp32_bit_for_bit(kind: TableOptimizerKind) -> None:
    both = [make(RowFormat.SPLIT_BF16, kind), make(RowFormat.FP32, kind)]
    optimizers = [TableOptimizer(tables) for tables in both]
    for step in range(4):
        for tables, optimizer in zip(both, optimizers, strict=True):
            pooled = tables(make_batch(MIXED, size=25, seed=step))
            target = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(step))
            (pooled * target).sum().backward()  # a gradient that does not depend on what was read
            optimizer.step(0.05)
    for name in both[0].tables.places:
        found, wanted = (tables.table(name) for tables in both)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32)), name
    storage = both[0].tables.storage(0)
    read = storage.looked_up(torch.arange(storage.num_rows))
    assert not torch.equal(read, storage.read(0, storage.num_rows)), "lookups read the upper halves alone"
    assert torch.equal(read.view(torch.int32) & 0xFFFF, torch.zeros_like(read, dtype=torch.int32))


@pytest.mark.parametrize("row_format", LOW)
def test_a_checkpoint_goes_on_bit_for_bit_and_fits_tables_in_fp32(row_format: RowFormat, tmp_path: Path) -> None:
    def state(tables: EmbeddingTables, optimizer: TableOptimizer) -> dict[str, torch.Tensor]:
        return tables.state_dict() | {f"state.{name}": value for name, value in optimizer.state_dict().items()}

    first = make(row_format)
    optimizer = TableOptimizer(first)
    train(first, optimizer)
    with CheckpointStore(tmp_path) as store:
        store.save(1, tensors=state(first, optimizer), state={})
    for other in (RowFormat.FP32, row_format):
        again = make(other, seed=None)
        resumed = TableOptimizer(again)
        into = state(again, resumed)
        CheckpointStore(tmp_path).load(into=into)
        resumed.load_state_dict({key[6:]: value for key, value in into.items() if key.startswith("state.")})
        again.tables.mark_filled()
        for name in first.tables.places:
            assert torch.equal(again.table(name), first.table(name)), (other, name)
        if other is row_format:
            more = range(4, 7)
            for one, two in zip(train(again, resumed, steps=more), train(first, optimizer, steps=more), strict=True):
                assert torch.equal(one, two)


def test_nearest_and_random_rounding_differ_and_each_repeats() -> None:
    results = {}
    for rounding in Rounding:
        for turn in range(2):
            tables = make(RowFormat.INT8, rounding=rounding)
            train(tables, TableOptimizer(tables))
            results[rounding, turn] = tables.table("user").clone()
    for rounding in Rounding:
        assert torch.equal(results[rounding, 0], results[rounding, 1])
    assert not torch.equal(results[Rounding.NEAREST, 0], results[Rounding.STOCHASTIC, 0])


def test_bytes_are_counted_with_ends_lower_halves_and_state() -> None:
    state = {RowFormat.BF16: 32, RowFormat.SPLIT_BF16: 64, RowFormat.INT8: 20, RowFormat.INT4: 12}
    for row_format, row_bytes in state.items():
        tables = make(row_format)
        TableOptimizer(tables)
        storage = tables.tables.storage(0)
        assert isinstance(storage, LowPrecisionStorage)
        assert storage.num_bytes == 80 * (row_bytes + 4), "and one number of row-wise Adagrad"
        size = tables.tables.sizes["user"]
        assert size.weight_bytes + size.state_bytes == 50 * (row_bytes + 4)
        read = LowPrecision(row_format=row_format, is_trained=False)(80, 16)
        assert read.num_bytes == 80 * row_format.row_bytes(16)


def test_tables_with_formats_of_their_own_are_those_of_one_format_each() -> None:
    by_table = {"item": RowFormat.BF16, "genres": RowFormat.FP32}
    config = EmbeddingConfig(dim=16, kernel=KernelChoice.TORCH)
    made = TablesConfig(weights=RowFormat.INT8, by_table=by_table).make_storage(seed=7)
    mixed = EmbeddingTables(MIXED, config, seed=5, make_storage=made)
    batch = make_batch(MIXED, size=25)
    target = torch.randn(25, mixed.output_dim, generator=torch.Generator().manual_seed(1))
    formats = {RowFormat.INT8: "user", RowFormat.BF16: "item", RowFormat.FP32: "genres"}
    for row_format, name in formats.items():
        made = TablesConfig(weights=row_format).make_storage(seed=7)
        alike = EmbeddingTables(MIXED, config, seed=5, make_storage=made)
        for tables in (alike, mixed) if row_format is RowFormat.INT8 else (alike,):
            optimizer = TableOptimizer(tables)
            (tables(batch) * target).sum().backward()  # a gradient that does not depend on what was read
            optimizer.step(0.05)
        assert torch.equal(mixed.table(name), alike.table(name)), name
        assert mixed.tables.sizes[name].row_format is row_format
    report = [(each["tables"], each.get("rows", "fp32")) for each in mixed.report()["storages"]]
    assert report == [("user", "int8"), ("item", "bf16"), ("genres", "fp32")]


def test_a_format_for_a_name_that_is_no_table_names_the_nearest() -> None:
    embedding, wrong = EmbeddingConfig(), TablesConfig(by_table={"usr_id": RowFormat.INT8})
    with pytest.raises(ConfigError, match=r"did you mean 'user_id'\?") as caught:
        wrong.check(embedding, tables=["user_id", "item_id"])
    assert caught.value.expected == "names of embedding tables: item_id, user_id"


def test_rows_that_would_save_nothing_keep_fp32_and_wrong_settings_are_refused() -> None:
    assert isinstance(LowPrecision(row_format=RowFormat.INT8)(10, 1), MemoryStorage)
    assert isinstance(LowPrecision(row_format=RowFormat.INT8)(10, 2), LowPrecisionStorage)
    dense = EmbeddingConfig(dim=16, optimizer=TableOptimizerKind.ADAM_DENSE, kernel=KernelChoice.TORCH)
    config = TablesConfig(weights=RowFormat.INT8)
    with pytest.raises(ConfigError, match="a gradient for every row"):
        config.check(dense, tables=["user"])
    with pytest.raises(ConfigError, match="a gradient for every row"):
        TablesConfig(by_table={"user": RowFormat.BF16}).check(dense, tables=["user"])
    with pytest.raises(ConfigError, match=r"tables\.weights fp32"):
        EmbeddingTables(MIXED, dense, make_storage=config.make_storage(seed=1))
    with pytest.raises(ConfigError, match="to stay"):
        make(RowFormat.INT8).double()


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("row_format", LOW)
def test_a_step_that_the_host_does_not_wait_for_leaves_the_bits_of_one_that_it_does(
    row_format: RowFormat, kind: TableOptimizerKind
) -> None:
    """Adam's step size is rounded once more on a device: a number in a hundred may then round to its neighbour."""
    most = 0.01 if kind is TableOptimizerKind.SPARSE_ADAM else 0.0
    few, rate = make(row_format, kind), 0.0625
    optimizer = TableOptimizer(few)
    with pretend_cuda() as cuda:
        other = make(row_format, kind).to(cuda)
        late = TableOptimizer(other)
        other.tables.faults = RowFaults(other)
        numbers = {"lr": torch.tensor(rate, device=cuda)}
        flags = [torch.tensor(applies, device=cuda) for applies in (True, True, False)]
        batches = [make_batch(MIXED, size=25, seed=seed).to(cuda) for seed in range(3)]
        for seed, (batch, applies) in enumerate(zip(batches, flags, strict=True)):
            with record_waits() as forward:
                pooled = other(batch)
            leaf = pooled.detach().cpu().requires_grad_()
            some_loss(leaf, seed=seed).backward()
            gradient = leaf.grad.to(cuda)
            with record_waits() as backward:
                pooled.backward(gradient)
                late.step_where(applies, **numbers)
            assert seed == 0 or forward + backward == [], "numbers that are made once travel in the first step"
            if seed < 2:
                expected = few(make_batch(MIXED, size=25, seed=seed))
                some_loss(expected, seed=seed).backward()
                optimizer.step(rate)
                assert seed or torch.equal(pooled.detach().cpu(), expected.detach())
        for name in few.tables.places:
            near = torch.isclose(other.table(name).cpu(), few.table(name), rtol=most / 1000, atol=0.0)
            assert (~near).float().mean() <= most, name
        for key, value in optimizer.state_dict().items():
            if key != "step":
                torch.testing.assert_close(late.state_dict()[key].cpu(), value, rtol=most, atol=most / 10)
