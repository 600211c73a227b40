"""Fingerprint: what a run computes with, as dotted settings and short values, so that two runs can be compared.

    training.learning-rate              0.001
    model.embedding-dim                 16
    inputs.tables.0.num-rows            6041
    data train rows                     800000
    data train content                  5f0c…          SHA-256 of every encoded value
    vocabulary                          91ab…          of the fitted preprocessing
    version torch                       2.13.0

Two uses: the ranks of a job compare theirs before the first step (all of it must be equal), and a run that is resumed
compares its own with the one it was started with (a part of it may change, such as the number of epochs).

Values are text, so that what is compared is what is shown. Nothing here reads a row: datasets know their digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import ziggurat
from ziggurat.config import flattened
from ziggurat.data.encoded.dataset import dataset_facts
from ziggurat.features.inputs import InputSpec
from ziggurat.training.report.startup import version_lines


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One setting with two values.

    Args:
        setting: dotted, as in `fingerprint`.
        first: its value in the first fingerprint; "" if it is not there.
        second: in the second one.
    """

    setting: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.first or 'absent'} and {self.second or 'absent'}"


def fingerprint(
    config: object,
    *,
    inputs: InputSpec | None = None,
    datasets: Mapping[str, object] | None = None,
    vocabulary: str = "",
    versions: bool = True,
) -> dict[str, str]:
    """Collect what a run computes with; see the module's docstring. Arguments that are not given are left out.

    Args:
        config: any config, a `RunConfig` most of the time.
        inputs: of the model.
        datasets: EncodedDataset or MemoryDataset (or None) by split.
        vocabulary: `Preprocessing.fingerprint`.
        versions: whether installed versions count.
    """
    found = flattened(config)
    if inputs is not None:
        found |= flattened(inputs, prefix="inputs")
    found |= dataset_facts(datasets or {})
    if vocabulary:
        found["vocabulary"] = vocabulary
    if versions:
        found |= {f"version {name}": version for name, version in version_lines().items()}
        found["version ziggurat"] = ziggurat.__version__
    return found


def differences(first: Mapping[str, str], second: Mapping[str, str], *, ignore: Iterable[str] = ()) -> list[Difference]:
    """Every setting in which two fingerprints differ, in the order of the first.

    Args:
        first: a fingerprint.
        second: another one.
        ignore: settings, or beginnings of settings up to a dot or a space (`training.checkpoint`), that may differ.
    """
    skipped = tuple(ignore)

    def counts(setting: str) -> bool:
        return not any(setting == it or setting.startswith((f"{it}.", f"{it} ")) for it in skipped)

    names = [*first, *(name for name in second if name not in first)]
    return [
        Difference(setting=name, first=first.get(name, ""), second=second.get(name, ""))
        for name in names
        if first.get(name, "") != second.get(name, "") and counts(name)
    ]
