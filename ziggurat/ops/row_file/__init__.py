"""A flat file of rows that is read and written by row number: `RowFile`, in C++ with a twin in Python."""

from ziggurat.ops.row_file.file import RowFile
from ziggurat.ops.row_file.rate import DiskRate, DiskSample, disk_rate, rate_while_written
from ziggurat.ops.row_file.reference import RowLayout, RowState

__all__ = ["DiskRate", "DiskSample", "RowFile", "RowLayout", "RowState", "disk_rate", "rate_while_written"]
