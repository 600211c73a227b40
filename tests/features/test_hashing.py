"""The stable hash: frozen test vectors, a slow reference, and every input form in agreement."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.features.hashing import aligned_words, hash_ids, hash_spans, hash_texts, load_words

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & MASK
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def _reference(text: bytes) -> int:
    total = (len(text) + 1) * GOLDEN
    for i in range(0, len(text), 8):
        word = int.from_bytes(text[i : i + 8], "little")
        total += _mix(word ^ _mix((i // 8 + 1) * GOLDEN & MASK))
    return _mix(total & MASK)


def _arrow(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts], dtype=np.int64)]).astype(np.int64)
    return offsets, np.frombuffer(b"".join(texts), dtype=np.uint8)


# These numbers are part of the saved format of every hashing table: they may never change.
FROZEN = {
    "": 0xE220A8397B1DCDAF,
    "0": 0x8D4FEE18F55D1880,
    "1": 0x9C3632D52E50E88B,
    "-1": 0xC3EBF4057362DA5C,
    "68fd1e64": 0x5673AF8FFA50F367,
    "123456789": 0x636E60A64C2B40A2,
    "Zürich": 0xDF88A733009D2570,
    "the quick brown fox jumps over the lazy dog": 0xF73941545C274585,
}


def test_frozen_vectors():
    assert {text: int(hash_ids(np.array([text]))[0]) for text in FROZEN} == FROZEN


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=30))
def test_texts_equal_reference(texts: list[bytes]):
    offsets, data = _arrow(texts)
    assert hash_texts(offsets, data=data).tolist() == [_reference(text) for text in texts]


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"", b"68fd1e64", b"80e26c9b"]), max_size=30), st.integers(0, 3))
def test_eight_byte_path_equals_reference(texts: list[bytes], skip: int):
    offsets, data = _arrow([b"x" * skip, *texts])
    assert hash_texts(offsets[1:], data=data).tolist() == [_reference(text) for text in texts]


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_integers_hash_as_their_text(values: list[int]):
    numbers = np.array(values, dtype=np.int64)
    as_text = np.array([str(value) for value in values], dtype=object)
    assert hash_ids(numbers).tolist() == hash_ids(as_text).tolist() == [_reference(str(v).encode()) for v in values]


def test_unsigned_and_small_integers():
    assert hash_ids(np.array([2**64 - 1], dtype=np.uint64))[0] == _reference(b"18446744073709551615")
    assert hash_ids(np.array([7], dtype=np.int8))[0] == _reference(b"7")


def test_numpy_text_forms_agree():
    texts = ["a", "", "ü" * 9, "longer than one word"]
    expected = [_reference(text.encode()) for text in texts]
    assert hash_ids(np.array(texts)).tolist() == expected
    assert hash_ids(np.array([text.encode() for text in texts])).tolist() == expected
    assert hash_ids(np.array(texts, dtype=object)).tolist() == expected


def test_blocks_do_not_change_the_hash():
    texts = [str(value).encode() for value in range(70_000)]
    offsets, data = _arrow(texts)
    hashes = hash_texts(offsets, data=data)
    assert hashes[65_530:65_545].tolist() == [_reference(text) for text in texts[65_530:65_545]]
    assert len(np.unique(hashes)) == len(texts)


def test_one_huge_text():
    text = bytes(range(256)) * 40_000  # 10 MB
    offsets, data = _arrow([b"a", text, b"b"])
    hashes = hash_texts(offsets, data=data)
    assert hashes[0] == _reference(b"a")
    assert hashes[2] == _reference(b"b")


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=60), st.lists(st.tuples(st.integers(0, 59), st.integers(0, 20)), max_size=10))
def test_spans_anywhere_in_a_buffer(data: bytes, cuts: list[tuple[int, int]]):
    spans = [(start, min(length, len(data) - start)) for start, length in cuts if start < len(data)]
    starts = np.array([start for start, _ in spans], dtype=np.int32)
    lengths = np.array([length for _, length in spans], dtype=np.int32)
    words = aligned_words(data)
    expected = [_reference(data[start : start + length]) for start, length in spans]
    assert hash_spans(starts, lengths=lengths, words=words).tolist() == expected
    loaded = [int.from_bytes(data[start : start + 8], "little") for start, _ in spans]
    assert load_words(words, starts).tolist() == loaded


def test_empty_input():
    assert hash_ids(np.array([], dtype=np.int64)).shape == (0,)
    assert hash_ids(np.array([], dtype=object)).shape == (0,)


@pytest.mark.parametrize("bad", [np.array([1.5]), np.array([None], dtype=object), np.array([True], dtype=object)])
def test_other_types_are_refused(bad: np.ndarray):
    with pytest.raises(TypeError, match="integers or text"):
        hash_ids(bad)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 1000))
def test_spreads_evenly_over_rows(num_rows: int):
    counts = np.bincount((hash_ids(np.arange(20_000)) % np.uint64(num_rows)).astype(np.int64), minlength=num_rows)
    expected = 20_000 / num_rows
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_squared - (num_rows - 1)) < 6 * np.sqrt(2 * num_rows)


def test_imports_without_polars_and_pyarrow():
    code = "import sys; import ziggurat.features.hashing; assert not {'polars', 'pyarrow', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
