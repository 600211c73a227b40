"""Files: the only writer of formats. Written whole or not at all, checksummed, versioned; read within bounds.

Every small file of Ziggurat is JSON with three keys of its own beside the content:

    {"format": "ziggurat.plan", "version": 1, "world_size": 4, …, "sha256": "…"}

- *format* tells what it is, so that a plan given where towers were asked for is named as what it is.
- *version* is that of the layout. A `Format` has migrations, version → function: `{0: f}` turns version 0 (files
  without a version: those of the first release, and those that people write by hand) into version 1. A newer version
  than ours is an error that says so.
- *sha256* covers all the rest, whatever its spelling (canonical JSON). A file that people may edit (`Seal.EDITABLE`)
  may go without; where the key stands, it must be right. Files that only Ziggurat writes must have it.

Writing is atomic: temporary file in the same folder → fsync → rename → fsync of the folder. After a crash or a full
disk there is the old file or the new one. `replacing` does the same for large files, `replacing_folder` for folders.

Reading is bounded: a regular file (no pipe, no device: opened without blocking), of at most so many bytes, nested at
most so deep, with numbers that a computer can hold, and without a key that occurs twice. What goes wrong is an error
in four parts of the kind that the caller names, never a traceback, a hang or a machine without memory.

    reading.py    bytes, text, JSON and TOML within bounds
    writing.py    files and folders, whole or not at all
    formats.py    the three keys, migrations, checksums
    pictures.py   drawings of matplotlib
    locking.py    one process at a time
    parts.py      finished parts of one result, so that work which is killed goes on
    first_kept.py the first of several processes that decide the same thing
    streams.py    standard output and standard error
    stores.py     files in object stores under their URLs, for reading; store_reader.py reads them
"""

from ziggurat.files.figures import write_figure
from ziggurat.files.formats import Format, Migration, Seal, check_version, digest_of, sha256_of
from ziggurat.files.locking import FileLock, locked
from ziggurat.files.reading import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_DIGITS,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_text,
    read_toml,
)
from ziggurat.files.writing import (
    is_temporary,
    left_behind,
    make_room,
    publish,
    refuse_url,
    remove,
    remove_left_behind,
    replacing,
    replacing_folder,
    sync,
    take_away,
    temporary_beside,
    ways_to_write,
    write_bytes,
    write_text,
    writing_to,
)

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_DIGITS",
    "FileLock",
    "Format",
    "Migration",
    "Seal",
    "check_version",
    "digest_of",
    "is_temporary",
    "locked",
    "left_behind",
    "make_room",
    "parse_json",
    "parse_toml",
    "publish",
    "read_bytes",
    "read_json",
    "read_text",
    "read_toml",
    "refuse_url",
    "remove",
    "remove_left_behind",
    "replacing",
    "replacing_folder",
    "sha256_of",
    "sync",
    "take_away",
    "temporary_beside",
    "ways_to_write",
    "write_bytes",
    "write_figure",
    "write_text",
    "writing_to",
]
