"""An index of item vectors that is a module: clusters of INT8 rows, searched by `ops.scan`.

    build     vectors N × D ──► k-means ──► rows sorted by cluster: *positions*; order[position] = number of the vector
    search    query ──► best clusters ──► their rows that pass the mask ──► products with the upper four bits
              ──► best *candidates* ──► INT8 products ──► best k positions
              with kept vectors: best `rerank` of INT8 ──► products with the kept vectors in FP32 ──► best k

All state is in buffers, so the index goes through `state_dict` and safetensors, moves between devices and is shared
between processes as any module is. It takes D + 8 bytes a vector, and 9/8 · D + 16 for each of 4·√N clusters.

*How many candidates.* The upper four bits of rows are half of the memory that a search reads. `build` measures how many
candidates they must keep so that 99.8 % of the best hundred are among them, for vectors of the index as queries:
about 2.5 a wanted row for numbers without extremes. If eight do not suffice, or the index has fewer than 16,384 rows,
all bits of all rows are read.

*How many clusters.* More clusters fit the vectors more closely, so fewer rows are read; but each query reads all
centroids. 4·√N balances them. *How many probes.* As many as hold about 16,384 rows, or N/64, or 32·k, whatever is
most: small catalogues are searched whole. `tune` finds the smallest number that reaches a recall on queries of yours.

*Which clusters first.* The mean of a cluster says where its rows are on average, but the best k come from its edge. The
spread of a cluster (root of the mean squared distance a number) times the query's length is how far its rows reach
along a query; twice that is added to the mean's product. For vectors of length one this ranks about as
normalised centroids do (a tight cluster has a long mean), and it holds for any lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.ops.scan import (
    Found,
    Masks,
    Rows,
    ScanTables,
    dequantize_rows,
    quantize_rows,
    scan_clusters,
    scan_rows,
    split_codes,
)
from ziggurat.ops.scan.triton import is_without_wait, search_clusters, why_not_triton
from ziggurat.retrieval.vectors.best import best_of, exact_search, recall_of
from ziggurat.retrieval.vectors.candidates import candidates_for, measure_candidates
from ziggurat.retrieval.vectors.checks import as_matrix, check_count, check_numbers, check_question, check_vectors
from ziggurat.retrieval.vectors.clustering import cluster, spreads
from ziggurat.retrieval.vectors.config import FirstPass, Kept, VectorIndexConfig
from ziggurat.retrieval.vectors.graphs import Answer, Form, SearchGraphs
from ziggurat.retrieval.vectors.row_block import RowBlock

_REACH = 2.0  # spreads that the best rows of a cluster are expected beyond its mean
_PROBED_ROWS = 16_384


_ROW_BUFFERS = ("upper", "lower", "scales")
_CENTROID_BUFFERS = ("centroid_upper", "centroid_lower", "centroid_scales")


class _Sizes(NamedTuple):  # older files have two or three of them
    dim: int
    probes: int
    tuned_k: int = 0
    candidate_percent: int = 0


_KEPT_DTYPES = {Kept.NONE: torch.int8, Kept.BFLOAT16: torch.bfloat16, Kept.FLOAT32: torch.float32}


class VectorIndex(nn.Module):
    """Finds the vectors with the largest inner products, among those that a mask lets pass.

    Make one with `build`, or load a `state_dict` into an empty one: `VectorIndex()`.

    Attributes:
        dim: numbers of a vector.
        num_clusters: clusters that have vectors.
        default_probes: clusters that a search looks into unless it says; 0: chosen by the number of rows.
    """

    upper: Tensor
    lower: Tensor
    scales: Tensor
    stored_order: Tensor
    offsets: Tensor
    centroid_upper: Tensor
    centroid_lower: Tensor
    centroid_scales: Tensor
    centroid_reach: Tensor
    kept: Tensor
    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Buffers of no row, so that a state can be loaded into them.
        empty = quantize_rows(torch.zeros(0, 1))
        self._set(dict(zip(_ROW_BUFFERS, empty, strict=True)))
        self._set(dict(zip(_CENTROID_BUFFERS, empty, strict=True)))
        self._set({"stored_order": torch.zeros(0, dtype=torch.int32), "offsets": torch.zeros(1, dtype=torch.int64)})
        self._set({"centroid_reach": torch.zeros(0), "kept": torch.zeros(0, 1, dtype=torch.bfloat16)})
        self._set({"sizes": torch.tensor([1, 0, 0, 0])})  # as _Sizes

    @classmethod
    def build(cls, vectors: Float[Tensor, "N D"], *, config: VectorIndexConfig | None = None) -> VectorIndex:
        """Cluster vectors and round them.

        Args:
            vectors: finite numbers; any N, zero included.
            config: the defaults unless given.

        Raises:
            DataError: a vector has a number that is not finite, or the matrix has no columns.
        """
        config = config or VectorIndexConfig()
        vectors = as_matrix(vectors, argument="vectors")
        check_vectors(vectors)
        vectors = vectors.detach().to("cpu", torch.float32).contiguous()
        num, dim = vectors.shape
        index = cls()
        if not num:
            index._set({"sizes": torch.tensor([dim, config.probes, 0, 0])})
            index._set({"kept": torch.zeros(0, dim, dtype=_KEPT_DTYPES[config.kept])})
            index._set(dict(zip(_ROW_BUFFERS, quantize_rows(vectors), strict=True)))
            index._set(dict(zip(_CENTROID_BUFFERS, quantize_rows(vectors), strict=True)))
            return index
        # No more clusters than vectors, or some would stay empty.
        num_clusters = min(num, config.num_clusters or math.ceil(4 * math.sqrt(num)))
        centroids, labels = cluster(vectors, num_clusters=num_clusters, seed=config.seed)
        # Stable, so that within a cluster vectors keep the order in which they came.
        order = labels.argsort(stable=True)
        spread = spreads(vectors, centroids, labels)
        offsets = torch.zeros(len(centroids) + 1, dtype=torch.int64)
        # Behind the leading 0: cluster i has the rows from offsets[i] to offsets[i + 1].
        offsets[1:] = torch.bincount(labels, minlength=len(centroids)).cumsum(0)
        kept = vectors[order] if config.kept is not Kept.NONE else vectors[:0]
        index._set(dict(zip(_ROW_BUFFERS, quantize_rows(vectors, order=order), strict=True)))
        index._set(dict(zip(_CENTROID_BUFFERS, quantize_rows(centroids), strict=True)))
        index._set({"offsets": offsets, "centroid_reach": _REACH * spread, "stored_order": order.to(torch.int32)})
        index._set({"kept": kept.to(_KEPT_DTYPES[config.kept]), "sizes": torch.tensor([dim, config.probes, 0, 0])})
        # Measured with the finished index, since it is its own searches that are compared.
        if config.first_pass is FirstPass.AUTO:
            percent = measure_candidates(
                index.search, vectors=vectors, num_clusters=index.num_clusters, seed=config.seed
            )
            index._set_sizes(index._numbers()._replace(candidate_percent=percent))
        return index

    def __len__(self) -> int:
        return len(self.scales)

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self._numbers().dim

    @property
    def default_probes(self) -> int:
        """Clusters that a search looks into unless it says; 0: chosen by the number of rows."""
        return self._numbers().probes

    @default_probes.setter
    def default_probes(self, probes: int) -> None:
        self.keep_tuned(probes, k=0)

    @property
    def tuned_k(self) -> int:
        """The k that the default probes were tuned for; 0: for every k."""
        return self._numbers().tuned_k

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, without its scale."""
        return 2 * self.upper.shape[1]

    @property
    def candidate_percent(self) -> int:
        """Candidates of the upper bits for a hundred rows that are wanted; 0: all bits of all rows are read."""
        return self._numbers().candidate_percent

    @property
    def num_clusters(self) -> int:
        """Clusters that have vectors."""
        return len(self.offsets) - 1

    @property
    def order(self) -> Int64[Tensor, "N"]:
        """The number, for each position, of the vector that was given to `build`."""
        return self.stored_order.to(torch.int64)

    def search(
        self,
        queries: Float[Tensor, "Q D"],
        *,
        k: int,
        masks: Masks = None,
        probes: int | Int64[Tensor, "Q"] | None = None,
        least: int | Int64[Tensor, "Q"] | None = None,
        rerank: int | None = None,
        candidates: int | None = None,
    ) -> Found:
        """Find the best k positions of each query in its nearest clusters.

        Args:
            queries: finite numbers.
            k: positions wanted; −1 with a score of −∞ stands where fewer pass.
            masks: bits of the positions that may be returned (`ops.bitmask`): one mask for all queries, or one each;
                None: all may.
            probes: clusters to look into, for all queries or each; 0 or None: as the index chose.
            least: look further until so many rows have passed; k unless given.
            rerank: positions that are scored again with the kept vectors; 0: none. Unless given, 3·k if there are any.
            candidates: rows that the upper bits choose; 0: all bits of all rows are read. Unless given, as measured.

        Raises:
            ConfigError: k, probes or rerank is impossible, or masks are of another size.
            DataError: queries are of another width, or not finite.
        """
        tables = self._tables()
        sizes = self._numbers()
        check_question(queries, k=k, masks=masks, dim=sizes.dim, scales=tables.rows.scales)
        has_kept = self.has_kept
        if not isinstance(probes, Tensor):
            check_count(probes or 0, 0, 2**31 - 1, name="probes", ways_out="leave it out: the index chooses")
            probes = probes or self.probes_for(k)
        if rerank is None:
            rerank = 3 * k if has_kept else 0
        if rerank and not has_kept:
            raise ConfigError(
                expected="kept vectors, to score candidates again",
                found=f"rerank={rerank} for an index of INT8 rows alone",
                where="VectorIndex.search",
                ways_out=('build with VectorIndexConfig(kept="bfloat16"): 2 bytes a number more', "leave rerank out"),
            )
        # The first pass must find all that is scored again.
        wanted = max(k, rerank)
        least = wanted if least is None else least
        candidates = candidates_for(k, percent=sizes.candidate_percent) if candidates is None else candidates
        most = max(wanted, candidates)
        if isinstance(probes, int) and isinstance(least, int) and self._is_captured(queries, masks, most=most):
            form = Form(k=k, probes=probes, least=least, candidates=candidates, rerank=rerank)
            return self._graphs().search(self._answer_of(form), queries, masks=masks, form=form)
        found = scan_clusters(tables, queries, k=wanted, probes=probes, least=least, masks=masks, candidates=candidates)
        return self.rescored(queries, found, k=k) if rerank else found

    def exact(
        self,
        queries: Float[Tensor, "Q D"],
        *,
        k: int,
        masks: Masks = None,
    ) -> Found:
        """Find the best k positions among all: with the kept vectors in FP32, else with INT8 rows."""
        check_question(queries, k=k, masks=masks, dim=self.dim, scales=self.scales)
        if not self.has_kept:
            # All clusters and all bits make the search exact, up to the rounding of rows.
            return self.search(queries, k=k, masks=masks, probes=max(1, self.num_clusters), candidates=0)
        return exact_search(self.kept, queries, k=k, masks=masks)

    def scan_rows(self, queries: Float[Tensor, "Q D"], *, k: int, rows: Sequence[Int64[Tensor, "_"] | None]) -> Found:
        """Find the best k of the given positions for each query; None: of all positions.

        Raises:
            ConfigError: k is impossible.
            DataError: queries are of another width, or not finite.
        """
        check_question(queries, k=k, masks=None, dim=self.dim, scales=self.scales)
        return scan_rows(self._tables(), queries, k=k, rows=rows, candidates=self.candidates_for(k))

    def row_block(self, rows: Int64[Tensor, "R"]) -> RowBlock:
        """Copy rows side by side: what a filter that comes often lets pass, to be read from front to back."""
        own = self._rows().at(rows)
        return RowBlock.of(own, positions=rows, dim=self.dim, candidate_percent=self.candidate_percent)

    def candidates_for(self, k: int) -> int:
        """Candidates of the upper bits for the best k; 0: all bits of all rows are read."""
        return candidates_for(k, percent=self.candidate_percent)

    @property
    def has_kept(self) -> bool:
        """True if vectors are kept to score candidates again."""
        if "has_kept" not in self._cached:
            self._cached["has_kept"] = len(self.kept) > 0
        return self._cached["has_kept"]

    def probes_for(self, k: int) -> int:
        """Clusters to look into for the best k, unless a search says.

        Probes that were tuned for some k are the least for more than that.
        """
        # For a larger k than they were tuned for, tuned probes may be too few.
        if (probes := self.default_probes) and not 0 < self.tuned_k < k:
            return min(probes, max(1, self._tables().num_clusters))
        rows = max(_PROBED_ROWS, len(self) // 64, 32 * k)
        own = math.ceil(rows * self.num_clusters / max(1, len(self)))
        return max(1, min(self.num_clusters, max(probes, own)))

    def tune(self, queries: Float[Tensor, "Q D"], *, k: int, recall: float) -> int:
        """Find the fewest probes that reach a recall@k against `exact`, and make them the default.

        Args:
            queries: like those that will come; a few hundred.
            k: positions wanted.
            recall: share of the exact answer that is found on average.

        Returns:
            The number of probes; all clusters if no number reaches it.
        """
        exact = self.exact(queries, k=k).positions
        low = 1
        high = max(1, self.num_clusters)
        while low < high:
            middle = (low + high) // 2
            found = self.search(queries, k=k, probes=middle).positions
            # Recall rises with the number of clusters that are read, so the fewest can be bisected.
            low, high = (low, middle) if recall_of(found, exact) >= recall else (middle + 1, high)
        self.keep_tuned(low, k=k)
        return low

    def keep_tuned(self, probes: int, *, k: int) -> None:
        """Make probes that were found for some k the default; a larger k may get more."""
        self._set_sizes(self._numbers()._replace(probes=probes, tuned_k=k))

    def vectors(self, positions: Int64[Tensor, "R"]) -> Float[Tensor, "R D"]:
        """The vectors at positions, kept or from INT8."""
        if self.has_kept:
            return self.kept[positions].float()
        return dequantize_rows(self._rows().at(positions), dim=self.dim)

    @property
    def kept_kind(self) -> Kept:
        """The kind of vectors kept beside the INT8 rows."""
        # An empty index says by the type what it would keep.
        if self.kept.dtype is _KEPT_DTYPES[Kept.NONE] or (len(self) and not self.has_kept):
            return Kept.NONE
        return Kept.FLOAT32 if self.kept.dtype is torch.float32 else Kept.BFLOAT16

    def rename(self, numbers: Int64[Tensor, "N"]) -> None:
        """Give the vectors other numbers: `order` then holds these, which are in the order that `build` was given.

        Raises:
            DataError: there are not as many numbers, one comes twice, or one does not fit into 32 bits.
        """
        check_numbers(numbers, len(self))
        # In the order of positions, which is not that in which numbers are given.
        self._set({"stored_order": numbers[self.order].to(torch.int32)})

    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(each.numel() * each.element_size() for each in self.buffers())

    def rescored(self, queries: Float[Tensor, "Q D"], found: Found, *, k: int) -> Found:
        """The best k of what was found, by products of kept vectors and queries in FP32."""
        # Where nothing was found stands -1: row 0 is read there, and its score becomes −∞ below.
        vectors = self.kept[found.positions.clamp(min=0)].float()
        # Not a matrix product: each query has rows of its own.
        scores = (vectors * queries.detach().float().unsqueeze(1)).sum(-1)
        return best_of(scores.masked_fill(found.positions < 0, -torch.inf), found.positions, k=k)

    def _answer_of(self, form: Form) -> Answer:
        """Return the search of a form, without what asks the device."""
        tables = self._tables()

        def answer(queries: Tensor, masks: Masks) -> tuple[Found, Tensor]:
            found, are_finite = search_clusters(
                tables,
                queries,
                k=max(form.k, form.rerank),
                probes=form.probes,
                least=form.least,
                masks=masks,
                candidates=form.candidates,
            )
            return self.rescored(queries, found, k=form.k) if form.rerank else found, are_finite

        return answer

    def _is_captured(self, queries: Tensor, masks: Masks, *, most: int) -> bool:
        """Return whether a search of these queries can be a CUDA graph."""
        if queries.device.type != "cuda" or not len(queries) or not len(self) or why_not_triton(queries):
            return False
        is_bound = is_without_wait(len(queries), knows_sizes=masks is None, most=most)
        # One capture within another is not allowed.
        return is_bound and not torch.cuda.is_current_stream_capturing()

    def _graphs(self) -> SearchGraphs:
        """The graphs of searches; they end with the buffers that they read."""
        if "graphs" not in self._cached:
            self._cached["graphs"] = SearchGraphs(len(self))
        return self._cached["graphs"]

    def _tables(self) -> ScanTables:
        """Return the tables that the kernel reads, kept until a buffer is replaced."""
        tables = self._cached.get("tables")
        if tables is None:
            tables = self._cached["tables"] = ScanTables(
                dim=self.dim,
                rows=self._rows(),
                offsets=self.offsets,
                centroids=Rows(self.centroid_upper, self.centroid_lower, self.centroid_scales),
                centroid_reach=self.centroid_reach,
            )
        return tables

    def _rows(self) -> Rows:
        return Rows(self.upper, self.lower, self.scales)

    def _numbers(self) -> _Sizes:
        """Return the contents of the buffer of sizes, read once."""
        if "sizes" not in self._cached:
            # `tolist` waits for the device, which each search would do otherwise.
            self._cached["sizes"] = _Sizes(*self.sizes.tolist())
        return self._cached["sizes"]

    def _set_sizes(self, sizes: _Sizes) -> None:
        self._set({"sizes": torch.tensor(sizes, device=self.sizes.device)})

    def _set(self, buffers: dict[str, Tensor]) -> None:
        for name, value in buffers.items():
            self.register_buffer(name, value)
        # Tables, sizes and graphs were made from the old buffers.
        self._cached: dict[str, Any] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> VectorIndex:
        # A move to another device replaces the buffers without `_set`.
        super()._apply(fn, recurse)
        self._cached = {}
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("", "centroid_"):  # files that were written before rows were two planes
            if (codes := state_dict.pop(f"{prefix}{name}codes", None)) is not None:
                state_dict |= dict(
                    zip((f"{prefix}{name}upper", f"{prefix}{name}lower"), split_codes(codes), strict=True)
                )
        # Sizes come with the state: an empty index becomes the one that was saved.
        for name, own in list(self._buffers.items()):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and own is not None and value.shape != own.shape:
                self.register_buffer(name, torch.empty_like(value, device=own.device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._cached = {}
