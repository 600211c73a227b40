"""Table and picture of block formats: what they take, what they hold, what they lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ziggurat.files import Format
from ziggurat.numerics.block_format import BlockFormat, Scope
from ziggurat.numerics.qsnr import VECTOR_LENGTH, Spread, measure_qsnr

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = Format(name="ziggurat.block_formats", what="a table of block formats")
COLUMNS = ("format", "whose", "bits", "block", "scale", "element", "rule", "binades in a block", "QSNR, dB")
_MARKERS = "osD^vPX*"


@dataclass(frozen=True, kw_only=True)
class MeasuredFormat:
    """A format, and its error.

    Args:
        format: that was measured.
        qsnr: in dB, of normal vectors of unlike sizes.
    """

    format: BlockFormat
    qsnr: float

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table, under `COLUMNS`."""
        format = self.format
        rule = format.scale_rule.value if format.has_scale and format.has_power_of_two_scales else ""
        bits = f"{format.bits_per_element:g}"
        binades = f"{format.binades_in_a_block:.1f}"
        return (
            *(format.name, format.family, bits, block_text(format), scale_text(format), element_text(format), rule),
            *(binades, f"{self.qsnr:.1f}"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        format = self.format
        return {
            "name": format.name,
            "family": format.family,
            "bits_per_element": format.bits_per_element,
            "k1": str(format.k1) if isinstance(format.k1, Scope) else format.k1,
            "k2": format.k2,
            "d1": format.d1,
            "d2": format.d2,
            "exponent_bits": format.element.exponent_bits,
            "fraction_bits": format.element.fraction_bits,
            "largest": format.element.largest,
            "smallest": format.element.smallest,
            "scale_rule": format.scale_rule.value,
            "rounding": format.rounding.value,
            "binades_in_a_block": format.binades_in_a_block,
            "qsnr_db": self.qsnr,
        }


def measured_formats(
    formats: Sequence[BlockFormat], *, num_vectors: int, on_vectors: Callable[[int], None] | None = None
) -> list[MeasuredFormat]:
    """Measure formats on the same vectors.

    Args:
        formats: to measure.
        num_vectors: how many.
        on_vectors: is told how many are done, now and then.
    """
    found = measure_qsnr(formats, spread=Spread.VECTOR, num_vectors=num_vectors, on_vectors=on_vectors)
    return [MeasuredFormat(format=format, qsnr=qsnr) for format, qsnr in zip(formats, found, strict=True)]


def report_json(measured: Sequence[MeasuredFormat], *, num_vectors: int) -> dict[str, Any]:
    """Return the table as plain data."""
    vectors = {"count": num_vectors, "length": VECTOR_LENGTH, "spread": Spread.VECTOR.value}
    return {"vectors": vectors, "formats": [each.to_json() for each in measured]}


def format_figure(measured: Sequence[MeasuredFormat]) -> Figure:
    """Draw the error of formats over their bits, a marker for each family."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    families = list(dict.fromkeys(each.format.family for each in measured))
    for index, family in enumerate(families):
        own = [each for each in measured if each.format.family == family]
        bits = [each.format.bits_per_element for each in own]
        axes.scatter(bits, [each.qsnr for each in own], marker=_MARKERS[index % len(_MARKERS)], label=family)
        for each in own:
            place = (each.format.bits_per_element, each.qsnr)
            axes.annotate(each.format.name, place, xytext=(4, 3), textcoords="offset points", fontsize=6)
    axes.set_xlabel("bits of a number, shared scales counted in")
    axes.set_ylabel("QSNR, dB (higher is better; 6.02 dB are one bit)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def block_text(format: BlockFormat) -> str:
    """Return what shares scales: 16 / 2."""
    if not format.has_scale:
        return ""
    return f"{format.k1} / {format.k2}" if format.d2 else str(format.k1)


def scale_text(format: BlockFormat) -> str:
    """Return the bits of the scales of both levels: power of two, 8 bits + 1."""
    if not format.has_scale:
        return ""
    first = f"power of two, {format.d1} bits" if format.has_power_of_two_scales else "FP32"
    return f"{first} + {format.d2}" if format.d2 else first


def element_text(format: BlockFormat) -> str:
    """Return the kind of numbers: int8, E4M3."""
    element = format.element
    return f"int{element.bits}" if element.is_integer else f"E{element.exponent_bits}M{element.fraction_bits}"
