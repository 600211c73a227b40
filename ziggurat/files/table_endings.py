"""Choose how a table is read and written by the ending of its file: one rule for every verb that has rows.

Written:

    .parquet, .pq, no ending   Parquet: types and lists stay
    .csv, .tsv                 text, fields divided by a comma or a tab, one line of names: plain values alone

A verb whose rows hold lists writes them to text in another shape (one line an item, one column a number), and says so
in its help; one whose files others are made from takes Parquet alone, under a name that says so.
"""

from __future__ import annotations

from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError
from ziggurat.files.writing import refuse_url

# The format (`data.raw.FileFormat`) of files that are read; the first bytes may say otherwise.
READ_AS = {
    **{".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"},
    **{".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".txt": "tsv"},
    **{".jsonl": "jsonl", ".ndjson": "jsonl"},
}
_TEXT = {".csv": ",", ".tsv": "\t"}
_PARQUET = (".parquet", ".pq", "")
ENDINGS = ".parquet, .csv or .tsv"


def separator_by_ending(out: str | Path) -> str:
    """Return what divides the fields of a text file; "" for Parquet.

    Args:
        out: the file to write.

    Raises:
        ConfigError: a URL, or an ending of another format.
    """
    refuse_url(out, error=ConfigError)
    path = Path(out)
    suffix = path.suffix.lower()
    if suffix not in (*_TEXT, *_PARQUET):
        stem = path.with_suffix("")
        # A compressed text has two endings.
        stem = stem.with_suffix("") if stem.suffix.lower() in _TEXT else stem
        names = [stem.with_name(stem.name + ending) for ending in (".parquet", *_TEXT)]
        raise ConfigError(
            expected=f"a file that ends in {ENDINGS}",
            found=repr(str(out)),
            where="out",
            ways_out=tuple(f"--out {pasted(name)}" for name in names),
        )
    return _TEXT.get(suffix, "")


def refuse_text(out: str | Path, *, because: str) -> None:
    """Refuse a file that is not named as Parquet, where nothing else is written.

    Args:
        out: the file to write.
        because: why it is Parquet.

    Raises:
        ConfigError: another ending.
    """
    path = Path(out)
    # Others read the file, and tell what it is by its ending.
    if path.suffix.lower() not in (".parquet", ".pq"):
        raise ConfigError(
            expected=f"a file that ends in .parquet: {because}",
            found=repr(path.name),
            where="out",
            ways_out=f"--out {pasted(path.with_suffix('.parquet'))}",
        )
