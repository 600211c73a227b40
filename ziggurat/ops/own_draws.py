"""OwnDraws: what is built in a block draws from generators of its own, and torch's global one stays as it is.

    with OwnDraws(seed):
        network = MLP(…)          the weights that `torch.manual_seed(seed)` would give

To seed the global generator and give it back afterwards (`torch.random.fork_rng`) is right in one thread only. Dropout
of a model that trains in another thread draws from the same generator: it would draw from the seed meanwhile, and what
is given back undoes draws that training has made. A notebook that loads an export beside training would so change it.

A mode of torch functions holds for its thread alone. It hands a generator to each function that draws and was given
none; a generator of the same seed draws the same numbers as the global one (`aten/src/ATen/CPUGeneratorImpl.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_IN_PLACE = frozenset(
    {
        Tensor.bernoulli_,
        Tensor.cauchy_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.log_normal_,
        Tensor.normal_,
        Tensor.random_,
        Tensor.uniform_,
    }
)
# Written in Python, and called as a whole: what they call inside comes past no mode.
_INITIALISERS = frozenset(
    {
        nn.init.kaiming_normal_,
        nn.init.kaiming_uniform_,
        nn.init.normal_,
        nn.init.orthogonal_,
        nn.init.sparse_,
        nn.init.trunc_normal_,
        nn.init.uniform_,
        nn.init.xavier_normal_,
        nn.init.xavier_uniform_,
    }
)
_OF_TENSORS = frozenset({torch.bernoulli, Tensor.bernoulli, torch.multinomial, Tensor.multinomial, torch.poisson})
_OF_SIZES = frozenset({torch.normal, torch.rand, torch.randint, torch.randn, torch.randperm})
_DRAWS = _IN_PLACE | _INITIALISERS | _OF_TENSORS | _OF_SIZES
# They take no generator in every torch that we support; each is its twin with the shape of a tensor.
_LIKE: dict[Callable[..., Any], Callable[..., Any]] = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}


class OwnDraws(TorchFunctionMode):
    """Gives generators of its own to all torch functions that draw in this thread while the block runs.

    Args:
        seed: of all its generators.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = int(seed)  # of numpy, perhaps
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function, with a generator if it draws."""
        given = dict(kwargs or {})
        if func in _LIKE:
            like: Tensor = args[0] if args else given.pop("input")
            given.setdefault("dtype", like.dtype)
            given.setdefault("device", like.device)
            given.pop("memory_format", None)
            # Not through this mode again, which is off while it handles a call.
            return _LIKE[func](like.shape, generator=self._generator(torch.device(given["device"])), **given)
        has_own = given.get("generator") is not None or any(isinstance(each, torch.Generator) for each in args)
        if func in _DRAWS and not has_own:
            given["generator"] = self._generator(_device_of(args, given))
        return func(*args, **given)

    def _generator(self, device: torch.device) -> torch.Generator | None:
        """Return the generator of a device; None for one without values."""
        if device.type == "meta":
            return None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Return the device on which a function draws."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if tensors:
        return tensors[0].device
    device = kwargs.get("device")
    return torch.get_default_device() if device is None else torch.device(device)
