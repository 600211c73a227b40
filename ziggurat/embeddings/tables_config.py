"""TablesConfig: what the rows of a run's tables are kept as."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field

from ziggurat.embeddings.config import EmbeddingConfig
from ziggurat.embeddings.storage import MakeStorage, MemoryStorage, StorageByTable
from ziggurat.embeddings.storage.budget import MemoryBudget
from ziggurat.embeddings.storage.cached import Cached
from ziggurat.embeddings.storage.disk import DiskTables
from ziggurat.embeddings.storage.host import HostTables
from ziggurat.embeddings.storage.low_precision import LowPrecision
from ziggurat.errors import ConfigError, nearest_names
from ziggurat.ops.machine.memory import size_of_text
from ziggurat.ops.row_cache import NO_CACHE, CachePolicy, CacheSize
from ziggurat.ops.row_file import RowFile
from ziggurat.ops.row_formats import PLAIN, Rounding, RowFormat
from ziggurat.typed import CachedShare, checked

AUTO = "auto"
_DEVICE_MEMORY = "tables.device-memory"


@dataclass(frozen=True, kw_only=True)
@checked
class TablesConfig:
    """Settings of how rows of all embedding tables of a run are kept, while they are trained and when they are read.

    Args:
        weights: the format of rows; see docs/guides/tables-larger-than-memory.md. Tables so narrow that it would save
            nothing keep FP32.
        by_table: another format for some tables: user_id=int8,item_id=bf16.
        rounding: how an update is rounded to the format; split_bf16 and fp32 round nothing.
        memory_limit: what all tables may take with their optimizer state, such as 4GiB: formats are chosen for those
            that `by_table` does not name, before the first step; "" chooses nothing.
        cache: share of the rows of a width that are kept in FP32 while they are hot, in front of rows in bf16, int8 or
            int4; 0: none.
        cache_policy: which row leaves the cache for another.
        disk: a folder on the disk that holds the rows of tables in fp32; "": they are in memory. With a memory limit
            the disk holds those for which the limit leaves nothing better.
        in_memory: tables in fp32 that lie in memory though there is a disk, or on the device though others lie on the
            host: user_id,item_id.
        memory: for rows of the disk that are held in memory, in each process: 1GiB, or a share of the rows: 10%.
        device_memory: tables in fp32 lie in the memory of the host, and so much of the device's holds those of their
            rows that steps need: 8GiB, or a share of the rows: 10%; with a memory limit auto: what it leaves. "": all
            rows lie on the device.
    """

    weights: RowFormat = PLAIN
    by_table: dict[str, RowFormat] = field(default_factory=dict)
    rounding: Rounding = Rounding.STOCHASTIC
    memory_limit: str = ""
    cache: CachedShare = 0.0
    cache_policy: CachePolicy = CachePolicy.LRU
    disk: str = ""
    in_memory: tuple[str, ...] = ()
    memory: str = "10%"
    device_memory: str = ""

    def __post_init__(self) -> None:
        if self.memory_limit:
            size_of_text(self.memory_limit, where="--tables.memory-limit")
        budget_of(self.memory, setting="tables.memory")
        self._check_disk()
        self._check_device_memory()

    @property
    def has_few_bits(self) -> bool:
        """True if any table is to be kept in fewer bits than FP32."""
        return not all(each.is_plain for each in self._formats)

    def is_on_disk(self, table: str) -> bool:
        """Return True if the rows of a table lie on a disk."""
        return bool(self.disk) and self._may_be_below(table)

    def is_in_host(self, table: str) -> bool:
        """Return True if the rows of a table lie in the memory of the host, behind that of the device."""
        return bool(self.device_memory) and self._may_be_below(table)

    def _may_be_below(self, table: str) -> bool:
        return self.by_table.get(table, self.weights).is_plain and table not in self.in_memory

    def format_of(self, table: str, *, dim: int) -> RowFormat:
        """Return the format in which a table of so many columns is kept."""
        return self.by_table.get(table, self.weights).for_columns(dim)

    def make_storage(self, *, seed: int, is_trained: bool = True) -> MakeStorage:
        """Return the maker of the storages of a model's tables.

        Args:
            seed: of the run, from which random rounding follows.
            is_trained: False for tables that are only read; where their disk is not on this machine, or takes no files
                here, its folder for temporary files holds them.
        """
        is_elsewhere = bool(self.disk) and not is_trained and not _takes_files(self.disk)  # than where it was trained
        folder = tempfile.gettempdir() if is_elsewhere else self.disk
        exact: MakeStorage = MemoryStorage
        if self.disk:
            exact = DiskTables(folder=folder, budget=budget_of(self.memory, setting="tables.memory"))
        elif self.device_memory:
            exact = HostTables(budget=budget_of(self.device_memory, setting=_DEVICE_MEMORY))

        def maker(row_format: RowFormat) -> MakeStorage:
            if row_format.is_plain:
                return exact
            low = LowPrecision(row_format=row_format, rounding=self.rounding, seed=seed, is_trained=is_trained)
            return Cached(behind=low, cache=self._cache) if self.cache_of(row_format).share else low

        rest = maker(self.weights)
        named = {name: maker(each) for name, each in self.by_table.items()}
        if exact is not MemoryStorage:
            kept = (name for name in self.in_memory if self.by_table.get(name, self.weights).is_plain)
            named |= dict.fromkeys(kept, MemoryStorage)
        return StorageByTable(rest=rest, by_table=named) if named else rest

    def check(self, embedding: EmbeddingConfig, *, tables: Iterable[str]) -> None:
        """Refuse an optimizer that needs tables in FP32, and formats for tables that there are not.

        Args:
            embedding: how the tables learn.
            tables: names of the model's tables.

        Raises:
            ConfigError: tables would be parameters with dense gradients; or a name in `by_table` is no table;
                or there is a cache, and no rows that it could help; or a policy of a cache, and none; or a rounding,
                and no rows that are rounded.
        """
        self.check_names(sorted(set(tables)))
        self._check_cache()
        self._check_rounding()
        if (self.disk or self.device_memory) and embedding.optimizer.is_dense:
            setting, place = ("tables.disk", "on a disk") if self.disk else (_DEVICE_MEMORY, "on the host")
            raise ConfigError(
                expected=f"an optimizer of touched rows, for tables {place}",
                found=f"--{setting} and {embedding.optimizer.value}, whose gradients are dense",
                where=setting,
                ways_out=(
                    "--model.embedding.optimizer rowwise_adagrad (or sgd, sparse_adam)",
                    f"leave --{setting} out",
                ),
            )
        if self.has_few_bits:
            self.check_touched_rows(embedding, setting="tables.by-table" if self.weights.is_plain else "tables.weights")

    @staticmethod
    def check_touched_rows(embedding: EmbeddingConfig, *, setting: str) -> None:
        """Refuse an optimizer that has a gradient for every row, for tables in fewer bits.

        Args:
            embedding: how the tables learn.
            setting: that asks for fewer bits.

        Raises:
            ConfigError: it has.
        """
        if embedding.optimizer.is_dense:
            raise ConfigError(
                expected="an optimizer of touched rows, for tables that are not kept in FP32",
                found=f"--{setting} and {embedding.optimizer.value}, which has a gradient for every row of every table",
                where=setting,
                ways_out=(
                    "--model.embedding.optimizer rowwise_adagrad (or sgd, sparse_adam)",
                    f"leave --{setting} out",
                ),
            )

    def check_folder(self) -> None:
        """Make a file on the disk, and give it back: what cannot be made is told before data is read.

        Raises:
            FileError: the folder is not there, or takes no files.
        """
        if self.disk:
            RowFile(self.disk, num_rows=1, payload_bytes=4).close()

    def cache_of(self, row_format: RowFormat) -> CacheSize:
        """The cache in front of rows of a format: none where their updates are exact without."""
        return self._cache if row_format.rounds else NO_CACHE

    @property
    def _formats(self) -> tuple[RowFormat, ...]:
        return (self.weights, *self.by_table.values())

    @property
    def _may_round(self) -> bool:
        """True if updates of any table are rounded, or a limit of memory may lead to rounding."""
        return bool(self.memory_limit) or any(each.rounds for each in self._formats)

    @property
    def _cache(self) -> CacheSize:
        return CacheSize(share=self.cache, policy=self.cache_policy)

    def _check_cache(self) -> None:
        has_or_gets_one = bool(self.cache or self.memory_limit)
        if self.cache_policy is not CachePolicy.LRU and not has_or_gets_one:
            raise ConfigError(
                expected="--tables.cache SHARE beside --tables.cache-policy, which says who leaves the cache",
                found=f"--tables.cache-policy {self.cache_policy.value} and no cache",
                where="tables.cache-policy",
                ways_out=("--tables.cache 0.05", f"leave it out, or --tables.cache-policy {CachePolicy.LRU.value}"),
            )
        if not self.cache or self._may_round:
            return
        formats = ", ".join(each.name for each in RowFormat if each.rounds)
        raise ConfigError(
            expected=f"rows in {formats} behind a cache of rows in FP32",
            found=f"--tables.cache {self.cache:g} with --tables.weights {self.weights.value}, whose updates are exact",
            where="tables.cache",
            ways_out=("--tables.weights int8 (or bf16, int4)", "leave --tables.cache out"),
        )

    def _check_rounding(self) -> None:
        if self.rounding is Rounding.STOCHASTIC or self._may_round:
            return
        raise ConfigError(
            expected="rows that are rounded, beside --tables.rounding, which says how",
            found=f"--tables.rounding {self.rounding.value} with --tables.weights {self.weights.value}",
            where="tables.rounding",
            ways_out=(
                f"--tables.weights int8 (or another of {', '.join(each.name for each in RowFormat if each.rounds)})",
                f"leave it out, or --tables.rounding {Rounding.STOCHASTIC.value}",
            ),
        )

    def _check_disk(self) -> None:
        """Refuse settings of a disk that cannot take effect."""
        if not self.disk and self.memory != TablesConfig.memory:
            raise ConfigError(
                expected="--tables.disk FOLDER beside --tables.memory, which is for rows of a disk",
                found=f"--tables.memory {self.memory} alone",
                where="tables.memory",
                ways_out=(
                    "--tables.disk FOLDER",
                    f"leave --tables.memory out; for a run that has it already: --tables.memory {TablesConfig.memory}",
                ),
            )
        if not self.disk and not self.device_memory and self.in_memory:
            raise ConfigError(
                expected="--tables.disk FOLDER or --tables.device-memory SIZE beside --tables.in-memory, which is for "
                "tables that shall lie neither on the disk nor on the host",
                found=f"--tables.in-memory {','.join(self.in_memory)} alone",
                where="tables.in-memory",
                ways_out=(
                    "--tables.disk FOLDER",
                    "leave it out: all tables are in memory; for a run that has it already: --tables.in-memory ''",
                ),
            )
        if self.disk and not any(each.is_plain for each in self._formats):
            raise ConfigError(
                expected="tables in fp32, which are those that --tables.disk holds",
                found=f"--tables.weights {self.weights.value}",
                where="tables.disk",
                ways_out=("--tables.weights fp32", "--tables.by-table NAME=fp32 for those that shall lie on the disk"),
            )

    def _check_device_memory(self) -> None:
        """Refuse memory of the device for rows of the host where there are none, or nobody says how much it is."""
        if not self.device_memory:
            return
        is_auto = self.device_memory == AUTO
        if not is_auto:
            budget_of(self.device_memory, setting=_DEVICE_MEMORY)
        if self.disk:
            raise ConfigError(
                expected="one place for the rows that are not held: the memory of the host, or a disk",
                found=f"--{_DEVICE_MEMORY} {self.device_memory} and --tables.disk {self.disk}",
                where=_DEVICE_MEMORY,
                ways_out=(f"leave --{_DEVICE_MEMORY} out", "leave --tables.disk out; in a run that has it: ''"),
            )
        if is_auto and not self.memory_limit:
            raise ConfigError(
                expected="memory of the device for rows of the host: bytes, or a share of the rows",
                found=f"--{_DEVICE_MEMORY} {AUTO}, which is what --tables.memory-limit leaves, and no limit",
                where=_DEVICE_MEMORY,
                ways_out=(f"--{_DEVICE_MEMORY} 8GiB (or 10%)", "--tables.memory-limit 20GiB"),
            )
        if not any(each.is_plain for each in self._formats):
            raise ConfigError(
                expected="tables in fp32, which are those that lie on the host",
                found=f"--tables.weights {self.weights.value}",
                where=_DEVICE_MEMORY,
                ways_out=("--tables.weights fp32", "--tables.by-table NAME=fp32 for those that shall lie on the host"),
            )

    def check_names(self, tables: list[str]) -> None:
        """Refuse formats and places for tables that there are not.

        Raises:
            ConfigError: with the nearest names.
        """
        named = [(name, "by-table") for name in self.by_table] + [(name, "in-memory") for name in self.in_memory]
        for name, setting in named:
            if name in tables:
                continue
            near = nearest_names(name, tables)
            shown = ", ".join(tables[:20]) + (f" and {len(tables) - 20} more" if len(tables) > 20 else "")
            raise ConfigError(
                expected=f"names of embedding tables: {shown or 'there are none'}",
                found=repr(name),
                where=f"tables.{setting}",
                ways_out=(
                    *(f"did you mean {each!r}?" for each in near),
                    "a feature that names a table looks up that one: see its `table` in the schema",
                ),
            )


def budget_of(text: str, *, setting: str) -> MemoryBudget:
    """Memory for rows that are held, from words: 1GiB, 300MiB, 10%.

    Args:
        text: the words.
        setting: whose they are.

    Raises:
        ConfigError: none of these, or nothing at all.
    """
    if not text.strip().endswith("%"):
        return MemoryBudget(num_bytes=size_of_text(text, where=f"--{setting}"))
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?%", text.strip())
    if match is None or not 0 < float(match[1]) <= 100:
        raise ConfigError(
            expected="a share of the rows above 0 % and up to 100 %, or memory",
            found=repr(text),
            where=setting,
            ways_out=(f"--{setting} 10%", f"--{setting} 1GiB"),
        )
    return MemoryBudget(share=float(match[1]) / 100)


def _takes_files(folder: str) -> bool:
    """Return True if a folder is there and lets this process make files in it."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
