"""Boolean programs over packed masks: AND and OR of sets of items, in one pass, exact although some sets are Bloom's.

A set of items (`Leaf`) is stored in the way that suits it:

    PlaneLeaf       one of the planes (P, W): a bit an item
    MaskLeaf        a mask of its own
    ListLeaf        numbers of items, ascending: few items
    CodesLeaf       one byte an item; the set is a range of bytes
    BloomLeaf       the items that have all of k planes set, which are those of the set and a few others; a code of each
                    item tells for sure
    ConstantLeaf    all items, or none

A `Literal` is a leaf, or what is `present` and not in the leaf: NOT stands at the leaves alone, so the tree above them
(`AllOf`, `AnyOf`) is monotone. A Bloom leaf says of an item "no" or "perhaps"; negated, it would say "yes" or
"perhaps". What is perhaps must be looked up before anything follows from it, or a false positive becomes a lost item
under NOT. But not everything: in an AND, items that an earlier child excludes stay out whatever comes later; in an OR,
those that an earlier child lets in stay in. So children run in the order of their cost, Bloom leaves last, and each
leaf knows which items are still undecided: only those are looked up, and where a cache line of items has none, its
codes and planes are not even read.

`run_reference` defines the result, by torch on whole masks, for any device. On the CPU `csrc/mask_program.cpp` does the
same in blocks of 16,384 items, in the caches. `mask_program_kernel()` says which runs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int32, Int64, UInt8
from torch import Tensor

from ziggurat.ops.bitmask import full_mask, mask_of_rows, pack_mask, rows_of_mask
from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.kernel_choice import library_for

_SOURCE = CppSource(
    path=Path(__file__).parent / "csrc" / "mask_program.cpp",
    without="go on without: torch's own operations give the same masks, several times slower",
)
_FIELDS = 9  # numbers in a step
# Numbers that mask_program.cpp knows: kinds of steps, and how a step joins the stack.
_CONSTANT, _PLANE, _MASK, _LIST, _CODES, _BLOOM, _OPEN, _FOLD = range(8)
_PUSH, _AND, _OR = range(3)


@dataclass(frozen=True, slots=True)
class ConstantLeaf:
    """All items, or none of them."""

    value: bool


@dataclass(frozen=True, slots=True)
class PlaneLeaf:
    """The items of one plane."""

    plane: int


@dataclass(frozen=True, slots=True, eq=False)
class MaskLeaf:
    """The items of a mask of its own."""

    words: Int64[Tensor, "W"]


@dataclass(frozen=True, slots=True, eq=False)
class ListLeaf:
    """The items of a list, ascending."""

    rows: Int32[Tensor, "R"]


@dataclass(frozen=True, slots=True, eq=False)
class CodesLeaf:
    """The items whose code is from `low` to `high`."""

    codes: UInt8[Tensor, "N"]
    low: int
    high: int


@dataclass(frozen=True, slots=True, eq=False)
class BloomLeaf:
    """The items that have a code, found by planes that some other items have set, too.

    Args:
        planes: all of them are set for each item of the set.
        item_codes: the code of each item, or the codes of one item after the other.
        item_offsets: where an item's codes begin, if it can have several.
        code: of the items in the set.
        holders: about how many items have the code; rare ones are looked up first.
    """

    planes: tuple[int, ...]
    item_codes: Int32[Tensor, "E"]
    item_offsets: Int32[Tensor, "N+1"] | None
    code: int
    holders: int = 0


Leaf = ConstantLeaf | PlaneLeaf | MaskLeaf | ListLeaf | CodesLeaf | BloomLeaf


@dataclass(frozen=True, slots=True)
class Literal:
    """The items of a leaf, or those that are present and not in it.

    Args:
        leaf: a set of items.
        negated: whether those outside of the leaf are meant.
        present: the plane of the items of which the leaf knows something; -1 if those are all. Only read if negated.
    """

    leaf: Leaf
    negated: bool = False
    present: int = -1


@dataclass(frozen=True, slots=True)
class AllOf:
    """The items in every child; there is at least one child."""

    children: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """The items in at least one child; there is at least one child."""

    children: tuple[Tree, ...]


Tree = Literal | AllOf | AnyOf


class MaskProgram:
    """A tree of sets that is ready to run.

    Args:
        tree: what to compute.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._steps: list[list[int]] = []
        self._kept: list[Tensor] = []  # whose addresses are in the steps
        # The kernel's stack is as deep as the deepest moment of the program.
        self._depth = self._height = 0
        self._emit(tree, combine=_PUSH)
        self._encoded = torch.from_numpy(
            np.array(self._steps, dtype=np.int64)
        )  # torch.tensor takes three times as long

    def run(
        self,
        planes: Int64[Tensor, "P W"],
        *,
        n: int,
        out: Int64[Tensor, "W"],
        spans: Int64[Tensor, "S 2"] | None = None,
    ) -> int:
        """Write the mask of the items in the tree.

        Args:
            planes: what the plane leaves name.
            n: number of items.
            out: the mask; contiguous.
            spans: first and last + 1 of the words to write; all if None. Other words of `out` stay as they are.

        Returns:
            How many items a Bloom leaf had to look up (0 where torch runs).
        """
        library = library_for(out, _LIBRARY)
        if library is None:
            self._run_torch(planes, n=n, out=out, spans=spans)
            return 0
        spans = spans if spans is None else spans.contiguous()
        return library.ziggurat_run_mask_program(
            self._encoded.data_ptr(),
            len(self._encoded),
            self._depth,
            planes.data_ptr(),
            n,
            None if spans is None else spans.data_ptr(),
            1 if spans is None else len(spans),
            out.data_ptr(),
        )

    def _run_torch(self, planes: Tensor, *, n: int, out: Tensor, spans: Tensor | None) -> None:
        words = run_reference(self.tree, planes=planes, n=n)
        for begin, end in [(0, len(out))] if spans is None else spans.tolist():
            out[begin:end] = words[begin:end]

    def _emit(self, tree: Tree, *, combine: int) -> None:
        """Add the steps that push a tree on the stack, or combine it with what lies on top."""
        if isinstance(tree, Literal):
            self._add(self._leaf(tree.leaf), combine=combine, invert=tree.negated, present=tree.present)
            return
        # A tree below another is computed beside it first (open), then joined to it (fold).
        if combine != _PUSH:
            self._add([_OPEN], combine=combine)
        inner = _AND if isinstance(tree, AllOf) else _OR
        # Cheap ones first: what they decide, the dear ones need not look up.
        for number, child in enumerate(sorted(tree.children, key=_cost)):
            self._emit(child, combine=inner if number else _PUSH)
        if combine != _PUSH:
            self._add([_FOLD], combine=combine)

    def _add(self, step: list[int], *, combine: int, invert: bool = False, present: int = -1) -> None:
        op, *rest = step
        fields = [op, combine, int(invert), present, *rest]
        # Steps are rows of one matrix, so all have as many numbers.
        self._steps.append(fields + [0] * (_FIELDS - len(fields)))
        # A fold takes one from the stack; a step that pushes adds one; AND and OR change the top in place.
        self._height += {_FOLD: -1, _OPEN: 0}.get(op, int(combine == _PUSH))
        self._depth = max(self._depth, self._height)

    def _leaf(self, leaf: Leaf) -> list[int]:
        if isinstance(leaf, ConstantLeaf):
            return [_CONSTANT, int(leaf.value)]
        if isinstance(leaf, PlaneLeaf):
            return [_PLANE, leaf.plane]
        if isinstance(leaf, MaskLeaf):
            return [_MASK, self._address(leaf.words)]
        if isinstance(leaf, ListLeaf):
            return [_LIST, self._address(leaf.rows), len(leaf.rows)]
        if isinstance(leaf, CodesLeaf):
            return [_CODES, self._address(leaf.codes), leaf.low, leaf.high]
        # The address stays good: `_address` keeps the tensor.
        numbers = self._address(torch.from_numpy(np.array(leaf.planes, dtype=np.int64)))
        offsets = 0 if leaf.item_offsets is None else self._address(leaf.item_offsets)
        return [_BLOOM, numbers, len(leaf.planes), self._address(leaf.item_codes), offsets, leaf.code]

    def _address(self, tensor: Tensor) -> int:
        # The kernel sees a bare address, and no strides.
        assert tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _cost(tree: Tree) -> float:
    """About how many bits an item a tree reads; what is looked up counts more."""
    if not isinstance(tree, Literal):
        return sum(map(_cost, tree.children))
    leaf = tree.leaf
    if isinstance(leaf, CodesLeaf):
        share = (leaf.high - leaf.low + 1) / 256
        return 8 + (1 - share if tree.negated else share)  # what excludes more goes first
    if isinstance(leaf, BloomLeaf):
        # Last of all, the rarest first: what it lets through has to be looked up item by item.
        return 100 + leaf.holders
    return 1 if isinstance(leaf, PlaneLeaf | MaskLeaf) else 0


def run_reference(tree: Tree, *, planes: Int64[Tensor, "P W"], n: int) -> Int64[Tensor, "W"]:
    """Compute the words that `MaskProgram.run` must write; look up every item of which a Bloom leaf says perhaps."""
    full = full_mask(n, device=planes.device)
    if isinstance(tree, Literal):
        # NOT sets bits behind the last item, too; `full` clears them.
        words = _leaf_words(tree.leaf, planes=planes, full=full)
        if tree.negated:
            words = ~words if tree.present < 0 else planes[tree.present] & ~words
        return words & full
    parts = [run_reference(child, planes=planes, n=n) for child in tree.children]
    return functools.reduce(torch.bitwise_and if isinstance(tree, AllOf) else torch.bitwise_or, parts)


def _leaf_words(leaf: Leaf, *, planes: Tensor, full: Tensor) -> Tensor:
    if isinstance(leaf, ConstantLeaf):
        return full if leaf.value else torch.zeros_like(full)
    if isinstance(leaf, PlaneLeaf):
        return planes[leaf.plane]
    if isinstance(leaf, MaskLeaf):
        return leaf.words
    if isinstance(leaf, ListLeaf):
        # As many items as the words have bits; those behind the last item are cleared by `full`.
        return mask_of_rows(leaf.rows.long(), n=len(full) * 64)
    if isinstance(leaf, CodesLeaf):
        return pack_mask((leaf.codes >= leaf.low) & (leaf.codes <= leaf.high))
    rows = rows_of_mask(functools.reduce(torch.bitwise_and, [planes[plane] for plane in leaf.planes]))
    return mask_of_rows(rows[_has_code(leaf, rows)], n=len(full) * 64)


def _has_code(leaf: BloomLeaf, rows: Tensor) -> Tensor:
    if leaf.item_offsets is None:
        return leaf.item_codes[rows] == leaf.code
    # Codes that hit, counted up: an item has one if the count grows between its begin and its end.
    hits = torch.zeros(len(leaf.item_codes) + 1, dtype=torch.int64, device=rows.device)
    hits[1:] = (leaf.item_codes == leaf.code).cumsum(0)
    return hits[leaf.item_offsets[rows + 1].long()] > hits[leaf.item_offsets[rows].long()]


def clear_rows(words: Int64[Tensor, "W"], rows: Int64[Tensor, "R"]) -> None:
    """Clear the bits of rows in a mask, in place; -1 among the rows is passed over."""
    library = library_for(words, _LIBRARY) if words.is_contiguous() else None
    if library is None:
        # In place: the caller's mask.
        words &= ~mask_of_rows(rows[rows >= 0].to(words.device), n=len(words) * 64)
        return
    rows = rows.contiguous()
    library.ziggurat_clear_rows(rows.data_ptr(), len(rows), words.data_ptr())


def mask_program_kernel() -> str:
    """Say which implementation serves filters on this CPU, and why; build the kernel if need be."""
    return _LIBRARY.kernel_line()


def _declare(library: ctypes.CDLL) -> None:
    """Say which arguments the functions of the library take."""
    run = library.ziggurat_run_mask_program
    run.argtypes = [c_void_p, *[c_int64] * 2, c_void_p, c_int64, c_void_p, c_int64, c_void_p]
    run.restype = c_int64
    library.ziggurat_clear_rows.argtypes = [c_void_p, c_int64, c_void_p]
    library.ziggurat_clear_rows.restype = None


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)


def conjunction(trees: Sequence[Tree]) -> Tree:
    """The items in all of some trees; every item if there are none."""
    if not trees:
        return Literal(ConstantLeaf(True))
    return trees[0] if len(trees) == 1 else AllOf(tuple(trees))


def disjunction(trees: Sequence[Tree]) -> Tree:
    """The items in any of some trees; no item if there are none."""
    if not trees:
        return Literal(ConstantLeaf(False))
    return trees[0] if len(trees) == 1 else AnyOf(tuple(trees))
