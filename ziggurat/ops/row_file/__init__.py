"""A flat file of rows that is read and written by row number: `RowFile`, in C++ with a twin in Python."""

from ziggurat.ops.row_file.file import DiskRate, RowFile, disk_rate
from ziggurat.ops.row_file.reference import RowLayout, RowState

__all__ = ["DiskRate", "RowFile", "RowLayout", "RowState", "disk_rate"]
