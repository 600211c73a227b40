"""text_kernel: which of the two kernels reads text here: C++ where it can be built, else numpy, which is said once."""

from __future__ import annotations

import functools
import warnings

from ziggurat.errors import MissingDependencyError
from ziggurat.ops.text.cpp import CppTextKernel
from ziggurat.ops.text.kernel import TextKernel
from ziggurat.ops.text.reference import NumpyTextKernel


@functools.cache
def text_kernel() -> TextKernel:
    """The C++ kernel where it can be built, else the numpy reference; decided once a process."""
    try:
        return CppTextKernel()
    except MissingDependencyError as error:
        warnings.warn(f"text is read with numpy, several times slower than in C++: {error.found}", stacklevel=2)
        return NumpyTextKernel(reason=error.found)
