"""A synthetic teacher: Criteo-shaped data of any size whose best possible AUC, log loss and calibration are known.

Real data cannot say how good a model could be. Here every label is drawn from a probability p* that is a known
function of the row, so the best reachable metrics follow from p* exactly (`best_metrics.py`), and whatever a model
lacks is the model's. The features are cut into *groups*: only features of one group interact.

    z_d      dense feature d, standard normal; the file has x_d = exp(m_d + s_d·z_d), like a count
    i_f      id of categorical feature f, drawn with P(i) ≈ (i+1)^−exponent on 0 … cardinality−1 (id 0 most frequent)
    w_f, h_f a weight and a hidden vector (hidden_dim) for each id, normal, centred under that distribution
             (even_vectors: h evenly from −√3 … √3)

    D = Σ_d a_d·z_d + b_d·(z_d² − 1)/√2                        each number for itself
    F = Σ_f w_f[i_f]                                           first order: each id for itself
    S = Σ_groups Σ_{f<g} ⟨h_f, h_g⟩                            second order: every pair of a group
    T = Σ_groups Σ_{f<g<l} Σ_k h_fk·h_gk·h_lk                  third order: every triple of a group
    …                                                          fourth, fifth …: higher_order_shares, alike
    weighted_products: each product of S, T … times a weight of its own, normal

    logit p* = bias + logit_sd · Σ_parts √share · part / sd(part)

The parts are uncorrelated, since the vectors are centred, so the shares are shares of the logit's variance. The sds and
the bias (for the chosen click rate) come from 131,072 rows of a separate stream. S is what a pairwise dot product sees,
T what a second cross layer adds. Sums over pairs and triples are elementary symmetric polynomials, built feature by
feature: e3 += e2∘h, e2 += e1∘h, e1 += h; cost O(orders · features · hidden_dim) a row.

List features draw Poisson many ids; the mean of their vectors takes part like one id's. With a second label,
P(conversion) = p*·σ(logit₂): a conversion needs a click.

Row r depends on (seed, r) alone, not on chunk sizes: rows are made in blocks of 32,768, each with its own generator
seeded by (seed, block). Same NumPy and same processor, same bytes; elsewhere a last bit may differ in rare rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from ziggurat.arguments import check_arguments
from ziggurat.data.raw.parquet_seal import seal_parquet
from ziggurat.data.synthetic.best_metrics import BestMetrics, best_metrics
from ziggurat.data.synthetic.rows import BLOCK_ROWS, BlockMaker, Moment, RowBlock, SyntheticConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema import Categorical, Dense, Encoding, Feature, Label, MultiHot, Schema, Table
from ziggurat.files import replacing
from ziggurat.files.parquet import ParquetFile

__all__ = ["SyntheticConfig", "SyntheticTeacher", "criteo_shaped", "learnable", "six_orders"]


def learnable(*, seed: int = 0) -> SyntheticConfig:
    """Few ids, each seen often, and pairs only: 4 dense and 8 categorical features with 150 ids in all, in 2 groups.

    The best AUC is 0.851. Measured with embedding dim 16 and MLPs of up to 200 units: plain DLRM and DCNv2 under
    Adam come within 0.0012 of it after three passes over one million rows; this package's DLRM with row-wise Adagrad
    (table_learning_rate 0.05) within 0.0010 after two passes over 1.7 million. The tables must start near 0.1 and learn
    faster than the rest, or training stays long at the saddle around zero. Third order terms are left out because
    pairwise dot products, and so DLRM, can hardly express them.
    """
    return SyntheticConfig(
        num_dense=4,
        cardinalities=(8, 10, 12, 16, 20, 24, 28, 32),
        zipf_exponent=0.3,
        num_groups=2,
        hidden_dim=2,
        third_order_share=0.0,
        seed=seed,
    )


def six_orders(*, seed: int = 0) -> SyntheticConfig:
    """Interactions of two to six features, so that larger models find more: 2 dense and 8 categorical features, 54 ids.

    Of the logit's variance (sd 2.5) each order carries

        numbers 5 %, single ids 15 %, pairs 30 %, triples 20 %, fours 15 %, fives 10 %, sixes 5 %

    All features are of one group and have one hidden number for each id, which takes part in all orders: pairs teach
    the numbers, and what is learned there helps with the orders above. With numbers of their own for each order,
    products of six would have no gradient to begin with, and no model would learn them in one pass. Each of the 238
    products has a weight of its own, which a model has to have room for: where all counted alike, the smallest Wukong
    was within 0.011 nats of the best after 276,000 rows, and 64 times its compute within 0.008. There are 1.8 million
    combinations of ids, evenly drawn.
    """
    return SyntheticConfig(
        num_dense=2,
        cardinalities=(4, 5, 5, 6, 6, 7, 8, 9),
        zipf_exponent=0.0,
        num_groups=1,
        hidden_dim=1,
        even_vectors=True,
        weighted_products=True,
        dense_share=0.05,
        first_order_share=0.15,
        second_order_share=0.30,
        third_order_share=0.20,
        higher_order_shares=(0.15, 0.10, 0.05),
        logit_sd=2.5,
        seed=seed,
    )


def criteo_shaped(*, cardinality: int = 100_000, seed: int = 0) -> SyntheticConfig:
    """13 dense and 26 categorical features of `cardinality` ids each, uneven as Criteo's, a tenth of the numbers null.

    For speed and scale: most ids are too rare to be learned, as in life.
    """
    return SyntheticConfig(
        num_dense=13,
        cardinalities=(cardinality,) * 26,
        zipf_exponent=1.05,
        num_groups=4,
        hidden_dim=4,
        missing_share=0.1,
        seed=seed,
    )


class SyntheticTeacher:
    """Makes rows, their labels and the probabilities behind them; see the module.

    Args:
        config: what to make.

    Attributes:
        config: as given.
        maker: makes the blocks of rows.
        groups: names of the features that interact, group by group.
        labels: names of the label columns.

    Example:
        >>> teacher = zg.SyntheticTeacher(zg.SyntheticConfig(click_rate=0.3, seed=1))
        >>> teacher.frame(1_000).height, teacher.labels
        (1000, ('label',))
    """

    @check_arguments
    def __init__(self, config: SyntheticConfig | None = None) -> None:
        self.config = config or SyntheticConfig()
        self.maker = maker = BlockMaker(self.config)
        self.labels = maker.labels
        self.groups = tuple(tuple(maker.names[index] for index in group) for group in maker.groups)

    # ------------------------------------------------------------------------------------------------------- public

    def schema(self, *, encoding: Encoding = Encoding.IDENTITY) -> Schema:
        """The schema of the rows. Ids are 0 … cardinality−1, so `identity` tables have exactly the true ids."""
        config = self.config
        names = self.maker.names
        counts = self.maker.cardinalities
        tables = ()
        if encoding is not Encoding.VOCABULARY:
            tables = tuple(
                Table(name=name, encoding=encoding, num_rows=count) for name, count in zip(names, counts, strict=True)
            )
        features: list[Feature] = [Dense(name=f"I{number}") for number in range(1, config.num_dense + 1)]
        for index, name in enumerate(names):
            is_list = index >= len(config.cardinalities)
            features.append(
                MultiHot(name=name, max_length=config.list_max_length) if is_list else Categorical(name=name)
            )
        return Schema(features=tuple(features), labels=tuple(Label(name=name) for name in self.labels), tables=tables)

    def frame(self, rows: int | range) -> pl.DataFrame:
        """The given rows (an int: the first so many) as one frame: labels int8, I… float32, C… int32, L… list<int32>.

        Raises:
            ConfigError: the range has a step or a negative start.
        """
        return pl.concat(list(self.frames(rows, chunk_rows=1 << 20)) or [self.frame_of(self.maker.block(0), 0, 0)])

    def frames(self, rows: int | range, *, chunk_rows: int = 131_072) -> Iterator[pl.DataFrame]:
        """The given rows in frames of `chunk_rows` (the last may be shorter); bounded memory."""
        pending: list[pl.DataFrame] = []
        height = 0
        for block, first, last in self.blocks(rows):
            while first < last:
                part = self.frame_of(block, first, min(last, first + chunk_rows - height))
                first += part.height
                height += part.height
                pending.append(part)
                if height == chunk_rows:
                    yield pl.concat(pending)
                    pending = []
                    height = 0
        if pending:
            yield pl.concat(pending)

    def probabilities(self, rows: int | range) -> NDArray[np.float64]:
        """(labels, rows) true probabilities."""
        parts = [block.probabilities[:, first:last] for block, first, last in self.blocks(rows)]
        return np.concatenate(parts or [np.empty((len(self.labels), 0))], axis=1)

    def best_metrics(self, rows: int | range, *, label: str = "label") -> BestMetrics:
        """Return what the best possible model scores on the given rows (at least two); see `best_metrics.py`."""
        index = self.labels.index(label)
        parts = [(b.probabilities[index, i:j], b.labels[index, i:j]) for b, i, j in self.blocks(rows)]
        return best_metrics(np.concatenate([p for p, _ in parts]), np.concatenate([y for _, y in parts]))

    def write_parquet(self, path: str | os.PathLike[str], rows: int | range) -> Path:
        """Write the given rows to one sealed Parquet file (`parquet_seal.py`), all or nothing; bounded memory.

        Raises:
            DataError: the file cannot be written.
        """
        empty = self.frame_of(self.maker.block(0), 0, 0)
        return write_frames(path, self.frames(rows), empty=empty)

    # ------------------------------------------------------------------------------------------------------ the rows

    def blocks(self, rows: int | range, *, moment: Moment | None = None) -> Iterator[tuple[RowBlock, int, int]]:
        """Yield each block that holds some of the rows, with the first and last+1 row wanted of it.

        Args:
            rows: as in `frame`.
            moment: at which they are drawn; None: nothing has drifted.
        """
        wanted = range(rows) if isinstance(rows, int) else rows
        if wanted.step != 1 or wanted.start < 0:
            raise ConfigError(
                expected="a number of rows, or range(start, stop) with start >= 0 and no step",
                found=repr(rows),
                where="rows of a SyntheticTeacher",
                ways_out="read single ranges",
            )
        start = wanted.start
        while start < wanted.stop:
            number, first = divmod(start, BLOCK_ROWS)
            last = min(BLOCK_ROWS, wanted.stop - number * BLOCK_ROWS)
            yield self.maker.block(number, moment), first, last
            start += last - first

    def frame_of(self, block: RowBlock, first: int, last: int) -> pl.DataFrame:
        """Return rows first … last−1 of a block as a frame."""
        columns: dict[str, pl.Series | NDArray] = {
            name: label[first:last] for name, label in zip(self.labels, block.labels, strict=True)
        }
        for name, column in block.columns.items():
            part = column[first:last]
            columns[name] = pl.Series(name, part, nan_to_null=name.startswith("I"))
        return pl.DataFrame(columns)


def write_frames(path: str | os.PathLike[str], frames: Iterable[pl.DataFrame], *, empty: pl.DataFrame) -> Path:
    """Write frames to one sealed Parquet file (`parquet_seal.py`), all or nothing.

    Args:
        path: of the file.
        frames: one after the other.
        empty: a frame with their columns.

    Raises:
        DataError: the file cannot be written.
    """
    columns = empty.to_arrow().schema
    # Floats are nearly all different: a dictionary of them would save nothing.
    in_dictionaries = [field.name for field in columns if not pa.types.is_floating(field.type)]
    options: dict[str, Any] = {
        "compression": "zstd",
        "compression_level": 1,
        "write_page_checksum": True,
        "use_dictionary": in_dictionaries,
    }
    with replacing(path, error=DataError) as temporary:
        with ParquetFile(temporary, columns, **options) as writer:
            for frame in frames:
                writer.write_table(frame.to_arrow())
        seal_parquet(temporary)
    return Path(path)
