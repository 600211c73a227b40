"""Data sets that Hugging Face's `datasets` saved on disk: which of the files in such a folder are the data.

    saved/  data-00000-of-00002.arrow  data-00001-of-00002.arrow  dataset_info.json  state.json     one data set
    saved/  dataset_dict.json  train/…  test/…                                                       one a split

`state.json` names the data files in their order; others of the suffix (`cache-….arrow`) are left over from mapping and
filtering, and would be rows twice. So a description that names no file, one file twice, or one outside of the folder is
refused: no other files stand for it. The files are Arrow streams, which `arrow_source.py` reads: the package itself is
not needed. Values of a ClassLabel are its numbers, as they are stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ziggurat.commands import pasted
from ziggurat.errors import DataError
from ziggurat.files import read_json
from ziggurat.plain import JSON

_WHAT = "the description of a saved data set"


def saved_files(folder: Path) -> Sequence[Path]:
    """Return the data files of a saved data set, in their order; nothing for any other folder.

    Raises:
        DataError: a data set of several splits, one whose rows are chosen by an index, or a description that names no
            file, one twice, one outside of the folder, or one that is not there.
    """
    if (folder / "dataset_dict.json").is_file():
        about = _group_in(folder / "dataset_dict.json")
        splits = [str(name) for name in _list_in(about, "splits", path=folder / "dataset_dict.json")]
        if not splits or any(not _lies_in_folder(split) for split in splits):
            raise _wrong(folder / "dataset_dict.json", about)
        if len(splits) == 1:
            split = folder / splits[0]
            files = saved_files(split)
            if not files:
                raise DataError(
                    expected="state.json and dataset_info.json of the only split",
                    found="one of them, or both, not there",
                    where=str(split),
                    ways_out=("copy the whole folder again", "save the data set again: dataset.save_to_disk(…)"),
                )
            return files
        raise DataError(
            expected="one split of a saved data set",
            found=f"{len(splits)} splits: {', '.join(splits)}",
            where=str(folder),
            ways_out=(
                *(f"name the folder of one: {folder / split}" for split in splits[:3]),
                "train, validation and test apart: --data.split.by files with --data.train, --data.valid, --data.test",
            ),
        )
    if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return ()
    state = _group_in(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            expected="a saved data set whose files hold its rows",
            found="rows that are chosen by an index beside the files",
            where=str(folder / "state.json"),
            ways_out="save it again: dataset.flatten_indices().save_to_disk(…)",
        )
    entries = _list_in(state, "_data_files", path=folder / "state.json")
    names = [_file_name(entry, path=folder / "state.json") for entry in entries]
    if not names:
        raise DataError(
            expected="the names of the data files, in `_data_files`",
            found="an empty list"
            if "_data_files" in state
            else f"only {', '.join(sorted(state)) or 'an empty object'}",
            where=str(folder / "state.json"),
            ways_out=(
                "save the data set again: dataset.save_to_disk(…)",
                f"all Arrow files of the folder, by a glob: {pasted(f'{folder}/*.arrow')}",
            ),
        )
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise DataError(
            expected="each data file once in `_data_files`",
            found=f"{', '.join(twice[:5])} more than once: its rows would be there as often",
            where=str(folder / "state.json"),
            ways_out="save the data set again: dataset.save_to_disk(…)",
        )
    files = [folder / name for name in names]
    if absent := [file.name for file in files if not file.is_file()]:
        raise DataError(
            expected=f"the {len(files)} data files that state.json names",
            found=f"no {', '.join(absent[:5])}",
            where=str(folder),
            ways_out="copy the whole folder again",
        )
    return files


def _group_in(path: Path) -> dict[str, JSON]:
    """Return the names and values in a JSON file."""
    data = read_json(path, what=_WHAT)
    if not isinstance(data, dict):
        raise _wrong(path, data)
    return data


def _list_in(group: dict[str, JSON], name: str, *, path: Path) -> list[JSON]:
    """Return a list of a group; an empty one where it has none."""
    found = group.get(name, [])
    if not isinstance(found, list):
        raise _wrong(path, found)
    return found


def _file_name(entry: JSON, *, path: Path) -> str:
    name = entry.get("filename") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise _wrong(path, entry)
    if not _lies_in_folder(name):
        raise DataError(
            expected="data files in the folder of the saved data set, by their names alone",
            found=f"{name!r:.200}",
            where=str(path),
            ways_out="save the data set again: dataset.save_to_disk(…)",
        )
    return name


def _lies_in_folder(name: str) -> bool:
    """Return whether a name is that of an entry of the folder itself, and no path that leads out of it or below."""
    return PurePosixPath(name).name == name and "\\" not in name and name not in ("", "..")


def _wrong(path: Path, found: JSON) -> DataError:
    return DataError(
        expected=f"{_WHAT} as the package writes it",
        found=f"{found!r:.80}",
        where=str(path),
        ways_out="save the data set again: dataset.save_to_disk(…)",
    )
