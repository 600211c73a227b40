"""What an earlier report of a benchmark has, read from its JSON, so that nobody measures or trains it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ziggurat.config import from_json
from ziggurat.embeddings import PooledDtype
from ziggurat.errors import ConfigError
from ziggurat.recipes.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class EarlierReport:
    """The JSON of a report.

    Args:
        benchmark: whose it is.
        file: where it is.
        data: all of it; "cases" is a list of mappings.
    """

    benchmark: str
    file: Path
    data: dict[str, Any]

    @property
    def origin(self) -> str:
        """Where figures come from, for the notes of a new report."""
        return f"{self.file} (commit {self.data.get('commit', 'unknown')}, {self.data.get('date', 'unknown')})"

    def take(self, kind: type[Any], case: Mapping[str, Any], *, where: str) -> Any:
        """The keys of a case that a class knows.

        Raises:
            ConfigError: a value that the class does not take.
        """
        known = {entry.name for entry in fields(kind)}
        return from_json(kind, {name: value for name, value in case.items() if name in known}, where=where)

    def refused(self, found: str, *, where: str, expected: str) -> ConfigError:
        """The error of a report whose figures cannot stand beside new ones."""
        return _refused(self.benchmark, found, where=where, expected=expected)


def read_earlier(path: Path, *, benchmark: str) -> EarlierReport:
    """Read a report.

    Args:
        path: of its JSON.
        benchmark: whose it must be.

    Raises:
        ConfigError: no such file, or no report of this benchmark.
    """
    expected = f"a report of `ziggurat bench {benchmark}`"
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise _refused(benchmark, found, where=str(path), expected=expected) from error
    if not isinstance(data, dict) or data.get("benchmark") != benchmark:
        raise _refused(benchmark, "a file that does not say so", where=str(path), expected=expected)
    cases = data.get("cases")
    if not isinstance(cases, list) or not all(isinstance(each, dict) for each in cases):
        raise _refused(benchmark, "no list of cases", where=str(path), expected=expected)
    return EarlierReport(benchmark=benchmark, file=path, data=data)


def same_settings(reported: Mapping[str, Any], today: Mapping[str, Any], *, where: str) -> bool:
    """Whether two configs of a run, as plain data, are one; what one of them does not name has its default."""
    return _on_a_cpu(from_json(RunConfig, reported, where=where)) == _on_a_cpu(from_json(RunConfig, today, where=where))


def _on_a_cpu(config: RunConfig) -> RunConfig:
    """Return a config with pooled fields in FP32 where they follow the device: these reports are of CPUs."""
    embedding = config.model.embedding
    if embedding.pooled is not PooledDtype.AUTO:
        return config
    model = replace(config.model, embedding=replace(embedding, pooled=PooledDtype.FP32))
    return replace(config, model=model)


def _refused(benchmark: str, found: str, *, where: str, expected: str) -> ConfigError:
    ways_out = (
        f"name the JSON of a report: --with-report benchmarks/reports/…/{benchmark}.json",
        "leave --with-report away",
    )
    return ConfigError(expected=expected, found=found, where=where, ways_out=ways_out)
