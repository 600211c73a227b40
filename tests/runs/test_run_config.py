"""What a run refuses before it reads a file."""

import dataclasses

import pytest

from ziggurat.config import override
from ziggurat.errors import ConfigError
from ziggurat.recipes.catalogue import recipe_named


@pytest.mark.parametrize("shuffle", ["sessions", "session_lanes"])
def test_a_shuffle_of_sessions_needs_a_session_in_the_schema(shuffle: str) -> None:
    config = override(recipe_named("movielens_dlrm"), {"training.loader.shuffle": shuffle})
    with pytest.raises(ConfigError, match="schema with a session"):
        config.check()
    schema = dataclasses.replace(config.table_schema, session="user_id")
    dataclasses.replace(config, table_schema=schema).check()
