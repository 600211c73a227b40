"""The dispatch of a run: a copy of the file that training began with, which all later steps and scores compute by.

    --training.dispatch FILE ─► RUN/dispatch.json ─► every rank, every resumed start, evaluate --precision dispatch

The file of the user may be written anew at any time, with other kernels; the run then goes on by its copy. One that is
given to a resumed run has to say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError
from ziggurat.files import digest_of
from ziggurat.precision.dispatch import DISPATCH
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training.records.run_folder import RunFolder


def content_of(config: RunConfig) -> dict[str, str]:
    """Return the digest of the file of a run, for the comparison of ranks; nothing where there is no file."""
    path = config.training.dispatch
    if not path or not Path(path).exists():
        return {}
    return {"training.dispatch, content": digest_of(DISPATCH.read(path))[:16]}


def keep_dispatch(config: RunConfig, run: RunFolder, *, has_begun: bool, is_given: bool) -> None:
    """Keep a copy of the file in the run's folder; call on the rank that writes.

    Args:
        config: of the run.
        run: its folder.
        has_begun: whether the copy there is that of the run, and no leftover of a start that died.
        is_given: whether a resumed run was given a file of its own.

    Raises:
        ConfigError: the run began with another dispatch, or the file is damaged.
        MissingFileError: there is no file.
    """
    path = config.training.dispatch
    if not path or (has_begun and run.dispatch.exists() and not is_given):
        return
    facts = DISPATCH.read(path)
    if not has_begun or not run.dispatch.exists():
        DISPATCH.write(run.dispatch, facts)
        return
    kept = DISPATCH.read(run.dispatch)
    if kept != facts:
        raise ConfigError(
            expected=f"the dispatch that the run began with, SHA-256 {digest_of(kept)[:16]}",
            found=f"{path}, SHA-256 {digest_of(facts)[:16]}",
            where="--training.dispatch of a run that is resumed",
            ways_out=(
                f"leave it out: the run kept its own (ziggurat train {pasted(run.path)} --resume)",
                "start a new run by the other file: --out ANOTHER_FOLDER, without --resume",
            ),
        )


def by_kept_dispatch(config: RunConfig, run: RunFolder) -> RunConfig:
    """Return the config with the copy in place of the user's file."""
    if not config.training.dispatch:
        return config
    return replace(config, training=replace(config.training, dispatch=str(run.dispatch.absolute())))


@contextmanager
def naming_given_dispatch(given: str, *, kept: str) -> Iterator[None]:
    """Let errors within name the file that was given, where they name its copy in the run's folder.

    Args:
        given: path of the user's file; the copy's own where a run goes on by it.
        kept: path of the copy.
    """
    try:
        yield
    except ConfigError as error:
        is_of_copy = error.where == kept or error.where.startswith(f"{kept}, ")
        if not kept or given == kept or not is_of_copy:
            raise
        raise ConfigError(
            expected=error.expected,
            found=error.found,
            where=given + error.where.removeprefix(kept),
            ways_out=error.ways_out,
        ) from error
