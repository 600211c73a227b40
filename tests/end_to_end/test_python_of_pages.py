"""Every block of Python in the documentation runs: here, page by page, or in the test that is named here.

A block that opens with "python" is whole: with those above it on its page it runs as it stands. One that opens with
"py" is a fragment. Pages that speak of runs and exports find small ones under the names that they use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.end_to_end.test_documentation import DOCUMENTS, ROOT, blocks, functions_of, named
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.features.items import Items
from ziggurat.features.kinds import Feature
from ziggurat.models import MLPConfig
from ziggurat.models.retrieval.encoders import EncoderConfig
from ziggurat.ops.row_formats import RowFormat
from ziggurat.ops.table_optimizers import TableOptimizerKind
from ziggurat.placements import Placement
from ziggurat.precision import Precision
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.metrics import Metric

OF_DOCUMENTATION = "tests/end_to_end/test_documentation.py"
RUN_ELSEWHERE = {
    "README.md": (OF_DOCUMENTATION, "test_python_of_the_readme_runs"),
    "docs/tour.md": (OF_DOCUMENTATION, "test_python_of_the_tour_runs"),
    "docs/maintainers/formats.md": (OF_DOCUMENTATION, "test_python_of_a_maintainers_page_runs"),
    "docs/maintainers/own-loss.md": (OF_DOCUMENTATION, "test_python_of_a_maintainers_page_runs"),
    "docs/guides/bring-your-own-data.md": ("tests/data/test_guide_own_data.py", "test_the_python_of_the_guide_runs"),
    "docs/guides/looking-into-a-run.md": (
        "tests/runs/test_guide_looking_into_a_run.py",
        "test_the_code_of_the_guide_runs",
    ),
    "docs/guides/own-model.md": (
        "tests/models/test_guide_own_model.py",
        "test_the_guide_runs_on_one_device_and_on_four_ranks",
    ),
    "docs/guides/torchrec.md": ("tests/bridges/test_guide.py", "test_the_guide_runs"),
}
FILMS = ("Alien (1979)", "Heat (1995)", "Fargo (1996)", "Brazil (1985)", "Dune (1984)", "Gattaca (1997)")
SCHEMA = zg.Schema(
    features=(
        zg.Categorical(name="user_id"),
        zg.Dense(name="age"),
        zg.Categorical(name="movie_id"),
        zg.MultiHot(name="genres"),
        zg.Dense(name="year"),
    ),
    labels=(zg.Label(name="like", column="rating", positive_from=4.0),),
    group="user_id",
    time="timestamp",
    items=Items(id="movie_id", features=("movie_id", "genres", "year")),
)
LOG = zg.Schema(
    features=(zg.Categorical(name="movie_id"),),
    group="user_id",
    time="timestamp",
    items=Items(id="movie_id", features=("movie_id",)),
    events=zg.Events(max_length=8),
)
SETTINGS = zg.TrainingConfig(epochs=1, threads=1, loader=zg.LoaderConfig(batch_size=64))


def has_python(document: Path) -> bool:
    return any(language == "python" for language, _ in blocks(document))


PAGES = [page for page in DOCUMENTS if has_python(page) and named(page) not in RUN_ELSEWHERE]


def ratings(num_rows: int) -> pl.DataFrame:
    """Who rated which film, and when; each user has an age and each film a year and genres."""
    draw = np.random.default_rng(0)
    user = draw.integers(1, 31, num_rows)
    film = draw.integers(0, len(FILMS), num_rows)
    genres = [["Drama"], ["Drama", "Sci-Fi"], ["Comedy"]]
    return pl.DataFrame(
        {
            "user_id": user,
            "age": 20 + user,
            "movie_id": [FILMS[each] for each in film],
            "genres": [genres[each % 3] for each in film],
            "year": [int(FILMS[each][-5:-1]) for each in film],
            "rating": 1 + (user + film) % 5,
            "timestamp": 1_700_000_000 + 60 * np.arange(num_rows),
        }
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs, the export and the files that pages name."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        frame = ratings(600)
        frame.write_parquet("events.parquet")
        frame.head(3).write_parquet("new.parquet")
        small = MLPConfig(hidden_dims=(8,))
        tables = EmbeddingConfig(kernel=KernelChoice.TORCH)
        encoder = EncoderConfig(hidden=small)
        two_tower = zg.TwoTowerConfig(
            embedding_dim=4, output_dim=8, negatives_block=64, user=encoder, item=encoder, embedding=tables
        )
        ranker = zg.DCNv2Config(embedding_dim=4, deep=small, embedding=tables)
        follower = zg.NextItemConfig(embedding_dim=8, embedding=tables)
        data = zg.DataConfig(train=("events.parquet",))
        runs = (("movielens_two_tower", two_tower, SCHEMA), ("clicks", ranker, SCHEMA), ("next", follower, LOG))
        for name, model, schema in runs:
            config = zg.RunConfig(data=data, table_schema=schema, model=model, training=SETTINGS)
            zg.train_run(config, folder=f"runs/{name}")
        zg.export_run(
            "runs/movielens_two_tower",
            ranker="runs/clicks",
            out="exports/films",
            config=zg.ExportConfig(value="like", num_candidates=6, golden=2, program=False),
        )
    return folder


@pytest.fixture
def known_members() -> Iterator[None]:
    """Members of kinds as they were before a page added its own."""
    before = {kind: dict(kind._members) for kind in (Placement, RowFormat, TableOptimizerKind, Precision, Metric, Hook)}
    kinds_of_feature = dict(Feature._kinds)
    yield
    for kind, members in before.items():
        kind._members.clear()
        kind._members.update(members)
    Feature._kinds.clear()
    Feature._kinds.update(kinds_of_feature)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_of_a_page_runs(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch, known_members: None) -> None:
    monkeypatch.chdir(place)
    names: dict[str, object] = {}
    for number, (language, content) in enumerate(blocks(page)):
        if language == "python":
            exec(compile(content, f"{named(page)}, block {number + 1}", "exec"), names)


def test_pages_that_run_elsewhere_are_read_by_the_test_that_is_named() -> None:
    for page, (file, test) in RUN_ELSEWHERE.items():
        assert has_python(ROOT / page), f"{page} has no Python any more"
        assert test in functions_of(ROOT / file), test
        assert Path(page).name in (ROOT / file).read_text(), f"{file} does not read {page}"


def test_a_block_is_either_whole_or_a_fragment() -> None:
    for document in DOCUMENTS:
        opened = re.findall(r"^ *```([^\s`]*)", document.read_text(), re.MULTILINE)
        wrong = {
            language for language in opened if language.lower().startswith("py") and language not in ("python", "py")
        }
        assert not wrong, f"{named(document)}: {wrong}; write python, or py for a fragment"
