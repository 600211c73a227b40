"""The model of an export: that of the run, or a simpler one with the same vectors, if the model knows one.

A model over a graph (`models/graph/lightgcn.py`) answers by vectors that were propagated once. Its export holds these
in place of its tables, so that a server needs no graph, and row formats pack what is read.
"""

from __future__ import annotations

from dataclasses import replace

from ziggurat.models import build_model
from ziggurat.serving.export.packed_model import PackedModel


def answering(packed: PackedModel) -> PackedModel:
    """Return what an export holds of a model; see `Model.for_answers`.

    Args:
        packed: the model of a run, on one device.
    """
    simpler = packed.model.for_answers()
    if simpler is None:
        return packed
    model = build_model(simpler.config, packed.preprocessing.inputs, seed=0, draw_tables=False)
    weights = model.embeddings.tables
    weights.about_to_load()
    for name, rows_RD in simpler.tables.items():
        weights.rows(name).write(0, rows_RD)
    weights.mark_filled()
    return replace(packed, config=simpler.config, model=model.eval())
