"""Names of files and columns: what a glob stands for, in natural order, and what a misspelt column may have meant.

Files with numbers in their names are read in the order of the numbers (day_2 before day_10). A column that is missing
is an error that names the nearest one there is, upper and lower case counting as alike: `UserId` for `user_id`.
"""

from __future__ import annotations

import glob
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from ziggurat.commands import pasted, python_line
from ziggurat.data.raw.bad_rows import BadReason, BadRow
from ziggurat.data.raw.saved_datasets import saved_files
from ziggurat.data.streams.brokers import is_broker
from ziggurat.errors import ConfigError, DataError, MissingFileError, SchemaError, ZigguratError, nearest_names
from ziggurat.files.stores import DataPath, StoreFile, files_at, is_url, local_path

_OUT_OF_SCHEMA = 'take its block out of the schema; of the only label, name its column there: column = "COLUMN"'
_FEATURES_OUT_OF_SCHEMA = "take their blocks out of the schema"
_MAX_NAMED = 10
_MAX_NEAREST = 3
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_OF_VALUES = (  # faults that a missing value in their place mends
    BadReason.NOT_A_NUMBER,
    BadReason.NOT_AN_INTEGER,
    BadReason.NOT_FINITE,
    BadReason.TOO_LARGE,
    BadReason.OUT_OF_RANGE,
)
_DOCUMENTS = {"readme", "license", "licence", "copying", "changelog", "notice"}


def doubled(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, in order of the alphabet."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def missing_column(
    path: DataPath,
    name: str,
    known: Sequence[str],
    *,
    separator: str = "",
    asked: str = "",
    others: Sequence[str] = (),
) -> SchemaError:
    """Make the error for a column that a file has not, with the nearest names it has.

    Args:
        path: the file.
        name: the column that was asked for.
        known: the columns that the file has.
        separator: what divides the fields of a text file; a first line that another one divides better is said.
        asked: what names the column: a flag ("--session") or a role of the schema ("group"); "" for a feature or label.
        others: further columns that were asked for and are not there.
    """
    other = guess_separator(separator.join(known)) if separator else ""
    # A wrong separator makes one long name of the whole header, so it is the likelier mistake.
    if other and other != separator:
        return SchemaError(
            expected=f"a column {name!r} in a first line divided by {separator!r}",
            found=f"a first line that {other!r} divides: {separator.join(known)[:100]}",
            where=str(path),
            ways_out=(
                f"set the separator: --data.separator {name_of_separator(other)}",
                "let it be guessed: ziggurat data inspect FILE prints the command",
            ),
        )
    near = nearest_names(name, known)
    listed = ", ".join(known[:30]) + (", …" if len(known) > 30 else "")
    if asked:
        is_flag = asked.startswith("--")
        ways = [f"{asked} {shlex.quote(each)}" if is_flag else f'{asked} = "{each}"' for each in near]
        other = "name another column" if is_flag else f"take {asked} out of [roles]"
        return SchemaError(
            expected=f"a column {name!r}",
            found=f"columns {listed}",
            where=f"{asked}, in {path}" if is_flag else f"[roles] {asked} of the schema, in {path}",
            ways_out=(*ways, other, "add the column to the file"),
        )
    missing = tuple(dict.fromkeys((name, *others)))
    free = [each for each in known if each not in missing]
    hints = [
        f"rename {near[0]!r} to {each!r}, or set column = {near[0]!r} in the schema: that is the nearest name"
        for each in missing[:_MAX_NEAREST]
        if (near := nearest_names(each, free))
    ]
    named = ", ".join(map(repr, missing[:_MAX_NAMED]))
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    are_many = len(missing) > 1
    return SchemaError(
        expected=f"columns {named}{more}" if are_many else f"a column {named}",
        found=f"columns {listed}",
        where=str(path),
        ways_out=(
            *hints,
            "add the columns to the file" if are_many else "add the column to the file",
            _FEATURES_OUT_OF_SCHEMA if are_many else _OUT_OF_SCHEMA,
        ),
    )


def in_terms_of_run(error: SchemaError, folder: Path) -> SchemaError:
    """The error of a column that a file has not, for a trained run, whose schema is not to be changed; others as is.

    Args:
        error: of `missing_column`, or another one.
        folder: of the run.
    """
    are_many = _FEATURES_OUT_OF_SCHEMA in error.ways_out
    # Told by its way out, since the error itself has no field for its kind.
    if not are_many and _OUT_OF_SCHEMA not in error.ways_out:
        return error
    near = [found[1] for way in error.ways_out if (found := re.match(r"(rename '.+' to '.+'), or set column", way))]
    what = "columns" if are_many else "column"
    feature = "these features: take them" if are_many else "the feature: take it"
    return SchemaError(
        expected=f"{error.expected}, which the run was trained on",
        found=error.found,
        where=error.where,
        ways_out=(
            *(f"{each} in the file: that is the nearest name" for each in near),
            f"add the {what} to the file; where values are not known, leave them empty: they are missing then",
            f"train again without {feature} out of a copy of the schema of {folder}, --out ANOTHER_FOLDER",
        ),
    )


def in_terms_of_roles(error: SchemaError, roles: Mapping[str, str]) -> SchemaError:
    """Return the error of columns that a file has not, where what names one of them is no feature; others as they are.

    Args:
        error: of `missing_column`, or another one.
        roles: by column, the flag or the role that names it.
    """
    if _FEATURES_OUT_OF_SCHEMA in error.ways_out:
        named = [
            f"{name!r} is named by {role if role.startswith('--') else f'{role} under [roles]'}"
            for name, role in roles.items()
            if name and repr(name) in error.expected
        ]
        if not named:
            return error
        features = f"take those that are features out of the schema; {', '.join(named)}"
        ways = [features if way == _FEATURES_OUT_OF_SCHEMA else way for way in error.ways_out]
        return SchemaError(expected=error.expected, found=error.found, where=error.where, ways_out=ways)
    column = next((name for name in roles if error.expected == f"a column {name!r}"), "")
    if not column or _OUT_OF_SCHEMA not in error.ways_out:
        return error
    known = error.found.removeprefix("columns ").removesuffix(", …").split(", ")
    return missing_column(Path(error.where), column, known, asked=roles[column])


def in_terms_of_keys(error: ZigguratError, keys: Sequence[str]) -> ZigguratError:
    """Return an error of a column or a row in words of the dict of columns that was given; others as they are.

    Args:
        error: of encoding the columns.
        keys: of the dict.
    """
    name = re.match(r"columns? ('.+')", error.expected.removeprefix("a "))
    cell = re.search(r"row (\d+), column ('.+')", error.where)
    are_many = _FEATURES_OUT_OF_SCHEMA in error.ways_out
    if isinstance(error, SchemaError) and name and (are_many or _OUT_OF_SCHEMA in error.ways_out):
        near = [found[1] for way in error.ways_out if (found := re.match(r"(rename '.+' to '.+'), or set column", way))]
        key = "keys" if are_many else "key"
        return SchemaError(
            expected=f"the {key} {name[1]}, which the run was trained on",
            found=f"keys {', '.join(map(str, keys))}" if keys else "no keys",
            where="dict to score",
            ways_out=(
                *(f"{each}: that is the nearest name" for each in near),
                f"add the {key} {name[1]} with a value for each row; None where one is not known: it is missing then",
            ),
        )
    if isinstance(error, DataError) and cell:
        return DataError(
            expected=error.expected,
            found=error.found,
            where=f"dict to score, key {cell[2]}, value {cell[1]} of the list",
            ways_out=("correct the value", "None in its place: it is missing then"),
        )
    return error


def in_terms_of_frame(error: ZigguratError) -> ZigguratError:
    """Return an error of a row in words of the frame that was given to a trained run; others as they are.

    Flags of a command line and changes of the schema are no ways out there: the run has been trained with them.

    Args:
        error: of encoding the rows.
    """
    bad = BadRow.of(error)
    if bad is None or bad.reason not in _OF_VALUES:
        return error
    is_number = bad.reason is BadReason.NOT_A_NUMBER
    as_number = "give the column as numbers in place of text: they are taken as they are"
    return type(error)(
        expected=error.expected,
        found=error.found,
        where=error.where,
        ways_out=(
            "correct the value",
            *([as_number] if is_number else []),
            "None in its place: it is missing then",
        ),
    )


def guess_separator(header: str) -> str:
    """Guess what divides the names in the first line of a text file: the one of `,` `;` tab and `|` that occurs most.

    Commas win a tie. "" where none occurs. Names in quotes may hold separators, which are not counted.
    """
    # Quotes may hold separators, which belong to a name.
    outside = re.sub(r'"[^"]*"', "", header)
    counts = {separator: outside.count(separator) for separator in (",", ";", "\t", "|")}
    # `max` takes the first of equals, and a comma stands first.
    best = max(counts, key=lambda separator: counts[separator])
    return best if counts[best] else ""


def name_of_separator(separator: str) -> str:
    """Return how to write a separator on a command line: by name where a shell would take the character away."""
    return {";": "semicolon", "\t": "tab", "|": "pipe", " ": "space"}.get(separator, separator)


def expand_path(path: str | DataPath, *, suffixes: Iterable[str], copies: str = "") -> list[DataPath]:
    """Return the files that a path, URL, glob or folder stands for, in natural order.

    Args:
        path: a file, a folder, or a glob; of this machine, or the URL of a store.
        suffixes: a folder stands for the files in it with one of these; hidden ones and documents are left out. A
            folder that Hugging Face's `save_to_disk` wrote stands for the files that it names, in its order, and one of
            partitions (day=1/part.parquet) for all of theirs.
        copies: a folder for whole copies of files in stores; "" reads the stores.

    Raises:
        MissingFileError: nothing there.
        ConfigError: the URL of a message broker.
        DataError: a store that does not answer, a saved data set of several splits, or a folder of this machine with
            data in folders below it that are no partitions.
    """
    known = set(suffixes)
    if isinstance(path, str):
        path = local_path(path)
    if isinstance(path, StoreFile):
        return [replace(path, copies=copies or path.copies)]
    if is_broker(path):
        raise ConfigError(
            expected="files, folders or URLs of stores",
            found="the URL of a message broker, which the verb `stream` alone reads from",
            where=str(path),
            ways_out=("ziggurat stream RECIPE --data.train URL", "write its messages into files first"),
        )
    if is_url(path):
        found: list[DataPath] = list(files_at(str(path), is_wanted=lambda name: _is_data(name, known), copies=copies))
    elif (folder := Path(path)).is_dir():
        if saved := saved_files(folder):
            # In the order of its description, whatever numbers the names have.
            return [*saved]
        found = [file for file in folder.iterdir() if _is_data_file(file, known)]
        if found:
            _refuse_tree(folder, known, beside=True)
        else:
            found = [*_partitioned_files(folder, known)]
    elif folder.exists():
        _refuse_other_than_files(folder)
        return [folder]
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
    if not found:
        # `Path("s3://bucket")` has one slash only.
        hint = ("give a URL as text: Path takes a slash away",) if re.match(r"[a-z0-9]+:/[^/]", str(path)) else ()
        raise MissingFileError(
            expected="a data file, a folder with data files, or a glob that matches some",
            found="nothing there",
            where=str(path),
            ways_out=(*hint, "correct the path", "look at it with ls"),
        )
    return sorted(found, key=_natural)


def partition_keys(path: DataPath) -> dict[str, str | None]:
    """Return the keys that the folders right above a file name, as Hive writes them: day=1/country=FR/part.parquet.

    Args:
        path: of the file.
    """
    keys: dict[str, str | None] = {}
    # From the file upwards: the keys of a partition stand right above it.
    for part in reversed(PurePosixPath(str(path)).parts[:-1]):
        name, is_key, value = part.partition("=")
        if not is_key or not name or "?" in part:
            break
        keys[unquote(name)] = None if value == _NO_VALUE else unquote(value)
    return dict(reversed(keys.items()))


def _partitioned_files(folder: Path, suffixes: set[str]) -> list[Path]:
    """Return all files below a folder whose folders all name the same keys; refuse any other tree.

    Raises:
        DataError: data lies below the folder in another way, so that its own files would be a part of it.
    """
    deep = [file for file in sorted(folder.rglob("*")) if _is_data_file(file, suffixes) and _is_shown(file, folder)]
    depths = {len(file.relative_to(folder).parts) - 1 for file in deep}
    names = {tuple(partition_keys(file.relative_to(folder))) for file in deep}
    # Every folder is a key, and all files have the same ones; anything else is a tree of another kind.
    if len(names) == 1 and {len(each) for each in names} == depths and depths != {0}:
        return deep
    _refuse_tree(folder, suffixes, beside=False)
    return []


def _is_shown(file: Path, folder: Path) -> bool:
    """Return whether no folder between is hidden, as those of unfinished writers are."""
    return not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts[:-1])


def _refuse_tree(folder: Path, suffixes: set[str], *, beside: bool) -> None:
    """Refuse a folder whose sub folders hold data: its own files alone would be a part of the data.

    Args:
        folder: that was named.
        suffixes: of data files.
        beside: whether files of data lie in the folder itself, too.
    """
    inner = [each for each in sorted(folder.iterdir()) if each.is_dir() and not each.name.startswith((".", "_"))]
    deep = next((file for each in inner for file in each.rglob("*") if _is_data_file(file, suffixes)), None)
    if deep is None:
        return
    parts = [part for part in deep.relative_to(folder).parts[:-1] if "=" in part]
    every = pasted(f"{folder}/**/*{deep.suffix}")
    ways = [f"all files below it, by a glob: {every}"]
    if beside:
        ways.append(f"those of the folder alone: {pasted(f'{folder}/*{deep.suffix}')}")
    if parts:
        keys = [part.partition("=")[0] for part in parts]
        pattern = f"{folder}/**/*{deep.suffix}"
        if deep.suffix == ".parquet":
            read = f"pl.scan_parquet({pattern!r}, hive_partitioning=True)"
        else:
            columns = ", ".join(f"pl.col('_path').str.extract('{key}=([^/]*)').alias('{key}')" for key in keys)
            scan = "scan_ndjson" if deep.suffix in (".jsonl", ".ndjson") else "scan_csv"
            read = f"pl.{scan}({pattern!r}, include_file_paths='_path').with_columns({columns}).drop('_path')"
        code = f"import polars as pl; {read}.sink_parquet('data.parquet')"
        ways.insert(0, f"write it as one file, with {', '.join(keys)} as columns: {python_line(code)}")
    raise DataError(
        expected="a folder with data files in it, and none in folders below it",
        found=f"{deep.relative_to(folder)}" + (", and files beside that folder" if beside else ""),
        where=str(folder),
        ways_out=ways,
    )


def _refuse_other_than_files(path: Path) -> None:
    """Refuse a pipe, which would wait for a writer and can be read once only, and a device, which may have no end."""
    if path.is_file():
        return
    raise DataError(
        expected="a regular file: data is read more than once, and in parts",
        found="a pipe" if path.is_fifo() else "a device or a socket",
        where=str(path),
        ways_out=("write what comes out of it to a file, and name that",),
    )


def documents_in(path: str | DataPath, *, suffixes: Iterable[str]) -> list[Path]:
    """Files that `expand_path` leaves out of a folder because their names are those of documents (README.txt)."""
    known = set(suffixes)
    folder = Path(local_path(str(path)))
    inside = sorted(folder.iterdir()) if not is_url(str(folder)) and folder.is_dir() else []
    return [file for file in inside if file.is_file() and known & set(file.suffixes) and _is_document(file.name)]


def _is_data_file(file: Path, suffixes: set[str]) -> bool:
    return file.is_file() and _is_data(file.name, suffixes)


def _is_data(name: str, suffixes: set[str]) -> bool:
    hidden = name.startswith((".", "_"))
    return bool(suffixes & set(PurePosixPath(name).suffixes)) and not hidden and not _is_document(name)


def _is_document(name: str) -> bool:
    file = PurePosixPath(name)
    return file.suffix.lower() == ".txt" and bool(_DOCUMENTS & set(re.split(r"[^a-z]+", file.stem.lower())))


def _natural(path: DataPath) -> tuple[tuple[int, int | str], ...]:
    # Digits count as numbers, so that part-2 comes before part-10.
    parts = re.split(r"(\d+)", str(path))
    # Pairs with 0 and 1, since Python does not compare numbers with texts.
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)
