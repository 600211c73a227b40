"""What makes a result too good to be true, found before the training: leaks, and labels that are all equal.

A column that was written after the fact ("dwell_s" is there only if there was a click), or that is the label under
another name, gives an AUC of 1 in training and is missing in service. Three checks, at every preparation:

- a feature that reads the label's own column is refused;
- each feature alone is asked for the label. Its score for a row is the mean label, in training rows, of the row's id
  (of the 256th part of the numbers it falls in, of its list's ids on average), so that nothing is learned by heart:

      score(row) = (Σ labels of the id + mean label) / (count of the id + 1),       measured on validation rows

  An AUC above 0.99 (for a number to predict: a squared correlation above 0.99) is said, with the way out;
- a split whose labels are all equal or all missing is said, as its AUC is undefined and nothing is learned from it.

Most features are far from a leak, and a few thousand rows show it: only what is above 0.9 there is asked on all rows.

Cost: at most four row groups of training rows and two of validation rows are read; about 1 ms a feature, 10 ms where a
few thousand rows do not settle it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.encoded.records import label_column
from ziggurat.data.synthetic.best_metrics import pair_share
from ziggurat.errors import SchemaError
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.schema import Outcomes, Schema, column_of

LEAK = 0.99
_NUM_BINS = 256
_MIN_CLASS = 20  # rows of each class, below which an AUC says nothing
_NEAR_LEAK = 0.9  # in the first look, at so many held-out rows, and of numbers at so many training rows
_FIRST_LOOK_ROWS, _FIRST_LOOK_NUMBERS = 8192, 16384
_TRAIN_GROUPS, _HELD_OUT_GROUPS = 4, 2


def refuse_label_as_feature(schema: Schema) -> None:
    """Refuse features that read the column of a label.

    Raises:
        SchemaError: names feature and column.
    """
    labels = {column_of(label): label.name for label in schema.labels}
    for feature in schema.features:
        column = column_of(feature)
        if column in labels:
            raise SchemaError(
                expected="features that do not read the column of a label",
                found=f"feature {feature.name!r} reads {column!r}, like label {labels[column]!r}",
                where="schema, features",
                ways_out=(
                    f"take feature {feature.name!r} out: it would be known only afterwards",
                    "if the column is known beforehand, take the label out and name the right one",
                ),
            )


def find_leaks(train: EncodedDataset, valid: EncodedDataset | None) -> list[str]:
    """Sentences on features that alone predict a label, and on labels that are all equal; empty if all is well.

    Args:
        train: encoded training rows.
        valid: encoded validation rows; None takes every fifth training row out to measure on.
    """
    inputs = train.inputs
    if not inputs.labels or not train.num_rows:
        return []
    seen = sampled_rows(train, num_groups=_TRAIN_GROUPS)
    if valid is not None and valid.num_rows:
        held_out = sampled_rows(valid, num_groups=_HELD_OUT_GROUPS)
        name = "validation"
    else:
        is_out = np.arange(len(seen)) % 5 == 0
        seen, held_out, name = seen.filter(pa.array(~is_out)), seen.filter(pa.array(is_out)), "held-out training"
    labels = [label for label in inputs.labels if label.outcomes is not Outcomes.POSITIVE_ONLY]
    warnings = [line for label in labels for line in _equal_labels(label, train=seen, valid=held_out, name=name)]
    for label in labels:
        of_label, out_of_label = (_with_label(table, label) for table in (seen, held_out))
        y, y_out = (_labels(table, label) for table in (of_label, out_of_label))
        if _too_few(label, y) or _too_few(label, y_out):
            continue
        for feature, is_dense in _features(inputs):
            columns = (of_label[feature].combine_chunks(), out_of_label[feature].combine_chunks())
            if _is_far(label, columns, y, y_out, is_dense=is_dense):
                continue
            score = _number_score(columns, y) if is_dense else _id_score(columns, y)
            strength, what = _strength(label, score, y_out)
            if strength > LEAK:
                warnings.append(
                    f"feature {feature!r} alone predicts {label.name!r} almost perfectly ({what} {strength:.4f} on "
                    f"{name} rows): if it is known only afterwards, take it out of the schema"
                )
    return warnings


def _is_far(
    label: LabelSpec, columns: tuple[pa.Array, pa.Array], y: np.ndarray, y_out: np.ndarray, *, is_dense: bool
) -> bool:
    """Return whether some of the rows show that a feature is no leak; only binary labels are settled this way."""
    some = np.arange(0, len(y_out), -(-len(y_out) // _FIRST_LOOK_ROWS))
    if not label.task.has_positives or len(some) == len(y_out) or _too_few(label, y_out[some]):
        return False
    seen = columns[0]
    held_out = columns[1].take(pa.array(some))
    if is_dense:
        few = np.arange(0, len(y), -(-len(y) // _FIRST_LOOK_NUMBERS))
        if _too_few(label, y[few]):
            return False
        score = _number_score((seen.take(pa.array(few)), held_out), y[few])
    else:
        score = _id_score((seen, held_out), y)
    return _strength(label, score, y_out[some])[0] < _NEAR_LEAK


def sampled_rows(dataset: EncodedDataset, *, num_groups: int) -> pa.Table:
    """Read row groups from evenly spread places as one table."""
    total = len(dataset.group_sizes)
    places = np.unique(np.linspace(0, total - 1, min(num_groups, total)).round().astype(int))
    return pa.concat_tables([dataset.read_group(int(place)) for place in places]).combine_chunks()


def _features(inputs: InputSpec) -> list[tuple[str, bool]]:
    """Every feature with one score a sample, and whether it is dense."""
    return [*((name, True) for name in inputs.dense), *((spec.name, False) for spec in inputs.fields)]


def _with_label(table: pa.Table, label: LabelSpec) -> pa.Table:
    """The rows where the label is there."""
    missing = np.isnan(table[label_column(label.name)].to_numpy())
    return table.filter(pa.array(~missing)).combine_chunks() if missing.any() else table


def _labels(table: pa.Table, label: LabelSpec) -> np.ndarray:
    return table[label_column(label.name)].to_numpy().astype(np.float64)


def _too_few(label: LabelSpec, y: np.ndarray) -> bool:
    if not label.task.has_positives:
        return len(y) < 2 * _MIN_CLASS or float(np.var(y)) == 0.0
    return min(float(y.sum()), len(y) - float(y.sum())) < _MIN_CLASS


def _equal_labels(label: LabelSpec, *, train: pa.Table, valid: pa.Table, name: str) -> list[str]:
    """Say of a label that no row has, or that is the same in all rows, what becomes of it."""
    lines: list[str] = []
    undefined = "AUC" if label.task.has_positives else "R²"
    for rows, table in (("training", train), (name, valid)):
        y = _labels(_with_label(table, label), label)
        if not len(y):
            found = f"missing in all {len(table):,} {rows} rows looked at"
            lasting = "no metric of it is defined there"
        elif len(y) > 1 and y.min() == y.max():
            found = f"{y[0]:g} in all {len(y):,} {rows} rows looked at"
            lasting = f"{undefined} is undefined there, and nothing improves"
        else:
            continue
        why = "nothing can be learned from it" if rows == "training" else lasting
        lines.append(f"label {label.name!r} is {found}: {why}")
    return lines


def _number_score(columns: tuple[pa.Array, pa.Array], y: np.ndarray) -> np.ndarray:
    """(N,) the mean label of training rows in the same bin, for each held-out row."""
    numbers, numbers_out = (each.to_numpy() for each in columns)
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, _NUM_BINS + 1)[1:-1]))
    codes, codes_out = (np.searchsorted(edges, each, side="right") for each in (numbers, numbers_out))
    return _means(codes, y, num_codes=len(edges) + 1)[codes_out]


def _id_score(columns: tuple[pa.Array, pa.Array], y: np.ndarray) -> np.ndarray:
    """(N,) the mean label of training rows with the same ids, for each held-out row."""
    seen, held_out = columns
    if not pa.types.is_list(seen.type):
        codes, codes_out, num_codes = _small_codes(seen.to_numpy(), held_out.to_numpy())
        return _means(codes, y, num_codes=num_codes)[codes_out]
    lengths, lengths_out = (np.diff(each.offsets.to_numpy()) for each in (seen, held_out))
    ids, ids_out, num_codes = _small_codes(*(each.flatten().to_numpy() for each in (seen, held_out)))
    means = _means(ids, np.repeat(y, lengths), num_codes=num_codes, mean=float(y.mean()))
    owner = np.repeat(np.arange(len(lengths_out)), lengths_out)
    sums = np.bincount(owner, weights=means[ids_out], minlength=len(lengths_out))
    empty = y[lengths == 0].mean() if (lengths == 0).any() else y.mean()  # whether a list is there may say it all
    return np.where(lengths_out > 0, sums / np.maximum(lengths_out, 1), empty)


def _small_codes(ids: np.ndarray, ids_out: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Ids as codes, and how many codes there are: as they are, unless few of very many rows are used."""
    num_codes = int(max(ids.max(initial=0), ids_out.max(initial=0))) + 1
    # Counters of up to 128 MiB; above, only ids that occur get one.
    if num_codes <= 1 << 24:
        return ids, ids_out, num_codes
    known, codes = np.unique(np.concatenate([ids, ids_out]), return_inverse=True)
    return codes[: len(ids)], codes[len(ids) :], len(known)


def _means(codes: np.ndarray, y: np.ndarray, *, num_codes: int, mean: float | None = None) -> np.ndarray:
    """(num_codes,) mean label of each code, drawn towards the mean of all."""
    mean = float(y.mean()) if mean is None else mean
    sums = np.bincount(codes, weights=y, minlength=num_codes)
    return (sums + mean) / (np.bincount(codes, minlength=num_codes) + 1.0)


def _strength(label: LabelSpec, score: np.ndarray, y: np.ndarray) -> tuple[float, str]:
    if label.task.has_positives:
        return pair_share(score, y, 1.0 - y), "AUC"
    if float(np.var(score)) == 0.0:
        return 0.0, "squared correlation"
    return float(np.corrcoef(score, y)[0, 1] ** 2), "squared correlation"
