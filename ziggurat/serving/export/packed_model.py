"""A model in an export: its config, its fitted preprocessing and its weights, and back to a model that scores.

    ranker/model.json             {"model": {"kind": "dcn_v2", …}, "towers": null, "tables": "int8", "by_table": {…}}
    ranker/preprocessing/         as a run has it
    ranker/weights.safetensors    embeddings.tables.user_id.weight …, cross.0.weight …
                                  tables in few bits: (rows, bytes of a row), as `ops/row_formats` keeps them
                                  packed products: products.cross.0 (outputs, bytes), the bits of `numerics/packing.py`

What a model sees of the data (`InputSpec`) follows from the fitted preprocessing and is not written twice. A config of
the user's own is loaded where its class is given (`models=`); a file never makes this code import anything.

Tables in few bits are written and loaded in pieces and stay so in memory: lookups decode the rows that they add
(`LowPrecisionStorage`). Exports of version 1 have other codes (`export/version_1.py`); their tables
are decoded to FP32 once, so that they answer as they did.

Weights of dense products that are packed (`models/packed.py`) are written in the bits of their format and laid out for
the kernel when they are loaded. Such a model.json has version 3, which an earlier Ziggurat refuses; all others stay as
it reads them. One that lists deltas (`deltas.py`), which lie over the weights, has version 4; one whose modules are
packed in unlike formats (`models/scoring_plan.py`) has version 5.

Safetensors has neither code nor compression; it is opened only after its checksum was compared.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ziggurat.config import from_json, to_json
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.embeddings import KernelChoice
from ziggurat.embeddings.storage import LowPrecisionStorage, reader
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.embeddings.weights import TableWeights
from ziggurat.errors import ConfigError, ExportError
from ziggurat.features.schema import PADDING_ROW
from ziggurat.files import Format
from ziggurat.files.tensors import open_tensors
from ziggurat.models import MODEL_CONFIGS, Model, ModelConfig, build_model
from ziggurat.models.build import kind_of
from ziggurat.models.packed import PackedProducts, empty_bits, formats_by_module, take_bits
from ziggurat.numerics import BlockFormat
from ziggurat.ops.row_formats import PLAIN, RowFormat
from ziggurat.parallel.device import usable_kernel
from ziggurat.plain import JSON
from ziggurat.plan import Towers
from ziggurat.serving.answering.histories import HistorySnapshots
from ziggurat.serving.export.deltas import Delta, lay_over, separate
from ziggurat.serving.export.export_folder import WAYS_OUT, ExportFolder, damaged
from ziggurat.serving.export.version_1 import decoded, layout, parts_of
from ziggurat.typed import Kinds

MODEL = Format(
    name="ziggurat.export_model",
    what="the model of an export",
    version=2,
    newest=5,
    migrations={1: lambda data: data | {"by_table": {}, "version_1": data.get("tables") != "fp32"}},
    error=ExportError,
    ways_out=WAYS_OUT,
)
MODEL_FILE, WEIGHTS_FILE, PREPROCESSING = "model.json", "weights.safetensors", "preprocessing"
_WITH_PACKED_PRODUCTS = 3
_WITH_DELTAS = 4
_WITH_UNLIKE_PRODUCTS = 5
_TABLES = "embeddings.tables."
_BITS = "products."
_CHUNK_ROWS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class _Products:
    """Dense products that are packed.

    Args:
        format_of_weights: of most of them.
        modules: whose weights they are.
        by_module: the format of those that have another one.
    """

    format_of_weights: str
    modules: tuple[str, ...]
    by_module: dict[str, str] = field(default_factory=dict)

    def formats(self, *, where: str) -> dict[str, BlockFormat]:
        """Return the format of each module."""
        return formats_by_module(self.format_of_weights, self.modules, self.by_module, where=where)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The content of model.json."""

    model: Annotated[ModelConfig, Kinds(MODEL_CONFIGS)]
    towers: Towers | None
    tables: RowFormat
    by_table: dict[str, RowFormat]
    origin: str  # class of a config of the user's own, for people
    version_1: bool = False  # tables in the codes of version 1
    products: _Products | None = None
    deltas: tuple[str, ...] = ()

    @property
    def kept(self) -> TablesConfig:
        """The formats in which the tables are kept in memory."""
        return TablesConfig() if self.version_1 else TablesConfig(weights=self.tables, by_table=self.by_table)


@dataclass(frozen=True, kw_only=True)
class PackedModel:
    """A model with what it needs to score raw rows.

    Args:
        config: of the model.
        towers: groups of features behind modules, or None.
        preprocessing: as fitted on the training data.
        model: in evaluation mode.
        tables: what its tables are kept as.
        products: its dense products that are packed in few bits; None where all are FP32.
        histories: vectors of users that a teacher has logged.
    """

    config: ModelConfig
    towers: Towers | None
    preprocessing: Preprocessing
    model: Model
    tables: TablesConfig = field(default_factory=TablesConfig)
    products: PackedProducts | None = None
    histories: HistorySnapshots = field(default_factory=HistorySnapshots)

    @property
    def products_format(self) -> str:
        """The format of the weights of its dense products: fp32, mx6, int8+mx9, …"""
        return "fp32" if self.products is None else self.products.format_name


def save_weights(packed: PackedModel, folder: Path, *, weights: Mapping[str, Tensor]) -> None:
    """Write a model into a folder of an export, with FP32 weights that are given: those of all ranks, say.

    Args:
        packed: config and preprocessing of the model.
        folder: is made.
        weights: all of them, by the names of its state dict.
    """
    folder.mkdir(parents=True)
    MODEL.write(folder / MODEL_FILE, _content(packed, tables=TablesConfig()))
    save_preprocessing(packed.preprocessing, folder / PREPROCESSING)
    save_file({name: each.contiguous() for name, each in separate(weights).items()}, str(folder / WEIGHTS_FILE))


def save_delta(packed: PackedModel, folder: Path, *, delta: Delta, names: Sequence[str]) -> None:
    """Write what changed beside the weights of a version before, which are in the folder already.

    Args:
        packed: config of the model.
        folder: of the model.
        delta: what changed.
        names: of all deltas below `folder`, in order; the last one is written.
    """
    content = _content(packed, tables=TablesConfig()) | {"deltas": list(names)}
    MODEL.write(folder / MODEL_FILE, content, version=_WITH_DELTAS)
    delta.save(folder / names[-1])


def delta_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the deltas of a model below its folder, in order.

    Raises:
        ExportError: model.json is damaged.
    """
    content = MODEL.read(folder / MODEL_FILE)
    names = content.get("deltas", []) if isinstance(content, dict) else []
    return tuple(map(str, names))


def _content(packed: PackedModel, *, tables: TablesConfig) -> dict[str, object]:
    """The content of model.json."""
    is_own = type(packed.config) not in MODEL_CONFIGS
    places = packed.model.embeddings.tables.places if tables.by_table else {}
    return {
        "model": to_json(packed.config),
        "towers": None if packed.towers is None else to_json(packed.towers),
        "tables": tables.weights.value,
        "by_table": {name: each.value for name, each in tables.by_table.items() if name in places},
        "origin": f"{type(packed.config).__module__}:{type(packed.config).__qualname__}" if is_own else "",
    }


def save_model(packed: PackedModel, folder: Path, *, tables: TablesConfig) -> None:
    """Write a model into a folder of an export.

    Args:
        packed: the model as it was trained.
        folder: is made.
        tables: the formats that its tables are written in.
    """
    folder.mkdir(parents=True)
    places = packed.model.embeddings.tables.places
    content = _content(packed, tables=tables)
    bits: dict[str, Tensor] = {}
    if packed.products is None:
        MODEL.write(folder / MODEL_FILE, content)
    else:
        bits = packed.products.bits
        by_module = packed.products.by_module
        content["products"] = {"format_of_weights": packed.products.most_common.name, "modules": list(bits)} | (
            {"by_module": by_module} if by_module else {}
        )
        version = _WITH_UNLIKE_PRODUCTS if by_module else _WITH_PACKED_PRODUCTS
        MODEL.write(folder / MODEL_FILE, content, version=version)
    save_preprocessing(packed.preprocessing, folder / PREPROCESSING)
    tensors: dict[str, Tensor] = {f"{_BITS}{name}": rows for name, rows in bits.items()}
    known: set[int] = set()
    for name, value in packed.model.state_dict().items():
        if name.removesuffix(".weight") in bits:
            continue
        table = name.removeprefix(_TABLES).removesuffix(".weight") if name.startswith(_TABLES) else ""
        row_format = tables.format_of(table, dim=places[table].dim) if table else PLAIN
        if not row_format.is_plain:
            tensors[name] = _packed(value, row_format)
            continue
        # Tables that the run keeps in few bits or on a disk have no tensor of their own: their rows are read here.
        tensor = (reader(value)(0, len(value)) if table else value).detach().cpu()
        if tensor.data_ptr() in known:
            tensor = tensor.clone()  # two names of one weight: the format has no such thing
        known.add(tensor.data_ptr())
        tensors[name] = tensor.contiguous()
    save_file(tensors, str(folder / WEIGHTS_FILE))


def _packed(table: Tensor, row_format: RowFormat) -> Tensor:
    """The rows of a table in few bits; one piece of them at a time is FP32."""
    num_rows, dim = table.shape
    read = reader(table)
    packed = torch.empty(num_rows, row_format.width(dim), dtype=row_format.dtype)
    for first in range(0, num_rows, _CHUNK_ROWS):
        count = min(_CHUNK_ROWS, num_rows - first)
        packed[first : first + count] = row_format.checked_encode(read(first, count).detach().cpu())
    return packed.view(row_format.file_dtype)


def load_model(export: ExportFolder, part: str, *, models: Sequence[type[object]] = ()) -> PackedModel:
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
    tables = settings.kept
    chosen = settings.model.embedding.kernel
    if settings.version_1:
        warnings.warn(f"{file}: an older export, whose tables take FP32 in memory; make it again", stacklevel=2)
    kernel = usable_kernel(KernelChoice.AUTO if tables.has_few_bits else chosen, device=torch.device("cpu"))
    embedding = dataclasses.replace(settings.model.embedding.only_read, kernel=kernel)
    model = build_model(
        dataclasses.replace(settings.model, embedding=embedding),
        preprocessing.inputs,
        seed=0,
        towers=settings.towers,
        draw_tables=False,
        make_storage=tables.make_storage(seed=0, is_trained=False),
    )
    weights = export.file(f"{part}/{WEIGHTS_FILE}")
    bits = _fill(model, weights, settings=settings)
    preprocessing = lay_over(model, preprocessing, [export.file(f"{part}/{name}") for name in settings.deltas])
    products = None
    if settings.products is not None:
        products = take_bits(model, settings.products.formats(where=str(file)), bits)
    model.eval()
    model.requires_grad_(False)
    return PackedModel(
        config=settings.model,
        towers=settings.towers,
        preprocessing=preprocessing,
        model=model,
        tables=tables,
        products=products,
        histories=HistorySnapshots.load(export, part, schema=preprocessing.schema),
    )


def _settings(data: JSON, *, where: str, models: Sequence[type]) -> _Settings:
    known = {kind_of(each) for each in (*MODEL_CONFIGS, *models)}
    settings = data if isinstance(data, dict) else {}
    model = settings.get("model")
    kind = model.get("kind") if isinstance(model, dict) else None
    if kind not in known and settings.get("origin"):
        origin = str(settings["origin"])
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


def _fill(model: Model, path: Path, *, settings: _Settings) -> dict[str, Tensor]:
    """Read all weights, and return the bits of packed ones.

    What is missing, too much or of another shape is an error that names it.
    """
    weights = model.embeddings.tables
    parts = parts_of(settings.tables) if settings.version_1 else ()
    keys = [f"{_TABLES}{name}.weight{part}" for name in weights.places for part in ("", *parts)]
    try:
        with open_tensors(path) as file:
            names = set(file.keys())
            dense = {name: file.get_tensor(name) for name in names if not name.startswith(_TABLES)}
            if wrong := sorted((names ^ set(keys)) - dense.keys()):
                raise damaged(path, expected="the tables of the model", found=f"other ones: {', '.join(wrong)[:200]}")
            for name in weights.places:
                _fill_table(file, weights, name, settings=settings, where=path)
    except SafetensorError as error:
        raise damaged(path, expected="a file in the format safetensors", found=str(error)[:200]) from error
    bits = _taken_bits(dense, model, settings=settings, where=path)
    packed = {f"{name}.weight" for name in bits}
    try:
        missing, unexpected = model.load_state_dict(dense, strict=False)
    except RuntimeError as error:
        raise damaged(path, expected="weights of the model's shapes", found=str(error)[:300]) from error
    missing = [name for name in missing if not name.startswith(_TABLES) and name not in packed]
    if missing or unexpected:
        raise damaged(
            path, expected="the weights of the model", found=f"missing {missing}, too much {unexpected}"[:300]
        )
    weights.mark_filled()
    return bits


def _taken_bits(dense: dict[str, Tensor], model: Model, *, settings: _Settings, where: Path) -> dict[str, Tensor]:
    """Take the bits of packed weights out of the tensors of a file, by the names of their modules."""
    if settings.products is None:
        return {}
    found: dict[str, Tensor] = {}
    for name, room in empty_bits(model, settings.products.formats(where=str(where))).items():
        bits = dense.pop(f"{_BITS}{name}", None)
        if bits is None or bits.shape != room.shape or bits.dtype is not room.dtype:
            shown = "none" if bits is None else f"{bits.dtype} of shape {tuple(bits.shape)}"
            raise damaged(where, expected=f"{_BITS}{name} as {room.dtype} of shape {tuple(room.shape)}", found=shown)
        found[name] = bits
    return found


def _fill_table(file: safe_open, weights: TableWeights, name: str, *, settings: _Settings, where: Path) -> None:
    rows = weights.rows(name)
    key = f"{_TABLES}{name}.weight"
    dim = weights.places[name].dim
    if settings.version_1:
        expected = layout(settings.tables, dim)
    else:
        row_format = settings.kept.format_of(name, dim=dim)
        expected = {"": ((row_format.width(dim),), row_format.file_dtype)}
    slices = {part: file.get_slice(key + part) for part in expected}
    for part, (shape, _) in expected.items():
        found = tuple(slices[part].get_shape())
        if found != (rows.num_rows, *shape):
            shown = (rows.num_rows, *shape)
            raise damaged(where, expected=f"{key}{part} of shape {shown}", found=f"{found}")
    for first in range(0, rows.num_rows, _CHUNK_ROWS):
        last = min(first + _CHUNK_ROWS, rows.num_rows)
        chunk = {part: slices[part][first:last] for part in expected}
        for part, (_, dtype) in expected.items():
            if chunk[part].dtype != dtype:
                raise damaged(where, expected=f"{key}{part} in {dtype}", found=str(chunk[part].dtype))
        if settings.version_1:
            rows.write(first, decoded(chunk, dim=dim))
        elif isinstance(rows.storage, LowPrecisionStorage):
            rows.storage.write_packed(rows.first_row + first, chunk[""])
        else:
            rows.write(first, chunk[""])
    if bool(rows.read(PADDING_ROW, 1).any()):
        raise damaged(where, expected=f"zeros in the padding row of table {name!r}", found="other numbers")
