"""The index of an export divided among processes: shards that search, and the server in front of them that asks them.

    clients ──► ServerApp ─► engine ─► Recommender ─► Shards ─► ShardClient ══HTTP══► ShardApp of shard 0
                (`ziggurat serve EXPORT --shards 2`)                       ══════════► ShardApp of shard 1

The front has the models, the catalogue and the rest of the chain, and turns users into vectors; each shard has the
vectors and attributes of its own items (`retrieval/sharding.py`) and answers nothing but searches. Shards are
processes of this machine that a `ShardKeeper` starts, and starts again when they end, or servers of other machines
that know the export under the same path (`ziggurat serve EXPORT --shard 0/2`).

*One version*: a question names the version of the export and the state of the shard's items (`answering/shards.py`).
A shard can have two versions loaded, so workers of the old and of the new one are both answered during a swap,
and an answer that mixes two cannot come about. A server takes a new version only when all shards hold it.

*A shard that is late or gone*: the answer is that of the others and says so. A shard that is gone, or was late
several times in a row, is asked for its health beside the requests until it is well, and is then part of the answers
again.

    messages.py   tensors and plain data as bytes, without pickle
    app.py        a shard as an ASGI app; its versions
    process.py    the process of a shard; the keeper that starts it, and starts it again
    client.py     questions to all shards, their deadlines, their health
    front.py      the recommender of an export that searches through shards
"""
