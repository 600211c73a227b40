"""What orders the answers of an export: a formula that was given, one fitted on validation likes, or a plain default.

    --value FORMULA       that one
    nothing, or auto      fitted (`value_fit.py`), where a run retrieves and something scores what it finds, and rows
                          that nobody trained on can be had
    else                  retrieval where a run retrieves, else the one task; why is said

Rows of validation count as such only if the ranker was not trained on them either: its split must be by the same cuts
in time, or of the same files in the same way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.runs.data_paths import located
from ziggurat.runs.data_record import DataRecord, refuse_other_data
from ziggurat.runs.execute import prepare_run, raw_files
from ziggurat.runs.export.data import RunData
from ziggurat.runs.export.held_out_likes import HeldOutLikes, LikesWanted, held_out_likes, scored_candidates
from ziggurat.runs.export.value_fit import ValueFit, fit_value, quoted
from ziggurat.runs.load import Run
from ziggurat.serving.answering.chain import RETRIEVAL, Chain, numeric_names
from ziggurat.serving.answering.item_catalogue import ItemCatalogue
from ziggurat.serving.answers import Effort
from ziggurat.serving.load_parts import further_names
from ziggurat.serving.value_model.formula import ValueModel
from ziggurat.training.records.run_folder import STARTUP, RunFolder
from ziggurat.training.report.progress import Progress

AUTO = "auto"
_SEED = 0
_TIMED = 20  # requests


@dataclass(frozen=True, kw_only=True)
class ValueAsked:
    """The value that is to order answers, as it was asked for.

    Args:
        value: a formula, "auto" or "".
        num_likes: validation likes that formulas are tried on, at most.
        encoder: run that retrieves, or None.
        ranker: run that ranks, or None.
    """

    value: str
    num_likes: int
    encoder: Run | None
    ranker: Run | None

    @property
    def labels(self) -> list[str]:
        """Tasks of the ranker."""
        return [] if self.ranker is None else [label.name for label in self.ranker.preprocessing.inputs.labels]

    @property
    def further(self) -> list[str]:
        """The names that a formula may use beside tasks and columns."""
        return further_names(None if self.encoder is None else self.encoder.model)

    @property
    def is_fitted(self) -> bool:
        """True if formulas are tried; False where one was given, only one could be tried, or the run is on events."""
        if self.encoder is None or self.encoder.config.table_schema.events is not None:
            return False
        return self.value in ("", AUTO) and len(self.labels) + len(self.further) > 1

    def first(self) -> str:
        """The formula that an export begins with: the final one, unless formulas are tried.

        Raises:
            ConfigError: several tasks and nothing that says what they are worth; or nothing to choose among.
        """
        if self.value not in ("", AUTO):
            return self.value
        if self.encoder is not None:
            return RETRIEVAL
        if len(self.labels) > 1 or self.value == AUTO:
            shown = " + ".join(map(quoted, self.labels))
            raise ConfigError(
                expected="a formula that makes one value of the scores of the tasks",
                found=f"{self.value or 'none'}, and the tasks {', '.join(self.labels)}; formulas are tried on "
                "full rankings, which take a run that retrieves",
                where="ziggurat export, --value",
                ways_out=(
                    f"--value '{shown}'; in Python config=zg.ExportConfig(value={shown!r})",
                    "see docs/guides/serving.md for what a formula may be",
                ),
            )
        return quoted(self.labels[0])

    def check(self, formula: str, *, catalogue: ItemCatalogue | None) -> None:
        """Refuse a formula that names what the export will not have."""
        names = [] if catalogue is None else numeric_names(catalogue.frame, taken=self.labels)
        ValueModel(formula, names=(*self.labels, *self.further, *names), where="--value")


@dataclass(frozen=True, kw_only=True)
class ChosenValue:
    """The formula of an export.

    Args:
        formula: of the value model.
        facts: how it was chosen, for the manifest.
    """

    formula: str
    facts: dict[str, Any]


def chosen_value(asked: ValueAsked, *, chain: Chain, data: RunData | None, progress: Progress) -> ChosenValue:
    """The formula that orders answers, and how it was chosen, which is also said.

    Args:
        asked: what for.
        chain: of the export, with the formula it begins with.
        data: of the run that retrieves.
        progress: shows questions, and says what was found.

    Raises:
        ConfigError: "auto" was asked for, and there are no rows to choose by.
    """
    first = chain.settings.formula
    if not asked.is_fitted:
        how = "given" if asked.value not in ("", AUTO) else "default"
        if how == "default" and asked.encoder is not None and asked.ranker is not None:
            progress.say(
                f"order: {first}; for a run on events no formula is tried. --value {asked.labels[0]} orders otherwise"
            )
        return ChosenValue(formula=first, facts={"formula": first, "how": how} | _say_missing(chain, progress=progress))
    assert data is not None
    try:
        fit = fitted(asked, chain=chain, data=data, progress=progress)
    except ZigguratError as error:
        if asked.value == AUTO:
            raise
        why = str(getattr(error, "found", "") or error)
        progress.say(
            f"order: {first}. No formula was tried, since there are no rows to try it on: {why}. "
            "--value FORMULA orders by another"
        )
        return ChosenValue(formula=first, facts={"formula": first, "how": "default", "why": why})
    for line in fit.lines():
        progress.say(line)
    return ChosenValue(formula=fit.formula, facts=fit.to_json())


def fitted(asked: ValueAsked, *, chain: Chain, data: RunData, progress: Progress) -> ValueFit:
    """Try formulas on validation likes.

    Args:
        asked: what for.
        chain: of the export.
        data: of the run that retrieves.
        progress: shows questions.

    Raises:
        ConfigError: there are no validation likes, or the ranker may have been trained on them.
        DataError: the raw files are not those of the run any more.
    """
    assert asked.encoder is not None
    prepared = _prepared(asked.encoder, progress)
    _refuse_trained_rows(asked.encoder, asked.ranker, prepared)
    if prepared.valid is None or not prepared.valid.num_rows:
        raise _no_rows(asked.encoder, "a run without validation rows")
    likes = held_out_likes(
        prepared,
        chain=chain,
        data=data,
        schemas=[run.preprocessing.schema for run in (asked.encoder, asked.ranker) if run is not None],
        wanted=LikesWanted(split="valid", most=asked.num_likes, seed=_SEED),
    )
    if not len(likes.questions) or (likes.targets < 0).all():
        raise _no_rows(asked.encoder, "no validation like of an item that the catalogue and the training rows have")
    labels = () if asked.ranker is None else asked.ranker.preprocessing.inputs.labels
    fit = fit_value(likes, scored_candidates(likes, progress=progress), labels=labels, seed=_SEED)
    return replace(fit, split=prepared.summary.split, costs_ms=_costs_ms(likes))


def _prepared(run: Run, progress: Progress) -> PreparedData:
    config = located(run.config, folder=run.folder)
    prepared = prepare_run(config, progress=progress, fitted=run.preprocessing)
    ways_out = ("restore the raw files", "name the formula: --value FORMULA")
    refuse_other_data(
        RunFolder(run.folder),
        prepared,
        data=raw_files(config, progress=progress),
        asked="the run's own validation rows",
        ways_out=ways_out,
    )
    return prepared


def _refuse_trained_rows(encoder: Run, ranker: Run | None, prepared: PreparedData) -> None:
    """Refuse a ranker that may have been trained on the validation rows of the run that retrieves."""
    if ranker is None:
        return
    mine = prepared.summary.split
    path = RunFolder(ranker.folder).startup
    theirs = STARTUP.read(path).get("Data", {}).get("split", "") if path.exists() else ""
    if mine == theirs and (mine.startswith("by time column") or _files(encoder) == _files(ranker)):
        return
    raise ConfigError(
        expected="a ranker that was not trained on the validation rows of the run that retrieves: the same cuts in "
        "time, or the same files split in the same way",
        found=f"the ranker's rows are split {theirs or 'in a way that its folder does not say'}, those of the run that "
        f"retrieves {mine}",
        where=f"{encoder.folder} and {ranker.folder}",
        ways_out=("train the ranker with the same --data.split settings", "name the formula: --value FORMULA"),
    )


def _files(run: Run) -> Sequence[tuple[int, str, str]] | None:
    record = DataRecord.load(RunFolder(run.folder).data)
    return None if record is None else [(each.num_bytes, each.digest, each.role) for each in record.raw_files]


def _say_missing(chain: Chain, *, progress: Progress) -> dict[str, object]:
    """Say of how many items a column of the formula is missing, since the formula takes them for others without a word.

    Returns:
        Counts by column, for the manifest; nothing where nothing is missing.
    """
    missing = {name: int(numbers.isnan().sum()) for name, numbers in chain.numbers.items()}
    missing = {name: count for name, count in missing.items() if count}
    for name, count in missing.items():
        progress.say(
            f"value model: {name} is missing for {count:,} of {len(chain.numbers[name]):,} items; comparisons with it "
            "are false for them, and a value that is computed with it puts them last"
        )
    return {"missing": missing} if missing else {}


def _no_rows(run: Run, found: str) -> ConfigError:
    return ConfigError(
        expected="validation likes to try formulas on",
        found=found,
        where=str(run.folder),
        ways_out=("train with --data.split.valid-fraction 0.1", "name the formula: --value FORMULA"),
    )


def _costs_ms(likes: HeldOutLikes) -> dict[str, float]:
    """Milliseconds of processor time of a request for ten items, with the ranker ordering and without, in turns.

    Returns:
        Medians by what orders; nothing without a ranker.
    """
    if likes.chain.ranker is None:
        return {}
    labels = likes.chain.labels
    formulas = {"ordered by retrieval": RETRIEVAL, "by the ranker": quoted(labels[0])}
    chains = {
        what: replace(likes.chain, value=ValueModel(formula, names=(*labels, RETRIEVAL)))
        for what, formula in formulas.items()
    }
    spent: dict[str, list[float]] = {what: [] for what in chains}
    for question in likes.questions[:_TIMED]:
        for what, chain in chains.items():
            begin = time.process_time()
            chain.recommend([replace(question, k=10)], effort=Effort.FULL, explain=False)
            spent[what].append(1e3 * (time.process_time() - begin))
    return {what: round(statistics.median(each), 2) for what, each in spent.items()}
