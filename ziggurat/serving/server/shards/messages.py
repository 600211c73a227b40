"""What travels between a server and its shards: tensors and plain data in one safetensors message. No pickle.

question   queries (Q, D), exclude_offsets (Q + 1), exclude_items; k, probes, filters      header: version, state
answer     scores, positions (Q, k); fresh_scores, fresh_numbers where items changed; plans
state      numbers, vectors, gone, lines of the catalogue (Arrow)
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping

import numpy as np
import polars as pl
import torch
from polars.exceptions import PolarsError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ziggurat.errors import RequestError
from ziggurat.ops.scan import Found
from ziggurat.plain import JSON, as_list, as_text, as_whole
from ziggurat.retrieval.sharding import PartFound, ShardChange
from ziggurat.serving.answering.shards import ShardQuestion

VERSION, STATE = "X-Export-Version", "X-Shard-State"
_PLAIN = "plain:"  # the name of the tensor that holds plain data as JSON


def encode_question(question: ShardQuestion) -> bytes:
    """A question as bytes."""
    left_out = [torch.empty(0, dtype=torch.int64) if each is None else each for each in question.exclude]
    offsets = torch.tensor([0, *(len(each) for each in left_out)]).cumsum(0)
    tensors = {
        "queries": question.queries.contiguous(),
        "exclude_offsets": offsets,
        "exclude_items": torch.cat(left_out) if left_out else torch.empty(0, dtype=torch.int64),
    }
    return _encode(tensors, {"k": question.k, "probes": question.probes, "filters": list(question.filters)})


def decode_question(content: bytes) -> ShardQuestion:
    """A question from bytes; raises RequestError."""
    tensors, plain = _decode(content)
    try:
        offsets = tensors["exclude_offsets"].tolist()
        items = tensors["exclude_items"]
        exclude = [items[begin:end] for begin, end in itertools.pairwise(offsets)]
        question = ShardQuestion(
            queries=tensors["queries"],
            k=as_whole(plain["k"]),
            filters=[None if each is None else as_text(each) for each in as_list(plain["filters"])],
            exclude=exclude,
            probes=as_whole(plain["probes"]),
        )
    except (KeyError, TypeError) as problem:
        raise _damaged(f"{type(problem).__name__}: {problem}") from None
    if not len(question.queries) == len(question.filters) == len(exclude):
        raise _damaged(f"{len(question.queries)} queries, {len(question.filters)} filters, {len(exclude)} exclusions")
    return question


def encode_answer(found: PartFound) -> bytes:
    """Encode what a shard found as bytes."""
    tensors = {"scores": found.main.scores.contiguous(), "positions": found.main.positions.contiguous()}
    if found.fresh is not None:
        tensors |= {"fresh_scores": found.fresh.scores.contiguous(), "fresh_numbers": found.fresh.positions}
    return _encode(tensors, {"plans": found.plans})


def decode_answer(content: bytes) -> PartFound:
    """Decode what a shard found; raise RequestError for bytes that no shard sends."""
    tensors, plain = _decode(content)
    try:
        fresh = None
        if "fresh_scores" in tensors:
            fresh = Found(tensors["fresh_scores"], tensors["fresh_numbers"])
        main = Found(tensors["scores"], tensors["positions"])
        return PartFound(main=main, fresh=fresh, plans=tuple(as_text(plan) for plan in as_list(plain["plans"])))
    except (KeyError, TypeError) as problem:
        raise _damaged(f"{type(problem).__name__}: {problem}") from None


def encode_change(change: ShardChange) -> bytes:
    """Encode how the items of a shard changed, as bytes."""
    lines = io.BytesIO()
    change.items.write_ipc(lines)
    tensors = {"numbers": change.numbers, "vectors": change.vectors.contiguous(), "gone": change.gone}
    return _encode(tensors | {"lines": torch.from_numpy(np.frombuffer(lines.getvalue(), dtype=np.uint8).copy())}, {})


def decode_change(content: bytes) -> ShardChange:
    """Decode how the items of a shard changed; raise RequestError for damaged bytes."""
    tensors, _ = _decode(content)
    try:
        items = pl.read_ipc(io.BytesIO(tensors["lines"].numpy().tobytes()))
        return ShardChange(numbers=tensors["numbers"], vectors=tensors["vectors"], items=items, gone=tensors["gone"])
    except (KeyError, PolarsError, OSError) as problem:
        raise _damaged(f"{type(problem).__name__}: {problem}"[:200]) from None


def _encode(tensors: Mapping[str, Tensor], plain: Mapping[str, object]) -> bytes:
    # A copy: torch wants memory that may be written, and that of bytes may not.
    text = np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8).copy()
    return save(dict(tensors) | {_PLAIN: torch.from_numpy(text)})


def _decode(content: bytes) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    try:
        tensors = load(content)
        plain = json.loads(tensors.pop(_PLAIN).numpy().tobytes())
    except (SafetensorError, KeyError, ValueError, RuntimeError) as problem:
        raise _damaged(str(problem)[:200]) from None
    if not isinstance(plain, dict):
        raise _damaged("no object")
    return tensors, plain


def _damaged(found: str) -> RequestError:
    return RequestError(
        expected="a message between a server and a shard of its index",
        found=found,
        where="request, body",
        ways_out="server and shards must be of one version of Ziggurat",
    )
