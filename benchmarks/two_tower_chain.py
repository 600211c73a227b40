"""The whole chain on MovieLens: encoders, index, ranker and the formula that an export chose, against retrieval alone.

An export chooses its formula on validation likes (`runs/export/value_fit.py`). Here the same chain is asked likes of
the test period, once, with that formula, with `retrieval`, and with each task alone; and whether the index finds what a
scan of all vectors finds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.runs.execute import prepare_run, raw_files
from ziggurat.runs.export import ExportConfig, export_run
from ziggurat.runs.export.data import RunData
from ziggurat.runs.export.held_out_likes import (
    HeldOutLikes,
    LikesWanted,
    ScoredCandidates,
    held_out_likes,
    scored_candidates,
)
from ziggurat.runs.load import load_run
from ziggurat.serving.export.export_folder import open_export
from ziggurat.serving.recommender import Recommender
from ziggurat.serving.value_model.formula import ValueModel
from ziggurat.training.report.progress import Progress

TEST_LIKES = 5_000
_DEEP = 100


def chosen_formula(run: Path, *, ranker: Path | None, out: Path, progress: Progress) -> dict[str, Any]:
    """Export a run with what scores its candidates; returns what the export tried on validation likes.

    Args:
        run: folder of a two_tower.
        ranker: folder of a ranking run, or None.
        out: of the export; one that is there is taken.
        progress: shows what goes on.
    """
    if not (out / "export.json").exists():
        config = ExportConfig(program=False, golden=2, parity_rows=500)
        export_run(run, ranker=ranker, out=out, config=config, progress=progress)
    return open_export(out).manifest.facts["value"]


def on_test(export: Path, *, run: Path, ranker: Path, progress: Progress) -> dict[str, Any]:
    """NDCG@10 of likes of the test period by formula, and recall@100 of the index and of a full scan.

    Args:
        export: whose chain is asked.
        run: that retrieves.
        ranker: that ranks.
        progress: shows questions.
    """
    kept = export.with_name(f"{export.name}_test.json")
    if kept.exists():
        return json.loads(kept.read_text())
    loaded, encoder = Recommender.load(export), load_run(run)
    chain = loaded.chain
    data = RunData(
        config=raw_files(encoder.config, progress=progress), schema=encoder.preprocessing.schema, bad_rows=BadRows()
    )
    schemas = [encoder.preprocessing.schema, load_run(ranker).preprocessing.schema]
    wanted = LikesWanted(split="test", most=TEST_LIKES)
    prepared = prepare_run(encoder.config, progress=progress)
    likes = held_out_likes(prepared, chain=chain, data=data, schemas=schemas, wanted=wanted)
    candidates = scored_candidates(likes, progress=progress)
    formulas = ("retrieval", chain.settings.formula, *chain.labels)
    retrieval = candidates.scores["retrieval"].double()
    found = {
        "formula": chain.settings.formula,
        "likes": len(likes.questions),
        "likes_of_split": likes.num_all,
        "users": likes.num_users,
        "ndcg@10": {formula: _ndcg(likes, candidates, formula) for formula in formulas},
        "recall@100": {
            "index": _share(likes, candidates.ranks(retrieval)),
            "exact": _share(likes, exact_ranks(likes)),
        },
    }
    kept.write_text(json.dumps(found, indent=1))
    return found


def _ndcg(likes: HeldOutLikes, candidates: ScoredCandidates, formula: str, *, k: int = 10) -> float:
    value = ValueModel(formula, names=tuple(candidates.scores))
    ranks = candidates.ranks(value(candidates.scores)).double()
    gains = torch.where((ranks > 0) & (ranks <= k), 1.0 / torch.log2(ranks + 1.0), 0.0)
    return float(np.average(gains.numpy(), weights=likes.weights))


def _share(likes: HeldOutLikes, ranks: Tensor) -> float:
    return float(np.average(((ranks > 0) & (ranks <= _DEEP)).numpy(), weights=likes.weights))


def exact_ranks(likes: HeldOutLikes) -> Tensor:
    """The rank of each question's item among all items by a scan of all vectors; 0 where it is none of them."""
    chain = likes.chain
    assert chain.index is not None
    assert chain.catalogue is not None
    items_ND = chain.index.vectors_of(torch.arange(len(chain.catalogue)))
    there = chain.index.passing(filters=[None], exclude=[None])[0]
    firsts = range(0, len(likes.questions), 256)
    users_QD = torch.cat([chain.user_vectors(likes.questions[at : at + 256]) for at in firsts])
    ranks = []
    for user_D, question, target in zip(users_QD, likes.questions, likes.targets.tolist(), strict=True):
        scores_N = torch.where(there, items_ND @ user_D, -torch.inf)
        if question.exclude is not None:
            scores_N[question.exclude] = -torch.inf
        ranks.append(int((scores_N > scores_N[target]).sum()) + 1 if target >= 0 else 0)
    return torch.tensor(ranks)
