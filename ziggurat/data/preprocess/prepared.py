"""PreparedData: what `prepare` leaves on disk, opened and checked; and its summary for the start-up report.

FOLDER/FINGERPRINT/
  prepared.json        fingerprint, summary; checksummed
  preprocessing/       vocabularies and statistics, fitted on training rows
  train/ valid/ test/  encoded data sets; a split without rows has an empty one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ziggurat.config import from_json
from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.preprocess.preprocessing import FeatureCounters, Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing
from ziggurat.data.preprocess.splits import SPLITS
from ziggurat.errors import DataError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.kinds.dense import Dense
from ziggurat.files import Format, digest_of
from ziggurat.plain import JSON, as_group

_MAIN_FILE = "prepared.json"
_REDO = "delete the folder and prepare the data again"


def _unwrapped(data: JSON) -> JSON:
    """Version 0: the payload and its checksum side by side."""
    content = as_group(data)
    if content["sha256"] != digest_of(content["payload"]):
        raise ValueError("its sha256 differs")
    return content["payload"]


PREPARED = Format(
    name="ziggurat.prepared", what="prepared data", migrations={0: _unwrapped}, ways_out=(_REDO,), max_bytes=1 << 30
)
_NOTABLE_SHARE = 0.005  # shares from here on are worth a line in the report


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """Summary of what one split holds.

    Args:
        rows: encoded rows.
        features: what encoding met in each feature.
    """

    rows: int
    features: dict[str, FeatureCounters]


@dataclass(frozen=True, kw_only=True)
class PreparedSummary:
    """Counts and facts that `prepare` found in the data, for the start-up report.

    Args:
        split: how rows were split, in one line.
        splits: by name: train, valid, test.
        quarantined: bad rows by reason.
        quarantine: folder with the bad rows, or "".
        raw_files: number of raw files.
        text_kernel: what read text and looked ids up.
        warnings: features that alone predict the label, labels that are all equal; see leaks.py.
        left_out: files of a folder that are no data by their names.
    """

    split: str
    splits: dict[str, SplitSummary]
    quarantined: dict[str, int]
    quarantine: str
    raw_files: int
    text_kernel: str
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, JSON]:
        """The summary as plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: JSON, *, where: str) -> PreparedSummary:
        """Read what `to_json` made; `where` names the file in errors."""
        return from_json(PreparedSummary, data, where=where, error=DataError)


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Encoded training, validation and test data, and the preprocessing that made them.

    Args:
        folder: where they lie.
        preprocessing: fitted on the training rows.
        train: training rows.
        valid: validation rows, or None if there are none.
        test: test rows, or None if there are none.
        summary: what preparing found.
        reused: whether all was there already.
        auto_split: whether nobody said how to split, so that the schema decided.
        note: why a folder that was there was made anew, or "".
    """

    folder: Path
    preprocessing: Preprocessing
    train: EncodedDataset
    valid: EncodedDataset | None
    test: EncodedDataset | None
    summary: PreparedSummary
    reused: bool = False
    auto_split: bool = False
    note: str = ""

    @property
    def inputs(self) -> InputSpec:
        """The inputs of models."""
        return self.preprocessing.inputs

    def __repr__(self) -> str:
        return "\n    ".join([f"PreparedData({str(self.folder)!r}", *self.summary_lines()]) + ")"

    def summary_lines(self) -> list[str]:
        """The summary for a person: rows, split, bad rows, tables, and features worth a look."""
        summary = self.summary
        splits = self.summary.splits
        rows = ", ".join(f"{name} {entry.rows:,}" for name, entry in splits.items())
        lines = [f"rows: {rows} from {summary.raw_files:,} raw file{'s' if summary.raw_files != 1 else ''}"]
        why = " (the schema has a time)" if self.preprocessing.schema.time else " (the schema has no time)"
        lines.append(f"split: {summary.split}{why if self.auto_split else ''}")
        if summary.quarantined:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in summary.quarantined.items())
            lines.append(f"bad rows: {sum(summary.quarantined.values()):,} ({reasons}), in {summary.quarantine}")
        else:
            lines.append("bad rows: none")
        for label in self.inputs.labels:
            if label.negative_rate != 1.0:
                kept = f"{100 * label.negative_rate:g} % of those in the training rows are kept"
                lines.append(f"negatives: {kept}; scores are corrected for it")
        largest = sorted(self.inputs.tables, key=lambda table: -table.num_rows)
        shown = ", ".join(f"{table.name} {table.num_rows:,}" for table in largest[:8])
        more = f", and {len(largest) - 8} smaller ones" if len(largest) > 8 else ""
        if largest:
            total = sum(table.num_rows for table in largest)
            lines.append(f"tables: {total:,} rows in {len(largest)}: {shown}{more}")
        stands_for = {
            feature.name: f" (counts as {feature.missing:.6g})"
            for feature in self.preprocessing.schema.features
            if isinstance(feature, Dense) and not feature.transform.makes_rows
        }
        lines += [line for name, entry in splits.items() for line in _notable(name, entry, stands_for=stands_for)]
        lines.append(f"text kernel: {summary.text_kernel}")
        lines.append(f"encoded: {self.folder}{' (reused)' if self.reused else ''}")
        if summary.left_out:
            lines.append(f"left out: {', '.join(summary.left_out)} (no data, by the name)")
        lines += [f"warning {number}: {text}" for number, text in enumerate(summary.warnings, start=1)]
        if self.note:
            lines.append(f"note: {self.note}")
        return lines


def _notable(split: str, summary: SplitSummary, *, stands_for: Mapping[str, str]) -> list[str]:
    """Features with many unknown ids, and in the training rows also those with missing values and cut lists.

    Args:
        split: its name.
        summary: of the split.
        stands_for: by name of a number, what its missing values count as.
    """
    lines: list[str] = []
    kinds = ("unknown", "out_of_range", "missing", "truncated") if split == "train" else ("unknown", "out_of_range")
    for kind in kinds:
        found: list[tuple[float, str]] = []
        for name, counters in summary.features.items():
            total = summary.rows if kind == "truncated" else counters.ids
            share = getattr(counters, kind) / total if total else 0.0
            # A missing value is ordinary, an id out of range is not, however rare.
            if share >= _NOTABLE_SHARE or (kind == "out_of_range" and share > 0):
                found.append((share, name))
        found.sort(reverse=True)
        if found:
            said = stands_for if kind == "missing" else {}
            shown = ", ".join(f"{name} {share:.1%}{said.get(name, '')}" for share, name in found[:6])
            more = f", and {len(found) - 6} more" if len(found) > 6 else ""
            lines.append(f"{kind.replace('_', ' ')} in {split}: {shown}{more}")
    return lines


def write_prepared(folder: Path, *, fingerprint: str, preprocessing: Preprocessing, summary: PreparedSummary) -> None:
    """Write the main file into a folder that holds everything else."""
    payload = {
        "fingerprint": fingerprint,
        "preprocessing": preprocessing.fingerprint,
        "summary": summary.to_json(),
    }
    PREPARED.write(folder / _MAIN_FILE, payload)


def open_prepared(
    folder: Path, *, fingerprint: str, reused: bool, note: str = "", auto_split: bool = False
) -> PreparedData:
    """Open what was prepared, and check it: every checksum but those of the Parquet pages, which reading verifies.

    Raises:
        DataError, MissingFileError, CheckpointError: something is damaged, absent or does not belong together.
    """
    path = folder / _MAIN_FILE
    payload = PREPARED.read(path)
    if payload.get("fingerprint") != fingerprint:
        raise _damaged(path, f"data prepared with the fingerprint {fingerprint}", repr(payload.get("fingerprint")))
    preprocessing = load_preprocessing(folder / "preprocessing")
    datasets = {split.value: EncodedDataset(folder / split.value) for split in SPLITS}
    summary = PreparedSummary.from_json(payload["summary"], where=str(path))
    if preprocessing.fingerprint != payload["preprocessing"]:
        raise _damaged(folder / "preprocessing", "the preprocessing that encoded the data", "another one")
    for name, dataset in datasets.items():
        if dataset.inputs != preprocessing.inputs or dataset.num_rows != summary.splits[name].rows:
            raise _damaged(dataset.folder, "the data that was encoded together with the preprocessing", "other data")
    return PreparedData(
        folder=folder,
        preprocessing=preprocessing,
        train=datasets["train"],
        valid=datasets["valid"] if datasets["valid"].num_rows else None,
        test=datasets["test"] if datasets["test"].num_rows else None,
        summary=summary,
        reused=reused,
        auto_split=auto_split,
        note=note,
    )


def _damaged(path: Path, expected: str, found: str) -> DataError:
    return DataError(expected=expected, found=found, where=str(path), ways_out=_REDO)
