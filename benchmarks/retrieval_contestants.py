"""Contestants of `ziggurat bench retrieval`: each answers queries with filters, at a setting tuned for recall.

A contestant has `settings(share)`, from fast to thorough, and `prepare(share, filters)`, outside the clock: whatever
can be made of a filter before queries come (a selector, packed bits, rows side by side in a cell called cached). Then
it answers `search(queries, which, setting)`, where query i has filter `which[i]`; −1 where nothing was found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

K = 100


class Contestant(Protocol):
    """An index under test."""

    name: str
    build_s: float
    num_bytes: int

    def settings(self, share: float) -> Sequence[Any]:
        """Settings to try, from fast to thorough."""
        ...

    def prepare(self, share: float, filters: np.ndarray | None, *, cached: bool) -> bool:
        """Make ready for filters (F, N), or for none; False if this cell cannot be answered."""
        ...

    def search(self, queries: np.ndarray, which: np.ndarray, setting: Any) -> np.ndarray:
        """Numbers of the best items (Q, K)."""
        ...


class Ours:
    """VectorIndex with the planner's choice for each filter."""

    def __init__(self, vectors: np.ndarray) -> None:
        import torch

        from ziggurat.retrieval.planner import Planner
        from ziggurat.retrieval.vectors import VectorIndex

        self.name, self._torch = "ziggurat", torch
        begin = time.process_time()
        self._index = VectorIndex.build(torch.from_numpy(vectors))
        self.build_s, self.num_bytes = time.process_time() - begin, self._index.num_bytes()
        own = self._index
        self._planner = Planner(num_rows=len(own), num_clusters=own.num_clusters, row_bytes=own.row_bytes)
        self._order = self._index.order.numpy()
        self._masks: list[Any] = []
        self._passing: list[int] = []
        self._blocks: list[Any] = []

    def settings(self, share: float) -> Sequence[int]:
        return [8, 12, 16, 20, 24, 28, 32, 34, 36, 38, 40, 44, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512, 1024]

    def prepare(self, share: float, filters: np.ndarray | None, *, cached: bool) -> bool:
        from ziggurat.ops.bitmask import pack_mask, rows_of_mask

        self._masks = (
            [] if filters is None else [pack_mask(self._torch.from_numpy(own[self._order])) for own in filters]
        )
        self._passing = [] if filters is None else [int(own.sum()) for own in filters]
        self._blocks = [self._index.row_block(rows_of_mask(mask)) for mask in self._masks] if cached else []
        return True

    def search(self, queries: np.ndarray, which: np.ndarray, setting: int) -> np.ndarray:
        from ziggurat.retrieval.planner import PlanKind
        from ziggurat.retrieval.vectors import search_blocks

        torch, own = self._torch, self._torch.from_numpy(queries)
        if self._blocks:
            return self._order[search_blocks([self._blocks[f] for f in which], own, k=K).positions.numpy()]
        if not self._masks:
            return self._order[self._index.search(own, k=K, probes=setting).positions.numpy()]
        plans = [self._planner.filtered(k=K, probes=setting, passing=self._passing[f], cached=False) for f in which]
        all_clusters = self._index.num_clusters
        probes = [all_clusters if plan.kind is PlanKind.ROWS else plan.probes for plan in plans]
        found = self._index.search(
            own,
            k=K,
            masks=[self._masks[f] for f in which],
            probes=probes[0] if len(probes) == 1 else torch.tensor(probes),
            least=plans[0].least if len(plans) == 1 else torch.tensor([plan.least for plan in plans]),
        )
        return self._order[found.positions.numpy()]


class Faiss:
    """An inverted file of faiss; a bitmap selector a filter, so one call a query where filters differ."""

    def __init__(self, vectors: np.ndarray, *, kind: str, refine: float = 0.0) -> None:
        import faiss

        faiss.omp_set_num_threads(1)
        self._faiss, self._refine = faiss, refine
        self.name = f"faiss {kind}" + (f" refined x{refine:g}" if refine else "")
        begin = time.process_time()
        inner = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
        inner.train(vectors[np.random.default_rng(0).permutation(len(vectors))[:131_072]])
        inner.add(vectors)
        self._index = inner
        if refine:
            self._refined = faiss.IndexRefineFlat(inner, faiss.swig_ptr(vectors))
            self._refined.k_factor = refine
            self._vectors = vectors
        self.build_s = time.process_time() - begin
        self.num_bytes = _written_bytes(inner) + (vectors.nbytes if refine else 0)
        self._selectors: list[Any] = []

    def settings(self, share: float) -> Sequence[int]:
        return [4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128, 160, 192, 256, 384, 512, 1024]

    def prepare(self, share: float, filters: np.ndarray | None, *, cached: bool) -> bool:
        faiss = self._faiss
        self._bits = [] if filters is None else [np.packbits(own, bitorder="little") for own in filters]
        self._selectors = [faiss.IDSelectorBitmap(bits) for bits in self._bits]
        return not cached

    def search(self, queries: np.ndarray, which: np.ndarray, setting: int) -> np.ndarray:
        if not self._selectors:
            return self._one(queries, setting, {})
        found = [self._one(queries[i : i + 1], setting, {"sel": self._selectors[f]}) for i, f in enumerate(which)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _one(self, queries: np.ndarray, setting: int, selector: dict[str, Any]) -> np.ndarray:
        inner = self._faiss.SearchParametersIVF(nprobe=setting, **selector)
        if not self._refine:
            return self._index.search(queries, K, params=inner)[1]
        outer = self._faiss.IndexRefineSearchParameters(k_factor=self._refine, base_index_params=inner)
        return self._refined.search(queries, K, params=outer)[1]


class PreFilter:
    """Exact search of the rows that pass, by faiss.knn; gathered inside the call, or beforehand where cached."""

    def __init__(self, vectors: np.ndarray) -> None:
        import faiss

        self._faiss, self._vectors = faiss, vectors
        self.name, self.build_s, self.num_bytes = "faiss.knn on the rows that pass", 0.0, vectors.nbytes

    def settings(self, share: float) -> Sequence[int]:
        return [0]

    def prepare(self, share: float, filters: np.ndarray | None, *, cached: bool) -> bool:
        self._filters, self._rows = filters, None
        if filters is None or share > 0.1:
            return False
        if cached:
            self._rows = [(rows := np.flatnonzero(own), self._vectors[rows]) for own in filters]
        return True

    def search(self, queries: np.ndarray, which: np.ndarray, setting: int) -> np.ndarray:
        found = []
        for i, f in enumerate(which):
            if self._rows is not None:
                rows, vectors = self._rows[f]
            else:
                rows = np.flatnonzero(self._filters[f])
                vectors = self._vectors[rows]
            metric = self._faiss.METRIC_INNER_PRODUCT
            found.append(rows[self._faiss.knn(queries[i : i + 1], vectors, K, metric=metric)[1]])
        return np.concatenate(found)


class Scann:
    """ScaNN's tree of 1,000 leaves, 4-bit anisotropic codes and reordering; filters after the search."""

    def __init__(self, vectors: np.ndarray) -> None:
        import scann

        self.name = "scann-core"
        begin = time.process_time()
        builder = scann.scann_ops_pybind.builder(vectors, K, "dot_product")
        builder = builder.tree(num_leaves=1000, num_leaves_to_search=16, training_sample_size=131_072)
        self._searcher = builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(400).build()
        self.build_s, self.num_bytes = time.process_time() - begin, vectors.nbytes + vectors.nbytes // 16
        self._filters: np.ndarray | None = None

    def settings(self, share: float) -> Sequence[tuple[int, int, float]]:
        if share == 1.0:
            return [(leaves, 300 + 25 * (leaves // 4), 1.0) for leaves in (8, 10, 12, 14, 16, 20, 24, 32, 48, 96)]
        most = {0.5: (16, 20, 24, 32, 64), 0.1: (32, 40, 48, 64, 80, 96), 0.01: (192, 256, 320)}[share]
        over = 1.3 if share > 0.1 else 1.4
        return [(leaves, max(600, int(1.8 * K / share) + 10 * leaves), over) for leaves in most]

    def prepare(self, share: float, filters: np.ndarray | None, *, cached: bool) -> bool:
        self._filters, self._share = filters, share
        return not cached

    def search(self, queries: np.ndarray, which: np.ndarray, setting: tuple[int, int, float]) -> np.ndarray:
        leaves, reorder, over = setting
        wanted = K if self._filters is None else int(over * K / self._share)
        reorder = max(reorder, wanted)
        search = self._searcher.search_batched if len(queries) > 1 else self._one
        found = search(queries, final_num_neighbors=wanted, pre_reorder_num_neighbors=reorder, leaves_to_search=leaves)
        numbers = np.asarray(found[0]).reshape(len(queries), -1)
        if self._filters is None:
            return numbers
        return _passing(numbers, [self._filters[f] for f in which])

    def _one(self, queries: np.ndarray, **settings: int) -> Any:
        return self._searcher.search(queries[0], **settings)


class Graph:
    """A graph of usearch (BF16) or hnswlib (FP32), built in minutes.

    hnswlib calls a function of Python for every item that it reaches; usearch's Python interface takes no filter, so it
    fetches more and drops what does not pass.
    """

    def __init__(self, vectors: np.ndarray, *, library: str) -> None:
        self.name, self._library = f"{library} M=16", library
        begin = time.process_time()
        num, dim = vectors.shape
        if library == "usearch":
            from usearch.index import Index

            self._index = Index(ndim=dim, metric="ip", dtype="bf16", connectivity=16, expansion_add=100)
            self._index.add(np.arange(num), vectors, threads=1)
            self.num_bytes = int(self._index.memory_usage)
        else:
            import hnswlib

            self._index = hnswlib.Index(space="ip", dim=dim)
            self._index.init_index(max_elements=num, M=16, ef_construction=100)
            self._index.add_items(vectors, np.arange(num), num_threads=1)
            self._index.set_num_threads(1)
            self.num_bytes = int(self._index.index_file_size())
        self.build_s = time.process_time() - begin
        self._filters: np.ndarray | None = None

    def settings(self, share: float) -> Sequence[int]:
        wanted = self._wanted(share)
        return sorted({max(wanted, breadth) for breadth in (100, 160, 240, 400, 800, 1600, 3200)})

    def _wanted(self, share: float) -> int:
        return K if share == 1.0 or self._library == "hnswlib" else int(1.3 * K / share)

    def prepare(self, share: float, filters: np.ndarray | None, *, cached: bool) -> bool:
        self._filters, self._share = filters, share
        return not cached and share >= 0.1  # below, thousands of candidates a query

    def search(self, queries: np.ndarray, which: np.ndarray, setting: int) -> np.ndarray:
        if self._library == "hnswlib":
            return self._search_hnswlib(queries, which, setting)
        self._index.expansion_search = setting
        found = self._index.search(queries, self._wanted(self._share), threads=1)
        numbers = np.asarray(found.keys).reshape(len(queries), -1).astype(np.int64)
        if self._filters is None:
            return numbers
        return _passing(numbers, [self._filters[f] for f in which])

    def _search_hnswlib(self, queries: np.ndarray, which: np.ndarray, setting: int) -> np.ndarray:
        self._index.set_ef(setting)
        if self._filters is None:
            return self._index.knn_query(queries, K, num_threads=1)[0].astype(np.int64)
        found = np.full((len(queries), K), -1)
        for i, f in enumerate(which):
            try:
                own = self._index.knn_query(queries[i], K, num_threads=1, filter=self._filters[f].__getitem__)[0]
            except RuntimeError:  # it reached fewer than K items that pass
                continue
            found[i] = own[0].astype(np.int64)
        return found


def _written_bytes(index: Any) -> int:
    """Bytes of an index of faiss in a file, counted without making one."""
    import faiss

    counted = [0]

    def count(part: bytes) -> int:
        counted[0] += len(part)
        return len(part)

    writer = faiss.PyCallbackIOWriter(count)
    faiss.write_index(index, writer)
    return counted[0]


def _passing(numbers: np.ndarray, masks: Sequence[np.ndarray]) -> np.ndarray:
    """The first K numbers of each query that its mask lets pass; -1 where there are fewer."""
    best = np.full((len(numbers), K), -1)
    for i, mask in enumerate(masks):
        own = numbers[i][mask[numbers[i]]][:K]
        best[i, : len(own)] = own
    return best
