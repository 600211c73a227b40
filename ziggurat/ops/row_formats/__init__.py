"""What rows of tables are kept as: formats, counted random numbers, and how numbers become rows and rows numbers."""

from ziggurat.ops.row_formats.formats import Rounding, RowFormat
from ziggurat.ops.row_formats.noise import RowNoise, RowOrigin

__all__ = ["Rounding", "RowFormat", "RowNoise", "RowOrigin"]
