"""Probe: which numbers the operands of dense products have, in a few statistics and no raw tensors.

LoKA (arXiv 2605.10886, "Probe") asks where a format of few bits is safe. Random N(0, 1) operands do not answer it:
features of one activation differ in scale by orders of magnitude, and they are correlated, so that sums cancel. So
statistics of the real operands are kept while a model trains, and operands are drawn from them later:

    activations, gradients   rows ~ N(μ, Σ)          batched Welford                       moments.py
    weights                  W ~ MN(M, U, V)         flip-flop, with exponential averages  matrix_normal.py
    one product              left, right, gradient   draws operands of its three products  product.py
    a file                   JSON with digests, and tensors                                record.py

Reference: LoKA, arXiv 2605.10886.
"""

from __future__ import annotations

from ziggurat.numerics.probe.matrix_normal import MatrixNormal
from ziggurat.numerics.probe.moments import Moments
from ziggurat.numerics.probe.product import Direction, ProductStatistics
from ziggurat.numerics.probe.record import ProbeRecord

__all__ = ["Direction", "MatrixNormal", "Moments", "ProbeRecord", "ProductStatistics"]
