"""The space of training: one for all models, whose dimensions have an effect on the tables that there are."""

from __future__ import annotations

from ziggurat.embeddings import EmbeddingConfig, TableOptimizerKind
from ziggurat.models.contract.search_space import Choices
from ziggurat.recipes.protocols import bars_tables, bars_training
from ziggurat.training.config import TrainingConfig
from ziggurat.training.search_space import training_space


def test_a_penalty_is_searched_where_tables_have_dense_gradients() -> None:
    dense = {each.name for each in training_space(bars_training(embedding_l2=0.1), tables=bars_tables())}
    fused = EmbeddingConfig(optimizer=TableOptimizerKind.ROWWISE_ADAGRAD)
    sparse = {each.name for each in training_space(TrainingConfig(), tables=fused)}
    assert dense - sparse == {"embedding_l2"}
    assert sparse - dense == {"table_learning_rate"}


def test_ranges_do_not_depend_on_what_a_model_was_given() -> None:
    first = training_space(bars_training(embedding_l2=0.01), tables=bars_tables())
    assert first == training_space(bars_training(embedding_l2=0.5, learning_rate=1e-2), tables=bars_tables())


def test_batches_lie_around_that_of_the_run() -> None:
    space = training_space(bars_training(embedding_l2=0.1, batch_size=100), tables=bars_tables())
    assert space[-1] == Choices("loader.batch_size", ("50", "100", "200"))
