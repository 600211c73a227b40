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
from jaxtyping import Int64, Integer, Shaped, UInt8, UInt64

# 2^64 divided by the golden ratio, and the two multipliers: the constants of splitmix64. Data sets rely on them.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
MULTIPLIERS = (_MULTIPLIER_1, _MULTIPLIER_2)
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
        # The longest 64-bit integers have 20 characters: 19 digits and a sign, or 20 digits.
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
    """The stable hash of N texts that lie one after the other in `data` (Arrow's layout).

    Args:
        offsets: (N + 1,) rising positions in `data`; text i is `data[offsets[i] : offsets[i + 1]]`.
        data: (M,) UTF-8 bytes.

    Returns:
        (N,) hashes.
    """
    cuts = np.asarray(offsets, dtype=np.int64)
    words = aligned_words(data[cuts[0] : cuts[-1]])
    return hash_spans(cuts[:-1] - cuts[0], lengths=np.diff(cuts), words=words)


def hash_spans(
    starts: Integer[np.ndarray, "N"], *, lengths: Integer[np.ndarray, "N"], words: UInt64[np.ndarray, "W"]
) -> UInt64[np.ndarray, "N"]:
    """The stable hash of N texts that lie anywhere in one buffer.

    Args:
        starts: (N,) first byte of each text.
        lengths: (N,) bytes of each text.
        words: the buffer, from `aligned_words`.

    Returns:
        (N,) hashes.
    """
    hashes = np.empty(len(starts), dtype=np.uint64)
    for start in range(0, len(starts), _BLOCK_IDS):
        block = slice(start, start + _BLOCK_IDS)
        hashes[block] = _hash_block(starts[block], lengths[block], words)
    return hashes


def hash_words(words: UInt64[np.ndarray, "N"], *, lengths: Integer[np.ndarray, "N"]) -> UInt64[np.ndarray, "N"]:
    """The stable hash of N texts of at most eight bytes.

    Args:
        words: (N,) the bytes of each text as a little-endian word; what follows the text in it is ignored.
        lengths: (N,) bytes of each text, 0 to 8.

    Returns:
        (N,) hashes.
    """
    mixed = mix(_masked(words, lengths) ^ _position_keys(1)[0])
    # An empty text has no word, so it has nothing to add up.
    if not bool(lengths.all()):
        mixed[lengths == 0] = 0
    return _finish(mixed, lengths)


def aligned_words(data: bytes | UInt8[np.ndarray, "M"]) -> UInt64[np.ndarray, "W"]:
    """A buffer of bytes as little-endian 64-bit words, with zeros behind its end: what `load_words` reads from."""
    array = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
    # One word more than the bytes need: `load_words` always reads two neighbours.
    words = np.zeros(len(array) // 8 + 2, dtype="<u8")
    words.view(np.uint8)[: len(array)] = array
    return words.astype(np.uint64, copy=False)


def load_words(words: UInt64[np.ndarray, "W"], first_byte: Integer[np.ndarray, "N"]) -> UInt64[np.ndarray, "N"]:
    """The eight bytes from `first_byte` on, as little-endian words, out of two aligned words each."""
    index = first_byte >> 3
    shift = ((first_byte & 7) << 3).astype(np.uint64)
    low = words[index] >> shift
    high = words[index + 1] << (np.uint64(63) - shift)
    high <<= np.uint64(1)  # in two steps: a shift by 64 is not defined
    low |= high
    return low


def mix(values: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """The finaliser of splitmix64: a bijection of 64-bit numbers in which every input bit moves every output bit."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _hash_block(starts: np.ndarray, lengths: np.ndarray, words: np.ndarray) -> np.ndarray:
    longest = int(lengths.max()) if len(lengths) else 0
    if longest <= 8:  # one word at most: no need to sum
        return hash_words(load_words(words, starts), lengths=lengths)
    num_words = (lengths.astype(np.int64) + 7) >> 3
    ends = np.cumsum(num_words)
    firsts = ends - num_words
    position = np.arange(int(ends[-1])) - np.repeat(firsts, num_words)
    first_byte = np.repeat(starts, num_words) + 8 * position
    num_bytes = np.minimum(np.repeat(lengths, num_words) - 8 * position, 8)
    mixed = mix(_masked(load_words(words, first_byte), num_bytes) ^ _position_keys(int(num_words.max()))[position])
    sums = np.zeros(len(lengths), dtype=np.uint64)
    # For an empty span `reduceat` gives the element at its start instead of 0.
    nonempty = num_words > 0
    sums[nonempty] = np.add.reduceat(mixed, firsts[nonempty])
    return _finish(sums, lengths)


def _masked(loaded: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Words with the bytes behind the first `num_bytes` (0 to 8) set to zero."""
    if bool((num_bytes == 8).all()):
        return loaded
    unused_bits = (64 - 8 * np.maximum(num_bytes, 1)).astype(np.uint64)  # a shift by 64 is not defined
    return loaded & (np.uint64(0xFFFFFFFFFFFFFFFF) >> unused_bits)


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
