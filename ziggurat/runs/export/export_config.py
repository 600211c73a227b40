"""ExportConfig: the settings of an export."""

from __future__ import annotations

from dataclasses import dataclass, field

from ziggurat.commands import pasted
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError
from ziggurat.models.packed import packed_format
from ziggurat.ops.row_formats import PLAIN, RowFormat
from ziggurat.typed import Count, CountOrNone, Share, checked

_MOST_BITS = "mx9"  # of the formats that products are usually packed in


@dataclass(frozen=True, kw_only=True)
@checked
class ExportConfig:
    """Settings of an export.

    Args:
        tables: the format that rows of embedding tables are kept in; fp32: the numbers of the run, whatever it keeps.
        by_table: another format for some tables.
        products: the format that weights of dense products are packed in, for scoring on CPUs: mx6, mx9, int8; "": as
            the run has them, which is FP32 unless `ziggurat quantise` packed it.
        dispatch: file of formats, one for each product (`ziggurat numerics dispatch --for scoring`), in place of
            `products`.
        value: formula over the tasks that orders answers; "" and "auto" choose one on validation likes, where a run
            retrieves and something scores what it finds; "" without such likes is the inner product, and without a run
            that retrieves the one task.
        value_likes: likes that formulas are tried on, at most; of more a sample is drawn.
        items: files with the catalogue, one row an item; none: what was last seen of each item in the run's data.
        keep: further columns of the data for the catalogue: for filters, people, and the value model. Of `items`, none
            named: all.
        users: whether columns and items of known users go into the export.
        num_candidates: items that the ranker scores.
        num_over_arch: items that the index gives the OverArch, where the retrieving run has one.
        recall: share of the exact candidates that the index finds, for known users; more takes more time.
        parity_rows: raw rows that the export is compared with its run on.
        golden: golden requests of each kind.
        program: whether the dense network is also written as a program of `torch.export`.
        compiled: whether that program is compiled ahead for this processor as well, for other runtimes; takes a minute.
        allow: publish although the scores differ from the run's, or the ranker knows few of the items or users.

    Example:
        >>> zg.ExportConfig(num_candidates=500, keep=("title",)).keep
        ('title',)
    """

    tables: RowFormat = PLAIN
    by_table: dict[str, RowFormat] = field(default_factory=dict)
    products: str = ""
    dispatch: str = ""
    value: str = ""
    value_likes: Count = 4_000
    items: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    users: bool = True
    num_candidates: Count = 500
    num_over_arch: Count = 2000
    recall: Share = 0.995
    parity_rows: Count = 100_000
    golden: CountOrNone = 8
    program: bool = True
    compiled: bool = False
    allow: bool = False

    def __post_init__(self) -> None:
        for row_format in (self.tables, *self.by_table.values()):
            if row_format.has_beside:
                raise ConfigError(
                    expected=", ".join(each.name for each in RowFormat if not each.has_beside),
                    found=f"{row_format}, which keeps for updates what nobody reads",
                    where="ExportConfig.tables",
                    ways_out=f"{row_format.without_beside}: the same numbers are read",
                )

        if self.products:
            packed_format(self.products, where="ExportConfig.products")
        if self.products and self.dispatch:
            raise ConfigError(
                expected="one format for all products, or a dispatch that has one for each",
                found=f"products {self.products} and dispatch {self.dispatch}",
                where="ExportConfig.products and dispatch",
                ways_out=("leave --products out", "leave --dispatch out"),
            )

    @property
    def is_exact(self) -> bool:
        """True if tables and products are those of the runs, so that scores are."""
        return not self.kept.has_few_bits and not self.products and not self.dispatch

    @property
    def ways_to_more_bits(self) -> tuple[str, ...]:
        """The ways out of formats that cost too much: more bits, where fewer are set."""
        ways: list[str] = []
        if self.kept.has_few_bits:
            ways.append("tables in more bits: --tables int8, bf16 or fp32, or some of them: --by-table NAME=fp32")
        if self.products and self.products != _MOST_BITS:
            ways.append(f"products in more bits: --products {_MOST_BITS}, or none: leave --products out")
        elif self.products:
            ways.append("products in FP32: leave --products out")
        if self.dispatch:
            ways.append("products in FP32: leave --dispatch out")
        return tuple(ways)

    def ways_to_see_costs(self, run: str) -> tuple[str, ...]:
        """Return the commands that say what the formats cost a run.

        Args:
            run: its folder.
        """
        commands: list[str] = []
        if self.kept.has_few_bits:
            commands.append(f"ziggurat quantise {pasted(run)} --by-table")
        if self.products or self.dispatch:
            commands.append(f"ziggurat quantise {pasted(run)} --products {self.products or _MOST_BITS}")
        return tuple(f"see what each costs: {command}" for command in commands)

    @property
    def kept(self) -> TablesConfig:
        """The formats of all tables."""
        return TablesConfig(weights=self.tables, by_table=self.by_table)
