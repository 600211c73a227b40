"""Numbers of shards: how many an index may have, and which of them there are.

Settings and command lines ask this long before an index is read, so it imports nothing (`sharding.py` has the shards).
"""

from __future__ import annotations

from ziggurat.errors import ConfigError

MAX_SHARDS = 256


def check_shard(shard: int, num_shards: int) -> None:
    """Refuse a shard that cannot be.

    Raises:
        ConfigError: names what can.
    """
    if not (1 <= num_shards <= MAX_SHARDS and 0 <= shard < num_shards):
        raise ConfigError(
            expected=f"a shard from 0, of 1 to {MAX_SHARDS}",
            found=f"shard {shard} of {num_shards}",
            where="shards of an index",
            ways_out=("shards 0/2 and 1/2 are those of two", "fewer shards"),
        )
