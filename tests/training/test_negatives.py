"""Drawn negatives: the same for the same samples on any number of ranks; mined ones hard, not liked, resumable."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.batch import Batch
from ziggurat.features.items import Items
from ziggurat.models import EncoderConfig, MLPConfig, TwoTowerConfig, build_model
from ziggurat.models.contract.negatives import CANDIDATES, DrawnLayout, MiningConfig, NegativesConfig, NegativesKind
from ziggurat.ops.lookup import KernelChoice
from ziggurat.training.config import CheckpointConfig, Precision, TrainingConfig
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.evaluation.full_ranking_pass import FullRanking
from ziggurat.training.negatives import DrawnNegatives
from ziggurat.training.trainer import Trainer

ENCODER = EncoderConfig(hidden=MLPConfig(hidden_dims=(8,)))


def whole_table(data: MemoryDataset) -> pa.Table:
    return pa.concat_tables([data.read_group(number) for number in range(len(data.group_sizes))])


def shop(num_rows: int = 300) -> MemoryDataset:
    """The tiny data with items: tags and price describe them."""
    made = tiny_dataset(num_rows)
    inputs = dataclasses.replace(made.inputs, items=Items(id="item", features=("price", "tags")))
    return MemoryDataset(whole_table(made), inputs, rows_per_group=64)


def config(kind: NegativesKind, *, drawn: int = 5, every: int = 3) -> TwoTowerConfig:
    return TwoTowerConfig(
        embedding_dim=4, output_dim=4, user=ENCODER, item=ENCODER, negatives_block=8,
        embedding=EmbeddingConfig(kernel=KernelChoice.TORCH),
        negatives=NegativesConfig(kind=kind, num_drawn=drawn, mining=MiningConfig(every=every, depth=6)),
    )  # fmt: skip


def drawer(kind: NegativesKind, data: MemoryDataset, **changes: int) -> tuple[DrawnNegatives, FullRanking]:
    model = build_model(config(kind, **changes), data.inputs, seed=0)
    ranking = FullRanking(data)
    return DrawnNegatives(model, train=data, ranking=ranking, seed=3), ranking


def first_batch(data: MemoryDataset, size: int) -> Batch:
    return next(iter(ordered_batches(data, batch_size=size).batches(epoch=0)))


def lists_of(batch: Batch, feature: int) -> list[list[int]]:
    offsets = batch.jagged.offsets[feature * batch.batch_size : (feature + 1) * batch.batch_size + 1].tolist()
    return [batch.jagged.values[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def test_drawn_items_are_items_of_the_data_and_samples_stay_what_they_were():
    data = shop()
    negatives, ranking = drawer(NegativesKind.MIXED, data)
    batch = first_batch(data, 21)
    made = negatives.extended(batch, step=4)
    layout = DrawnLayout(made.batch_size, 8, 5)
    assert (layout.num_samples, layout.num_blocks) == (21, 3)
    kept = made.take(layout.samples())
    assert all(torch.equal(value, kept.tensors()[name]) for name, value in batch.tensors().items())
    whole = first_batch(data, 300)
    last = {row: index for index, row in enumerate(whole.single[1].tolist())}  # dicts keep the last
    places = layout.drawn_items()
    for block, block_places in enumerate(places.tolist()):
        for place in block_places:
            source = last[int(made.single[1, place])]
            assert made.dense[place, 0] == whole.dense[source, 0]
            assert lists_of(made, 0)[place] == lists_of(whole, 0)[source]
            assert made.single[0, place] == batch.single[0, 8 * block]
            assert int(made.extras[CANDIDATES][place]) == int(made.single[1, place])
    drawn = made.take(places.reshape(-1))
    assert drawn.labels.isnan().all()
    assert set(drawn.groups.tolist()) == {0}
    assert len(set(drawn.single[1].tolist())) > 5
    assert ranking.items.num_rows == 20


@pytest.mark.parametrize("kind", [NegativesKind.UNIFORM, NegativesKind.MINED])
def test_ranks_draw_what_one_device_draws(kind: NegativesKind):
    """A block gets the same items wherever it is, others in another step, and others than the next block."""
    data = shop()
    negatives, _ = drawer(kind, data)
    batch = first_batch(data, 40)
    whole = negatives.extended(batch, step=3)  # with a search, where negatives are mined
    parts = [negatives.extended(batch.rows(first, last), step=3) for first, last in ((0, 16), (16, 24), (24, 40))]
    together = Batch.stacked(parts)
    found = together.tensors()
    assert all(torch.equal(value.nan_to_num(7), found[name].nan_to_num(7)) for name, value in whole.tensors().items())
    places = DrawnLayout(whole.batch_size, 8, 5).drawn_items()
    blocks = whole.extras[CANDIDATES][places]
    assert not torch.equal(blocks[0], blocks[1])
    later = negatives.extended(batch, step=4).extras[CANDIDATES][places]
    assert not torch.equal(later, blocks)
    assert negatives.extended(batch.rows(0, 0), step=3).batch_size == 0


def test_mined_items_are_the_best_that_the_user_does_not_like():
    data = shop()
    model = build_model(config(NegativesKind.MINED), data.inputs, seed=0)
    negatives = DrawnNegatives(model, train=data, ranking=FullRanking(data), seed=0)
    batch = first_batch(data, 300)
    before = negatives.extended(batch.rows(0, 24), step=0)
    assert not negatives.is_due(0)
    places = DrawnLayout(before.batch_size, 8, 5).drawn_items().reshape(-1)
    assert set(before.extras[CANDIDATES][places].tolist()) == {-1}, "nothing is mined before the first search"
    made = negatives.extended(batch.rows(0, 24), step=3)
    items = {row: index for index, row in enumerate(batch.single[1].tolist())}
    users = {user: index for index, user in enumerate(batch.groups.tolist())}
    with torch.no_grad():
        scores = model.user_vectors(batch) @ model.item_vectors(batch).T
    for block in range(3):
        own = range(8 * block, 8 * block + 8)
        hard = set()
        for sample in own:
            user = int(batch.groups[sample])
            if user == 0 or batch.labels[sample] == 0:
                continue
            mine = batch.groups == user
            liked = set(batch.single[1][mine & (batch.labels[:, 0] > 0)].tolist())
            ranked = sorted(items, key=lambda row, user=user: -float(scores[users[user], items[row]]))
            hard |= set([row for row in ranked if row not in liked][:6])
        drawn = made.extras[CANDIDATES][places.view(3, 5)[block]].tolist()
        found = [row for row in drawn if row >= 0]
        assert found
        assert set(found) <= hard
        assert len(set(found)) == len(found), "each once"


@pytest.mark.parametrize("every", [2, 3])
def test_a_run_that_mines_is_resumed_bit_for_bit(every: int, tmp_path: Path):
    """Five steps an epoch, saved after each second one: resumed before, at and after a search."""
    data = shop(80)

    def trainer(name: str, max_steps: int) -> Trainer:
        settings = TrainingConfig(
            epochs=3, max_steps=max_steps, loader=LoaderConfig(batch_size=16), precision=Precision.FP32, threads=1,
            checkpoint_every=2, table_learning_rate=0.1, checkpoint=CheckpointConfig(),
        )  # fmt: skip
        model = build_model(config(NegativesKind.MINED, every=every), data.inputs, seed=1)
        return Trainer(model, config=settings, train=data, folder=tmp_path / name)

    straight = trainer("straight", 12)
    straight.fit()
    for stop in (4, 6, 7):
        trainer("cut", stop).fit(resume=stop > 4)
    resumed = trainer("cut", 12)
    resumed.fit(resume=True)
    wanted = straight.model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in resumed.model.state_dict().items())
    assert torch.equal(resumed.negatives.state()["negatives.mined"], straight.negatives.state()["negatives.mined"])
    assert (resumed.negatives.state()["negatives.mined"] >= 0).any()
    assert "GFLOP" in resumed.negatives.lines["mining"]


def test_what_cannot_be_is_named(tmp_path: Path):
    data = shop()
    alone = MemoryDataset(
        whole_table(data).drop_columns(["group:"]), dataclasses.replace(data.inputs, has_groups=False)
    )
    with pytest.raises(ConfigError, match="which samples are of one user"):
        drawer(NegativesKind.MINED, alone)
    batches = list(ordered_batches(data, batch_size=16).batches(epoch=0))

    class Stream:
        def __iter__(self):
            return iter(batches)

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

    model = build_model(config(NegativesKind.UNIFORM), data.inputs, seed=0)
    model.observe(batches)
    with pytest.raises(ConfigError, match="items of its samples"):
        Trainer(model, config=TrainingConfig(precision=Precision.FP32), train=Stream(), folder=tmp_path / "run")
    assert np.isfinite(float(model.item_counts.sum()))


def test_a_model_without_drawn_negatives_and_data_without_items_are_refused():
    data = shop()
    in_batch = build_model(config(NegativesKind.IN_BATCH), data.inputs, seed=0)
    with pytest.raises(ConfigError, match=r"NegativesConfig\(kind=NegativesKind.MIXED\)"):
        DrawnNegatives(in_batch, train=data, ranking=FullRanking(data), seed=0)
    with pytest.raises(ConfigError, match=r"\[items\], id = "):
        FullRanking(MemoryDataset(whole_table(data), dataclasses.replace(data.inputs, items=None)))


def test_mined_negatives_need_to_know_whose_a_sample_is():
    data = shop()
    negatives, _ = drawer(NegativesKind.MINED, data)
    batch = dataclasses.replace(first_batch(data, 24), groups=None)
    with pytest.raises(DataError, match=r"Batch\(…, groups=…\)"):
        negatives.extended(batch, step=0)
