"""The folder of one run: everything needed to repeat, resume, evaluate and score with it.

runs/movielens_dlrm/
  config.json        the whole configuration (`ziggurat train --config FILE` repeats it)
  data.json          digests of the data and of the raw files it was made of
  inputs.json        names and sizes of the model's inputs
  preprocessing/     schema, vocabularies and statistics, as fitted
  startup.json       machine, versions, kernels and precision chosen, and why
  plan.json          where each table is; on many ranks
  dispatch.json      the kernel of each dense product; where precision dispatch was asked for
  products.json      which dense products are packed in few bits; of runs that `ziggurat quantise` wrote
  traffic.json       bytes and messages a step by kind of link, counted; on many ranks
  metrics.jsonl      one line a log interval or evaluation
  ledger.bin         one record a batch: which rows were trained (see data/encoded/ledger.py)
  windows.jsonl      one line a window; of streams (see windows.py)
  stream/            of streams: which files have arrived, rows that are not trained yet, scores that wait for labels
  raw/               the rows, where a table in memory was trained on: train.parquet, and valid and test if given
  checkpoints/       weights, optimizers, RNG, position; checksummed, no pickle
  baseline/          logistic regression on the same rows, a run of its own; where it was asked for
  probe/             statistics of the operands of dense products; where a probe was asked for
  evaluations/       metrics and calibration of each final evaluation
  run.log            all that the run has said, with times: the start-up report, evaluations, warnings
  tensorboard/       for `tensorboard --logdir`
  report.html        plots
  quarantine/        bad rows of the data, with reasons
  non_finite/        batches that gave NaN or infinity
  .lock              while a process trains here; see run_lock.py

A run has begun when its log or a checkpoint is there. Before that, a start may have been killed between any two of
these files, and what it left belongs to settings and data that nobody knows: the next start writes all of it anew.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError, DataError, FileError, ZigguratError
from ziggurat.features.inputs import labels_with_outcomes
from ziggurat.files import Format, Seal, ways_to_write
from ziggurat.files.system_text import text_of
from ziggurat.plan import PLAN
from ziggurat.training.checkpoint.retention import complete_steps

_WAYS_OUT = ("name the folder of a run, such as runs/movielens_dlrm", "restore the file from a copy")


def _words_of_version_2(traffic: dict[str, Any]) -> dict[str, Any]:
    """Version 1 said `a step` for `per step`, and `tower hop`, `peer hop` for the two exchanges of towers."""

    def renamed(row: dict[str, Any]) -> dict[str, Any]:
        row = {name.replace("_a_step", "_per_step"): value for name, value in row.items()}
        purpose = row["purpose"].replace("tower hop", "intra-group all-to-all")
        return {**row, "purpose": purpose.replace("peer hop", "inter-group all-to-all")}

    return {**traffic, "rows": [renamed(row) for row in traffic["rows"]]}


CONFIG = Format(
    name="ziggurat.run_config",
    what="the configuration of a run",
    newest=2,
    seal=Seal.EDITABLE,
    ways_out=_WAYS_OUT,
)
CONFIG_OF_PACKED = 2
"""The version of config.json in a run whose weights are packed: an earlier Ziggurat would look for them in FP32."""
PRODUCTS = Format(name="ziggurat.products", what="the packed products of a run", ways_out=_WAYS_OUT)
INPUTS = Format(
    name="ziggurat.inputs",
    what="the inputs of a model",
    version=2,
    migrations={1: labels_with_outcomes},  # version 1: what came next was known by its name
    ways_out=_WAYS_OUT,
)
STARTUP = Format(name="ziggurat.startup", what="a start-up report", ways_out=_WAYS_OUT)
TRAFFIC = Format(
    name="ziggurat.traffic",
    what="the traffic of a run",
    version=2,
    migrations={1: _words_of_version_2},
    ways_out=_WAYS_OUT,
)
WARM_START = Format(name="ziggurat.warm_start", what="the warm start of a run", ways_out=_WAYS_OUT)
VERSUS = Format(
    name="ziggurat.versus_baseline", what="how far a run and its baseline differ by chance", ways_out=_WAYS_OUT
)
TREES = Format(name="ziggurat.trees", what="what gradient-boosted trees reach on the rows of a run", ways_out=_WAYS_OUT)
EVALUATION = Format(name="ziggurat.evaluation", what="the evaluation of a run", ways_out=_WAYS_OUT)


class Ancestor(TypedDict):
    """A run that another one began from: its folder at that time, and the checkpoint by step and digest.

    `watermark` is the time of the newest row that it was trained on itself (`runs/watermark.py`), null where that was
    not known; it is absent in files of older versions.
    """

    run: str
    step: int
    digest: str
    watermark: NotRequired[float | None]
    is_calendar: NotRequired[bool]


class EvaluatedSlice(TypedDict):
    """Metrics of a part of the samples, as a file of `EVALUATION` has them."""

    column: str
    value: str
    num_rows: int
    metrics: dict[str, float]


class EvaluatedPairs(TypedDict):
    """Gain of features together; the fields of `PairsGain`."""

    metric: str
    value: float
    half_width: float
    num_rows: int
    fitted_too_long: bool
    below_floor: NotRequired[bool]


class Evaluated(TypedDict):
    """Content of a file of `EVALUATION`: an `Evaluation` as plain data."""

    num_rows: int
    metrics: dict[str, float]
    curves: dict[str, list[dict[str, float]]]
    slices: NotRequired[list[EvaluatedSlice]]
    unknown: NotRequired[dict[str, float]]
    half_widths: NotRequired[dict[str, float]]
    pairs: NotRequired[EvaluatedPairs]


def read_evaluation(path: Path) -> Evaluated:
    """Read a file of `EVALUATION`, with NaN for metrics that are undefined: JSON has null for them.

    Raises:
        MissingFileError, DataError: there is none, or it is damaged.
    """
    data = EVALUATION.read(path)
    try:
        for part in (data, *data.get("slices", ())):
            part["metrics"] = {name: math.nan if value is None else value for name, value in part["metrics"].items()}
    except (AttributeError, KeyError, TypeError) as problem:  # a file of the first release carries no format
        raise DataError(
            expected="the evaluation of a run, with its metrics",
            found=f"other content ({type(problem).__name__}: {problem})"[:200],
            where=str(path),
            ways_out=_WAYS_OUT,
        ) from problem
    return data


_ANOTHER_FOLDER = "choose another folder: --out runs/another_name"
_NAMES = {
    *("config.json", "data.json", "inputs.json", "preprocessing", "startup.json", "plan.json", "traffic.json"),
    *("dispatch.json", "products.json"),
    *("metrics.jsonl", "ledger.bin", "checkpoints", "baseline", "evaluations", "tensorboard", "report.html"),
    *("quarantine", "non_finite", ".lock", "run.log", "raw", "probe"),
    *("versus_baseline.json", "trees.json", "windows.jsonl", "stream", "warm_start.json"),
}  # all that a run writes

_REPLACED = (
    *("config.json", "inputs.json", "preprocessing", "plan.json", "traffic.json", "data.json", "startup.json"),
    *("evaluations", "report.html", "warm_start.json"),
)
"""Names that a start replaces or removes. All but plan.json are written after config.json, which says whose all are."""


def default_folder(recipe: str, *, train: str = "") -> Path:
    """Return the folder of a run that nobody named: after its recipe and, for files of one's own, after the table.

        table_dlrm on shop.csv          runs/table_dlrm_shop
        auto on s3://logs/2024/*.csv    runs/first_model_2024
        movielens_dlrm                  runs/movielens_dlrm

    Args:
        recipe: its name.
        train: the setting data.train; "" where the recipe has data of its own.
    """
    parts = [part for part in train.partition(",")[0].split("/") if part and not set(part) & set("*?[")]
    table = parts[-1] if parts and not parts[-1].endswith(":") else ""
    bare = table.partition(".")[0] or table  # of clicks.csv.gz: clicks
    name = re.sub(r"[^\w-]+", "_", bare).strip("_")
    return Path("runs") / (f"{recipe}_{name}" if name else recipe)


def _is_plan(path: Path) -> bool:
    try:
        return "tables" in PLAN.read(path)
    except ZigguratError:
        return False


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run's folder."""

    path: Path

    def consists_of(self, path: Path) -> bool:
        """Return whether a file below the folder is one that a run writes, where a run is there."""
        return self.config.is_file() and path.relative_to(self.path).parts[0] in _NAMES

    @property
    def config(self) -> Path:
        """The file of the whole configuration."""
        return self.path / "config.json"

    @property
    def data(self) -> Path:
        """The file on what the run is trained on: digests of splits, vocabulary and raw files."""
        return self.path / "data.json"

    @property
    def inputs(self) -> Path:
        """The model's InputSpec."""
        return self.path / "inputs.json"

    @property
    def preprocessing(self) -> Path:
        """The folder of the fitted preprocessing."""
        return self.path / "preprocessing"

    @property
    def startup(self) -> Path:
        """The file of the start-up report."""
        return self.path / "startup.json"

    @property
    def metrics(self) -> Path:
        """The file of the training log."""
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        """The file of the sample ledger."""
        return self.path / "ledger.bin"

    @property
    def warm_start(self) -> Path:
        """The file on the runs that this one began from, and on what was taken."""
        return self.path / "warm_start.json"

    @property
    def windows(self) -> Path:
        """The file of the windows of a stream."""
        return self.path / "windows.jsonl"

    @property
    def stream(self) -> Path:
        """The folder of the rows of a stream that are not trained yet, and of its journal."""
        return self.path / "stream"

    def is_stream(self) -> bool:
        """Return whether the run here is a stream, whose data is known window by window."""
        return self.stream.is_dir()

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def probe(self) -> Path:
        """The folder of statistics of dense products, where a probe was asked for."""
        return self.path / "probe"

    @property
    def said(self) -> Path:
        """The file of all that the run has said."""
        return self.path / "run.log"

    @property
    def raw(self) -> Path:
        """The folder of the rows of a run that was trained on a table in memory."""
        return self.path / "raw"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard logs."""
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        """The file of the HTML report."""
        return self.path / "report.html"

    @property
    def baseline(self) -> Path:
        """The folder of logistic regression on the same rows."""
        return self.path / "baseline"

    @property
    def versus(self) -> Path:
        """Error bars of the differences between the run and its baseline."""
        return self.path / "versus_baseline.json"

    @property
    def trees(self) -> Path:
        """Metrics that gradient-boosted trees reach on the same rows."""
        return self.path / "trees.json"

    @property
    def quarantine(self) -> Path:
        """The folder of bad rows."""
        return self.path / "quarantine"

    @property
    def non_finite(self) -> Path:
        """Batches that gave NaN."""
        return self.path / "non_finite"

    @property
    def plan(self) -> Path:
        """The file on where the tables of a run on many ranks were."""
        return self.path / "plan.json"

    @property
    def dispatch(self) -> Path:
        """The kernel of each dense product, as training began with it."""
        return self.path / "dispatch.json"

    @property
    def products(self) -> Path:
        """The file on the dense products that are packed, of a run that scores in few bits."""
        return self.path / "products.json"

    @property
    def traffic(self) -> Path:
        """The file on what a run on many ranks has sent."""
        return self.path / "traffic.json"

    def has_begun(self) -> bool:
        """Return whether training has begun here; what a start that died before it left is to be written anew."""
        return self.metrics.exists() or bool(complete_steps(self.checkpoints))

    def refuse_old_run(self) -> None:
        """Raise ConfigError if the folder already holds a run: nothing is ever overwritten."""
        if not self.has_begun():
            return
        if self.windows.exists() and not self.is_stream():
            raise ConfigError(
                expected=f"{self.stream.name}/ beside {self.windows.name}: it says which rows a stream has trained",
                found="a stream without it",
                where=str(self.path),
                ways_out=("restore the folder from a copy", "begin the stream anew: --out ANOTHER_FOLDER"),
            )
        has_config = self._has_config()
        if not (has_config or complete_steps(self.checkpoints)):
            raise ConfigError(
                expected="a folder without a run",
                found=f"{self.metrics.name}, without the config.json or checkpoints that our runs have beside it",
                where=str(self.path),
                ways_out=_ANOTHER_FOLDER,
            )
        ways = [f"go on with it: ziggurat train {pasted(self.path)} --resume"] if has_config else []
        ways.append(_ANOTHER_FOLDER)
        if {path.name for path in self.path.iterdir()} <= _NAMES:  # else it would take files that are no run's along
            ways.append(f"remove it: rm -r {pasted(self.path)}")
        raise ConfigError(
            expected="a folder without a run",
            found=f"a run that was started before{self._of_what()}",
            where=str(self.path),
            ways_out=ways,
        )

    def refuse_files_of_others(self) -> None:
        """Raise ConfigError if a start would replace files that no run of ours has written; they stay as they are.

        A start that was killed has left its config.json first of all, so what stands beside one is ours.
        """
        if self._has_config():
            return
        others = [name for name in _REPLACED if os.path.lexists(self.path / name)]
        if others == [self.plan.name] and _is_plan(self.plan):
            return
        if not others:
            return
        named = ", ".join(others)
        raise ConfigError(
            expected="a folder without files of these names, which a run writes itself",
            found=f"{named}, which no run has written",
            where=str(self.path),
            ways_out=(_ANOTHER_FOLDER, f"move {named} elsewhere"),
        )

    def _has_config(self) -> bool:
        """Return whether config.json is there, and that of a run: every one names its recipe."""
        try:
            return "recipe" in CONFIG.read(self.config)
        except ZigguratError:
            return False

    def _of_what(self) -> str:
        """Say of which recipe and files the run is, as far as its config tells."""
        try:
            config = CONFIG.read(self.config)
        except ZigguratError:
            return ""
        recipe = config.get("recipe")
        files = (config.get("data") or {}).get("train") or []
        text = f", {recipe}" if recipe else ""
        more = f" and {len(files) - 1} files more" if len(files) > 1 else ""
        return text + (f", on {files[0]}{more}" if files else "")

    def refuse_unwritable(self) -> None:
        """Raise FileError if nothing can be written here: said before data is prepared, not after. Leaves no trace."""
        if self.path.exists() and not self.path.is_dir():
            raise FileError(
                expected="a folder for the run",
                found="a file",
                where=str(self.path),
                ways_out=f"choose another: --out {pasted(Path('runs') / (self.path.stem or 'first'))}",
            )
        missing = [each for each in (self.path, *self.path.parents) if not each.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            # A run that goes on is its folder: with --resume another --out names another run.
            other = f"go on with a copy: cp -r {pasted(self.path)} COPY" if self.has_begun() else _ANOTHER_FOLDER
            raise FileError(
                expected="a folder for the run that can be written to",
                found=text_of(error),
                where=str(self.path),
                ways_out=(other, *ways_to_write(error, self.path)),
            ) from error
        finally:
            for made in missing:  # innermost first
                with contextlib.suppress(OSError):
                    made.rmdir()

    def evaluation(self, split: str) -> Path:
        """Result of the final evaluation of one split."""
        return self.path / "evaluations" / f"{split}.json"
