"""Text kernels: the C++ one and the numpy reference agree to the bit; both agree with Python; fall-backs are said."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ziggurat.errors import MissingDependencyError
from ziggurat.features.hashing import hash_ids
from ziggurat.ops import cpp_build
from ziggurat.ops.cpp_build import CppSource
from ziggurat.ops.text import choose as kernel_module
from ziggurat.ops.text import cpp as cpp_module
from ziggurat.ops.text.choose import text_kernel
from ziggurat.ops.text.cpp import CppTextKernel
from ziggurat.ops.text.kernel import Fields, KeySlots, TextKernel, TextKind
from ziggurat.ops.text.reference import NumpyTextKernel
from ziggurat.runs.doctor import text_kernel_lines

NUMPY = NumpyTextKernel()
TAB = ord("\t")


@pytest.fixture(scope="module")
def cpp() -> CppTextKernel:
    try:
        return CppTextKernel()
    except MissingDependencyError as error:
        pytest.skip(error.found)


# ---------------------------------------------------------------- split

FIELDS = st.one_of(
    st.sampled_from(
        ["", "-", "0", "-0", "7", "12345678", "-1234567", "123456789", "-12345678", "1.5", ".0", "7.0", "x.0", "0.00"]
        + ["+1", "1e3", "--1", "1-", " 1", "12:4", "1/2", "68fd1e64", "a longer text than eight bytes", "ü", "１", "\r"]
        + ["a" * length for length in (9, 15, 16, 17, 63, 64, 65, 200)]
    ),
    st.integers(-(10**9), 10**9).map(str),
    st.text(st.characters(exclude_characters="\t\n\r", exclude_categories=["Cs"]), max_size=20),
)
NUM_FIELDS = 3


def same(left: Fields | None, right: Fields | None) -> None:
    """Equal to the bit, wherever values mean anything."""
    assert (left is None) == (right is None)
    if left is None or right is None:
        return
    assert left.longest == right.longest
    assert left.simple.tolist() == right.simple.tolist()
    for name in ("starts", "lengths"):
        mine, theirs = getattr(left, name), getattr(right, name)
        assert mine.dtype == theirs.dtype == np.int32
        assert np.array_equal(mine, theirs)


def same_values(left: Fields, right: Fields, kinds: list[TextKind]) -> None:
    for column, kind in enumerate(kinds):
        if kind != TextKind.OTHER and left.simple[column]:
            assert left.values[column].tolist() == right.values[column].tolist()


KINDS = st.lists(st.sampled_from(TextKind), min_size=NUM_FIELDS, max_size=NUM_FIELDS)


@settings(deadline=None, max_examples=200)
@given(
    rows=st.lists(st.lists(FIELDS, min_size=NUM_FIELDS, max_size=NUM_FIELDS), max_size=80),
    kinds=KINDS,
    end=st.sampled_from(["\n", "\r\n"]),
)
@example(rows=[], kinds=[TextKind.ID] * 3, end="\n")
@example(rows=[["", "", ""]] * 65, kinds=[TextKind.NUMBER] * 3, end="\r\n")
@example(rows=[["-", "-", "-"]], kinds=[TextKind.NUMBER, TextKind.ID, TextKind.NUMBER], end="\n")
def test_split(cpp: CppTextKernel, rows: list[list[str]], kinds: list[TextKind], end: str):
    data = "".join("\t".join(row) + end for row in rows).encode()
    fields, reference = (kernel.split(data, delimiter=TAB, kinds=np.array(kinds)) for kernel in (cpp, NUMPY))
    same(fields, reference)
    assert fields is not None
    assert reference is not None
    same_values(fields, reference, kinds)
    assert fields.longest == max((len(line) + 1 for line in data.split(b"\n")[:-1]), default=0)
    for column, kind in enumerate(kinds):
        texts = [
            _without_return(row[column]) if column == NUM_FIELDS - 1 and end == "\n" else row[column] for row in rows
        ]
        starts, lengths = fields.starts[column], fields.lengths[column]
        spans = [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        assert spans == [text.encode() for text in texts]
        for kernel in (cpp, NUMPY):
            assert kernel.copy(data, starts=starts, lengths=lengths).tobytes() == b"".join(spans)
        _check_column(fields, column, kind, texts)


def _without_return(text: str) -> str:
    return text[:-1] if text.endswith("\r") else text


def _check_column(fields: Fields, column: int, kind: TextKind, texts: list[str]) -> None:
    """What Python says."""
    if kind == TextKind.ID:
        assert fields.simple[column] == (not any(text.endswith(".0") for text in texts))
        assert fields.values[column].tolist() == hash_ids(np.array(texts, dtype=object)).tolist()
    elif kind == TextKind.NUMBER:
        assert fields.simple[column] == all(text == "" or _is_short_integer(text) for text in texts)
        if fields.simple[column]:
            for text, number in zip(texts, fields.values[column].view(np.float64).tolist(), strict=True):
                assert math.isnan(number) if not text else (number == float(text))
                assert not text or math.copysign(1, number) == math.copysign(1, float(text))
    else:
        assert fields.simple[column]


def _is_short_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return len(text.encode()) <= 8 and digits.isascii() and digits.isdigit()


@settings(deadline=None, max_examples=200)
@given(st.text("a\t\n\r", max_size=150), st.integers(1, 4))
@example("", 1)
@example("a\ta", 2)
@example("a\ta\n\n", 2)
@example("a\na\ta\n", 2)
@example("a\t\n\ta\n\t", 2)
def test_split_of_anything(cpp: CppTextKernel, text: str, num_fields: int):
    data, kinds = text.encode(), np.full(num_fields, TextKind.ID)
    fields = cpp.split(data, delimiter=TAB, kinds=kinds)
    same(fields, NUMPY.split(data, delimiter=TAB, kinds=kinds))
    right = all(line.count("\t") == num_fields - 1 for line in text.split("\n")[:-1]) and text[-1:] in ("", "\n")
    assert (fields is not None) == right


def test_split_of_a_large_block(cpp: CppTextKernel):
    """Many tiles and blocks of 64 bytes; fields that cross them."""
    rng = np.random.default_rng(0)
    rows = [
        [f"{rng.integers(-999, 10**6)}", "x" * rng.integers(0, 100), f"{rng.integers(2**32):08x}"] for _ in range(5000)
    ]
    data = "".join("\t".join(row) + "\n" for row in rows).encode()
    kinds = [TextKind.NUMBER, TextKind.ID, TextKind.ID]
    fields, reference = (kernel.split(data, delimiter=TAB, kinds=np.array(kinds)) for kernel in (cpp, NUMPY))
    same(fields, reference)
    assert fields is not None
    assert reference is not None
    same_values(fields, reference, kinds)
    assert fields.simple.all()


@settings(deadline=None, max_examples=100)
@given(texts=st.lists(st.text(max_size=40), max_size=30), skipped=st.integers(0, 5))
def test_hashes_of_texts(cpp: CppTextKernel, texts: list[str], skipped: int):
    """Texts may begin anywhere in their buffer, and one that ends with it is not read beyond."""
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([skipped, *map(len, encoded)]).astype(np.int64)
    data = np.frombuffer(b"x" * skipped + b"".join(encoded), dtype=np.uint8)
    hashes, reference = (kernel.hash_texts(data, offsets=offsets) for kernel in (cpp, NUMPY))
    assert hashes.dtype == reference.dtype == np.uint64
    assert hashes.tolist() == reference.tolist() == hash_ids(np.array(texts, dtype=object)).tolist()


# ---------------------------------------------------------------- tables of keys

KEYS = st.lists(
    st.sampled_from([0, 1, 2, 5, 2**64 - 1, 2**63, 2**54, 2**54 + 1]) | st.integers(0, 2**64 - 1), max_size=40
)


@settings(deadline=None, max_examples=150)
@given(batches=st.lists(KEYS, max_size=5), asked=KEYS, skip=st.sampled_from([0, 2, 3]), counted=st.booleans())
def test_find_and_add(cpp: CppTextKernel, batches: list[list[int]], asked: list[int], skip: int, counted: bool):
    kernels: list[TextKernel] = [cpp, NUMPY]
    slots = [KeySlots.empty(9) for _ in kernels]  # room for 256 keys
    counts = [np.zeros(256, dtype=np.int64) if counted else None for _ in kernels]
    known: dict[int, int] = {}
    for batch in batches:
        keys = np.array(batch, dtype=np.uint64)
        missing = np.arange(len(keys)) % skip == 0 if skip else None
        next_number = len(known)
        places: list[int] = []
        for index, key in enumerate(batch):
            if (missing is None or not missing[index]) and max(key, 1) not in known:
                known[max(key, 1)] = len(known)
                places.append(index)
        for index, kernel in enumerate(kernels):
            numbers, new = kernel.add(
                slots[index], keys, next_number=next_number, missing=missing, counts=counts[index]
            )
            assert numbers.dtype == np.int32
            assert new.tolist() == places
            is_missing = np.zeros(len(keys), dtype=bool) if missing is None else missing
            assert numbers.tolist() == [
                -1 if skipped else known[max(key, 1)] for key, skipped in zip(batch, is_missing, strict=True)
            ]
    if counted:
        assert np.array_equal(counts[0], counts[1])  # type: ignore[arg-type]
    for index, kernel in enumerate(kernels):
        found = kernel.find(slots[index], np.array(asked, dtype=np.uint64))
        assert found.dtype == np.int32
        assert found.tolist() == [known.get(max(key, 1), -1) for key in asked]


@settings(deadline=None, max_examples=60)
@given(keys=KEYS, most=st.integers(0, 6), skip=st.sampled_from([0, 2]))
def test_add_ends_before_one_key_too_many(cpp: CppTextKernel, keys: list[int], most: int, skip: int):
    every = np.array(keys, dtype=np.uint64)
    missing = np.arange(len(every)) % skip == 0 if skip else None
    seen: dict[int, int] = {}
    end = len(keys)
    for index, key in enumerate(keys):
        if (missing is None or not missing[index]) and max(key, 1) not in seen:
            if len(seen) == most:
                end = index
                break
            seen[max(key, 1)] = index
    for kernel in (cpp, NUMPY):
        counts = np.zeros(256, dtype=np.int64)
        numbers, places = kernel.add(KeySlots.empty(9), every, next_number=0, missing=missing, counts=counts, most=most)
        assert len(numbers) == end
        assert places.tolist() == list(seen.values())
        assert counts.sum() == (numbers >= 0).sum()


def test_full_slots_wrap_around(cpp: CppTextKernel):
    """Keys that are all at home in the last slot go on at the first one."""
    keys = np.uint64(2**64 - 1) - np.arange(500, dtype=np.uint64)
    for kernel in (cpp, NUMPY):
        slots = KeySlots.empty(10)
        numbers, places = kernel.add(slots, keys, next_number=0)
        assert numbers.tolist() == places.tolist() == list(range(500))
        for asking in (cpp, NUMPY):  # each reads what the other wrote
            assert np.array_equal(asking.find(slots, keys[::-1]), numbers[::-1])
            assert (asking.find(slots, np.arange(2, 100, dtype=np.uint64)) == -1).all()


# ---------------------------------------------------------------- which one is used


@pytest.fixture
def forget_kernel():
    text_kernel.cache_clear()
    yield
    text_kernel.cache_clear()


@pytest.mark.usefixtures("forget_kernel")
def test_fall_back_is_loud(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp_build.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="numpy, several times slower.*g\\+\\+"):
        kernel = text_kernel()
    assert isinstance(kernel, NumpyTextKernel)
    assert kernel.name.startswith("numpy (none of g++")
    assert kernel_module.text_kernel() is kernel, "decided, and said, once"
    assert "slower" in text_kernel_lines()["text"]
    assert "g++" in text_kernel_lines()["text"]


@pytest.mark.usefixtures("forget_kernel")
def test_cpp_is_the_first_choice(cpp: CppTextKernel):
    assert isinstance(text_kernel(), CppTextKernel)
    assert text_kernel_lines() == {"text": "cpp"}


def test_another_byte_order_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp_module.sys, "byteorder", "big")
    with pytest.raises(MissingDependencyError, match="big-endian"):
        CppTextKernel()


def source(folder: Path, text: str = 'extern "C" int seven() { return 7; }\n', **settings: str) -> CppSource:
    path = folder / "small.cpp"
    path.write_text(text)
    return CppSource(path=path, without="count on your fingers", **settings)


def test_build_once_and_anew_after_a_change(tmp_path: Path):
    kernels = tmp_path / "kernels"
    assert source(tmp_path).load(folder=kernels).seven() == 7
    (built,) = kernels.iterdir()
    written = built.stat().st_mtime_ns
    assert source(tmp_path).load(folder=kernels).seven() == 7
    assert [path.stat().st_mtime_ns for path in kernels.iterdir()] == [written]
    assert source(tmp_path, 'extern "C" int seven() { return 8; }\n').load(folder=kernels).seven() == 8
    assert source(tmp_path).fingerprint() != source(tmp_path, depends_on="other").fingerprint()
    assert len(list(kernels.iterdir())) == 2


def test_a_changed_header_beside_the_source_builds_anew(tmp_path: Path):
    header = tmp_path / "number.h"
    including = '#include "number.h"\nextern "C" int number() { return NUMBER; }\n'
    for number in (7, 8):
        header.write_text(f"#define NUMBER {number}\n")
        assert source(tmp_path, including).load(folder=tmp_path / "kernels").number() == number


def test_errors_of_the_compiler_are_quoted(tmp_path: Path):
    with pytest.raises(MissingDependencyError, match=r"small\.cpp(.|\n)*no_such_thing(.|\n)*count on your fingers"):
        source(tmp_path, "int x = no_such_thing;\n").load(folder=tmp_path / "kernels")
    assert not list((tmp_path / "kernels").iterdir()), "nothing half-made is left"


def test_a_library_that_does_not_load_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\n[ "$last" = --version ] || echo nonsense > "$last"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(MissingDependencyError, match="building small"):
        source(tmp_path).load(folder=tmp_path / "kernels")
