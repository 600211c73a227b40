"""A stable 64-bit hash of ids: the same raw id lands in the same row on every machine, in every version.

Problem: a table with `encoding = "hashing"` needs a function from ids to numbers that never changes. The hashes of
polars, pandas, DuckDB and Python itself are not promised to stay the same, so a saved model would silently read other
rows after an upgrade.

Idea: hash the id's *text* (UTF-8) in words of eight bytes. Every word is mixed on its own with the finaliser of
splitmix64, so the words of all ids are mixed in one vectorised pass and summed for each id, without a loop over bytes:

    w_0 … w_{m−1}   the L bytes as little-endian 64-bit words, the last one padded with zero bytes
    hash(text)    = mix( (L + 1)·G + Σ_i mix(w_i ⊕ mix((i + 1)·G)) )        modulo 2^64
    mix(z)        : z ⊕= z ≫ 30; z ·= 0xBF58476D1CE4E5B9; z ⊕= z ≫ 27; z ·= 0x94D049BB133111EB; z ⊕= z ≫ 31
    G             = 0x9E3779B97F4A7C15                                       (2^64 divided by the golden ratio)

An integer hashes as its decimal text, so an integer column and a text column of the same ids agree. `mix` is a
bijection, so two texts of equal length up to eight bytes never collide before the modulo.

Test vectors (frozen in the tests):

    ""  0xE220A8397B1DCDAF      "0"  0x8D4FEE18F55D1880      "68fd1e64"  0x5673AF8FFA50F367

Reference: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (splitmix64).
Cost: about 10 ns an id of up to eight bytes on one core; memory is bounded by working in blocks of 65,536 ids.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64, Shaped, UInt8, UInt64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_BLOCK_IDS = 65_536  # ids hashed at once; keeps the temporaries in cache


def hash_ids(ids: Shaped[np.ndarray, "N"]) -> UInt64[np.ndarray, "N"]:
    """The stable hash of every id; the definition is in the module's docstring.

    Args:
        ids: (N,) integers, text (`str_`), bytes (`bytes_`, taken as UTF-8), or objects of type int, str or bytes.

    Returns:
        (N,) hashes. Integers hash as their decimal text.

    Raises:
        TypeError: ids of any other type; floats have no agreed text.
    """
    ids = np.asarray(ids)
    if ids.dtype.kind in "iu":
        return _hash_fixed_width(ids.astype("S21"))
    if ids.dtype.kind == "S":
        return _hash_fixed_width(ids)
    if ids.dtype.kind in "UO":
        texts = [_to_bytes(item) for item in ids.tolist()]
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum([len(text) for text in texts], out=offsets[1:])
        return hash_texts(offsets, data=np.frombuffer(b"".join(texts), dtype=np.uint8))
    raise TypeError(f"ids must be integers or text, not {ids.dtype}")


def hash_texts(offsets: Int64[np.ndarray, "N+1"], *, data: UInt8[np.ndarray, "M"]) -> UInt64[np.ndarray, "N"]:
    """The stable hash of N texts that lie one after the other in `data` (Arrow's layout, no copy needed).

    Args:
        offsets: (N + 1,) rising positions in `data`; text i is `data[offsets[i] : offsets[i + 1]]`.
        data: (M,) UTF-8 bytes.

    Returns:
        (N,) hashes.
    """
    num_ids = len(offsets) - 1
    hashes = np.empty(num_ids, dtype=np.uint64)
    for start in range(0, num_ids, _BLOCK_IDS):
        stop = min(start + _BLOCK_IDS, num_ids)
        cuts = np.asarray(offsets[start : stop + 1], dtype=np.int64)
        hashes[start:stop] = _hash_block(cuts - cuts[0], data[cuts[0] : cuts[-1]])
    return hashes


def mix(values: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """The finaliser of splitmix64: a bijection of 64-bit numbers in which every input bit moves every output bit."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _hash_block(offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
    lengths = np.diff(offsets)
    full = lengths == 8
    num_full = int(np.count_nonzero(full))
    if num_full and num_full * 8 == len(data):  # every text has 8 bytes or none: the bytes already are the words
        words = np.frombuffer(data.tobytes(), dtype="<u8").astype(np.uint64, copy=False)
        sums = np.zeros(len(lengths), dtype=np.uint64)
        sums[full] = mix(words ^ _position_keys(1)[0])
        return _finish(sums, lengths)
    num_words = (lengths + 7) >> 3
    ends = np.cumsum(num_words)
    total = int(ends[-1]) if len(ends) else 0
    sums = np.zeros(len(lengths), dtype=np.uint64)
    if total == 0:
        return _finish(sums, lengths)
    starts = ends - num_words
    position = np.arange(total) - np.repeat(starts, num_words)
    first_byte = np.repeat(offsets[:-1], num_words) + 8 * position
    num_bytes = np.minimum(np.repeat(lengths, num_words) - 8 * position, 8)
    words = _load_words(data, first_byte, num_bytes)
    mixed = mix(words ^ _position_keys(int(num_words.max()))[position])
    nonempty = num_words > 0
    sums[nonempty] = np.add.reduceat(mixed, starts[nonempty])
    return _finish(sums, lengths)


def _hash_fixed_width(texts: np.ndarray) -> np.ndarray:
    """Hash texts of numpy's `bytes_` type: a matrix of bytes, padded with zeros."""
    width = max(texts.dtype.itemsize, 1)
    num_words = (width + 7) // 8
    padded = np.zeros((len(texts), num_words * 8), dtype=np.uint8)
    padded[:, :width] = np.ascontiguousarray(texts).view(np.uint8).reshape(len(texts), width)
    words = padded.view("<u8").astype(np.uint64, copy=False)
    lengths = np.strings.str_len(texts).astype(np.int64)
    mixed = mix(words ^ _position_keys(num_words))
    used = np.arange(num_words) * 8 < lengths[:, None]
    return _finish(np.where(used, mixed, np.uint64(0)).sum(axis=1, dtype=np.uint64), lengths)


def _load_words(data: np.ndarray, first_byte: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Little-endian words of 1 to 8 bytes that start anywhere, out of two aligned ones each."""
    aligned = np.zeros(len(data) // 8 + 2, dtype="<u8")
    aligned.view(np.uint8)[: len(data)] = data
    index = first_byte >> 3
    shift = ((first_byte & 7) << 3).astype(np.uint64)
    low = aligned[index].astype(np.uint64, copy=False) >> shift
    high = (aligned[index + 1].astype(np.uint64, copy=False) << (np.uint64(63) - shift)) << np.uint64(1)
    unused_bits = (64 - 8 * num_bytes).astype(np.uint64)
    keep = np.uint64(0xFFFFFFFFFFFFFFFF) >> unused_bits
    return (low | high) & keep


def _position_keys(num_words: int) -> np.ndarray:
    return mix(np.arange(1, num_words + 1, dtype=np.uint64) * GOLDEN)


def _finish(sums: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return mix(sums + (lengths.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def _to_bytes(item: object) -> bytes:
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, int) and not isinstance(item, bool):
        return str(item).encode()
    raise TypeError(f"ids must be integers or text, not {type(item).__name__}")
