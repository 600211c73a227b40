"""Names of clusters for `ziggurat simulate`: one, several, or a range of hosts.

h100x64                64 devices
a100x{2..128}          hosts 2, 4, 8, … 128: the braces count hosts, of 8 devices each
a100x2 a100x3 …        the same, after a shell (bash, zsh) has expanded the braces
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ziggurat.errors import ConfigError
from ziggurat.planning.cluster.catalogue import DEVICES_PER_HOST, find_cluster, named_cluster
from ziggurat.planning.cluster.cluster import Cluster

_RANGE = re.compile(r"([a-z0-9]+)x\{(\d+)\.\.(\d+)\}")
_ONE = re.compile(r"([a-z]+[0-9]*?)x(\d+)")
_MIN_EXPANDED = 3  # names: two may as well be two clusters that somebody wants to compare


def clusters_named(words: Sequence[str]) -> list[Cluster]:
    """The clusters that the words of a command line stand for, in their order.

    Raises:
        ConfigError, MissingFileError: no such cluster, an empty range.
    """
    expanded = _expanded(words)
    if expanded is not None:
        return _doubled(*expanded)
    found: list[Cluster] = []
    for word in words:
        match = _RANGE.fullmatch(word)
        found += _doubled(match.group(1), int(match.group(2)), int(match.group(3))) if match else [find_cluster(word)]
    return found


def _doubled(kind: str, first: int, last: int) -> list[Cluster]:
    if not 1 <= first <= last:
        raise ConfigError(
            expected="a range of hosts, the smaller number first",
            found=f"{first}..{last}",
            where=f"cluster {kind}x{{{first}..{last}}}",
            ways_out="a100x{2..128}",
        )
    hosts = []
    while first <= last:
        hosts.append(first)
        first *= 2
    return [named_cluster(f"{kind}x{number * DEVICES_PER_HOST}") for number in hosts]


def _expanded(words: Sequence[str]) -> tuple[str, int, int] | None:
    """Kind, first and last number if the words are a range that a shell has expanded: consecutive numbers."""
    matches = [_ONE.fullmatch(word) for word in words]
    if len(words) < _MIN_EXPANDED or not all(matches):
        return None
    kinds = {match.group(1) for match in matches if match}
    numbers = [int(match.group(2)) for match in matches if match]
    if len(kinds) > 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return None
    return kinds.pop(), numbers[0], numbers[-1]
