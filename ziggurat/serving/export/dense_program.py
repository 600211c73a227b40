"""The dense network of a model as a program of `torch.export`: for C++, AOTInductor, and whoever has no Ziggurat.

    dense (B, N) ─┐
    fields (B, X) ├──► dense.pt2 ──► logits (B, L)          any B; the weights are in the file
    vectors {…}   ┘
    sequences {name: (values (N, D), offsets (B + 1))}      lists that are not pooled
    named     {name: tensor}                                what a model finds with the batch (`Model.further`), if any

What stands below it, the lookup of rows in tables, is a gather and a sum that every runtime has, and tables are too
large to be constants of a program. `fields` are the pooled embeddings in the order of the run's inputs (or what towers
make of them: towers are lookups' side of the model, and not in the file).

The file is written when an export is made, checked against the model on other batches, and never read here: the format
holds pickles of torch. On request AOTInductor compiles it ahead for this processor (`dense_compiled.pt2`, for
`AOTIModelPackageLoader` in C++ or `torch._inductor.aoti_load_package`): a request for few items then takes half the
time of the network, one for 1,000 items nine tenths (docs/experiments). It is machine code, so nothing here reads it
later, either.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ziggurat.features.batch import Batch
from ziggurat.files import write_bytes
from ziggurat.models import Embedded, Model, Unpooled

PROGRAM_FILE = "dense.pt2"
COMPILED_FILE = "dense_compiled.pt2"
_ATOL = 1e-5
Inputs = dict[str, Any]


class DenseProgram(nn.Module):
    """The dense network with plain tensors for arguments.

    Args:
        model: whose `forward_dense` it is.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        # Not the model itself: its tables would become constants of the program.
        self._forward = model.forward_dense
        for name, child in model.named_children():
            if name not in ("embeddings", "towers"):
                self.add_module(name, child)

    def forward(
        self,
        dense: Tensor,
        fields: Tensor,
        vectors: dict[str, Tensor],
        sequences: dict[str, tuple[Tensor, Tensor]],
        named: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Logits (B, L)."""
        lists = {name: Unpooled(values=values, offsets=offsets) for name, (values, offsets) in sequences.items()}
        embedded = Embedded(dense=dense, fields=fields, sequences=lists, vectors=vectors, named=named or {})
        return self._forward(embedded).logits


def inputs_of(embedded: Embedded) -> Inputs:
    """The arguments of a program for what was looked up."""
    found: Inputs = {
        "dense": embedded.dense,
        "fields": embedded.fields,
        "vectors": dict(embedded.vectors),
        "sequences": {name: (each.values, each.offsets) for name, each in embedded.sequences.items()},
    }
    return found | ({"named": dict(embedded.named)} if embedded.named else {})


@torch.no_grad()
def export_program(model: Model, batches: tuple[Batch, Batch]) -> torch.export.ExportedProgram:
    """Trace the dense network, and compare it with the model.

    Args:
        model: in evaluation mode, on the CPU.
        batches: to trace with, and to compare on; of different sizes, both above 1.

    Raises:
        RuntimeError, ValueError and what else torch raises: it cannot be traced.
        AssertionError: the program computes something else.
    """
    traced, compared = (inputs_of(model.embed(batch)) for batch in batches)
    network = DenseProgram(model)
    dynamic = pytree.tree_map(lambda _: {0: torch.export.Dim.DYNAMIC}, traced)
    program = torch.export.export(network, args=(), kwargs=traced, dynamic_shapes=dynamic)
    for given in (traced, compared):
        torch.testing.assert_close(program.module()(**given), network(**given), rtol=_ATOL, atol=_ATOL)
    return program


def program_bytes(program: torch.export.ExportedProgram) -> bytes:
    """The content of a program's file. In memory first: torch ends the process where a disk is full."""
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


@torch.no_grad()
def compile_program(program: torch.export.ExportedProgram, path: Path, *, model: Model, batch: Batch) -> None:
    """Compile a program ahead for this processor, and compare what it computes with the model.

    Args:
        program: of the model.
        path: file to write.
        model: in evaluation mode, on the CPU.
        batch: to compare on.

    Raises:
        RuntimeError and what else torch raises: there is no C++ compiler, or it cannot compile the program.
        AssertionError: the compiled program computes something else.
    """
    content = io.BytesIO()  # torch ends the process where a disk is full
    torch._inductor.aoti_compile_and_package(program, package_path=content)
    write_bytes(path, content.getvalue())
    given = inputs_of(model.embed(batch))
    found = torch._inductor.aoti_load_package(str(path))(**given)
    torch.testing.assert_close(found, DenseProgram(model)(**given), rtol=_ATOL, atol=_ATOL)
