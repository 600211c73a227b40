"""A cache of hot rows: exact rules in FP32, rounding of what leaves alone, the same bits from C++ and torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.embeddings.embedding_inputs import make_batch, some_loss
from tests.ops.lookup_problems import kernel_or_skip
from tests.ops.row_cache.way_oracle import WayOracle
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer
from ziggurat.embeddings.storage import LowPrecision, MemoryStorage, cache_of
from ziggurat.embeddings.storage.cached import CACHE, Cached, CachedStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, JaggedSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.ops.row_cache import CachePolicy, CacheSize
from ziggurat.ops.row_formats import Rounding, RowFormat, RowNoise, RowOrigin
from ziggurat.training.checkpoint import CheckpointStore

ADAGRAD, SGD, ADAM = (
    TableOptimizerKind.ROWWISE_ADAGRAD,
    TableOptimizerKind.SGD,
    TableOptimizerKind.SPARSE_ADAM,
)
INPUTS = InputSpec(
    single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
    jagged=(
        JaggedSpec(name="words", table="words", pooling=Pooling.MEAN),
        JaggedSpec(name="history", table="item", pooling=Pooling.SUM, ordered=True),
    ),
    tables=(
        TableSpec(name="user", num_rows=400),
        TableSpec(name="item", num_rows=300),
        TableSpec(name="words", num_rows=90),
    ),
)


def make(
    row_format: RowFormat = RowFormat.INT8,
    *,
    kind: TableOptimizerKind = ADAGRAD,
    share: float = 0.1,
    policy: CachePolicy = CachePolicy.LRU,
    kernel: KernelChoice = KernelChoice.TORCH,
    seed: int | None = 5,
    dim: int = 16,
    weight_decay: float = 0.01,
) -> tuple[EmbeddingTables, TableOptimizer]:
    kernel_or_skip(kernel)
    config = EmbeddingConfig(dim=dim, optimizer=kind, kernel=kernel, weight_decay=weight_decay, initial_sum=0.1)
    behind = LowPrecision(row_format=row_format, rounding=Rounding.STOCHASTIC, seed=7)
    made = (
        MemoryStorage
        if row_format is RowFormat.FP32
        else Cached(behind=behind, cache=CacheSize(share=share, policy=policy))
    )
    tables = EmbeddingTables(INPUTS, config, seed=seed, make_storage=made)
    return tables, TableOptimizer(tables)


def cached(tables: EmbeddingTables) -> CachedStorage:
    storage = tables.tables.storage(0)
    assert isinstance(storage, CachedStorage)
    return storage


def train(tables: EmbeddingTables, optimizer: TableOptimizer, *, steps: range, size: int = 40) -> list[torch.Tensor]:
    outputs = []
    for step in steps:
        batch = make_batch(INPUTS, size=size, seed=step)
        pooled = tables(batch)
        vectors, _ = tables.unpooled(batch, "history")
        (some_loss(pooled, seed=step) + vectors.square().sum()).backward()
        assert optimizer.all_finite()
        optimizer.step(0.05)
        outputs.append(pooled.detach())
    return outputs


def whole(storage: CachedStorage) -> dict[str, torch.Tensor]:
    keys = ("weight", *storage._tails.keys() - {"weight"}, CACHE)
    return {key: storage.read(0, storage.num_rows, key=key).clone() for key in keys}


@pytest.mark.parametrize(
    ("kind", "row_format", "policy"),
    [
        (ADAGRAD, RowFormat.INT8, CachePolicy.LRU),
        (ADAGRAD, RowFormat.INT8, CachePolicy.LFU),
        (ADAM, RowFormat.INT4, CachePolicy.LRU),
        (SGD, RowFormat.BF16, CachePolicy.LFU),
    ],
)
def test_rows_in_the_cache_are_fp32_and_what_leaves_it_is_rounded_once(
    kind: TableOptimizerKind, row_format: RowFormat, policy: CachePolicy
) -> None:
    few, fast = make(row_format, kind=kind, policy=policy)
    exact, slow = make(RowFormat.FP32, kind=kind)
    exact.load_state_dict(few.state_dict())  # the numbers that lookups read, in FP32
    storage, plain = cached(few), exact.tables.storage(0)
    oracle = WayOracle(storage.ways.num_sets, policy)
    for row in storage.ways.held_rows.tolist():  # rows that were drawn and fill the cache
        if row >= 0:
            oracle.sets[row % oracle.num_sets][row] = 0
    origins = [
        RowOrigin(table=name, first_row=place.first_row, num_rows=place.num_rows)
        for name, place in few.tables.places.items()
    ]
    for step in range(1, 5):
        before = plain.read(0, plain.num_rows).clone()
        found, wanted = (train(*each, steps=range(step, step + 1)) for each in ((few, fast), (exact, slow)))
        assert torch.equal(found[0], wanted[0]), step
        after = plain.read(0, plain.num_rows)
        touched = (after != before).any(dim=1).nonzero().view(-1)
        left, conflicts = oracle.step(touched.tolist(), step=step)
        rows = torch.tensor(sorted(left | conflicts), dtype=torch.int64)
        words = RowNoise(origins, seed=7).words(rows, step=step)
        rounded = row_format.decode(row_format.encode(after[rows], words_N=words), dim=16)
        plain.scatter(rows, rounded)
        assert torch.equal(storage.read(0, storage.num_rows), plain.read(0, plain.num_rows)), step
        for key, value in slow.state_dict().items():
            assert torch.equal(dict(whole_state(few, fast))[key], value), key
    assert storage.counts.hits == oracle.hits > 0
    assert storage.counts.conflicts + storage.counts.stored > 0


def whole_state(tables: EmbeddingTables, optimizer: TableOptimizer) -> list[tuple[str, torch.Tensor]]:
    read = [(name, rows.read(0, rows.num_rows).clone()) for name, rows in optimizer.state_rows().items()]
    return [*read, ("step", torch.tensor(optimizer.num_steps))]


@pytest.mark.parametrize(
    ("kind", "row_format", "dim"),
    [
        (ADAGRAD, RowFormat.INT8, 16),
        (ADAM, RowFormat.INT8, 16),
        (SGD, RowFormat.INT4, 7),
        (ADAM, RowFormat.BF16, 64),
        (ADAGRAD, RowFormat.INT8, 64),
        (ADAGRAD, RowFormat.INT4, 128),
        (SGD, RowFormat.BF16, 32),
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_compiled_code_gives_the_bits_of_torch(
    kind: TableOptimizerKind, row_format: RowFormat, dim: int, weight_decay: float
) -> None:
    for policy in CachePolicy:
        both = [
            make(row_format, kind=kind, policy=policy, kernel=KernelChoice.CPP, dim=dim, weight_decay=weight_decay)
            for _ in range(2)
        ]
        slow = cached(both[1][0])
        slow._packed_by = lambda kernel: None  # type: ignore[method-assign]
        slow.ways._compiled = False
        for one, other in zip(*(train(*each, steps=range(1, 5)) for each in both), strict=True):
            assert torch.equal(one, other)
        for key, value in whole(slow).items():
            assert torch.equal(whole(cached(both[0][0]))[key], value), key
        assert cached(both[0][0]).counts == slow.counts
        assert slow.counts.stored
        assert slow.counts.conflicts


def test_threads_change_no_bit() -> None:
    found, threads = [], torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            tables, optimizer = make(kernel=KernelChoice.CPP, dim=64, weight_decay=0.0)
            train(tables, optimizer, steps=range(1, 4))
            found.append(whole(cached(tables)))
    finally:
        torch.set_num_threads(threads)
    for key, value in found[0].items():
        assert torch.equal(found[1][key], value), key


def test_split_rows_behind_a_cache_are_read_by_their_upper_halves_and_updated_exactly() -> None:
    split, optimizer = make(RowFormat.SPLIT_BF16, kernel=KernelChoice.CPP, share=0.1)
    exact, slow = make(RowFormat.FP32, kernel=KernelChoice.CPP)
    (pooled,) = train(split, optimizer, steps=range(1))
    (expected,) = train(exact, slow, steps=range(1))
    assert torch.allclose(pooled, expected, rtol=2**-7, atol=1e-3), "BF16 has 8 bits"
    storage = cached(split)
    assert storage.counts.conflicts > 0
    assert bool((storage.ways.held_rows >= 0).any())
    rows = torch.arange(storage.num_rows)
    held = storage.ways.find(rows) >= 0
    behind = storage.backing.fetch(rows, keys=("weight",))["weight"]
    values = torch.where(held.unsqueeze(1), storage.gather(rows), behind)
    assert torch.allclose(values, exact.tables.storage(0).gather(rows), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("dim", "weight_decay"), [(16, 0.01), (64, 0.0)])
def test_the_gradient_of_a_step_may_come_summed(dim: int, weight_decay: float) -> None:
    both = [make(kernel=KernelChoice.CPP, dim=dim, weight_decay=weight_decay) for _ in range(2)]
    for step in range(1, 4):
        for index, (tables, optimizer) in enumerate(both):
            some_loss(tables(make_batch(INPUTS, size=40, seed=step)), seed=step).backward()
            if index:
                optimizer.sums()
            optimizer.step(0.05)
    for key, value in whole(cached(both[0][0])).items():
        assert torch.equal(whole(cached(both[1][0]))[key], value), key


@pytest.mark.parametrize(
    ("policy", "kernel", "num_steps"),
    [
        (CachePolicy.LRU, KernelChoice.CPP, 0),
        (CachePolicy.LFU, KernelChoice.TORCH, 0),
        (CachePolicy.LRU, KernelChoice.CPP, (1 << 24) + 1),  # more steps than FP32 counts
    ],
)
def test_a_checkpoint_goes_on_bit_for_bit_in_whatever_order_it_is_read(
    policy: CachePolicy, kernel: KernelChoice, num_steps: int, tmp_path: Path
) -> None:
    def state(tables: EmbeddingTables, optimizer: TableOptimizer) -> dict[str, torch.Tensor]:
        return tables.state_dict() | {f"state.{name}": value for name, value in optimizer.state_dict().items()}

    first = make(policy=policy, kernel=kernel)
    first[1].num_steps = num_steps
    train(*first, steps=range(1, 5))
    with CheckpointStore(tmp_path) as store:
        store.save(1, tensors=state(*first), state={})
    fresh, drawn = (make(policy=policy, kernel=kernel, seed=seed) for seed in (None, 9))
    drawn[0].tables.about_to_load()
    into = state(*fresh)
    for tables, optimizer in (fresh, drawn):
        CheckpointStore(tmp_path).load(into=state(tables, optimizer))
        optimizer.num_steps = first[1].num_steps
        tables.tables.mark_filled()
        for key, value in whole(cached(first[0])).items():
            assert torch.equal(whole(cached(tables))[key], value), key
    assert f"state.user.{CACHE}" in into
    wanted = train(*first, steps=range(5, 9))
    for again in (fresh, drawn):
        for one, two in zip(train(*again, steps=range(5, 9)), wanted, strict=True):
            assert torch.equal(one, two)
        for key, value in whole(cached(first[0])).items():
            assert torch.equal(whole(cached(again[0]))[key], value), key


@pytest.mark.parametrize("policy", list(CachePolicy))
@pytest.mark.parametrize("weights_first", [True, False])
def test_a_load_into_drawn_tables_leaves_no_rows_of_theirs_in_the_cache(
    weights_first: bool, policy: CachePolicy
) -> None:
    first = make(RowFormat.BF16, policy=policy, seed=None)
    ones = {name: torch.ones_like(value) for name, value in make(RowFormat.FP32)[0].state_dict().items()}
    for value in ones.values():
        value[0] = 0.0
    first[0].load_state_dict(ones)  # exact in BF16: no row has to be in the cache
    train(*first, steps=range(1, 4), size=4)
    weights, state = first[0].state_dict(), first[1].state_dict()
    assert bool((cached(first[0]).ways.held_rows < 0).any()), "the cache of the drawn tables is full"
    drawn = make(RowFormat.BF16, policy=policy, seed=9)
    if weights_first:
        drawn[0].load_state_dict(weights)
    drawn[1].load_state_dict(state)
    if not weights_first:
        drawn[0].load_state_dict(weights)
    for key, value in whole(cached(first[0])).items():
        assert torch.equal(whole(cached(drawn[0]))[key], value), key


def test_what_is_loaded_to_be_scored_has_the_numbers_of_the_cache() -> None:
    first, optimizer = make(kernel=KernelChoice.CPP)
    train(first, optimizer, steps=range(1, 6))
    behind = LowPrecision(row_format=RowFormat.INT8, seed=7, is_trained=False)
    scored = EmbeddingTables(
        INPUTS, first.config, seed=None, make_storage=Cached(behind=behind, cache=CacheSize(share=0.1))
    )
    scored.load_state_dict(first.state_dict())
    batch = make_batch(INPUTS, size=30, seed=77)
    before = whole(cached(first))
    with torch.no_grad():
        assert torch.equal(first(batch), scored(batch))
    for key, value in before.items():
        assert torch.equal(whole(cached(first))[key], value), "a lookup changes nothing"


def test_a_share_of_one_keeps_fp32_alone_and_bytes_are_counted() -> None:
    behind = LowPrecision(row_format=RowFormat.INT8)
    assert isinstance(Cached(behind=behind, cache=CacheSize(share=1.0))(100, 16), MemoryStorage)
    assert isinstance(Cached(behind=behind, cache=CacheSize(share=0.5))(100, 1), MemoryStorage)
    for policy, counts, more in ((CachePolicy.LRU, 0, 8), (CachePolicy.LFU, 4, 12)):
        tables, _ = make(policy=policy)
        places = 96  # three sets for a tenth of 790 rows
        assert cached(tables).num_bytes == 790 * (20 + 4 + counts) + places * (64 + 4 + more)


def test_a_cache_that_is_larger_than_asked_for_says_so() -> None:
    behind = LowPrecision(row_format=RowFormat.INT8, rounding=Rounding.NEAREST, seed=0)
    small, large = (Cached(behind=behind, cache=CacheSize(share=0.05))(rows, 16).describe() for rows in (100, 6400))
    assert small["cache"] == "32 of 100 rows in FP32, lru; 0.05 of the rows would be 5, but a cache has sets of 32"
    assert large["cache"] == "320 of 6,400 rows in FP32, lru"


def test_a_cache_that_helps_no_rows_is_refused() -> None:
    embedding = EmbeddingConfig(dim=16)
    for weights in (RowFormat.FP32, RowFormat.SPLIT_BF16):
        with pytest.raises(ConfigError, match=r"tables\.cache"):
            TablesConfig(weights=weights, cache=0.05).check(embedding, tables=["user"])
    some = TablesConfig(weights=RowFormat.FP32, by_table={"user": RowFormat.INT4}, cache=0.05)
    some.check(embedding, tables=["user", "item"])
    made = some.make_storage(seed=0)
    assert cache_of(made, table="user", dim=16).share == 0.05
    assert cache_of(made, table="item", dim=16).share == 0.0
    with pytest.raises(ConfigError, match=r"0 to 1"):
        TablesConfig(weights=RowFormat.INT8, cache=1.5)
