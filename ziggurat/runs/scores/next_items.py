"""The next items of users: an event log in, for each of its users the items that a run puts first.

    run.next_items(["events.parquet"], k=10)            user_id │ rank │ movie_id         │ score
    ziggurat predict RUN events.parquet --out next.csv  1       │    1 │ Toy Story (1995) │ 0.66

Histories are the latest events of each user in the log, whatever the run was trained on; users need not be known. All
items of the run's training are ranked; those that the user had in the log are left out, unless the schema says
`repeats = "allow"` under `[items]`. A question is asked at the time of
the user's last event. Ids of the log that the run does not know are counted, as for any prediction. A score is the
inner product of the vectors of history and item, as in an export's answers: a cosine for vectors of length 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import torch

from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.events.log import compared_with_training, date_order_of, read_events
from ziggurat.data.events.questions import open_questions
from ziggurat.data.events.sequences import Purpose, sample_tables
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.frames import as_polars, is_frame
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.events import EARLIER, HISTORY
from ziggurat.features.schema import NUM_RESERVED_ROWS, table_of
from ziggurat.models.sequence.next_item import NextItem
from ziggurat.runs.scores.embeddings import ids_of_table
from ziggurat.runs.scores.given_data import files_in
from ziggurat.runs.scores.output import check_output, refuse_own_input, write_frames
from ziggurat.runs.scores.scoring import chunks_of_frame, collecting_bad_rows
from ziggurat.training.metrics.full_ranking import Questions, rank_all
from ziggurat.training.report.progress import Progress

if TYPE_CHECKING:
    from ziggurat.runs.load import Run

RANK, SCORE = "rank", "score"
_USERS = 4_096  # asked at once


def next_items_schema(run: Run) -> pl.Schema:
    """Columns of the answer: user, rank, item, score."""
    schema = run.config.table_schema
    return pl.Schema(
        {schema.group: pl.String(), RANK: pl.Int32(), schema.item_settings.id: pl.String(), SCORE: pl.Float32()}
    )


def next_items(
    run: Run, data: object, *, k: int, bad_rows: BadRowPolicy, progress: Progress | None = None
) -> Iterator[pl.DataFrame]:
    """The first `k` items of each user, user after user; collective on many ranks, each has all of them.

    Args:
        run: of a next-item model.
        data: files or globs, or a frame of events.
        k: items for each user; users who had nearly all items get fewer.
        bad_rows: stop at one, or put it aside.
        progress: shows warnings; without it they go to the log.

    Raises:
        ConfigError: the run's data is no event log, or k is below 1.
        SchemaError, DataError: as reading events; times of another unit than those of the run's training.
    """
    schema = run.config.table_schema
    model = run.model
    if schema.events is None or not isinstance(model, NextItem) or k < 1:
        raise ConfigError(
            expected="a run of a next-item model on an event log, and k of 1 or more",
            found=f"model {run.config.model.kind!r}, k = {k}",
            where=f"{run.folder}, next items",
            ways_out=("ziggurat train table_hstu --data.train FILE --schema events.toml", "run.predict(data)"),
        )
    with collecting_bad_rows(run, bad_rows, progress=progress) as collector:
        date_order = date_order_of(run.preprocessing.schema)
        log = read_events(_chunks(run, data, collector), schema, bad_rows=collector, date_order=date_order)
    far = compared_with_training(log, run.preprocessing.schema)
    for note in filter(None, (log.sorted_note, log.equal_times_note, far)):
        run.warn(note, progress)
    questions = open_questions(log, max_length=schema.events.max_length)
    repeats = schema.item_settings.repeats
    if progress is not None and run.team.is_first:
        progress.say(f"{repeats.of_answers} (repeats = {repeats.value})")
    with torch.no_grad():
        # Only items that training met: of another one nothing is known but how its row was drawn.
        rows_N = model.item_counts[NUM_RESERVED_ROWS:].nonzero().squeeze(1) + NUM_RESERVED_ROWS
        items_ND = model.vectors_of_items(rows_N)
        table_ids = ids_of_table(run, table_of(schema.feature(schema.item_settings.id)))
        ids = table_ids.gather(rows_N.cpu().numpy() - NUM_RESERVED_ROWS)
        # From rows of the table to places in `items_ND`; -1 for what is no candidate.
        number_of_row = torch.full_like(model.item_counts, -1)
        number_of_row[rows_N] = torch.arange(len(rows_N), device=rows_N.device)
        for table in sample_tables(log, questions, schema, purpose=Purpose.PREDICTION):
            for first in range(0, table.num_rows, _USERS):
                frame = pl.DataFrame(table.slice(first, _USERS))
                encoded = run.preprocessing.encode(RawChunk.of(frame, name="histories"), with_labels=False)
                batch = table_to_batch(encoded, run.preprocessing.inputs).to(items_ND.device)
                users_QD = model.user_vectors(batch)
                nobody_Q = torch.full((len(users_QD),), -1, dtype=torch.int64, device=users_QD.device)
                had = _had(model, batch, number_of_row)
                excluded = had if repeats.answers_leave_out else had[:0]
                asked = Questions(users=users_QD, targets=nobody_Q, excluded=excluded)
                yield _answers(run, frame[schema.group], ids, items_ND, asked, k=k)


def _chunks(run: Run, data: object, bad_rows: BadRows) -> Iterable[RawChunk]:
    if is_frame(data):
        text = run.reading.text
        return chunks_of_frame(as_polars(data, written=run.written), text=text)
    source = RawSource(files_in(data), format=run.reading.format, bad_rows=bad_rows, text=run.reading.text)
    return source.frames(columns=run.config.table_schema.columns)


def _had(model: NextItem, batch: Batch, number_of_row: torch.Tensor) -> torch.Tensor:
    """(E, 2) pairs of question and item that the user had, by question."""
    pairs = []
    for name in (HISTORY, EARLIER):
        rows_N, offsets_B1 = model.lists_of(batch, name)
        questions_N = torch.arange(batch.batch_size, device=rows_N.device).repeat_interleave(offsets_B1.diff())
        pairs.append(torch.stack([questions_N, number_of_row[rows_N]], dim=1))
    both = torch.cat(pairs)
    return torch.unique(both[both[:, 1] >= 0], dim=0)


def _answers(
    run: Run, users: pl.Series, ids: pl.Series, items_ND: torch.Tensor, asked: Questions, *, k: int
) -> pl.DataFrame:
    _, found_QK = rank_all(items_ND, asked, depth=min(k, len(items_ND)))
    # Places without an item are -1: they take the score of any, and are left out below.
    scores_QK = torch.einsum("qd,qkd->qk", asked.users, items_ND[found_QK.clamp(min=0)])
    found = found_QK.cpu().numpy()
    schema = next_items_schema(run)
    user, rank, item, score = schema
    kept = found >= 0
    questions, places = np.nonzero(kept)
    columns = {
        user: users.cast(pl.String).gather(questions),
        rank: pl.Series(places + 1, dtype=pl.Int32),
        item: ids.gather(found[kept]),
        score: pl.Series(scores_QK.cpu().numpy()[kept], dtype=pl.Float32),
    }
    return pl.DataFrame(columns, schema=schema)


def next_items_frame(
    run: Run, data: object, *, k: int, bad_rows: BadRowPolicy, progress: Progress | None = None
) -> pl.DataFrame:
    """The answers of `next_items` in one frame."""
    found = next_items(run, data, k=k, bad_rows=bad_rows, progress=progress)
    return pl.concat([pl.DataFrame(schema=next_items_schema(run)), *found])


def predict_next(
    run: Run,
    data: object,
    *,
    out: str | Path | None,
    keep: Sequence[str],
    bad_rows: BadRowPolicy,
    progress: Progress | None,
) -> object:
    """Implement `Run.predict` for a run on events: ten items a user, as a frame or in a file.

    Raises:
        ConfigError: columns to keep.
    """
    if keep:
        raise ConfigError(
            expected="no columns to keep: an answer belongs to a user, not to a row of the events",
            found=", ".join(keep),
            where=f"{run.folder}, predict",
            ways_out="leave them out, and join the answer with what you know of users",
        )
    if out is None:
        return next_items_frame(run, data, k=10, bad_rows=bad_rows, progress=progress)
    check_output(out, next_items_schema(run))
    refuse_own_input(out, data, trained=[Path(path) for path in run.config.data.train])
    frames = next_items(run, data, k=10, bad_rows=bad_rows, progress=progress)
    if run.team.is_first:
        return write_frames(frames, out, schema=next_items_schema(run))
    return sum(len(frame) for frame in frames)
