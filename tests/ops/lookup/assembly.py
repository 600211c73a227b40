"""Compile a Triton kernel for a GPU that is not there, and read its assembly: registers, spills, widths."""

# pyright: reportMissingImports=false

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = 90


@dataclass(frozen=True)
class Assembly:
    """What `ptxas` made of a kernel.

    Args:
        registers: of a thread.
        spilled_bytes: stored to and loaded from local memory because registers ran out.
        accesses: instructions of global and local memory, and how many there are: "LDG.E.128", "LDL.LU".
        shared_sums: sums of floating-point numbers that several threads hold, in an order that the compiler picks.
    """

    registers: int
    spilled_bytes: int
    accesses: Counter[str]
    shared_sums: int

    def wide(self, kind: str) -> int:
        """Accesses of 16 bytes: loads "LDG", stores "STG", or loads into shared memory "LDGSTS"."""
        return sum(
            count for name, count in self.accesses.items() if name.startswith(f"{kind}.") and ".128" in f"{name}."
        )


def compiled(
    kernel: Any,
    *,
    types: dict[str, str],
    constants: dict[str, Any],
    architecture: int = ARCHITECTURE,
    **options: Any,
) -> Any:
    """Compile a kernel as Triton would for a GPU of that architecture, which need not be there.

    Args:
        kernel: a function under `triton.jit`.
        types: of its arguments, "*fp32" for a pointer; pointers are aligned to 16 bytes, as torch's are, and integers
            whose type ends in ":16" are multiples of 16.
        constants: its `tl.constexpr` arguments.
        architecture: 90 is sm_90.
        options: of the compiler.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name].removesuffix(":16") for name in names}
    aligned = [name for name in names if name not in constants and (types[name][0] == "*" or types[name][-3:] == ":16")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def assemble(
    kernel: Any,
    folder: Path,
    *,
    types: dict[str, str],
    constants: dict[str, Any],
    architecture: int = ARCHITECTURE,
    **options: Any,
) -> Assembly:
    """Compile a kernel (`compiled`) and read its assembly; `folder` is for files."""
    import triton.backends.nvidia

    found = compiled(kernel, types=types, constants=constants, architecture=architecture, **options)
    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    ptxas = tools / ("ptxas-blackwell" if architecture >= 100 else "ptxas")  # as Triton chooses
    text, binary = folder / "kernel.ptx", folder / "kernel.cubin"
    text.write_text(found.asm["ptx"])
    command = [ptxas, "-v", f"--gpu-name=sm_{architecture}{'a' * (architecture >= 90)}", text, "-o", binary]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    code = subprocess.run([tools / "cuobjdump", "-sass", binary], capture_output=True, text=True, check=True).stdout
    registers = re.search(r"Used (\d+) registers", said)
    assert registers, said
    spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", said))
    reductions = re.findall(r'"tt\.reduce".*?tt\.reduce\.return', found.asm["ttgir"], re.DOTALL)
    return Assembly(
        registers=int(registers[1]),
        spilled_bytes=spilled,
        accesses=Counter(re.findall(r"\b((?:LDGSTS|LDG|STG|LDL|STL)(?:\.[A-Z0-9]+)*)\b", code)),
        shared_sums=sum("addf" in each for each in reductions),
    )
