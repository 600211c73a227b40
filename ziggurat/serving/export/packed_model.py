"""A model in an export: its config, its fitted preprocessing and its weights, and back to a model that scores.

    ranker/model.json             {"model": {"kind": "dcn_v2", …}, "towers": null, "tables": "fp32", "dims": {…}}
    ranker/preprocessing/         as a run has it
    ranker/weights.safetensors    embeddings.tables.user_id.weight …, cross.0.weight …
                                  tables in few bits: …weight (codes), …weight:scale, …weight:offset

What a model sees of the data (`InputSpec`) follows from the fitted preprocessing and is not written twice. A config of
the user's own is loaded where its class is given (`models=`); a file never makes this code import anything.

Tables are loaded as they lie: those in few bits stay so in memory and are decoded row by row (`QuantisedStorage`).
Safetensors has neither code nor compression; it is opened only after its checksum was compared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ziggurat.config import from_json, to_json
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.embeddings import TableOptimizerKind
from ziggurat.embeddings.storage import MemoryStorage, QuantisedStorage, TablePart, TablePrecision
from ziggurat.embeddings.storage.quantised import encode, layout
from ziggurat.embeddings.weights import TableWeights
from ziggurat.errors import ConfigError, ExportError
from ziggurat.features.schema import PADDING_ROW
from ziggurat.files import Format
from ziggurat.models import MODEL_CONFIGS, Model, ModelConfig, build_model
from ziggurat.models.build import kind_of
from ziggurat.parallel.device import usable_kernel
from ziggurat.plan import Towers
from ziggurat.serving.export.export_folder import WAYS_OUT, ExportFolder, damaged
from ziggurat.typed import Kinds

MODEL = Format(name="ziggurat.export_model", what="the model of an export", error=ExportError, ways_out=WAYS_OUT)
MODEL_FILE, WEIGHTS_FILE, PREPROCESSING = "model.json", "weights.safetensors", "preprocessing"
_TABLES = "embeddings.tables."
_CHUNK_ROWS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The content of model.json."""

    model: Annotated[ModelConfig, Kinds(MODEL_CONFIGS)]
    towers: Towers | None
    tables: TablePrecision
    origin: str  # class of a config of the user's own, for people


@dataclass(frozen=True, kw_only=True)
class PackedModel:
    """A model with what it needs to score raw rows.

    Args:
        config: of the model.
        towers: groups of features behind modules, or None.
        preprocessing: as fitted on the training data.
        model: in evaluation mode.
        tables: what its tables are kept as.
    """

    config: ModelConfig
    towers: Towers | None
    preprocessing: Preprocessing
    model: Model
    tables: TablePrecision = TablePrecision.FP32


def save_model(packed: PackedModel, folder: Path, *, tables: TablePrecision) -> None:
    """Write a model into a folder of an export.

    Args:
        packed: the model as it was trained.
        folder: is made.
        tables: what the numbers of its tables are written as.
    """
    folder.mkdir(parents=True)
    is_own = type(packed.config) not in MODEL_CONFIGS
    content = {
        "model": to_json(packed.config),
        "towers": None if packed.towers is None else to_json(packed.towers),
        "tables": tables.value,
        "origin": f"{type(packed.config).__module__}:{type(packed.config).__qualname__}" if is_own else "",
    }
    MODEL.write(folder / MODEL_FILE, content)
    save_preprocessing(packed.preprocessing, folder / PREPROCESSING)
    tensors: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, value in packed.model.state_dict().items():
        # Tables that the run keeps in few bits have no tensor of their own: their rows are decoded here.
        tensor = value.rows.read(0, len(value)) if isinstance(value, TablePart) else value.detach().cpu()
        if tensor.data_ptr() in places:
            tensor = tensor.clone()  # two names of one weight: the format has no such thing
        places.add(tensor.data_ptr())
        if name.startswith(_TABLES) and tables is not TablePrecision.FP32:
            parts = encode(tensor, tables)
            tensors |= {name if key == "weight" else f"{name}:{key}": part for key, part in parts.items()}
        else:
            tensors[name] = tensor.contiguous()
    save_file(tensors, str(folder / WEIGHTS_FILE))


def load_model(export: ExportFolder, part: str, *, models: Sequence[type[Any]] = ()) -> PackedModel:
    """Build a model of an export and fill it.

    Args:
        export: opened, so that its files are as they were written.
        part: "ranker" or "encoder".
        models: config classes of the user's own that it may name.

    Raises:
        ExportError: the files do not go together.
        ConfigError: a model that is neither built in nor in `models`.
    """
    file = export.file(f"{part}/{MODEL_FILE}")
    settings = _settings(MODEL.read(file), where=str(file), models=models)
    preprocessing = load_preprocessing(export.path / part / PREPROCESSING)
    kernel = usable_kernel(settings.model.embedding.kernel, device=torch.device("cpu"))
    rule = TableOptimizerKind.ROWWISE_ADAGRAD  # never used: tables that learn densely would be parameters
    embedding = dataclasses.replace(settings.model.embedding, kernel=kernel, optimizer=rule, weight_decay=0.0)
    few_bits = settings.tables is not TablePrecision.FP32
    model = build_model(
        dataclasses.replace(settings.model, embedding=embedding),
        preprocessing.inputs,
        seed=0,
        towers=settings.towers,
        draw_tables=False,
        make_storage=functools.partial(QuantisedStorage, precision=settings.tables) if few_bits else MemoryStorage,
    )
    _fill(model, export.file(f"{part}/{WEIGHTS_FILE}"), precision=settings.tables)
    model.eval()
    model.requires_grad_(False)
    return PackedModel(
        config=settings.model,
        towers=settings.towers,
        preprocessing=preprocessing,
        model=model,
        tables=settings.tables,
    )


def _settings(data: Any, *, where: str, models: Sequence[type[Any]]) -> _Settings:
    known = {kind_of(each) for each in (*MODEL_CONFIGS, *models)}
    kind = data.get("model", {}).get("kind") if isinstance(data.get("model"), dict) else None
    if kind not in known and data.get("origin"):
        origin = str(data["origin"])
        raise ConfigError(
            expected="the class of the model's config: code is loaded only when you name it, never because a file does",
            found=f"a model of kind {kind!r}, written by {origin:.120}",
            where=where,
            ways_out=(
                f"on the command line: --model {origin:.120}",
                f"in Python: Recommender.load(folder, models=({origin.rpartition(':')[2]:.80},))",
            ),
        )
    return from_json(_Settings, data, where=where, error=ExportError, kinds=tuple(models))


def _fill(model: Model, path: Path, *, precision: TablePrecision) -> None:
    """Read all weights; what is missing, too much or of another shape is an error that names it."""
    weights = model.embeddings.tables
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            dense = {name: file.get_tensor(name) for name in names if not name.startswith(_TABLES)}
            tables = {f"{_TABLES}{key}" for key in _table_keys(weights, precision)}
            if wrong := sorted((names ^ tables) - dense.keys()):
                raise damaged(path, expected="the tables of the model", found=f"other ones: {', '.join(wrong)[:200]}")
            for name, place in weights.places.items():
                _fill_table(file, weights, name, precision=precision, where=path, dim=place.dim)
    except SafetensorError as error:
        raise damaged(path, expected="a file in the format safetensors", found=str(error)[:200]) from error
    try:
        missing, unexpected = model.load_state_dict(dense, strict=False)
    except RuntimeError as error:
        raise damaged(path, expected="weights of the model's shapes", found=str(error)[:300]) from error
    missing = [name for name in missing if not name.startswith(_TABLES)]
    if missing or unexpected:
        raise damaged(
            path, expected="the weights of the model", found=f"missing {missing}, too much {unexpected}"[:300]
        )
    weights.mark_filled()


def _table_keys(weights: TableWeights, precision: TablePrecision) -> list[str]:
    keys = [f"{name}.weight" for name in weights.places]
    if precision in (TablePrecision.INT8, TablePrecision.INT4):
        keys += [f"{name}.weight:{part}" for name in weights.places for part in ("scale", "offset")]
    return keys


def _fill_table(
    file: Any, weights: TableWeights, name: str, *, precision: TablePrecision, where: Path, dim: int
) -> None:
    rows = weights.rows(name)
    key = f"{_TABLES}{name}.weight"
    parts = layout(precision, dim)
    slices = {part: file.get_slice(key if part == "weight" else f"{key}:{part}") for part in parts}
    for part, (shape, _) in parts.items():
        found = tuple(slices[part].get_shape())
        if found != (rows.num_rows, *shape):
            raise damaged(
                where, expected=f"{part} of table {name!r} of shape {(rows.num_rows, *shape)}", found=f"{found}"
            )
    for first in range(0, rows.num_rows, _CHUNK_ROWS):
        last = min(first + _CHUNK_ROWS, rows.num_rows)
        chunk = {part: slices[part][first:last] for part in parts}
        for part, (_, dtype) in parts.items():
            if chunk[part].dtype != dtype:
                raise damaged(where, expected=f"{part} of table {name!r} in {dtype}", found=str(chunk[part].dtype))
        if isinstance(rows.storage, QuantisedStorage):
            rows.storage.write_parts(rows.first_row + first, chunk)
        else:
            rows.write(first, chunk["weight"])
    if bool(rows.read(PADDING_ROW, 1).any()):
        raise damaged(where, expected=f"zeros in the padding row of table {name!r}", found="other numbers")
