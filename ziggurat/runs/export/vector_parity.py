"""Does the encoder of an export give the vectors of its run? Asked before the export is published, as for scores.

raw rows ──────► vectors of user and item, by the run and by the export ──► their inner products
requests ──────► the same with ids that nobody has seen, missing cells and empty lists
questions ─────► what the index gives for users of the data ──────────────► inner products by the run
catalogue ─────► the run's best items of some users ──────────────────────► how many are the export's best, too

With FP32 tables no inner product may differ by more than 1e-5. Tables in few bits change vectors by design; of the
run's best items, 95 % must then be among the export's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import ExportError
from ziggurat.features.batch import Batch
from ziggurat.runs.export.data import RunData
from ziggurat.runs.export.export_config import ExportConfig
from ziggurat.runs.export.parity import TOLERANCE, largest_difference, plain_columns, plain_rows, request_rows, unseen
from ziggurat.runs.load import Run
from ziggurat.serving.answering.chain import Chain, Question
from ziggurat.serving.answering.rescorer import Rescorer
from ziggurat.serving.answering.vector_encoder import VectorEncoder, VectorModel
from ziggurat.serving.answers import Effort
from ziggurat.serving.export.packed_model import PackedModel

MIN_RECALL = 0.95
_USERS = 256
_QUESTIONS = 32
_MAX_BEST = 100


@dataclass(frozen=True, kw_only=True)
class VectorParity:
    """The comparison of an export's vectors with those of its run.

    Args:
        num_rows: raw rows whose user and item both gave vectors.
        largest_difference: of any inner product of the raw rows.
        largest_of_requests: the same where rows came as requests, with unseen ids and missing cells.
        largest_of_answers: of the inner products in answers from the index, and of what the OverArch makes of them.
        best: items of a user that `recall` looks at.
        recall: share of the run's best items of a user that are among the export's.
    """

    num_rows: int
    largest_difference: float
    largest_of_requests: float
    largest_of_answers: float
    best: int
    recall: float

    def to_json(self) -> dict[str, object]:
        """The comparison as plain data."""
        return dict(vars(self))

    def line(self) -> str:
        """The comparison for people, in one line."""
        return (
            f"{self.num_rows:,} raw rows: inner products differ by at most {self.largest_difference:.1e}; "
            f"{self.recall:.2%} of the run's best {self.best} items of a user are the export's"
        )


def compare_vectors(run: Run, chain: Chain, *, data: RunData, num_rows: int) -> VectorParity:
    """Compute inner products by a run of vectors and by its export.

    Args:
        run: on one device.
        chain: of the export, read back; with encoder, catalogue and index.
        data: of the run.
        num_rows: about how many raw rows.
    """
    theirs = chain.needed_encoder
    catalogue = chain.needed_catalogue
    mine = VectorEncoder(packed_of(run), item_columns=catalogue.columns.features)
    of_run = []
    of_export = []
    sample: RawChunk | None = None
    for chunk in data.samples(num_rows=num_rows):
        sample = sample or chunk
        for encoder, found in ((mine, of_run), (theirs, of_export)):
            table = encoder.packed.preprocessing.encode(chunk, bad_rows=data.bad_rows, needs_extras=False)
            found.append(_products(encoder.packed.model, table_to_batch(table, encoder.inputs)).numpy())
    assert sample is not None, "a run has rows"
    rows = request_rows(plain_columns(sample, (*data.schema.features, *data.more)).head(_USERS))
    changed = unseen(plain_rows(sample, data.schema).head(_USERS), data.schema, joined=run.model.joined_lists)
    with_gaps = _products(mine.packed.model, run.preprocessing.batch(changed))
    as_requests = _products_of_rows(theirs, request_rows(changed))
    first = np.concatenate(of_run)
    second = np.concatenate(of_export)
    best = min(_MAX_BEST, len(catalogue), chain.settings.num_candidates)
    items = mine.item_vectors(catalogue.frame)
    return VectorParity(
        num_rows=len(first),
        largest_difference=largest_difference(first, second),
        largest_of_requests=largest_difference(with_gaps.numpy(), as_requests.numpy()),
        largest_of_answers=_of_answers(chain, mine, items, rows[:_QUESTIONS]),
        best=best,
        recall=_recall(
            _best(_user_vectors(mine, rows), items, best),
            _best(_user_vectors(theirs, rows), theirs.item_vectors(catalogue.frame), best),
        ),
    )


def packed_of(run: Run) -> PackedModel:
    """The model of a run as an export would hold it."""
    return PackedModel(
        config=run.config.model,
        towers=run.config.towers,
        preprocessing=run.preprocessing,
        model=run.model,
        products=run.packed,
    )


def refuse_other_vectors(parity: VectorParity, *, config: ExportConfig, where: str) -> None:
    """Refuse an export whose vectors differ.

    Args:
        parity: of the export and its run.
        config: of the export.
        where: the run.

    Raises:
        ExportError: they do; says by how much.
    """
    if config.allow:
        return
    differences = (parity.largest_difference, parity.largest_of_requests, parity.largest_of_answers)
    if config.is_exact and not all(each <= TOLERANCE for each in differences):
        raise ExportError(
            expected=f"the inner products of the run, to {TOLERANCE:.0e}",
            found=f"{parity.line()}; rows as requests by at most {parity.largest_of_requests:.1e}, "
            f"answers of the index by at most {parity.largest_of_answers:.1e}",
            where=where,
            ways_out=("`ziggurat doctor` says which kernels this machine uses", "take it all the same: --allow"),
        )
    if not config.is_exact and not parity.recall >= MIN_RECALL:
        raise ExportError(
            expected=f"at least {MIN_RECALL:.0%} of the run's best {parity.best} items of a user",
            found=parity.line(),
            where=where,
            ways_out=(
                *config.ways_to_more_bits,
                "take it all the same: --allow",
            ),
        )


@torch.no_grad()
def _products(model: VectorModel | Any, batch: Batch) -> Float32[Tensor, "B"]:
    return (model.user_vectors(batch).float() * model.item_vectors(batch).float()).sum(1)


def _user_vectors(encoder: VectorEncoder, rows: list[dict[str, object]]) -> Float32[Tensor, "B D"]:
    return encoder.user_vectors(encoder.encode_users(rows), torch.arange(len(rows)))


def _products_of_rows(encoder: VectorEncoder, rows: list[dict[str, object]]) -> Float32[Tensor, "B"]:
    return (_user_vectors(encoder, rows) * encoder.vectors_of_rows(rows)).sum(1)


def _of_answers(chain: Chain, mine: VectorEncoder, items: Tensor, rows: list[dict[str, object]]) -> float:
    """The largest difference of an inner product in answers of the index, as the golden requests ask for them."""
    found = chain.recommend([Question(row=row, k=20) for row in rows], effort=Effort.FULL, explain=False)
    differences = [0.0]
    for user, each in zip(_user_vectors(mine, rows), found, strict=True):
        assert each.retrieval is not None, "no effort was spared"
        differences.append(largest_difference((items[each.items] @ user).numpy(), each.retrieval.numpy()))
        if mine.over_arch is not None and each.over_arch is not None:
            again = Rescorer.build(mine.over_arch, vectors=items[each.items])
            (wanted,) = again.scores(user.unsqueeze(0), [torch.arange(len(each.items))])
            differences.append(largest_difference(wanted.numpy(), each.over_arch.numpy()))
    return max(differences)


def _best(users: Tensor, items: Tensor, k: int) -> Int64[Tensor, "B K"]:
    return torch.cat([(part @ items.T).topk(k).indices for part in users.split(16)])


def _recall(first: Int64[Tensor, "B K"], second: Int64[Tensor, "B K"]) -> float:
    shared = [len(np.intersect1d(a, b)) for a, b in zip(first.numpy(), second.numpy(), strict=True)]
    return float(np.sum(shared)) / max(1, first.numel())
