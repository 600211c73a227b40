"""The planner: how a query with a filter is answered, by what it costs.

    all            no filter: the nearest clusters
    clusters       the nearest clusters, rows whose bit is set; the fewer pass, the more clusters
    rows           every row that passes, wherever it is
    block          the same from a copy of these rows side by side, for filters that come often
    post_filter    the nearest clusters without a filter, and the filter on what they gave: for filters that
                   most rows pass, in catalogues where a mask takes longer than a search

*Probes by selectivity.* With a share s of rows passing, the best k of them lie farther from the query, so more clusters
hold them, but fewer than 1/s times as many. On the data of `ziggurat bench retrieval` equal recall takes s^−0.6 times
the probes (50 %: 1.5, 10 %: 4, 1 %: 16), which reads s^0.4 times the rows. A filter may be correlated with the vectors:
`least` makes a search go on until half of the rows that an independent filter would have let pass have passed.

*Costs.* Nanoseconds, measured on one core of an AMD EPYC (Zen 4): what counts is their ratio, which is that of reading
memory in order and at random, much the same on other machines. `rows` is taken up to 1.5 times the cost of `clusters`,
since it misses nothing.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

_PROBES_EXPONENT = 0.6
_WORD_NS = 1.0  # 64 bits of a mask are read
_LINE_NS = 5.0  # 64 bytes of rows, one after the other
_LISTED_NS = 8.5  # 64 bytes of rows, here and there
_CENTROID_NS = 2.5  # 64 bytes of centroids, in the cache
_CLUSTER_NS = 180.0  # a cluster is chosen, and its words of a mask are found
_EXACT_BONUS = 1.5
_POST_FILTER_ROWS = 4_000_000
_POST_FILTER_SHARE = 0.5


class PlanKind(enum.StrEnum):
    """Ways to answer a query."""

    ALL = "all"
    CLUSTERS = "clusters"
    ROWS = "rows"
    BLOCK = "block"
    POST_FILTER = "post_filter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The way to answer one query.

    Args:
        kind: the way.
        selectivity: share of the rows that pass; estimated for `post_filter`, else counted.
        probes: clusters that are looked into at least; 0: no clusters.
        least: rows that must pass before the search ends.
        cached: whether the mask was there already.
        expected_us: what it was expected to cost.
    """

    kind: PlanKind
    selectivity: float = 1.0
    probes: int = 0
    least: int = 0
    cached: bool = False
    expected_us: float = 0.0

    def __str__(self) -> str:
        where = f", {self.probes:,} clusters" if self.probes else ""
        mask = ", mask from the cache" if self.cached else ""
        return f"{self.kind}: {self.selectivity:.3%} pass{where}{mask}, expected {self.expected_us:.0f} µs"


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Chooses a plan by what is known of an index.

    Args:
        num_rows: rows of the index.
        num_clusters: clusters of the index.
        row_bytes: bytes of a row.
    """

    num_rows: int
    num_clusters: int
    row_bytes: int

    def unfiltered(self, *, k: int, probes: int) -> Plan:
        """The plan of a query without a filter."""
        cost = self._clusters_ns(probes, 1.0, is_listed=False)
        return Plan(kind=PlanKind.ALL, probes=probes, least=k, expected_us=cost / 1e3)

    def filtered(self, *, k: int, probes: int, passing: int, cached: bool) -> Plan:
        """The plan of a query whose mask is there.

        Args:
            k: positions wanted.
            probes: clusters that the query would look into without a filter.
            passing: rows that pass.
            cached: whether the mask comes from the cache; for the explanation.
        """
        share = passing / max(1, self.num_rows)
        more = self.probes(probes, share)
        # Every word of the mask is looked at, and every row that passes is read.
        by_rows = self.num_rows / 64 * _WORD_NS + passing * self._lines() * _LISTED_NS
        by_clusters = self._clusters_ns(more, share, is_listed=True)
        # Where all rows that pass are wanted, or all clusters would be opened, the exact answer costs least.
        if passing <= k or more >= self.num_clusters or by_rows <= _EXACT_BONUS * by_clusters:
            return Plan(kind=PlanKind.ROWS, selectivity=share, least=passing, cached=cached, expected_us=by_rows / 1e3)
        expected = more * passing / self.num_clusters
        return Plan(
            kind=PlanKind.CLUSTERS,
            selectivity=share,
            probes=more,
            # A search goes on until so many passed: fewer than half of what an independent filter lets pass show that
            # this one goes with the vectors.
            least=max(k, int(expected / 2)),
            cached=cached,
            expected_us=by_clusters / 1e3,
        )

    def block(self, *, passing: int) -> Plan:
        """The plan of a query whose rows lie side by side."""
        cost = passing * self._lines() * _CENTROID_NS
        share = passing / max(1, self.num_rows)
        return Plan(kind=PlanKind.BLOCK, selectivity=share, least=passing, cached=True, expected_us=cost / 1e3)

    def probes(self, probes: int, share: float) -> int:
        """Clusters to look into if this share of the rows passes."""
        return min(self.num_clusters, math.ceil(probes * max(share, 1e-9) ** -_PROBES_EXPONENT))

    def may_post_filter(self) -> bool:
        """Return whether a mask of all rows takes so long that a filter on the results may be better."""
        return self.num_rows >= _POST_FILTER_ROWS

    def post_filter(self, *, k: int, probes: int, share: float) -> Plan | None:
        """The plan of filtering what a search gives, if enough of it would pass."""
        if share < _POST_FILTER_SHARE:
            return None
        more = self.probes(probes, share)
        cost = self._clusters_ns(more, 1.0, is_listed=False)
        # Some more than k / share: the share is an estimate, and too few that pass cost a second search.
        wanted = math.ceil(1.2 * k / share) + 16
        return Plan(kind=PlanKind.POST_FILTER, selectivity=share, probes=more, least=wanted, expected_us=cost / 1e3)

    def _lines(self) -> float:
        return self.row_bytes / 64

    def _clusters_ns(self, probes: int, share: float, *, is_listed: bool) -> float:
        rows = probes * share * self.num_rows / max(1, self.num_clusters)
        # Few rows are picked out one by one, which the memory's prefetching does not see coming.
        row_ns = self._lines() * (_LISTED_NS if is_listed and share < 0.5 else _LINE_NS)
        return self.num_clusters * self._lines() * _CENTROID_NS + probes * _CLUSTER_NS + rows * row_ns
