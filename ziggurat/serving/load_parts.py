"""The parts of an opened export as objects: items, users, models, index, value model; checked to fit together."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from ziggurat.errors import ExportError
from ziggurat.features.schema import Schema, column_of
from ziggurat.models import Model
from ziggurat.serving.answering.chain import (
    CHAIN_FILE,
    OVER_ARCH,
    RETRIEVAL,
    Chain,
    ChainSettings,
    KnownSides,
    numbers_of,
    numeric_names,
)
from ziggurat.serving.answering.item_catalogue import CATALOGUE_FILE, USERS_FILE, ItemCatalogue, KnownUsers
from ziggurat.serving.answering.item_search import INDEX_FILE, ItemSearch
from ziggurat.serving.answering.ranker import Ranker
from ziggurat.serving.answering.rescorer import OVER_ARCH_FILE, Rescorer
from ziggurat.serving.answering.sides import encode_frame
from ziggurat.serving.answering.vector_encoder import VectorEncoder, VectorModel, task_names
from ziggurat.serving.answers import Column, Info
from ziggurat.serving.export.export_folder import ExportFolder, damaged
from ziggurat.serving.export.packed_model import MODEL_FILE, load_model
from ziggurat.serving.export.published_folder import publication_of
from ziggurat.serving.golden import read_requests
from ziggurat.serving.plain_values import plain
from ziggurat.serving.value_model.formula import ValueModel

RANKER, ENCODER = "ranker", "encoder"
_MAX_ENCODED = 1_000_000  # known users that are encoded when an export is loaded


def load_parts(export: ExportFolder, *, models: Sequence[type[object]] = ()) -> tuple[Chain, KnownUsers | None, Info]:
    """Everything that a `Recommender` is made of.

    Args:
        export: opened, so that its files are as they were written.
        models: config classes of the user's own.

    Raises:
        ExportError: parts do not fit each other.
        ConfigError: a model that is not known.
    """
    settings = ChainSettings.read(export.file(CHAIN_FILE))
    catalogue = ItemCatalogue.load(export) if export.has(CATALOGUE_FILE) else None
    of_item = () if catalogue is None else catalogue.columns.features
    ranker = encoder = index = users = rescorer = None
    if export.has(f"{RANKER}/{MODEL_FILE}"):
        ranker = Ranker(load_model(export, RANKER, models=models), item_columns=of_item)
        if catalogue is not None:
            ranker.encode_items(catalogue.frame)
    if export.has(f"{ENCODER}/{MODEL_FILE}"):
        packed = load_model(export, ENCODER, models=models)
        if catalogue is None or not isinstance(packed.model, VectorModel):
            raise damaged(export.path, expected="a model with vectors, and a catalogue", found="one without the other")
        encoder = VectorEncoder(packed, item_columns=of_item)
        index = ItemSearch.load(export.file(INDEX_FILE), num_items=len(catalogue))
        if encoder.over_arch is not None:
            path = export.file(OVER_ARCH_FILE)
            rescorer = Rescorer.load(path, over_arch=encoder.over_arch, num_items=len(catalogue))
    if catalogue is not None and export.has(USERS_FILE):
        users = KnownUsers.load(export, id_column=settings.user_id, num_items=len(catalogue))
    labels = () if ranker is None else ranker.labels
    names = () if catalogue is None else numeric_names(catalogue.frame, taken=labels)
    where = str(export.path / CHAIN_FILE)
    try:
        value = ValueModel(
            settings.formula, names=(*labels, *further_names(encoder and encoder.packed.model), *names), where=where
        )
    except ValueError as error:
        raise ExportError(
            expected="a value model over the tasks of the export",
            found=str(error),
            where=where,
            ways_out="make the export again: ziggurat export RUN --out FOLDER",
        ) from error
    used = [name for name in names if name in value.names]
    chain = Chain(
        settings=settings,
        catalogue=catalogue,
        ranker=ranker,
        encoder=encoder,
        index=index,
        value=value,
        rescorer=rescorer,
        numbers={} if catalogue is None else numbers_of(catalogue.frame, names=used),
        known=_known_sides(users, ranker, encoder),
    )
    return chain, users, _info(export, chain, users)


def further_names(model: Model | None) -> list[str]:
    """List what a formula may name beside tasks and columns, given the model that retrieves, or None."""
    if model is None:
        return []
    found = [RETRIEVAL] if getattr(model, "over_arch", None) is None else [RETRIEVAL, OVER_ARCH]
    return [*found, *task_names(model)]


def _known_sides(users: KnownUsers | None, ranker: Ranker | None, encoder: VectorEncoder | None) -> KnownSides:
    if users is None or not 0 < users.frame.height <= _MAX_ENCODED:
        return KnownSides()
    return KnownSides(
        ranker=None if ranker is None else encode_frame(ranker.users, users.frame),
        encoder=None if encoder is None else encode_frame(encoder.users, users.frame),
    )


def _info(export: ExportFolder, chain: Chain, users: KnownUsers | None) -> Info:
    catalogue = chain.catalogue
    ranker = chain.ranker
    encoder = chain.encoder
    sides = [side for part in (ranker, encoder) if part is not None for side in (part.users, part.items)]
    # Users and items stand there by turns.
    user_schemas = [side.preprocessing.schema for side in sides[::2] if side.preprocessing is not None]
    item_schemas = [side.preprocessing.schema for side in sides[1::2] if side.preprocessing is not None]
    user_columns = _columns(user_schemas, None if users is None else users.frame)
    if users is not None and users.id_column not in {column.name for column in user_columns}:
        example = Column(name=users.id_column, kind="categorical", example=users.ids[0] if len(users.ids) else None)
        user_columns = (example, *user_columns)
    item_columns = _columns(item_schemas, None if catalogue is None else catalogue.frame)
    if catalogue is None:  # nobody said what describes the item: any column may come from either
        item_columns = user_columns
    names = {column.name for column in item_columns}
    item_columns += tuple(Column(name=name, kind="dense") for name in chain.numbers if name not in names)
    return Info(
        name=export.name,
        version=export.version,
        made_with=export.manifest.made_with.get("ziggurat", ""),
        can_recommend=chain.index is not None,
        can_rank=ranker is not None,
        num_items=0 if catalogue is None else len(catalogue),
        labels=chain.labels,
        user_columns=user_columns,
        item_columns=item_columns,
        filters={} if chain.index is None else dict(chain.index.attributes),
        filter_example="" if chain.index is None else chain.index.example(),
        value_model=chain.settings.formula,
        num_candidates=chain.settings.num_candidates if chain.index is not None else 0,
        user_id="" if users is None else users.id_column,
        item_id="" if catalogue is None else catalogue.columns.id,
        num_over_arch=0 if chain.rescorer is None else chain.settings.num_over_arch,
        repeats=chain.settings.repeats.value,
        exclude_seen=chain.settings.repeats.answers_leave_out,
        products={
            part: each.packed.products_format
            for part, each in ((ENCODER, encoder), (RANKER, ranker))
            if each is not None
        },
        examples=read_requests(export),
        published=publication_of(export.manifest.facts, where=str(export.path)),
    )


def _columns(schemas: Sequence[Schema], frame: pl.DataFrame | None) -> tuple[Column, ...]:
    found: dict[str, Column] = {}
    for schema in schemas:
        for feature in schema.features:
            name = column_of(feature)
            example = None
            if frame is not None and name in frame.columns and frame.height:
                example = plain(frame[name][0])
            # Where both models have a column, one entry is enough for both.
            found.setdefault(name, Column(name=name, kind=feature.kind, example=example))
    return tuple(found.values())
