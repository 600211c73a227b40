"""Deltas of a model in an export: what changed since the version before, laid over a base file after file.

    ranker/weights.safetensors          the base: all weights
    ranker/deltas/000008.safetensors    dense weights, and rows of tables that changed: (rows), (rows, D)
    ranker/deltas/000009.safetensors    the same since version 8
                                        of a table that grows also which ids its rows have now

    weights of version 9 = base ← delta 8 ← delta 9        each row as the last file says that has it

`model.json` lists the files in their order, and the manifest of the export holds the digest of each. The weights that
come out are those that were trained, bit for bit: rows are copied, nothing is added up.

Names of tensors: those of the state dict for dense weights, and four kinds with a slash, which no module's name has.
Cost of a load: the base, and all rows of the deltas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.grown import GrownVocabulary
from ziggurat.errors import CheckpointError
from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.files.tensors import load_tensors
from ziggurat.models import Model
from ziggurat.serving.export.export_folder import damaged

_ROWS = "rows/"
_VALUES = "values/"
_GROWN_ROWS = "grown_rows/"
_GROWN_IDS = "grown_ids/"


@dataclass(frozen=True, kw_only=True)
class ChangedRows:
    """Rows of a table, with their weights.

    Args:
        rows: (N,) of the table, rising.
        values: (N, D), FP32.
    """

    rows: Int64[Tensor, "N"]
    values: Float[Tensor, "N D"]


@dataclass(frozen=True, kw_only=True)
class ChangedIds:
    """Rows of a growing table that have another id than before.

    Args:
        rows: (N,) of the table, the reserved ones counted.
        ids: (N,) numbers of their ids (`features/growing.py`).
    """

    rows: Int64[np.ndarray, " N"]
    ids: Int64[np.ndarray, " N"]


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The content of a delta.

    Args:
        dense: all weights and buffers but tables, by name.
        tables: rows by table.
        grown: ids by growing table.
    """

    dense: dict[str, Tensor]
    tables: dict[str, ChangedRows] = field(default_factory=dict)
    grown: dict[str, ChangedIds] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(len(each.rows) for each in self.tables.values())

    def save(self, path: Path) -> None:
        """Write the file."""
        tensors = {name: value.contiguous() for name, value in separate(self.dense).items()}
        for name, each in self.tables.items():
            tensors[_ROWS + name] = each.rows
            tensors[_VALUES + name] = each.values
        for name, ids in self.grown.items():
            tensors[_GROWN_ROWS + name] = torch.from_numpy(ids.rows)
            tensors[_GROWN_IDS + name] = torch.from_numpy(ids.ids)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(path))

    @staticmethod
    def load(path: Path) -> Delta:
        """Read a file whose digest was compared.

        Raises:
            ExportError: it is no delta.
        """
        try:
            tensors = load_tensors(path)
            tables = {
                name: ChangedRows(rows=tensors[_ROWS + name], values=tensors[_VALUES + name])
                for name in _named(tensors, _ROWS)
            }
            grown = {
                name: ChangedIds(rows=tensors[_GROWN_ROWS + name].numpy(), ids=tensors[_GROWN_IDS + name].numpy())
                for name in _named(tensors, _GROWN_ROWS)
            }
        except (SafetensorError, KeyError) as error:
            raise damaged(path, expected="a delta of an export", found=str(error)[:200]) from error
        dense = {name: value for name, value in tensors.items() if "/" not in name}
        return Delta(dense=dense, tables=tables, grown=grown)


def lay_over(model: Model, preprocessing: Preprocessing, paths: Sequence[Path]) -> Preprocessing:
    """Lay deltas over a model that holds its base; return its preprocessing with the ids that growing tables have now.

    Args:
        model: filled with the base.
        preprocessing: of the base.
        paths: of the deltas, in order.

    Raises:
        ExportError: a delta names what the model does not have.
    """
    grown = {name: ids_in_order(each) for name, each in preprocessing.grown.items()}
    for path in paths:
        delta = Delta.load(path)
        _lay_dense(model, delta.dense, path=path)
        for name, changed in delta.tables.items():
            _lay_rows(model, name, changed, path=path)
        for name, ids in delta.grown.items():
            if name not in grown:
                raise damaged(path, expected=f"growing tables {', '.join(grown) or '(none)'}", found=f"{name!r:.80}")
            grown[name] = with_ids(grown[name], ids)
    if not paths or not grown:
        return preprocessing
    made = {name: GrownVocabulary.of(ids) for name, ids in grown.items()}
    try:
        return preprocessing.with_grown(made)
    except CheckpointError as error:
        raise damaged(paths[-1], expected=error.expected, found=error.found) from error


def with_ids(ids: Int64[np.ndarray, " K"], changed: ChangedIds) -> Int64[np.ndarray, " L"]:
    """Return the ids of rows 3, 4, 5 … of a growing table, after some of them have changed.

    Args:
        ids: before.
        changed: rows that have another one, or one for the first time.
    """
    places = changed.rows - NUM_RESERVED_ROWS
    found = np.zeros(max(len(ids), int(places.max(initial=-1)) + 1), dtype=np.int64)
    found[: len(ids)] = ids
    found[places] = changed.ids
    return found


def changed_ids(before: Int64[np.ndarray, " K"], now: Int64[np.ndarray, " L"]) -> ChangedIds:
    """Return which rows 3, 4, 5 … of a growing table have another id than before; rows never become free again."""
    shared = min(len(before), len(now))
    places = np.concatenate([np.flatnonzero(before[:shared] != now[:shared]), np.arange(shared, len(now))])
    return ChangedIds(rows=places.astype(np.int64) + NUM_RESERVED_ROWS, ids=now[places].astype(np.int64))


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which none shares memory with another: two names of one weight are two in a file."""
    known: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        tensor = value.detach().cpu()
        if tensor.data_ptr() in known:
            tensor = tensor.clone()
        known.add(tensor.data_ptr())
        found[name] = tensor
    return found


def ids_in_order(grown: GrownVocabulary) -> Int64[np.ndarray, " K"]:
    """Return the ids of rows 3, 4, 5 … of a growing table."""
    found = np.zeros(len(grown), dtype=np.int64)
    found[grown.table_rows - NUM_RESERVED_ROWS] = grown.numbers
    return found


def _named(tensors: Mapping[str, Tensor], prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]


def _lay_dense(model: Model, dense: dict[str, Tensor], *, path: Path) -> None:
    try:
        _, unexpected = model.load_state_dict(dense, strict=False)
    except RuntimeError as error:
        raise damaged(path, expected="weights of the model's shapes", found=str(error)[:300]) from error
    if unexpected:
        raise damaged(path, expected="weights of the model", found=f"others: {', '.join(unexpected)[:200]}")


def _lay_rows(model: Model, name: str, changed: ChangedRows, *, path: Path) -> None:
    tables = model.embeddings.tables
    place = tables.places.get(name)
    if place is None:
        raise damaged(path, expected=f"tables {', '.join(tables.places)}"[:200], found=f"{name!r:.80}")
    rows = changed.rows
    is_in_table = not len(rows) or (int(rows.min()) > 0 and int(rows.max()) < place.num_rows)
    if rows.dtype is not torch.int64 or not is_in_table or bool((rows.diff() <= 0).any()):
        raise damaged(
            path, expected=f"rising rows 1 to {place.num_rows - 1:,} of table {name!r}", found=f"{rows.dtype}, others"
        )
    if changed.values.shape != (len(rows), place.dim) or changed.values.dtype is not torch.float32:
        found = f"{changed.values.dtype} of shape {tuple(changed.values.shape)}"
        raise damaged(path, expected=f"{len(rows):,} rows of {place.dim} numbers for table {name!r}", found=found)
    tables.storage(place.storage).scatter(rows + place.first_row, changed.values)
