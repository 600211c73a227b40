"""first_look: what can be said of a question before its export is loaded: that it is there, and its filter's mistakes.

Loading an export reads and checks every byte of it. Its manifest and the attributes of its items are small, and enough
to refuse a wrong path, an export that has no index, or a mistake in a filter at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from ziggurat.config import from_json
from ziggurat.errors import RequestError
from ziggurat.files.tensors import open_tensors
from ziggurat.retrieval.filters import FilterSchema, parse_filter
from ziggurat.serving.answering.item_search import INDEX_FILE
from ziggurat.serving.export.export_folder import ExportFolder, read_manifest


def look_at_export(path: str | Path, *, filters: Sequence[str] = ()) -> ExportFolder:
    """The manifest of an export that can recommend, whose files are not read yet.

    Args:
        path: of the export.
        filters: texts that it will be asked with.

    Raises:
        MissingFileError: there is no export.
        ExportError: its manifest is damaged.
        RequestError: it has no index of items.
        FilterError: a filter cannot be read; points at the column.
    """
    export = read_manifest(path)
    if not export.has(INDEX_FILE):
        raise RequestError(
            expected="an export with an index of items",
            found="one that ranks given items only",
            where=f"export {export.name}",
            ways_out="ziggurat export RUN_THAT_FINDS_ITEMS --ranker RUN --out FOLDER",
        )
    schema = _schema_of(export.file(INDEX_FILE)) if any(filters) else None
    for text in filters:
        if text and schema is not None:
            parse_filter(text, schema=schema)
    return export


def _schema_of(path: Path) -> FilterSchema | None:
    """The attributes of an index; None where the file cannot be read, which loading explains."""
    try:
        with open_tensors(path, framework="numpy") as tensors:
            about = json.loads(tensors.get_tensor("filters.about").tobytes())
        return from_json(FilterSchema, about["schema"], where=str(path))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None
