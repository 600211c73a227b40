"""Programs over masks: C++ and torch give the mask that sets of Python give, with Bloom leaves, with negated ones."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ziggurat.ops import mask_program
from ziggurat.ops.bitmask import mask_of_rows, num_words, pack_mask, rows_of_mask
from ziggurat.ops.cpp_build import CppLibrary
from ziggurat.ops.mask_program import (
    AllOf,
    AnyOf,
    BloomLeaf,
    CodesLeaf,
    ConstantLeaf,
    Leaf,
    ListLeaf,
    Literal,
    MaskLeaf,
    MaskProgram,
    PlaneLeaf,
    Tree,
    clear_rows,
    run_reference,
)


class World:
    """Sets of n items in every form that a leaf has, each beside the Python set that it means."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.random = n, random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        flags = torch.rand(6, n, generator=generator) < torch.tensor([0.5, 0.1, 0.9, 0.02, 0.5, 0.5])[:, None]
        codes = torch.randint(0, 4, (n,), generator=generator, dtype=torch.int32)
        lengths = torch.randint(0, 4, (n,), generator=generator)
        offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
        many = torch.randint(0, 4, (int(offsets[-1]),), generator=generator, dtype=torch.int32)
        holders = torch.repeat_interleave(torch.arange(n), lengths)
        maybe = [flags[4] | (codes == code) for code in range(4)]
        for code in range(4):
            owns = torch.zeros(n, dtype=torch.bool)
            owns[holders[many == code]] = True
            maybe.append(flags[5] | owns)
        self.planes = pack_mask(torch.stack([*flags, *maybe])) if n else torch.zeros(14, 0, dtype=torch.int64)
        self.sets = [set(row.nonzero().view(-1).tolist()) for row in flags]
        self.codes, self.many, self.offsets, self.holders = codes, many, offsets, holders
        self.bytes = torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8)

    def leaf(self) -> tuple[Leaf, set[int]]:
        kind, code = self.random.randrange(7), self.random.randrange(4)
        if kind == 0:
            value = self.random.random() < 0.5
            return ConstantLeaf(value), set(range(self.n)) if value else set()
        if kind == 1:
            plane = self.random.randrange(4)
            return PlaneLeaf(plane), self.sets[plane]
        rows = sorted(self.random.sample(range(self.n), min(self.n, 5)))
        if kind == 2:
            return MaskLeaf(mask_of_rows(torch.tensor(rows, dtype=torch.int64), n=self.n)), set(rows)
        if kind == 3:
            return ListLeaf(torch.tensor(rows, dtype=torch.int32)), set(rows)
        if kind == 4:
            low, high = sorted(self.random.randrange(256) for _ in range(2))
            return CodesLeaf(self.bytes, low, high), {i for i, b in enumerate(self.bytes.tolist()) if low <= b <= high}
        if kind == 5:
            items = set((self.codes == code).nonzero().view(-1).tolist())
            return BloomLeaf((6 + code,), self.codes, None, code), items
        held = set(self.holders[self.many == code].tolist())
        return BloomLeaf((10 + code,) * 2, self.many, self.offsets, code), held

    def tree(self, depth: int) -> tuple[Tree, set[int]]:
        if depth == 0 or self.random.random() < 0.3:
            leaf, items = self.leaf()
            negated, present = self.random.random() < 0.5, self.random.choice([-1, 2])
            if not negated:
                return Literal(leaf), items
            known = set(range(self.n)) if present < 0 else self.sets[present]
            return Literal(leaf, negated=True, present=present), known - items
        parts = [self.tree(depth - 1) for _ in range(self.random.randrange(1, 4))]
        trees, sets = tuple(tree for tree, _ in parts), [items for _, items in parts]
        if self.random.random() < 0.5:
            return AllOf(trees), set.intersection(*sets)
        return AnyOf(trees), set.union(*sets)


def run(tree: Tree, world: World, spans: Tensor | None = None) -> Tensor:
    out = torch.zeros(num_words(world.n), dtype=torch.int64)
    MaskProgram(tree).run(world.planes, n=world.n, out=out, spans=spans)
    return out


@pytest.mark.parametrize("n", [0, 1, 64, 1000, 40_000])
def test_random_trees_give_the_set_that_python_gives(n: int) -> None:
    world = World(n, seed=n)
    for _ in range(8 if n > 1000 else 150):
        tree, items = world.tree(3)
        expected = mask_of_rows(torch.tensor(sorted(items), dtype=torch.int64), n=n)
        assert torch.equal(run_reference(tree, planes=world.planes, n=n), expected), tree
        assert torch.equal(run(tree, world), expected), tree


def test_only_the_words_of_spans_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1000, seed=3)
    spans = torch.tensor([[1, 3], [14, 16]])
    for kernel in ("C++", "torch"):
        tree, items = world.tree(3)
        words = run(tree, world, spans)
        expected = mask_of_rows(torch.tensor(sorted(items), dtype=torch.int64), n=1000)
        expected[0] = expected[3:14] = 0
        assert torch.equal(words, expected)
        assert kernel
        monkeypatch.setattr(mask_program, "_LIBRARY", CppLibrary.missing("no compiler"))
    assert "no compiler" in mask_program.mask_program_kernel()


def test_only_what_is_not_sure_is_looked_up() -> None:
    world = World(1000, seed=5)
    bloom = Literal(BloomLeaf((6,), world.codes, None, 0))
    out = torch.zeros(num_words(1000), dtype=torch.int64)
    maybe = len(rows_of_mask(world.planes[6]))
    assert MaskProgram(bloom).run(world.planes, n=1000, out=out) == maybe
    few = AllOf((bloom, Literal(PlaneLeaf(3))))
    assert MaskProgram(few).run(world.planes, n=1000, out=out) == len(rows_of_mask(world.planes[6] & world.planes[3]))
    decided = AnyOf((bloom, Literal(ConstantLeaf(True))))
    assert MaskProgram(decided).run(world.planes, n=1000, out=out) == 0


def test_rows_are_cleared_and_padding_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([5, -1, 64, 5])
    for _ in range(2):
        words = mask_of_rows(torch.arange(130), n=130)
        clear_rows(words, rows)
        assert set(range(130)) - set(rows_of_mask(words).tolist()) == {5, 64}
        monkeypatch.setattr(mask_program, "_LIBRARY", CppLibrary.missing("no compiler"))
