"""A run that begins from another one: rows follow raw ids, what is not taken is said, and the parent may go."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

import ziggurat as zg
from ziggurat.cache import cache_folder
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.data.preprocess.values.vocabulary import Ids
from ziggurat.errors import CheckpointError, ConfigError, MissingFileError
from ziggurat.features.schema import Encoding, Table
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.execute import RunResult, train_run
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.records.run_folder import STARTUP, WARM_START, RunFolder

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.MultiHot(name="tags"), zg.Dense(name="price")),
    labels=(zg.Label(name="click"),),
    time="ts",
)
DNN = zg.DNNConfig(embedding_dim=4, deep=zg.MLPConfig(hidden_dims=(8,)))


def events(num_rows: int, *, seed: int = 0, first_user: int = 0, name: str = "u") -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    users = first_user + rng.zipf(1.3, num_rows) % 40
    return pl.DataFrame(
        {
            "user": [f"{name}{user}" for user in users],
            "tags": [[f"{name}t{tag}" for tag in rng.integers(0, 9, rng.integers(0, 3))] for _ in users],
            "price": rng.random(num_rows),
            "ts": np.arange(num_rows),
            "click": (rng.random(num_rows) < 0.2 + 0.6 * (users % 2)).astype(np.int8),
        }
    )


def config_of(
    settings: dict[str, str] | None = None, *, schema: zg.Schema = SCHEMA, model: zg.ModelConfig = DNN
) -> RunConfig:
    usual = {"training.epochs": "1", "training.loader.batch-size": "64", "training.threads": "1"}
    config = zg.table_run(model, schema)
    return override(config, usual | (settings or {}))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_folder() / "kernels")  # compiled once, and not for these tests
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def tensors(run: RunResult, step: int | None = None) -> dict[str, Tensor]:
    return dict(CheckpointStore(run.folder / "checkpoints").load(step).tensors)


def taken_at(run: RunResult) -> dict[str, Tensor]:
    """Return what the best checkpoint of a parent has."""
    return tensors(run, run.fit.best_step or None)


def ids_of(run: RunResult, table: str) -> list[str]:
    return zg.load_run(run.folder).preprocessing.vocabularies[table].ids.to_list()


def test_the_same_data_goes_on_with_exactly_the_parents_weights(place: Path) -> None:
    first = train_run(config_of(), folder="runs/a", data=events(600))
    again = config_of({"warm-start.optimizers": "true"})
    second = train_run(again, folder="runs/b", data=events(600), warm_start=first)
    before = taken_at(first)
    begun = tensors(second, 0)
    # Random numbers are the run's own; all else is what the parent ended with.
    assert {name for name in before if not name.startswith("rng.")} == {n for n in begun if not n.startswith("rng.")}
    for name, tensor in begun.items():
        if name.startswith("rng."):
            continue
        rows = slice(3, None) if ".tables." in name or (name.startswith("table_optimizer.") and tensor.dim()) else ...
        assert torch.equal(tensor[rows], before[name][rows]), name
    assert not torch.equal(
        tensors(second)["model.embeddings.tables.user.weight"], before["model.embeddings.tables.user.weight"]
    )


@pytest.mark.parametrize("block_bytes", [64 << 20, 100])
def test_rows_follow_their_ids_and_a_plain_dict_says_the_same(
    place: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("ziggurat.runs.warm_start.parent._BLOCK_BYTES", block_bytes)
    first = train_run(config_of(), folder="runs/a", data=events(600))
    second = train_run(config_of(), folder="runs/b", data=events(600, seed=3, first_user=15), warm_start=first)
    before = taken_at(first)
    begun = tensors(second, 0)
    record = WARM_START.read(second.folder / "warm_start.json")
    for table in ("user", "tags"):
        name = f"model.embeddings.tables.{table}.weight"
        vectors = dict(zip(ids_of(first, table), before[name][3:], strict=True))
        ids = ids_of(second, table)
        known = [each for each in ids if each in vectors]
        (counted,) = [each for each in record["tables"] if each["table"] == table]
        assert (counted["taken"], counted["new"]) == (len(known), len(ids) - len(known))
        assert counted["gone"] == len(vectors) - len(known)
        for row, each in enumerate(ids, start=3):
            if each in vectors:
                assert torch.equal(begun[name][row], vectors[each]), each
        assert torch.equal(begun[name][1:3], before[name][1:3])  # unknown, missing
    assert known
    page = (second.folder / "report.html").read_text()
    said = (second.folder / "run.log").read_text()
    assert "Warm start" in page
    assert "by raw id" in page
    assert "warm start, rows of user" in said


def test_new_ids_keep_the_vectors_that_they_were_drawn(place: Path) -> None:
    frames = {"train": events(400, seed=3, first_user=15), "valid": events(100, seed=4, first_user=15)}
    first = train_run(config_of(), folder="runs/a", data=events(600))
    second = train_run(config_of(), folder="runs/b", data=frames, warm_start=first)
    model = zg.build_model(DNN, zg.load_run(second.folder).model.inputs, seed=second_seed(second))
    drawn = model.embeddings.tables.view("user")
    known = set(ids_of(first, "user"))
    rows = [row for row, each in enumerate(ids_of(second, "user"), start=3) if each not in known]
    assert rows
    assert torch.equal(tensors(second, 0)["model.embeddings.tables.user.weight"][rows], drawn[rows])


def second_seed(run: RunResult) -> int:
    return zg.load_run(run.folder).config.training.seed


def test_a_run_goes_on_without_its_parent_and_names_the_chain(place: Path) -> None:
    first = train_run(config_of(), folder="runs/a", data=events(600))
    second = train_run(config_of(), folder="runs/b", data=events(600), warm_start="runs/a")
    third = train_run(config_of(), folder="runs/c", data=events(600), warm_start=second)
    whole = tensors(third)
    shutil.rmtree("runs/a")
    shutil.rmtree("runs/b")
    # Killed behind the checkpoint of step 0: the log and what came later is gone.
    for step in CheckpointStore(third.folder / "checkpoints").steps():
        if step:
            shutil.rmtree(third.folder / f"checkpoints/step-{step:012d}")
    for marker in (third.folder / "checkpoints").glob("*.pinned"):
        marker.unlink()
    assert main(["train", "runs/c", "--resume"]) == 0
    again = dict(CheckpointStore(third.folder / "checkpoints").load().tensors)
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    ancestors = WARM_START.read(third.folder / "warm_start.json")["ancestors"]
    assert [Path(each["run"]).name for each in ancestors] == ["b", "a"]
    assert len({each["digest"] for each in ancestors}) == 2
    section = STARTUP.read(RunFolder(third.folder).startup)["Warm start"]
    assert "runs/a" in section["1 before"]
    assert first.folder.name == "a"


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again_from_the_same_parent(place: Path) -> None:
    first = train_run(config_of(), folder="runs/a", data=events(600))
    second = train_run(config_of(), folder="runs/b", data=events(600), warm_start=first)
    whole = tensors(second)
    shutil.rmtree(second.folder / "checkpoints")
    config = load_config(second.folder)
    again = train_run(config, folder="runs/b", resume=True)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors(again).items())
    shutil.rmtree(second.folder / "checkpoints")
    train_run(config_of({"training.epochs": "2"}), folder="runs/a", data=events(600), resume=True)
    with pytest.raises(CheckpointError, match="that the run began from"):
        train_run(config, folder="runs/b", resume=True)
    shutil.rmtree(first.folder)
    with pytest.raises(MissingFileError, match="no run"):
        train_run(config, folder="runs/b", resume=True)


def test_what_cannot_be_taken_is_refused_with_ways_out(place: Path) -> None:
    first = train_run(config_of(), folder="runs/a", data=events(600))

    def begin(config: RunConfig, frame: pl.DataFrame | None = None, parent: object = first) -> RunResult:
        shutil.rmtree("runs/b", ignore_errors=True)
        data = events(600) if frame is None else frame
        return train_run(config, folder="runs/b", data=data, warm_start=parent)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="model 'dnn'"):
        begin(config_of(model=zg.LogisticRegressionConfig()))
    with pytest.raises(ConfigError, match="no id is in both"):
        begin(config_of(), events(600, name="x"))
    with pytest.raises(MissingFileError, match="no run"):
        begin(config_of(), parent="runs/none")
    sgd = {"model.embedding.optimizer": "sgd", "warm-start.optimizers": "true"}
    with pytest.raises(ConfigError, match="tables learn by sgd"):
        begin(config_of(sgd))
    begin(config_of({**sgd, "warm-start.optimizers": "false"}))
    wide = {"model.embedding-dim": "6"}
    with pytest.raises(ConfigError, match="4 columns of table 'user'"):
        begin(config_of(wide))
    assert not Path("runs/b/config.json").exists()
    before = taken_at(first)["model.embeddings.tables.user.weight"]
    cut = tensors(begin(config_of({**wide, "warm-start.dims": "cut"})), 0)["model.embeddings.tables.user.weight"]
    assert torch.equal(cut[3:, :4], before[3:])
    fresh = tensors(begin(config_of({**wide, "warm-start.dims": "fresh"})), 0)["model.embeddings.tables.user.weight"]
    assert not torch.equal(fresh[3:, :4], before[3:])
    assert torch.equal(cut[3:, 4:], fresh[3:, 4:])
    # A flipped byte: the file is named, and another checkpoint is a way out that works.
    store = CheckpointStore(first.folder / "checkpoints")
    newest = store.steps()[-1]
    damaged = first.folder / f"checkpoints/step-{newest:012d}/rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors") as error:
        begin(config_of())
    ways = " ".join(error.value.ways_out)
    others = [step for step in store.steps() if step != newest]
    if others:
        assert f"--warm-start.step {others[-1]}" in ways
        begin(config_of({"warm-start.step": str(others[-1])}))


def test_another_network_with_weights_of_the_same_shapes_is_said(place: Path) -> None:
    first = train_run(config_of(), folder="runs/a", data=events(600))
    changes = {"model.deep.activation": "hard_swish", "model.deep.normalization": "block"}
    second = train_run(config_of(changes), folder="runs/b", data=events(600), warm_start=first)
    record = WARM_START.read(second.folder / "warm_start.json")
    assert not record["dense_not_taken"]
    assert record["lines"]["another network"] == (
        'deep.activation "hard_swish" in place of "relu", deep.normalization "block" in place of "none": its '
        "weights were trained in the parent's"
    )
    same = train_run(config_of(), folder="runs/c", data=events(600), warm_start=first)
    assert "another network" not in WARM_START.read(same.folder / "warm_start.json")["lines"]


def test_other_features_leave_the_weights_that_read_them_as_they_were_drawn(place: Path) -> None:
    first = train_run(config_of(), folder="runs/a", data=events(600))
    user, _, price = SCHEMA.features
    swapped = dataclasses.replace(SCHEMA, features=(zg.Categorical(name="day", column="ts"), user, price))
    frame = events(600).with_columns(ts=pl.col("ts") % 7)
    second = train_run(
        config_of(schema=dataclasses.replace(swapped, time="")), folder="runs/b", data=frame, warm_start=first
    )
    record = WARM_START.read(second.folder / "warm_start.json")
    assert record["lines"]["new features"] == "day"
    assert record["lines"]["features gone"] == "tags"
    # As many fields as before, so every shape is as it was: the first layer would have read others.
    (first_layer,) = [name for name in record["dense_not_taken"] if name.endswith("layers.0.weight")]
    begun = tensors(second, 0)
    before = taken_at(first)
    assert begun[f"model.{first_layer}"].shape == before[f"model.{first_layer}"].shape
    assert not torch.equal(begun[f"model.{first_layer}"], before[f"model.{first_layer}"])
    assert any(name.endswith("output.weight") for name in record["dense_taken"])
    for name in record["dense_taken"]:
        assert torch.equal(begun[f"model.{name}"], before[f"model.{name}"])
    renamed = dataclasses.replace(SCHEMA, labels=(zg.Label(name="bought", column="click"),))
    third = train_run(config_of(schema=renamed), folder="runs/c", data=events(600), warm_start=first)
    record = WARM_START.read(third.folder / "warm_start.json")
    assert any("labels are others" in why for why in record["dense_not_taken"].values())
    assert any(name.endswith("layers.0.weight") for name in record["dense_taken"])


def labelled(*names: str) -> zg.Schema:
    labels = {"click": zg.Label(name="click"), "late": zg.Label(name="late", column="is_late")}
    return dataclasses.replace(SCHEMA, labels=tuple(labels[name] for name in names))


def two_labels() -> pl.DataFrame:
    return events(600).with_columns(is_late=(pl.col("ts") > 300).cast(pl.Int8))


def test_networks_of_labels_begin_from_those_of_the_same_labels_alone(place: Path) -> None:
    """A network of one label has no label in its shape: in another order click's would answer for the other one."""
    experts = zg.MLPConfig(hidden_dims=(8,))
    model = zg.MMoEConfig(embedding_dim=4, num_experts=2, expert=experts, head=experts)
    learned = {"label-weights": "uncertainty"}
    both = config_of(learned, schema=labelled("click", "late"), model=model)
    first = train_run(both, folder="runs/a", data=two_labels())
    before = taken_at(first)

    def begin(folder: str, config: RunConfig, parent: RunResult = first) -> tuple[set[str], dict[str, Tensor]]:
        run = train_run(config, folder=folder, data=two_labels(), warm_start=parent)
        return set(WARM_START.read(run.folder / "warm_start.json")["dense_taken"]), tensors(run, 0)

    taken, begun = begin("runs/b", config_of(learned, schema=labelled("late", "click"), model=model))
    assert not any(name.startswith(("heads.", "gates.", "student.")) for name in taken)
    assert torch.equal(begun["model.student.log_variances"], torch.zeros(2))
    assert any(name.startswith("experts.") for name in taken)
    for name in ("heads.networks.0.output.weight", "gates.0.network.output.weight"):
        assert not torch.equal(begun[f"model.{name}"], before[f"model.{name}"])
    # A label in its old place goes on, also where one more comes or one goes behind it.
    taken, begun = begin("runs/c", config_of(learned, schema=labelled("click", "late"), model=model))
    assert {"heads.networks.1.output.weight", "student.log_variances"} <= taken
    taken, begun = begin("runs/d", config_of(schema=labelled("click"), model=model))
    assert "heads.networks.0.output.weight" in taken
    alone = train_run(config_of(schema=labelled("click"), model=model), folder="runs/e/1", data=two_labels())
    taken, begun = begin("runs/e/2", both, alone)
    assert "heads.networks.0.output.weight" in taken
    assert not any(name.startswith("heads.networks.1.") for name in taken)


def test_tables_with_a_column_for_each_label_are_refused_where_labels_are_others(place: Path) -> None:
    model = zg.FMConfig(embedding_dim=4)
    first = train_run(config_of(schema=labelled("click", "late"), model=model), folder="runs/a", data=two_labels())
    for names in (("late", "click"), ("click",)):
        config = config_of(schema=labelled(*names), model=model)
        with pytest.raises(ConfigError, match="a column for each") as caught:
            train_run(config, folder="runs/b", data=two_labels(), warm_start=first)
        assert "--warm-start.dims fresh" in str(caught.value)
        fresh = override(config, {"warm-start.dims": "fresh"})
        second = train_run(fresh, folder=f"runs/{names[0]}", data=two_labels(), warm_start=first)
        assert "as it was drawn" in WARM_START.read(second.folder / "warm_start.json")["lines"]["rows of user"]


@pytest.mark.parametrize("weights", ["int8", "split_bf16", "bf16"])
def test_rows_of_other_formats_are_taken(place: Path, weights: str) -> None:
    low = config_of({"tables.weights": weights})
    first = train_run(low, folder="runs/a", data=events(600))
    plain = train_run(config_of(), folder="runs/b", data=events(600), warm_start=first)
    name = "model.embeddings.tables.user.weight"
    assert torch.equal(tensors(plain, 0)[name][3:], taken_at(first)[name][3:])
    back = train_run(low, folder="runs/c", data=events(600), warm_start=first)
    assert torch.equal(tensors(back, 0)[name][3:], taken_at(first)[name][3:])


def test_tables_on_a_disk_are_taken(place: Path) -> None:
    (place / "disk").mkdir()
    on_disk = config_of({"tables.disk": str(place / "disk"), "tables.memory": "50%"})
    name = "model.embeddings.tables.user.weight"
    first = train_run(config_of(), folder="runs/a", data=events(600))
    second = train_run(on_disk, folder="runs/b", data=events(600), warm_start=first)
    assert torch.equal(tensors(second, 0)[name][3:], taken_at(first)[name][3:])
    back = train_run(config_of(), folder="runs/c", data=events(600), warm_start=second)
    assert torch.equal(tensors(back, 0)[name][3:], taken_at(second)[name][3:])


def growing(num_rows: int) -> zg.Schema:
    table = Table(name="user", encoding=Encoding.GROWING, num_rows=num_rows)
    return dataclasses.replace(SCHEMA, tables=(table,))


def test_vocabularies_that_grow_go_on_with_their_ids(place: Path) -> None:
    fitted = train_run(config_of(), folder="runs/fitted", data=events(600))
    name = "model.embeddings.tables.user.weight"
    frame = {"user": ids_of(fitted, "user")}
    of_fitted = zg.load_run(fitted.folder).preprocessing.rows("user", ids(frame["user"]), {})
    # From a fitted vocabulary to one that grows.
    grows = train_run(config_of(schema=growing(64)), folder="runs/grows", data=events(600, seed=2), warm_start=fitted)
    begun = zg.load_run(grows.folder, step=0)
    rows = begun.preprocessing.rows("user", ids(frame["user"]), {})
    assert (rows >= 3).all()
    assert torch.equal(tensors(grows, 0)[name][rows], taken_at(fitted)[name][of_fitted])
    # From one that grew to a smaller one: the ids of most uses are kept, all of them with their vectors.
    small = train_run(config_of(schema=growing(8)), folder="runs/small", data=events(600, seed=2), warm_start=grows)
    before = zg.load_run(grows.folder).preprocessing.rows("user", ids(frame["user"]), {})
    now = zg.load_run(small.folder, step=0).preprocessing.rows("user", ids(frame["user"]), {})
    assert (now >= 3).sum() == 8
    kept = now >= 3
    assert torch.equal(tensors(small, 0)[name][now[kept]], taken_at(grows)[name][before[kept]])
    # And back to a fitted one.
    back = train_run(config_of(), folder="runs/back", data=events(600), warm_start=grows)
    assert torch.equal(tensors(back, 0)[name][of_fitted], taken_at(grows)[name][before])
    assert main(["verify", str(small.folder)]) == 0


def ids(texts: list[str]) -> Ids:
    return Ids.of(pl.Series(texts))


def test_the_command_takes_schema_and_sizes_of_the_parent(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_run(config_of(), folder="runs/last", data=events(600))
    events(600, seed=1, first_user=5).write_parquet("new.parquet")
    begin = ["train", "table_dnn", "--data.train", "new.parquet", "--warm-start", "runs/last", "--epochs", "1"]
    assert main([*begin, "--warm-start.optimizers", "true", "--out", "runs/new"]) == 0
    record = WARM_START.read(place / "runs/new/warm_start.json")
    assert record["lines"]["optimizers"].startswith("those of the parent")
    assert not record["dense_not_taken"]
    assert main(["verify", "runs/new"]) == 0
    capsys.readouterr()
    assert main(["train", "table_dnn", "--data.train", "new.parquet", "--warm-start", "runs/gone"]) == 2
    assert "runs/gone, --warm-start" in capsys.readouterr().err
    run = zg.fit(events(400, seed=5), warm_start="runs/last", out="runs/fit", settings={"training.epochs": 1})
    assert run.config.warm_start.run.endswith("runs/last")
    assert run.config.model == dataclasses.replace(DNN, embedding=run.config.model.embedding)


def test_rows_of_a_hash_are_taken_into_a_larger_one_block_by_block(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of the parent goes to three of the run: more than one block of rows has."""
    monkeypatch.setattr("ziggurat.runs.warm_start.parent._BLOCK_BYTES", 5 * 4 * 4)  # five rows

    def hashed(num_rows: int) -> RunConfig:
        table = Table(name="user", encoding=Encoding.HASHING, num_rows=num_rows)
        return config_of(
            {"warm-start.optimizers": "true"}, schema=dataclasses.replace(SCHEMA, tables=(*SCHEMA.tables, table))
        )

    first = train_run(hashed(16), folder="runs/a", data=events(600))
    second = train_run(hashed(48), folder="runs/b", data=events(600, seed=3), warm_start=first)
    before = taken_at(first)
    begun = tensors(second, 0)
    kept_by_optimizer = [each for each in begun if each.startswith("table_optimizer.user.") and begun[each].dim()]
    assert kept_by_optimizer
    for name in ("model.embeddings.tables.user.weight", *kept_by_optimizer):
        kept = before[name][3:]
        assert torch.equal(begun[name][3:], torch.cat([kept, kept, kept])), name
        assert torch.equal(begun[name][1:3], before[name][1:3])
