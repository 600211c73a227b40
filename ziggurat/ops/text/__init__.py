"""Kernels for reading text and looking ids up: a numpy reference and a C++ twin with the same results."""
