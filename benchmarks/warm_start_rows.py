"""One contestant that carries the rows of a large table over to another run by raw id, in a process of its own.

    ziggurat      `match_rows` and `take_weights` of `runs/warm_start`, from a verified checkpoint into the run's table
    pandas        Index.get_indexer over both lists of ids, then NumPy takes and puts whole rows; a growing table gets
                  the hashes of its ids, sorted
    polars        a join of both lists of ids, then NumPy takes and puts whole rows

All begin with the ids of both runs in memory, as each keeps them, the new table allocated, and the old rows in a file
that the page cache holds; they end when every row that both know stands at its new place. Seconds are of the process
(one thread); memory is the peak less what the process had when it began.

`python -m benchmarks.warm_start_rows make FOLDER NUM_IDS`, then `… CASE CONTESTANT FOLDER` prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import torch

import ziggurat as zg
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.vocabulary import Vocabulary
from ziggurat.features.schema import NUM_RESERVED_ROWS, Encoding, Table
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.warm_start.parent import Parent
from ziggurat.runs.warm_start.take import take_weights
from ziggurat.training.checkpoint.retention import complete_steps, step_folder
from ziggurat.training.checkpoint.storage import CheckpointReader

DIM = 16
OVERLAP = 0.9
CASES = ("vocabulary", "growing", "hashing")


def contestants_of(case: str) -> tuple[str, ...]:
    """Who carries rows over; a join helps where both sides have ids, and nothing else does."""
    return ("ziggurat", "pandas", "polars") if case == "vocabulary" else ("ziggurat", "pandas")


def schema_of(table: Table) -> zg.Schema:
    """One feature, the ids of one table."""
    return zg.Schema(features=(zg.Categorical(name="user"),), labels=(zg.Label(name="click"),), tables=(table,))


def tables_of(case: str, *, num_ids: int) -> tuple[Table, Table]:
    """The table of the parent and of the run."""
    fitted = Table(name="user")
    if case == "vocabulary":
        return fitted, fitted
    if case == "growing":
        return fitted, Table(name="user", encoding=Encoding.GROWING, num_rows=num_ids)
    hashed = Table(name="user", encoding=Encoding.HASHING, num_rows=num_ids)
    return hashed, Table(name="user", encoding=Encoding.HASHING, num_rows=2 * num_ids)


def ids_of(folder: Path, side: str) -> pl.Series:
    """The ids of rows 3, 4, 5 … of one side."""
    return pl.read_parquet(folder / f"{side}.parquet")["id"].rechunk()


def preprocessing_of(table: Table, folder: Path, *, side: str) -> Preprocessing:
    """That of one side, with its vocabulary where it has one."""
    if table.encoding is not Encoding.VOCABULARY:
        return Preprocessing(schema_of(table), vocabularies={}, numbers={})
    ids = ids_of(folder, side)
    counts = pl.Series(np.maximum(1, len(ids) // np.arange(1, len(ids) + 1)))
    return Preprocessing(schema_of(table), vocabularies={"user": Vocabulary(ids, counts)}, numbers={})


def trainer_of(
    inputs: zg.InputSpec, train: PreparedData, *, config: RunConfig, folder: Path, seed: int = 0
) -> zg.Trainer:
    """A trainer that has made no step, with a table for these inputs."""
    model = zg.build_model(config.model, inputs, seed=seed)
    training = replace(config.training, unknown_ids=(), threads=1)
    return zg.Trainer(model, config=training, train=train.train, folder=folder)


def config_of(schema: zg.Schema) -> RunConfig:
    """A small network over a table of 16 columns."""
    return zg.table_run(zg.DNNConfig(embedding_dim=DIM, deep=zg.MLPConfig(hidden_dims=(8,))), schema)


def some_data(schema: zg.Schema, folder: Path) -> PreparedData:
    """A few rows, so that a trainer has data."""
    rows = pl.DataFrame({"user": [f"user-{number}" for number in range(200)], "click": [0, 1] * 100})
    folder.mkdir(parents=True, exist_ok=True)
    rows.write_parquet(folder / "rows.parquet")
    return zg.prepare(zg.DataConfig(train=(str(folder / "rows.parquet"),)), schema=schema, folder=folder / "prepared")


def make(folder: Path, *, num_ids: int) -> None:
    """Write ids of both sides in an order of their own, checkpoints of both parents, and the same rows for peers."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    gone = round((1.0 - OVERLAP) * num_ids)
    for side, first in (("theirs", 0), ("mine", gone)):
        numbers = pl.Series(first + rng.permutation(num_ids)).cast(pl.String)
        pl.DataFrame({"id": "user-" + numbers}).write_parquet(folder / f"{side}.parquet")
    for case in ("vocabulary", "hashing"):
        table, _ = tables_of(case, num_ids=num_ids)
        preprocessing = preprocessing_of(table, folder, side="theirs")
        data = some_data(schema_of(table), folder / f"data_{case}")
        config = config_of(schema_of(table))
        trainer = trainer_of(preprocessing.inputs, data, config=config, folder=folder / f"parent_{case}")
        weights = trainer.state.tensors()["model.embeddings.tables.user.weight"]
        assert isinstance(weights, torch.Tensor)
        trainer.save()
        if case == "vocabulary":
            np.save(folder / "weights.npy", weights.detach().numpy())


def parent_of(case: str, table: Table, folder: Path) -> Parent:
    """The parent with its checkpoint open, as after verification."""
    name = "hashing" if case == "hashing" else "vocabulary"
    checkpoints = folder / f"parent_{name}" / "checkpoints"
    step = complete_steps(checkpoints)[-1]
    reader = CheckpointReader(step_folder(checkpoints, step), step=step)
    reader.trust(reader.manifest.files)
    preprocessing = preprocessing_of(table, folder, side="theirs")
    return Parent(
        folder=folder / f"parent_{name}",
        config=config_of(preprocessing.schema),
        inputs=preprocessing.inputs,
        preprocessing=preprocessing,
        reader=reader,
    )


class Measured:
    """Seconds and peak memory of what happens inside of a `with`; the memory that was there before does not count."""

    def __enter__(self) -> Measured:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the process is what it has now
        self._before = _status("VmRSS")
        self._begin = time.perf_counter()
        self._cpu = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin
        self.cpu_s = time.process_time() - self._cpu
        self.peak_bytes = _status("VmHWM") - self._before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def by_ziggurat(case: str, folder: Path, *, num_ids: int) -> tuple[dict[str, float], np.ndarray]:
    """Carry the rows over as a warm start does; the time of matching alone stands beside that of all."""
    theirs, mine = tables_of(case, num_ids=num_ids)
    parent = parent_of(case, theirs, folder)
    run = preprocessing_of(mine, folder, side="mine")
    data = some_data(run.schema, folder / f"data_mine_{case}")
    data = replace(data, preprocessing=run)
    config = config_of(run.schema)
    trainer = trainer_of(run.inputs, data, config=config, folder=folder / "run", seed=1)
    with Measured() as whole:
        take_weights(parent, trainer, config=config, prepared=data)
    weights = trainer.state.tensors()["model.embeddings.tables.user.weight"]
    return carried(whole, weights.detach().numpy())


def by_pandas(case: str, folder: Path) -> tuple[dict[str, float], np.ndarray]:
    """Carry the rows over by a script of a few lines."""
    import pandas as pd
    from pandas.core.util.hashing import hash_array  # `pandas.util` gives it without a type

    theirs = pd.Index(ids_of(folder, "theirs").to_pandas())
    mine = pd.Index(ids_of(folder, "mine").to_pandas())
    num_rows = (2 if case == "hashing" else 1) * len(theirs)
    table = np.random.default_rng(1).random((num_rows + NUM_RESERVED_ROWS, DIM), dtype=np.float32)
    with Measured() as whole:
        old = np.load(folder / "weights.npy", mmap_mode="r")
        if case == "hashing":
            table[NUM_RESERVED_ROWS:] = old[np.arange(num_rows) % len(theirs) + NUM_RESERVED_ROWS]
        elif case == "growing":
            # Ids that come later are looked up by hash: sorted, with the row of each.
            hashes = hash_array(theirs.to_numpy(), categorize=False)
            order = np.argsort(hashes)
            _lookup = (hashes[order], order + NUM_RESERVED_ROWS)
            table[NUM_RESERVED_ROWS:] = old[NUM_RESERVED_ROWS:]
        else:
            rows = theirs.get_indexer(mine)
            known = np.flatnonzero(rows >= 0)
            table[known + NUM_RESERVED_ROWS] = old[rows[known] + NUM_RESERVED_ROWS]
    return carried(whole, table)


def by_polars(folder: Path) -> tuple[dict[str, float], np.ndarray]:
    """Carry the rows over by a script of a few lines."""
    theirs = ids_of(folder, "theirs").to_frame().with_row_index("row")
    mine = ids_of(folder, "mine").to_frame().with_row_index("row")
    table = np.random.default_rng(1).random((len(mine) + NUM_RESERVED_ROWS, DIM), dtype=np.float32)
    with Measured() as whole:
        old = np.load(folder / "weights.npy", mmap_mode="r")
        rows = mine.join(theirs, on="id", how="inner")
        table[rows["row"].to_numpy() + NUM_RESERVED_ROWS] = old[rows["row_right"].to_numpy() + NUM_RESERVED_ROWS]
    return carried(whole, table)


def carried(whole: Measured, table: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
    """What it took, and the new table."""
    return {"seconds": whole.seconds, "cpu_s": whole.cpu_s, "peak_bytes": whole.peak_bytes}, table


def main(arguments: list[str]) -> None:
    """Make the inputs, or print what one contestant needed."""
    torch.set_num_threads(1)
    first, second, *rest = arguments
    if first == "make":
        make(Path(second), num_ids=int(rest[0]))
        return
    folder = Path(rest[0])
    num_ids = len(ids_of(folder, "mine"))
    if second == "ziggurat":
        result, _ = by_ziggurat(first, folder, num_ids=num_ids)
    elif second == "pandas":
        result, _ = by_pandas(first, folder)
    else:
        result, _ = by_polars(folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
