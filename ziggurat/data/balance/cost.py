"""The cost of a sample, from its lengths alone: known before anything is computed.

    cost(sample) = fixed + Σ over lists f of   per_event_f · L_f  +  per_square_f · L_f²

Attention of every event to every other grows with the square, everything else (lookups, projections, target attention
as in DIN) with the length. The unit does not matter: plans compare costs with each other.

Three ways to the coefficients:

    counted     the FLOPs of the model's dense network with lists of 1, 2 and 3 events (`models/costs/length_cost.py`)
    measured    `fit_cost`: seconds of some batches against their summed terms, by least squares without negative terms
    given       `--training.balance-cost "40, 1*clicks, 0.002*clicks^2"`: terms of the sum, by name of list

A run takes counted or given ones, never a stopwatch's: its plan, and with it the order of its sums, must be the same
when it is resumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ziggurat.errors import ConfigError, DataError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.typed import FloatOrZero, checked

_NUMBER = r"\d+(?:\.\d*)?(?:[eE][-+]?\d+)?"
_TERM = re.compile(
    rf"(?P<number>{_NUMBER})|(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<name>[^\W\d][^*^\s]*)(?P<square>\^2)?"
)


@dataclass(frozen=True, kw_only=True)
@checked
class LengthCost:
    """The cost of the length of one list.

    Args:
        name: of the list feature, or of the group of sequences.
        per_event: what each event costs.
        per_square: what each pair of events costs: attention of events to each other.
    """

    name: str
    per_event: FloatOrZero = 1.0
    per_square: FloatOrZero = 0.0


@dataclass(frozen=True, kw_only=True)
@checked
class SampleCost:
    """The cost of a sample.

    Args:
        fixed: what every sample costs, whatever its lengths.
        lists: what their lengths cost; lists that are not named cost nothing.
    """

    fixed: FloatOrZero = 0.0
    lists: tuple[LengthCost, ...] = ()

    def of(self, lengths: Mapping[str, np.ndarray], *, num_samples: int) -> np.ndarray:
        """The cost of each sample: (B,) float64.

        Args:
            lengths: (B,) of every list by its name; see `lengths_of`.
            num_samples: B.

        Raises:
            DataError: a named list is not there.
        """
        costs = np.full(num_samples, self.fixed, dtype=np.float64)
        for each in self.lists:
            length = _named(lengths, each.name).astype(np.float64)
            costs += each.per_event * length + each.per_square * length * length
        return costs

    def describe(self) -> str:
        """One line for reports."""
        parts = [f"{self.fixed:.4g}"] if self.fixed else []
        for each in self.lists:
            parts += [f"{each.per_event:.4g} · {each.name}"] if each.per_event else []
            parts += [f"{each.per_square:.4g} · {each.name}²"] if each.per_square else []
        return " + ".join(parts) or "0"

    @property
    def is_constant(self) -> bool:
        """True where every sample costs the same: there is nothing to balance."""
        return not any(each.per_event or each.per_square for each in self.lists)


def cost_of_terms(terms: Sequence[str]) -> SampleCost:
    """A cost from its terms as text: `300`, `clicks`, `1.5*clicks`, `0.002*clicks^2`.

    Raises:
        ConfigError: a text is no term.
    """
    fixed = 0.0
    lists: dict[str, LengthCost] = {}
    for text in terms:
        found = _TERM.fullmatch(text)
        if found is None:
            raise ConfigError(
                expected="a number, or NAME, NUMBER*NAME, NUMBER*NAME^2 of a list",
                found=repr(text),
                where="training settings, balance-cost",
                ways_out='for example --training.balance-cost "1*clicks, 0.002*clicks^2"',
            )
        factor = float(found["factor"] or found["number"] or 1)
        name = found["name"]
        if name is None:
            fixed += factor
            continue
        # A list may have several terms, which add up: clicks + 0.002*clicks^2.
        before = lists.get(name, LengthCost(name=name, per_event=0.0))
        key = "per_square" if found["square"] else "per_event"
        lists[name] = replace(before, **{key: getattr(before, key) + factor})
    return SampleCost(fixed=fixed, lists=tuple(lists.values()))


def lengths_of(batch: Batch, inputs: InputSpec) -> dict[str, np.ndarray]:
    """Count the events in each list of each sample: (B,) int64 by feature, and by group of sequences."""
    kept_once = {at: group for group in batch.repeated for at in group.features.jagged}
    num_plain = len(inputs.jagged) - len(kept_once)
    size = batch.batch_size
    plain = iter(batch.jagged.lengths(num_features=num_plain) if num_plain and size else [])
    found: dict[str, np.ndarray] = {}
    for at, spec in enumerate(inputs.jagged):
        if at in kept_once:
            # A list that several samples share costs each of them.
            lengths = kept_once[at].lists(at).offsets.diff()[kept_once[at].inverse]
        else:
            lengths = next(plain) if size else batch.jagged.offsets[:0]
        found[spec.name] = lengths.cpu().numpy()
    for name, group in batch.sequences.items():
        lengths = group.offsets.diff()
        found[name] = (lengths if group.inverse is None else lengths[group.inverse]).cpu().numpy()
    return found


def tokens_of(batch: Batch, inputs: InputSpec) -> np.ndarray:
    """Events of each sample in all its lists: (B,) int64."""
    tokens = np.zeros(batch.batch_size, dtype=np.int64)
    for lengths in lengths_of(batch, inputs).values():
        tokens += lengths
    return tokens


def terms_of(cost: SampleCost, batches: Sequence[Batch], inputs: InputSpec) -> np.ndarray:
    """(batches, 1 + 2 · lists) what the coefficients of a cost multiply, summed over each batch: 1, L and L² a list."""
    rows = []
    for batch in batches:
        lengths = lengths_of(batch, inputs)
        row = [float(batch.batch_size)]
        for each in cost.lists:
            length = _named(lengths, each.name).astype(np.float64)
            row += [float(length.sum()), float((length * length).sum())]
        rows.append(row)
    return np.array(rows)


def fit_cost(cost: SampleCost, *, terms: np.ndarray, seconds: np.ndarray) -> SampleCost:
    """Coefficients that explain what batches took, in seconds; none is negative.

    Args:
        cost: which lists and which of their terms there are: a coefficient that is 0 stays 0.
        terms: of each batch (`terms_of`).
        seconds: (batches,) what each took.

    Raises:
        DataError: fewer batches than coefficients.
    """
    # The constant term is always fitted: a sample takes time even if its lists are empty.
    given = [cost.fixed or 1.0]
    for each in cost.lists:
        given += [each.per_event, each.per_square]
    used = np.flatnonzero(given)
    if len(terms) < len(used):
        raise DataError(
            expected=f"at least {len(used)} batches of different lengths, one a coefficient",
            found=f"{len(terms)} batches",
            where="fitting the cost of a sample",
            ways_out="measure more batches",
        )
    scale = np.maximum(np.abs(terms[:, used]).max(axis=0), 1e-300)  # lengths² dwarf lengths: bring both near 1
    from scipy.optimize import nnls  # training needs none of it

    # Not by least squares alone: a negative cost would make balancing prefer long lists.
    weights, _ = nnls(terms[:, used] / scale, np.asarray(seconds, dtype=np.float64))
    found = np.zeros(len(given))
    found[used] = weights / scale
    lists = tuple(
        replace(each, per_event=float(found[1 + 2 * at]), per_square=float(found[2 + 2 * at]))
        for at, each in enumerate(cost.lists)
    )
    return SampleCost(fixed=float(found[0]), lists=lists)


def _named(lengths: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name in lengths:
        return lengths[name]
    raise DataError(
        expected=f"a list of the model: {', '.join(lengths) or 'it has none'}",
        found=repr(name),
        where="cost of a sample (--training.balance-cost)",
        ways_out="name a list feature of the schema, or a group of sequences",
    )
