"""DataSource: whatever yields batches and knows where it is. The trainer asks for nothing else.

    iter(source)          the batches of this rank, from where the source stands to the end of an epoch (or for ever)
    state_dict()          where it stands: after the batch that it yielded last
    load_state_dict(s)    stand there again: the next `iter` goes on with the batch after it

Torch's stateful loaders have these three, so they train and resume as they are; `LoaderSource` gives them to our own
`Loader` over encoded data. An `iter` after the end of an epoch begins the next one. A source may know more, and then
more is shown and possible: `num_rows` of an epoch over all ranks for progress, `len(source)` batches of an epoch for
schedules that need an end. One that knows neither is a stream.

A state is plain data or holds tensors, arrays and bytes; `state_to_json` writes it into a checkpoint without a pickle.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ziggurat.data.balance.cost import tokens_of
from ziggurat.data.balance.packing import packed
from ziggurat.data.encoded.loader import Loader, LoaderConfig, Shuffle, is_dataset
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.features.batch import Batch
from ziggurat.plain import JSON, as_list, as_text, as_whole


@runtime_checkable
class DataSource(Protocol):
    """Yields batches, and can be put back to where it was; see the module docstring."""

    def __iter__(self) -> Iterator[Batch]:
        """Batches of this rank from here to the end of the epoch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the source."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to where a `state_dict` was taken."""
        ...


class LoaderSource:
    """The data source of encoded data: the epochs of a `Loader`, one after the other.

    Its state is the same on every rank and counts rows, not batches: a run goes on with another number of ranks.

    Args:
        loader: of this rank.
        token_budget: events of all lists of a batch, at most; batches are then cut by it (`balance/packing.py`), and
            nobody knows how many there will be. 0: batches of the loader.

    Raises:
        ConfigError: a budget on several ranks, or for data without lists.
    """

    def __init__(self, loader: Loader, *, token_budget: int = 0) -> None:
        self.loader = loader
        self.token_budget = token_budget
        if token_budget:
            _check_budget(loader)
        self.epoch = 0
        self.row = 0
        self.step_rows = 0  # rows, over all ranks, of the step that the last batch belongs to

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, over all ranks."""
        return self.loader.num_rows

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on every rank; 0 where a budget cuts them."""
        return 0 if self.token_budget else self.loader.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """The batches of this rank, to the end of the epoch."""
        loaded = self.loader.batches(epoch=self.epoch, start_row=self.row)
        per_step = self.loader.config.batch_size * self.loader.world_size
        if self.token_budget:
            tokens = functools.partial(tokens_of, inputs=self.loader.dataset.inputs)
            most = self.loader.config.batch_size
            loaded = packed(loaded, budget=self.token_budget, most=most, cost_of=tokens)
        for batch in loaded:
            self.step_rows = batch.batch_size if self.token_budget else min(per_step, self.num_rows - self.row)
            # Before the batch is handed out: a state that is taken after its step counts these rows as consumed.
            self.row += self.step_rows
            if self.row == self.num_rows:
                self.epoch = self.epoch + 1
                self.row = 0
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Epoch, and rows of it that all ranks together have consumed."""
        return {"epoch": self.epoch, "row": self.row}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Stand at a row of an epoch."""
        self.epoch = int(state_dict["epoch"])
        self.row = int(state_dict["row"])


def as_source(
    data: object, *, token_budget: int = 0, config: LoaderConfig | None = None, rank: int = 0, world_size: int = 1
) -> DataSource:
    """A source as it is; a data set (encoded, or in memory) behind a `Loader` with these settings.

    Raises:
        ConfigError: it is neither, or a budget of tokens cannot take effect.
    """
    if isinstance(data, DataSource):
        if token_budget:
            raise ConfigError(
                expected="a data set, whose batches are cut by the budget",
                found=f"{type(data).__name__}, a source that makes its own batches",
                where="training settings, token-budget",
                ways_out=("cut them in the source: ziggurat.data.balance.packing.packed", "--training.token-budget 0"),
            )
        return data
    if is_dataset(data):
        config = config or LoaderConfig()
        orders = {Shuffle.AUTO: Shuffle.BUFFER, Shuffle.LANES: Shuffle.BUFFER, Shuffle.SESSION_LANES: Shuffle.SESSIONS}
        if token_budget and config.shuffle in orders:  # lanes go on at whole batches alone
            config = replace(config, shuffle=orders[config.shuffle])
        loader = Loader(data, config=config, rank=rank, world_size=world_size)
        return LoaderSource(loader, token_budget=token_budget)
    raise ConfigError(
        expected="a data set (EncodedDataset, MemoryDataset), or a source: __iter__, state_dict and load_state_dict",
        found=type(data).__name__,
        where="training data",
        ways_out=("prepare(…).train", "a torchdata StatefulDataLoader that yields Batch", "see ziggurat.data.source"),
    )


def reading_lines(source: DataSource) -> dict[str, str]:
    """Describe what a rank reads of encoded data, for the start-up report; return nothing for other sources."""
    return {"reading": source.loader.reading()} if isinstance(source, LoaderSource) else {}


def _check_budget(loader: Loader) -> None:
    lists = loader.dataset.inputs.jagged
    if loader.world_size == 1 and lists:
        return
    raise ConfigError(
        expected="one device and data with lists" if lists else "data with lists, whose events are counted",
        found=f"{loader.world_size} ranks" if lists else "no list feature",
        where="training settings, token-budget",
        ways_out=("--training.token-budget 0", "on ranks: --training.balance karmarkar_karp (or zigzag, variable)"),
    )


def state_to_json(state: object) -> JSON:
    """A state as plain data.

    Raises:
        ConfigError: it holds something that cannot be written without a pickle.
    """
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, list):
        return [state_to_json(each) for each in state]
    if isinstance(state, tuple):
        return {"__tuple__": [state_to_json(each) for each in state]}
    if isinstance(state, bytes):
        return {"__bytes__": base64.b64encode(state).decode()}
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, Tensor | np.ndarray):
        kind = "__tensor__" if isinstance(state, Tensor) else "__array__"
        array = np.ascontiguousarray(state.detach().cpu().numpy() if isinstance(state, Tensor) else state)
        if array.dtype != object:
            data = base64.b64encode(array.tobytes()).decode()
            return {kind: data, "dtype": str(array.dtype), "shape": list(array.shape)}
    if isinstance(state, Mapping):
        return {"__items__": [[state_to_json(key), state_to_json(value)] for key, value in state.items()]}
    raise ConfigError(
        expected="a state of numbers, texts, bytes, lists, tuples, dictionaries, tensors and arrays",
        found=type(state).__name__,
        where="state_dict of the training data",
        ways_out="return plain values from state_dict: a checkpoint holds no pickles",
    )


def state_from_json(plain: JSON) -> Any:
    """The inverse of `state_to_json`.

    Raises:
        CheckpointError: that did not write it.
    """
    if not isinstance(plain, dict):
        return [state_from_json(each) for each in plain] if isinstance(plain, list) else plain
    try:
        if "__items__" in plain:
            pairs = [as_list(pair) for pair in as_list(plain["__items__"])]
            return {state_from_json(key): state_from_json(value) for key, value in pairs}
        if "__tuple__" in plain:
            return tuple(state_from_json(each) for each in as_list(plain["__tuple__"]))
        if "__bytes__" in plain:
            return base64.b64decode(as_text(plain["__bytes__"]), validate=True)
        (kind,) = {"__tensor__", "__array__"} & plain.keys()
        content = base64.b64decode(as_text(plain[kind]), validate=True)
        data = np.frombuffer(content, dtype=np.dtype(as_text(plain["dtype"])))
        # A view of bytes is read-only, which tensors cannot be.
        array = data.reshape([as_whole(size) for size in as_list(plain["shape"])]).copy()
        return torch.from_numpy(array) if kind == "__tensor__" else array
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            expected="the state of a data source, as a checkpoint keeps it",
            found=f"{type(error).__name__}: {error}",
            where="state of the training data",
            ways_out="resume from an older checkpoint",
        ) from error
