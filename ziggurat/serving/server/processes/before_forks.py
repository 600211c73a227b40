"""Work that is done once before the first fork, instead of once in every worker that is started.

    supervisor ── imports, one garbage collection, freeze ──► fork ─► worker: load, warm up, serve
                                                         └──► fork ─► worker …            at each swap and each death

An export is loaded after the fork. Modules that are imported for the first time while it is loaded would be imported
again by each worker, at each swap: pyarrow imports its computations when it is first used, pandas, where that is
installed, when it first sees an object, and torch its compiler (800 modules, a second) at the first call of an operator
of ours. And each worker would look for garbage among all objects of torch, polars and
pyarrow, which are none: frozen, they are looked at no more, and their memory stays shared between the processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys

_LATE = ("pandas", "pyarrow.pandas_compat", "pyarrow.compute", "pyarrow.dataset", "torch._dynamo")


def prepare_forks() -> None:
    """Import what the loading of an export imports late, and take all objects of this process out of its garbage."""
    for name in _LATE:
        # Where nothing has imported pyarrow or torch, the answerer is none that reads exports of ours.
        if {"pandas": "pyarrow"}.get(name, name.partition(".")[0]) in sys.modules:
            with contextlib.suppress(ImportError):  # pandas need not be there
                importlib.import_module(name)
    gc.collect()
    gc.freeze()
