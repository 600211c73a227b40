"""First look: what a model needs of the training data before its first step, and what the data must be for it.

Most models need nothing. A model whose loss compares samples with each other (in-batch negatives) wants batches of
whole blocks, and one that corrects for how often an item is drawn counts the items of all training rows first.
"""

from __future__ import annotations

from ziggurat.data.encoded.loader import LoaderConfig, is_dataset
from ziggurat.errors import ConfigError
from ziggurat.models import Model
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.evaluation.full_ranking_pass import FullRankings
from ziggurat.training.negatives import DrawnNegatives

_ROWS = 65_536


def first_look(model: Model, train: object, *, valid: object, loader: LoaderConfig) -> FullRankings:
    """Let a model observe its training data, each rank all of it; returns how its splits are ranked.

    Args:
        model: see `Model.observe`.
        train: a data set, which is read once where the model asks for it; or a source of batches, which is not.
        valid: the validation data, or None.
        loader: cuts a data set into batches.

    Raises:
        ConfigError: batches that are no multiple of the model's blocks, or a source that nobody observed.
    """
    if is_dataset(train):
        check_blocks(model, batch_size=loader.batch_size)
    if model.observes and is_dataset(train):
        model.observe(ordered_batches(train, batch_size=_ROWS).batches(epoch=0))
    elif model.observes and not model.has_observed:
        raise ConfigError(
            expected="a model that has observed its training data: it corrects for how often each item is drawn",
            found=f"a source of batches ({type(train).__name__}), and nothing observed",
            where=f"model {type(model).__name__}, before the first step",
            ways_out=(
                "model.observe(batches), with every training sample once, before it is trained",
                "train from a data set: zg.prepare(…).train",
                'correction = "none", which pushes popular items down',
            ),
        )
    return FullRankings(model, train=train, valid=valid)


def drawn_negatives(model: Model, train: object, *, rankings: FullRankings, seed: int) -> DrawnNegatives | None:
    """Return the object that draws negatives for the batches of a run; None where the model wants none.

    Args:
        model: see `Model.draws`.
        train: a data set.
        rankings: of the run.
        seed: of the run.

    Raises:
        ConfigError: a source of batches, whose items nobody knows; or nothing in the data to mine by.
    """
    if model.draws is None:
        return None
    if not rankings.names:
        raise ConfigError(
            expected="a data set to train on: negatives are drawn from the items of its samples",
            found=f"a source of batches ({type(train).__name__})",
            where=f"model {type(model).__name__}, negatives.kind = {model.draws.kind.value}",
            ways_out=("train from a data set: zg.prepare(…).train", 'negatives.kind = "in_batch"'),
        )
    assert is_dataset(train), "a source has no rankings"
    return DrawnNegatives(model, train=train, ranking=rankings.of_training(), seed=seed)


def check_blocks(model: object, *, batch_size: int) -> None:
    """Refuse batches that cut the blocks whose samples a loss compares with each other.

    Args:
        model: a model, or the config of one; see `Model.coupled_samples`.
        batch_size: of a rank.

    Raises:
        ConfigError: it is no multiple.
    """
    block = getattr(model, "coupled_samples", 1)
    if batch_size % block:
        raise ConfigError(
            expected=f"a batch size (of a rank) that is a multiple of {block}: the loss compares so many consecutive "
            "samples, and must not depend on the number of ranks",
            found=f"batch_size = {batch_size:,}",
            where="training settings, loader.batch-size, and model.negatives-block",
            ways_out=(f"--batch-size {-(-batch_size // block) * block}", f"--model.negatives-block {batch_size}"),
        )
