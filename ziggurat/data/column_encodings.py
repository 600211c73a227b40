"""Which columns of a Parquet file are smaller with a dictionary, and which plain: measured, not guessed.

A dictionary packs ids to as many bits as it has entries, which is small where values are few, but hides from the codec
that whole lists repeat: plain, equal lists are equal bytes one list apart. Plain pages also decode faster.
"""

from __future__ import annotations

from typing import TypedDict

import pyarrow as pa
import pyarrow.parquet as pq


class Codec(TypedDict):
    """Settings of the compression of a Parquet file."""

    compression: str
    compression_level: int


def smallest_encodings(sample: pa.Table, *, codec: Codec) -> list[str]:
    """The columns to write with a dictionary, by their paths in Parquet.

    Args:
        sample: first rows of the file.
        codec: `compression` (and level) that the file will have.
    """
    chosen: list[str] = []
    for name in sample.column_names:
        sizes = []
        for use_dictionary in (True, False):
            sink = pa.BufferOutputStream()
            pq.write_table(sample.select([name]), sink, use_dictionary=use_dictionary, **codec)
            metadata = pq.read_metadata(pa.BufferReader(sink.getvalue()))
            paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            sizes.append(sum(group.column(at).total_compressed_size for group in groups for at in range(len(paths))))
        if sizes[0] < sizes[1]:
            chosen += paths
    return chosen
