"""The manifest of encoded data: its format on disk and what older versions of it become."""

from __future__ import annotations

from typing import TypedDict

from ziggurat.features.inputs import labels_with_outcomes
from ziggurat.files import Format, digest_of
from ziggurat.plain import JSON, as_group

REDO = "delete the folder and prepare the data again"


class ManifestFile(TypedDict):
    """Facts about one file of encoded data."""

    name: str
    bytes: int
    footer_sha256: str
    group_rows: list[int]


class Manifest(TypedDict):
    """Content of a manifest, in the present version.

    `row_sum` is in hex, `content` the digest of all values in their order, `inputs` an InputSpec, `extra` whatever
    else was prepared with the data.
    """

    inputs: JSON
    num_rows: int
    row_sum: str
    content: str
    with_labels: bool
    extra: dict[str, JSON]
    files: list[ManifestFile]


def _first_version(content: JSON) -> JSON:
    """Version 0: `format` was the number 1, and the checksum covered it."""
    manifest = as_group(content)
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    if manifest["sha256"] != digest_of(body) or body.pop("format") != 1:
        raise ValueError("its sha256 differs")
    # What was prepared before there was a digest of the values has its manifest's: sizes and footers.
    return {"content": f"manifest {manifest['sha256']}", **body}


def _before_lists_stored_once(manifest: JSON) -> JSON:
    """Version 1: every list stood in its row, which the reader of version 2 takes as it is."""
    return manifest


def _labels_say_their_outcomes(content: JSON) -> JSON:
    """Version 2: that the label of what came next is always 1 followed from its name."""
    manifest = as_group(content)
    return {**manifest, "inputs": labels_with_outcomes(as_group(manifest["inputs"]))}


MANIFEST = Format(
    name="ziggurat.encoded",
    what="a data set's manifest",
    version=3,
    migrations={0: _first_version, 1: _before_lists_stored_once, 2: _labels_say_their_outcomes},
    ways_out=(REDO, "restore the file from a copy", "use the version of ziggurat that wrote it"),
    max_bytes=1 << 30,
)
