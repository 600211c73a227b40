"""A finished run whose files were damaged: verify says what, loading takes what is intact and says what it took."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from tests.end_to_end.test_towers import SCHEMA
from ziggurat.cli.main import main
from ziggurat.errors import DataError
from ziggurat.runs.load import load_run
from ziggurat.runs.verify import _unpinned
from ziggurat.training.checkpoint import Checkpoint, CheckpointStore
from ziggurat.training.checkpoint.retention import complete_steps, step_folder
from ziggurat.training.position import Position
from ziggurat.training.records.run_folder import INPUTS, read_evaluation


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZIGGURAT_CACHE", str(place / "cache"))
        events(1200).write_parquet(place / "events.parquet")
        ziggurat.write_schema(SCHEMA, place / "my.toml", comments=None)
        start = [
            "train",
            "table_dlrm",
            "--data.train",
            str(place / "events.parquet"),
            "--schema",
            str(place / "my.toml"),
        ]
        start += [*SMALL, "--training.precision", "fp32", "--model.embedding.kernel", "torch"]
        assert main([*start, "--training.epochs", "3", "--out", str(place / "run")]) == 0
    return place / "run"


@pytest.fixture
def copy(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(run.parent / "cache"))
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.mark.parametrize("name", ["ledger.bin", "metrics.jsonl"])
def test_verify_calls_damage_damage(copy: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(copy)]) == 0
    content = (copy / name).read_bytes()
    for damaged in (content[: len(content) // 2], bytes(len(content)), b""):
        (copy / name).write_bytes(damaged)
        capsys.readouterr()
        assert main(["verify", str(copy)]) == 1
        said = capsys.readouterr().out
        assert f"{name}: DAMAGED" in said
        assert "partial" not in said
        assert "start_new" in said


SMALL_FILES = ("inputs.json", "data.json", "startup.json", "evaluations/test.json", "preprocessing/preprocessing.json")


@pytest.mark.parametrize("name", [*SMALL_FILES, "preprocessing/vocabulary_000.parquet"])
def test_verify_sees_damage_to_every_small_file(copy: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = (copy / name).read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damaged in (flipped, content[:middle], b""):
        (copy / name).write_bytes(damaged)
        capsys.readouterr()
        assert main(["verify", str(copy)]) == 1
        said = capsys.readouterr().out
        assert f"{name.removesuffix('/preprocessing.json').removesuffix('/vocabulary_000.parquet')}: DAMAGED" in said
        assert "ways out:" in said


def test_a_checkpoint_that_the_run_deletes_while_it_is_verified_is_not_damaged(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    oldest = complete_steps(copy / "checkpoints")[0]
    look = CheckpointStore.verify

    def behind_the_run(store: CheckpointStore, step: int) -> None:
        if step == oldest:
            shutil.rmtree(step_folder(copy / "checkpoints", step))
        look(store, step)

    monkeypatch.setattr(CheckpointStore, "verify", behind_the_run)
    assert main(["verify", str(copy)]) == 0
    assert f"checkpoint {oldest}: deleted meanwhile" in capsys.readouterr().out


@pytest.mark.parametrize(("now", "unpinned"), [(7, 0), (5, 5)])
def test_a_pin_that_the_run_moves_while_it_is_verified_is_not_missed(now: int, unpinned: int) -> None:
    def knowing(best: int) -> Checkpoint:
        position = Position(step=6, best_step=best)
        return Checkpoint(step=6, tensors={}, state={"position": position.to_json()})

    store = SimpleNamespace(steps=lambda: [5, 6, 7], pinned=lambda: [7], load=lambda **settings: knowing(now))
    assert _unpinned(cast(CheckpointStore, store), knowing(5)) == unpinned


def test_verify_misses_the_pin_of_the_best_checkpoint_and_says_how_to_set_it(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = list((copy / "checkpoints").glob("*.pinned"))
    assert pins
    for pin in pins:
        pin.unlink()
    assert main(["verify", str(copy)]) == 1
    said = capsys.readouterr().out
    assert "NOT PINNED" in said
    subprocess.run(said.split("pin it: ")[1].splitlines()[0], shell=True, check=True)
    assert main(["verify", str(copy)]) == 0


def test_verify_compares_inputs_with_vocabularies(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = INPUTS.read(copy / "inputs.json")
    inputs["tables"][0]["num_rows"] += 1
    INPUTS.write(copy / "inputs.json", inputs)
    assert main(["verify", str(copy)]) == 1
    assert "inputs.json: DAMAGED" in capsys.readouterr().out


def test_loading_takes_the_newest_checkpoint_where_the_best_is_gone(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = sorted((copy / "checkpoints").glob("step-*[0-9]"))
    newest = int(steps[-1].name.split("-")[1])
    state = json.loads((steps[-1] / "state.json").read_text())
    best = state["position"]["best_step"]
    if best == newest:  # then the one before is the newest intact one
        shutil.rmtree(steps[-1])
        (copy / f"checkpoints/{steps[-1].name}.pinned").unlink(missing_ok=True)
        assert load_run(copy).step < newest
        return
    shutil.rmtree(copy / f"checkpoints/step-{best:012d}")
    with caplog.at_level(logging.WARNING):
        assert load_run(copy).step == newest
    assert f"the best checkpoint (step {best}) is lost; that of step {newest} is taken" in caplog.text


def test_loading_takes_an_intact_checkpoint_where_the_best_is_damaged(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = load_run(copy).step
    weights = next((copy / f"checkpoints/step-{best:012d}").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert load_run(copy).step != best
    assert "damaged" in caplog.text


@pytest.mark.parametrize("content", ['{"position": 3}', "[]", '{"metrics": 3}', '{"metrics": {}, "slices": [1]}'])
def test_other_content_in_the_place_of_an_evaluation_is_found(tmp_path: Path, content: str) -> None:
    path = tmp_path / "test.json"
    path.write_text(content)
    with pytest.raises(DataError, match="other content"):
        read_evaluation(path)


@pytest.mark.parametrize("name", ["ledger.bin", "metrics.jsonl"])
def test_the_way_out_of_a_damaged_record_can_be_taken(
    copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    assert main(["train", str(copy), "--resume", "--training.epochs", "4"]) == 2
    way = next(line for line in capsys.readouterr().err.splitlines() if "start_new" in line)
    command = shlex.split(way.partition(": ")[2])
    assert main(command[1:]) == 0  # of a finished run, too
    assert f"{name} is damaged: a new one begins after step" in capsys.readouterr().err
    (aside,) = copy.glob(f"{name}.damaged-at-*")
    assert aside.read_bytes() == content
    assert main(["train", str(copy), "--resume", "--training.epochs", "4"]) == 0
    assert list(copy.glob(f"{name}.damaged-at-*")) == [aside]
    assert aside.read_bytes() == content
    capsys.readouterr()
    main(["verify", str(copy)])
    assert "DAMAGED" not in capsys.readouterr().out


def test_a_report_of_a_damaged_log_says_what_it_lacks(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(copy)]) == 0
    assert "is damaged" not in (copy / "report.html").read_text() + capsys.readouterr().out
    log = copy / "metrics.jsonl"
    content = log.read_bytes()
    lines = content.splitlines(keepends=True)
    at = content.index(b'"log_loss": 0.') + 14
    digit = b"1" if content[at : at + 1] == b"0" else b"0"
    damage = {
        "2 lines from the first that cannot be read": b"".join([*lines[:-2], b"\0\0\n", lines[-1]]),
        "1 line from the first": b"".join([*lines[:-1], lines[-1].replace(b'"step"', b'"stap"')]),
        "other content in them": content[:at] + digit + content[at + 1 :],
        " bytes, unlike": b"".join(lines[:2]),
    }
    for said, damaged in damage.items():
        log.write_bytes(damaged)
        assert main(["report", str(copy)]) == 1
        assert said in capsys.readouterr().out
        assert said in (copy / "report.html").read_text()


def test_verify_names_the_newest_intact_checkpoint_only_where_there_is_one(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *others, newest = sorted((copy / "checkpoints").glob("step-*[0-9]"))
    for path in (newest, *others):
        (path / "state.json").write_bytes(b"{}")
        capsys.readouterr()
        assert main(["verify", str(copy)]) == 1
        said = capsys.readouterr().out
        is_one_left = "intact\n" in said
        assert ("the newest intact checkpoint is used" in said) == is_one_left
        assert ("restore a checkpoint from a copy" in said) != is_one_left
    assert not is_one_left
