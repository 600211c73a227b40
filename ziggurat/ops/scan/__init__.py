"""Search of INT8 rows: one interface (`kernel.py`), a torch reference that defines it, C++, and Triton for CUDA."""

from ziggurat.ops.scan.kernel import ScanPath, best_path, scan_clusters, scan_kernel, scan_rows, scan_tables
from ziggurat.ops.scan.reference import empty_found, scan_clusters_reference, scan_rows_reference
from ziggurat.ops.scan.rows import Found, Masks, Rows, ScanTables, dequantize_rows, quantize_rows, split_codes
from ziggurat.ops.scan.triton import scan_clusters_triton, scan_rows_triton

__all__ = [
    "Found",
    "Masks",
    "Rows",
    "ScanPath",
    "ScanTables",
    "best_path",
    "dequantize_rows",
    "empty_found",
    "quantize_rows",
    "scan_clusters",
    "scan_clusters_reference",
    "scan_clusters_triton",
    "scan_kernel",
    "scan_rows",
    "scan_rows_reference",
    "scan_rows_triton",
    "scan_tables",
    "split_codes",
]
