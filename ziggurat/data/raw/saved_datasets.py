"""Data sets that Hugging Face's `datasets` saved on disk: which of the files in such a folder are the data.

    saved/  data-00000-of-00002.arrow  data-00001-of-00002.arrow  dataset_info.json  state.json     one data set
    saved/  dataset_dict.json  train/…  test/…                                                       one a split

`state.json` names the data files in their order; others of the suffix (`cache-….arrow`) are left over from mapping and
filtering, and would be rows twice. The files are Arrow streams, which `arrow_source.py` reads: the package itself is
not needed. Values of a ClassLabel are its numbers, as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ziggurat.errors import DataError
from ziggurat.files import read_json


def saved_files(folder: Path) -> Sequence[Path]:
    """The data files of a saved data set, in their order; nothing for any other folder.

    Raises:
        DataError: a data set of several splits, one whose rows are chosen by an index, or a file that is not there.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = list(read_json(folder / "dataset_dict.json", what="the splits of a saved data set").get("splits", ()))
        if len(splits) == 1:
            return saved_files(folder / splits[0])
        raise DataError(
            expected="one split of a saved data set",
            found=f"{len(splits)} splits: {', '.join(map(str, splits))}",
            where=str(folder),
            ways_out=(
                *(f"name the folder of one: {folder / str(split)}" for split in splits[:3]),
                "train, validation and test apart: --data.split.by files with --data.train, --data.valid, --data.test",
            ),
        )
    if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return ()
    state = read_json(folder / "state.json", what="the state of a saved data set")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            expected="a saved data set whose files hold its rows",
            found="rows that are chosen by an index beside the files",
            where=str(folder / "state.json"),
            ways_out="save it again: dataset.flatten_indices().save_to_disk(…)",
        )
    files = [folder / str(entry["filename"]) for entry in state.get("_data_files", ())]
    if absent := [file.name for file in files if not file.is_file()]:
        raise DataError(
            expected=f"the {len(files)} data files that state.json names",
            found=f"no {', '.join(absent[:5])}",
            where=str(folder),
            ways_out="copy the whole folder again",
        )
    return files
