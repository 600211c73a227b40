"""Pack the dense products of a model for scoring: weights in INT8, MX6 or MX9, and proof of which products they are.

    packed = pack_products(model, BlockFormat.named("mx6"))      MLPs, crosses, projections, heads
    packed = pack_products(model, {"top.layers.0": INT8, …})     a format for each module; the others stay FP32
    packed.line()                                                "packed mx6 in 12 modules, FP32 in 3: …"

A module is packed if it multiplies activations by its own whole weight and by nothing else, x Wᵀ + b. That is found out
as `converted.py` finds out whether all products are reached: the dense network and the towers run once on shapes, and
each module's arithmetic notes what it is asked for. What else multiplies stays FP32 and is named with the reason:
products of two activations (interactions of fields, attention), batches of small weights (a map for each field), parts
of a weight (DIN's first layer, which multiplies target and history apart).

The packed bits are the weights from then on: the module's FP32 weight becomes the numbers that they hold, so that bits,
products and whoever reads `weight` agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.models.contract.model import Model
from ziggurat.models.converted import convert, runs_on_shapes
from ziggurat.models.costs.model_cost import Run, on_shapes, run_apart
from ziggurat.numerics import BlockFormat
from ziggurat.numerics.linear import is_packed_format, linear_of_bits, pack_linear
from ziggurat.numerics.packing import Packed, pack, row_bits, unpack
from ziggurat.precision.arithmetic import NATIVE, Arithmetic
from ziggurat.precision.packed import PackedArithmetic
from ziggurat.precision.products import DenseProducts, exchanged, products_of

_TWO_ACTIVATIONS = "products of two activations"
_NO_LINEAR_MAP = "weights that are no single matrix"
_PARTS = "multiplies by parts of its weight, or by another module's"
_UNUSED = "not used when samples are scored"
_NOTHING = "no product of its own"
_NOT_CHOSEN = "no format was chosen for them"


@dataclass(frozen=True, kw_only=True)
class PackedProducts:
    """The products of a model that were packed, and those that were not.

    Args:
        formats: of the weights, by the names of their modules.
        bits: of each packed weight, (outputs, bytes), by the name of its module.
        left: modules whose products are FP32, and why.
    """

    formats: dict[str, BlockFormat]
    bits: dict[str, Tensor]
    left: dict[str, str]

    @property
    def most_common(self) -> BlockFormat:
        """The format of most weights; of all of them, unless a plan chose one for each."""
        return Counter(self.formats.values()).most_common(1)[0][0]

    @property
    def by_module(self) -> dict[str, str]:
        """Names of the formats that are not the most common one, by module."""
        usual = self.most_common
        return {name: each.name for name, each in self.formats.items() if each != usual}

    @property
    def format_name(self) -> str:
        """The format for people and records: mx6; int8+mx9 where modules differ, the most common one first."""
        return "+".join(each.name for each, _ in Counter(self.formats.values()).most_common())

    @property
    def num_bytes(self) -> int:
        """The bytes of the packed weights in a file."""
        return sum(rows.numel() for rows in self.bits.values())

    def line(self) -> str:
        """Return a line for reports."""
        counts = Counter(self.formats.values()).most_common()
        text = f"dense products in {self.format_name}, packed in {len(self.bits)} modules"
        if len(counts) > 1:
            text += f" ({', '.join(f'{format} in {count}' for format, count in counts)})"
        reasons = Counter(self.left.values())
        parts = [f"{count} ({why}: {_some(self.left, why)})" for why, count in reasons.items()]
        return text + (f"; FP32 in {', '.join(parts)}" if parts else "")


def packed_format(name: str, *, where: str) -> BlockFormat:
    """Return a format of packed weights by its name.

    Raises:
        ConfigError: there is none of that name, or its weights cannot be packed.
    """
    known = {each.name: each for each in BlockFormat.listed() if is_packed_format(each)}
    if name not in known:
        raise ConfigError(
            expected=f"a format of packed weights: {', '.join(known)}",
            found=repr(name),
            where=where,
            ways_out=("--products mx6, or mx9, or int8", "a format of your own: ziggurat --extension MODULE …"),
        )
    return known[name]


def pack_products(model: Model, format: BlockFormat | Mapping[str, BlockFormat]) -> PackedProducts:
    """Pack the weights of a model's linear maps, in place; the model then scores by them, on a CPU.

    Args:
        model: on the CPU, with its trained weights; not parallel.
        format: of integers of at most 8 bits: INT8, MX6, MX9, … (`numerics.linear.pack_linear`); or one for each
            module by its name, where modules without one stay FP32.

    Raises:
        ConfigError: the format cannot be packed; a product cannot be reached; the model is packed already, or has no
            product by a weight. The model is then as it was, but for plain `nn.Linear`s, which became `Linear`s.
        NumericsError: a weight is not finite.
    """
    if any(module.arithmetic.holds_weight for module in products_of(model).values()):
        raise ConfigError(
            expected="a model with FP32 weights",
            found="one whose weights are packed already",
            where=f"{type(model).__name__}, products in {_text(format)}",
            ways_out="pack the run that this one was made from",
        )
    asked = _asked_of(model)
    packable = [name for name, each in asked.items() if not each.why_left()]
    formats = dict(format) if isinstance(format, Mapping) else dict.fromkeys(packable, format)
    if unknown := sorted(formats.keys() - set(packable)):
        raise _unknown_weights(model, unknown, formats)
    maps = dict[str, PackedArithmetic]()
    bits = dict[str, Tensor]()
    # In the order of the model, whatever that of the mapping is.
    formats = {name: formats[name] for name in packable if name in formats}
    for name, its_format in formats.items():
        weight = asked[name].weight
        map = pack_linear(weight, its_format, bias=asked[name].bias, name=f"{name}.weight")
        maps[name] = PackedArithmetic(map, module=name)
        bits[name] = pack(weight.detach().float(), its_format, 1).rows
    if not maps:
        raise ConfigError(
            expected="a model that multiplies activations by weights: an MLP, a cross network, a projection",
            found="no such product",
            where=f"{type(model).__name__}, products in {_text(format)}",
            ways_out="its tables are what takes bytes: ziggurat quantise RUN, and ziggurat export RUN --tables int8",
        )
    return _packed(model, formats, bits=bits, maps=maps, asked=asked)


def packable_modules(model: Model) -> dict[str, DenseProducts]:
    """Return the modules of a model whose weights `pack_products` packs, by name."""
    return {name: each.module for name, each in _asked_of(model).items() if not each.why_left()}


def take_bits(model: Model, formats: Mapping[str, BlockFormat], bits: Mapping[str, Tensor]) -> PackedProducts:
    """Let a model score by weights that were packed before.

    Args:
        model: on the CPU, with all its other weights.
        formats: of the weights, by the names of their modules.
        bits: of each packed weight, by the name of its module.

    Raises:
        ConfigError: the model does not multiply by these weights.
    """
    asked = _asked_of(model)
    unknown = [name for name in bits if name not in asked or asked[name].why_left()]
    if unknown or not bits:
        raise _unknown_weights(model, unknown, formats)
    maps = dict[str, PackedArithmetic]()
    for name, rows in bits.items():
        packed = Packed(rows=rows, format=formats[name], shape=asked[name].weight.shape, axis=1)
        map = linear_of_bits(packed, bias=asked[name].bias)
        maps[name] = PackedArithmetic(map, module=name)
    return _packed(model, dict(formats), bits=dict(bits), maps=maps, asked=asked)


def empty_bits(model: Model, formats: Mapping[str, BlockFormat]) -> dict[str, Tensor]:
    """Return room for the bits of a model's packed weights, by the names of their modules, for a file to fill.

    Raises:
        ConfigError: the model has no weight of such a name.
    """
    found = dict[str, Tensor]()
    weights = dict(model.named_parameters())
    for name, format in formats.items():
        weight = weights.get(f"{name}.weight")
        if weight is None or weight.dim() != 2:
            raise ConfigError(
                expected=f"a weight of {type(model).__name__}",
                found=f"{name}.weight",
                where=f"products in {format}",
                ways_out="pack the run again with this version: ziggurat quantise RUN --products FORMAT --out FOLDER",
            )
        found[name] = torch.empty(len(weight), -(-row_bits(format, weight.shape[1]) // 8), dtype=torch.uint8)
    return found


@contextmanager
def native_products(model: Model) -> Iterator[None]:
    """Let a packed model multiply in FP32 by its rounded weights within, to compare times: FLOPs are those before."""
    with exchanged(products_of(model), lambda name: NATIVE):
        yield


def formats_by_module(
    usual: str, modules: Iterable[str], by_module: Mapping[str, str], *, where: str
) -> dict[str, BlockFormat]:
    """Return the formats of packed weights as files have them: one for most modules, and others by name.

    Raises:
        ConfigError: a format is not known here.
    """
    return {name: packed_format(by_module.get(name, usual), where=where) for name in modules}


def _unknown_weights(model: Model, unknown: Iterable[str], formats: Mapping[str, BlockFormat]) -> ConfigError:
    names = ", ".join(list(unknown)[:5])
    return ConfigError(
        expected=f"packed weights of products of {type(model).__name__}",
        found=names or "none",
        where=f"products in {_text(formats)}",
        ways_out="pack the run again with this version: ziggurat quantise RUN --products FORMAT --out FOLDER",
    )


def _text(format: BlockFormat | Mapping[str, BlockFormat]) -> str:
    """Name a format, or those of modules."""
    if isinstance(format, BlockFormat):
        return format.name
    return ", ".join(dict.fromkeys(each.name for each in format.values())) or "none"


def _packed(
    model: Model,
    formats: dict[str, BlockFormat],
    *,
    bits: dict[str, Tensor],
    maps: Mapping[str, PackedArithmetic],
    asked: Mapping[str, _Asked],
) -> PackedProducts:
    """Give each module its arithmetic and its rounded weight, and prove once more that no product is missed."""
    converted = convert(model, lambda name, module: maps.get(name, NATIVE))
    with torch.no_grad():
        for name, rows in bits.items():
            weight = asked[name].weight
            # In place: what holds on to the parameter sees the numbers of the bits, too.
            weight.copy_(unpack(Packed(rows=rows, format=formats[name], shape=weight.shape, axis=1)))
    left = {name: why for name, each in asked.items() if (why := each.why_left()) and why != _NOTHING}
    not_chosen = {name: _NOT_CHOSEN for name, each in asked.items() if not each.why_left() and name not in bits}
    return PackedProducts(formats=formats, bits=bits, left=left | not_chosen | converted.native)


class _Asked(Arithmetic):
    """Multiplies as torch does, and notes which products its module asks for.

    Args:
        module: that asks.
    """

    name = "asked"
    holds_weight = True  # so that it is asked for the product by the weight as it is, not by a padded copy

    def __init__(self, module: DenseProducts) -> None:
        self.module = module
        self._by_own_weight = 0
        self._by_other_weights = 0
        self._of_matrices = 0

    @property
    def weight(self) -> Tensor:
        """The module's own weight; only of a module that multiplies by it."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Return what the module adds to its product, or None."""
        bias = self.module.bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

    def why_left(self) -> str:
        """Return why the weight of the module is not packed; "" if it is."""
        if self._of_matrices:
            has_weights = any(True for _ in self.module.parameters(recurse=False))
            return _NO_LINEAR_MAP if has_weights else _TWO_ACTIVATIONS
        if self._by_other_weights:
            return _PARTS
        if self._by_own_weight:
            return ""
        if self.module.native_products:
            return self.module.native_products
        return _UNUSED if isinstance(getattr(self.module, "weight", None), Tensor) else _NOTHING

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        self._of_matrices += 1
        return torch.matmul(left, right)

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        own = getattr(self.module, "weight", None)
        # By identity: a padded copy or a part of the weight is another tensor.
        if weight is own and bias is getattr(self.module, "bias", None) and weight.dim() == 2:
            self._by_own_weight += 1
        else:
            self._by_other_weights += 1
        return F.linear(inputs, weight, bias)


def _asked_of(model: Model) -> dict[str, _Asked]:
    """Run a model on shapes, and return what each of its modules asks its arithmetic for."""
    convert(model, NATIVE)  # plain linear maps take part from here on, and what cannot be reached is refused
    products = products_of(model)
    asked = {name: _Asked(module) for name, module in products.items()}
    with exchanged(products, asked.__getitem__):
        for module, run in runs_on_shapes(model):
            # `module=module` binds this turn's values: a closure would see the last ones.
            on_shapes(module, lambda device, module=module, run=run: _run(module, run, device))
    return asked


def _run(module: nn.Module, run: Run, device: torch.device) -> None:
    with torch.no_grad():
        run_apart(module, run, size=2, device=device)


def _some(left: Mapping[str, str], why: str) -> str:
    names = [name for name, each in left.items() if each == why]
    return ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
