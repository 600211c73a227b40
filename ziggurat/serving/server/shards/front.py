"""The recommender of an export that searches through shards, and what a server says of them.

It loads the export as every recommender does. Its own index is mapped and not searched, so little of it comes into
memory: it reads filters, explains, finds popular items, and says what became of items.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ziggurat.errors import ConfigError
from ziggurat.serving.answering.item_search import ItemSearch
from ziggurat.serving.answering.lacking import no_index
from ziggurat.serving.answering.shards import Shards
from ziggurat.serving.answers import Answerer
from ziggurat.serving.recommender import Recommender
from ziggurat.serving.server.shards.client import ShardClient, ShardSettings


def load_front(folder: Path, *, load: Callable[[Path], Answerer], settings: ShardSettings, seen: Path) -> Recommender:
    """An export whose searches go to shards.

    Args:
        folder: of the export.
        load: makes the recommender of a folder; other answerers have no index that shards could search.
        settings: where the shards are.
        seen: folder that remembers which versions all shards have loaded; a worker of such a version starts although a
            shard does not run at the moment.

    Raises:
        RequestError: the export has no index.
        ConfigError: a shard has not the version of this export, or what was loaded is no `Recommender`.
    """
    loaded = load(folder)
    if not isinstance(loaded, Recommender):
        raise ConfigError(
            expected="a Recommender, whose index shards can search",
            found=f"an answerer of the class {type(loaded).__name__}",
            where="server with shards",
            ways_out=("search in one piece: ServerConfig(shards=1)", "load=Recommender.load"),
        )
    index = loaded.chain.index
    if index is None:
        raise no_index(loaded.export.name)
    client = ShardClient(settings, version=loaded.export.version, export=loaded.export.path)
    mark = seen / loaded.export.version
    client.connect(strict=not mark.exists())
    seen.mkdir(exist_ok=True)
    mark.touch()
    shards = Shards(client, order=index.index.vectors.stored_order)
    loaded.chain = dataclasses.replace(loaded.chain, index=ItemSearch(index.index, shards=shards))
    return loaded


def shards_of(answerer: object) -> ShardClient | None:
    """Return the client that asks the shards of an answerer, or None where the answerer has none."""
    index = getattr(getattr(answerer, "chain", None), "index", None)
    shards = None if index is None else index.shards
    return None if shards is None or not isinstance(shards.scatter, ShardClient) else shards.scatter
