"""The command line: its flags are frozen, errors have four parts, and settings reach the config."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

import ziggurat
from ziggurat.cli.main import OWN_VERBS, _split_settings, build_parser, main
from ziggurat.cli.settings import arguments_of, described, settings_given
from ziggurat.cli.verbs import RECIPES, any_schema
from ziggurat.config import SHORT_NAMES, override, to_json
from ziggurat.recipes.catalogue import recipe_named

SLICES = ("--slices", "--slice-min-rows", "--report")
FROZEN = {
    "demo": {"--out", "--no-ranks", "--serve", "--sequences", "--stream"},
    "train": {
        *("--config", "--schema", "--towers", "--compression", "--out", "--resume", "--settings"),
        *("--model", "--baseline", "--hook", "--distil", "--teacher", "--warm-start"),
        *("--teacher-history", "--teacher-history-length", "--teacher-history-pooling"),
        *("--plan", "--tower-size", "--context", "--rank-order", "--dense", "--wire", "--exchange"),
        *(f"--{name}" for name in SHORT_NAMES),
    },
    "stream": {
        *("--distil", "--teacher", "--teacher-history", "--teacher-history-length", "--teacher-history-pooling"),
        *(
            "--schema",
            "--by",
            "--from",
            "--until",
            "--late",
            "--future",
            "--growing",
            "--frozen",
            "--model",
            "--out",
            "--plan",
        ),
        *("--settings", "--hook", "--follow", "--delay", "--label-time", "--labels", "--label-key"),
        *("--observe-s", "--attribution-s"),
        "--idle-close-s",
        *("--publish", "--publish-every", "--publish-keep", "--publish-value", "--server"),
        *(f"--{name}" for name in SHORT_NAMES if name not in ("epochs", "patience")),
    },
    "teacher": {
        "--out",
        "--name",
        "--example",
        "--vectors",
        "--history",
        "--watermark",
        "--bad-rows",
        "--step",
        "--model",
    },
    "images embed": {
        *("--backbone", "--weights", "--out", "--resolution", "--scale-model", "--batch-size", "--max-pixels"),
        "--compile",
    },
    "images scale": {
        *("--backbone", "--weights", "--out", "--resolutions", "--scans", "--by-class", "--tau", "--tolerance"),
        *("--sample", "--max-pixels"),
    },
    "images progressive": {"--out", "--max-pixels"},
    "rollback": {"--to"},
    "prepare": {"--config", "--schema"},
    "drift": {"--out", "--windows", "--settings"},
    "evaluate": {
        *("--full-ranking", "--bad-rows", "--step", "--json", "--model", "--ranking-k", "--split", "--precision"),
        *SLICES,
    },
    "predict": {"--bad-rows", "--step", "--out", "--model", "--keep"},
    "embeddings": {"--step", "--out", "--model"},
    "tables": {"--samples", "--table", "--model", "--json", "--plot"},
    "quantise": {
        *("--data", "--split", "--formats", "--by-table", "--step", "--model", "--json", "--plot"),
        *("--products", "--out", "--epochs", "--learning-rate"),
    },
    "numerics formats": {"--vectors", "--json", "--plot"},
    "numerics probe": {"--measure", "--kernels", "--model", "--json"},
    "numerics dispatch": {"--for", "--rows", "--measure", "--model", "--out"},
    "importance": {
        *("--data", "--split", "--metric", "--rounds", "--samples", "--seed", "--features", "--group", "--towers"),
        *("--bad-rows", "--step", "--model", "--json", "--csv", "--plot"),
    },
    "export": {
        *(
            "--out",
            "--dispatch",
            "--ranker",
            "--tables",
            "--by-table",
            "--value",
            "--value-likes",
            "--items",
            "--keep",
            "--no-users",
            "--candidates",
            "--candidates-overarch",
        ),
        *("--parity-rows", "--allow", "--compiled", "--model", "--products"),
    },
    "index recall": {"--k", "--filter", "--users", "--plot", "--model"},
    "recommend": {"--out", "--separator", "--k", "--filter", "--include-seen", "--exclude-seen", "--model"},
    "serve": {
        *("--host", "--port", "--workers", "--threads", "--deadline-ms", "--api-key-file", "--watch", "--model"),
        *("--shards", "--shard-addresses", "--shard"),
    },
    "data inspect": {"--write-schema", "--label", "--positive", "--separator", "--session"},
    "data cluster-by-session": {"--session", "--time", "--out"},
    "data import": {"--sql", "--database", "--out"},
    "data fetch": {"--source"},
    "towers partition": {
        "--towers",
        "--strategy",
        "--balance",
        "--tolerance",
        "--memory-limit-bytes",
        "--seed",
        "--samples",
        "--out",
        "--model",
        *("--settings", "--schema", "--run"),
        *(f"--{name}" for name in SHORT_NAMES if name != "seed"),
    },
    "compare": {
        *("--models", "--seeds", "--trials", "--protocol", "--source", "--rows", "--threads"),
        *("--max-epochs", "--precisions", "--tuned", "--read-test-again"),
        *("--out", "--json", "--schema", "--model", "--target", "--ranks"),
        *(f"--{name}" for name in SHORT_NAMES if name not in ("seed", "threads")),
        "--threads",
    },
    "tune": {
        *("--models", "--model", "--budget", "--hours", "--flops", "--metric", "--space", "--fix", "--show-space"),
        *(
            "--sampler",
            "--pruner",
            "--try-seeds",
            "--seed",
            "--storage",
            "--protocol",
            "--schema",
            "--source",
            "--rows",
        ),
        *("--threads", "--max-epochs", "--max-flops-per-sample", "--max-parameters", "--out"),
        *(f"--{name}" for name in SHORT_NAMES if name not in ("seed", "threads")),
    },
    "scale": {
        *("--schema", "--tuned", "--read-test-again", "--model", "--rates", "--rates-for", "--batch-size", "--lengths"),
        *("--compute", "--points", "--data", "--rows", "--seeds", "--source", "--threads", "--out", "--json"),
    },
    "plan": {
        *("--cluster", "--towers", "--compare", "--save", "--schema", "--compression", "--rows", "--list-length"),
        *("--budget-s", "--seed", "--costs", "--model", "--memory-limit", "--tiers"),
    },
    "simulate": {
        *("--cluster", "--towers", "--plot", "--schema", "--compression", "--rows", "--list-length", "--budget-s"),
        *("--seed", "--model"),
    },
    "cluster show": {"--out"},
    "cluster probe": {"--minutes", "--out", "--samples", "--disk", "--cluster"},
    "cluster order": {"--out", "--for", "--mib", "--days", "--again", "--hostfile", "--hostfile-form"},
    "recipes": set(),
    "report": {"--baseline", "--beside", "--model"},
    "verify": {"--model"},
    "doctor": set(),
    "bench": {"--json", "--quick"},
}


def flags(parser: argparse.ArgumentParser, prefix: str = "") -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    own: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found |= flags(child, f"{prefix} {name}".strip())
        else:
            own |= {option for option in action.option_strings if option not in ("-h", "--help", "--version")}
    return found or {prefix: own}


VERBOSE = {
    *(
        "demo",
        "train",
        "stream",
        "images embed",
        "images scale",
        "images progressive",
        "teacher",
        "prepare",
        "drift",
        "evaluate",
        "predict",
        "tables",
        "quantise",
        "export",
        "recommend",
    ),
    *("towers partition", "compare", "tune", "scale", "cluster probe", "cluster order", "report"),
}


def test_a_glob_that_the_shell_replaced_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first file is the value of the setting, and the second was called no flag."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text("{}\n")
    assert main(["stream", "table_dlrm", "--data.train", *map(str, files)]) == 2
    said = capsys.readouterr().err
    assert f"quote the glob, which the shell has replaced by its files: --data.train '{tmp_path}/*.jsonl'" in said


def test_flags_are_frozen() -> None:
    """A new flag is a decision: settings of runs belong into configs, which need none."""
    expected = {verb: own | ({"--verbose"} if verb in VERBOSE else set()) for verb, own in FROZEN.items()}
    assert flags(build_parser()) == expected


def test_help_is_fast_and_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.process_time()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert time.process_time() - begin < 0.5
    assert "ziggurat train movielens_dlrm" in capsys.readouterr().out


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    children = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in children:
        for child in action.choices.values():
            yield from leaves(child)
    yield parser


@pytest.mark.parametrize("parser", list(leaves(build_parser())), ids=lambda parser: parser.prog)
def test_every_verb_has_examples_that_parse(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    examples = re.findall(rf"^ +{parser.prog}\b(.*?)(?:   .*)?$", parser.epilog or "", flags=re.MULTILINE)
    assert examples, f"{parser.prog} --help shows no example"
    for example in examples:
        known, _ = _split_settings(shlex.split(example.strip()))
        parser.parse_known_args(known)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "movielens_dlmr"], "did you mean 'movielens_dlrm'"),
        (["train"], "ziggurat recipes"),
        (["train", "table_dlrm"], "data inspect"),
        (["train", "movielens_dlrm", "--training.epoch", "2"], "did you mean --training.epochs?"),
        (["train", "movielens_dlrm", "--learning-rate", "2"], "did you mean --training.learning-rate?"),
        (["train", "movielens_dlrm", "--training.lr", "2"], "did you mean --training.learning-rate?"),
        (["train", "movielens_dlrm", "--dropout", "0.1"], "did you mean --model.bottom.dropout?"),
        (["train", "movielens_dlrm", "--batchsize", "64"], "did you mean --training.loader.batch-size?"),
        (["train", "movielens_dlrm", "--training.batch-size", "64"], "1. did you mean --training.loader.batch-size?"),
        (["train", "movielens_dlrm", "--training.loader.epochs", "2"], "1. did you mean --training.epochs?"),
        (["train", "movielens_dlrm", "--precision", "bf17"], "one of auto, fp32, tf32, bf16"),
        (["train", "movielens_dlrm", "--training.epochs", "many"], "a whole number"),
        (["train", "movielens_dlrm", "--training.epochs"], "a value after --training.epochs"),
        (["train", "movielens_dlrm", "--training.epochs", "--verbose"], "a value after --training.epochs"),
        (["train", "movielens_dlrm", "epochs=2"], "begins with --"),
        (["stream", "table_dlrm", "--folow", "--data.train", "clicks/"], "did you mean --follow?"),
        (["stream", "table_dlrm", "--data.train", "clicks/", "--folow"], "did you mean --follow?"),
        (["train", "table_dlrm", "--verbos", "--data.train", "clicks/"], "did you mean --verbose?"),
        (["train", "nowhere", "--resume"], "config.json"),
        (["evaluate", "nowhere", "data.parquet"], "config.json"),
        (["report", "nowhere"], "metrics.jsonl"),
        (["towers", "partition", "nowhere", "--towers", "2"], "config.json"),
        (["towers", "partition", "nowhere", "--towers", "0"], "num_towers"),
        (["doctor", "--colour"], "--colour"),
        (["trian", "movielens_dlrm"], "did you mean 'train'?"),
        (["data", "inspekt", "a.csv"], "did you mean 'inspect'?"),
        (["predict", "runs/a"], "for example: ziggurat predict runs/first today.parquet"),
        (["predict", "runs/a", "b.csv", "--out", "c.csv", "--kepe", "user"], "did you mean --keep?"),
        (["predict", "runs/a", "b.csv", "--out", "c.csv", "--k", "5"], "found:    --k 5"),
        (["predict", "runs/a", "b.csv", "--ou", "c.csv"], "did you mean --out? (--ou is no flag)"),
        (["evaluate", "runs/a", "--spl", "test"], "did you mean --split?"),
        (["train", "table_dlrm", "--sch", "my.toml"], "did you mean --schema?"),
        (["index", "recall", "exports/a", "--filt", "a:b"], "did you mean --filter?"),
        (["evaluate", "runs/a", "b.csv", "--step", "last"], "a whole number after --step"),
        (["evaluate", "runs/a", "b.csv", "--json"], "a value after --json"),
        (["train", "movielens_dlrm", "--epochs", "0"], "a number from 1 on"),
        (["train", "movielens_dlrm", "--lr", "0"], "setting 'training.learning-rate (--lr)'"),
        (["train", "movielens_dlrm", "--data.split.valid-fraction", "2"], "a number from 0 to below 1"),
        (["train", "movielens_dlrm", "--model.top.hidden-dims", "8,0"], "hidden-dims[1]"),
        (["train", "movielens_dlrm", "--tower-size", "-1"], "setting 'parallel.tower-size (--tower-size)'"),
    ],
)
def test_errors_have_four_parts(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    for part in ("expected: ", "found:    ", "where:    ", "ways out:\n  1. "):
        assert part in shown
    assert words in shown


def test_settings_shows_what_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model.embedding-dim=32", "--epochs", "7", "--seed", "5"]
    assert main(["train", "movielens_dlrm", *given, "--settings"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("--")}
    assert rows["--model.embedding-dim"].split()[1:4] == ["int", "16", "32"]
    assert rows["--training.epochs"].split()[1:4] == ["int", "5", "7"]
    assert "passes over the training data" in rows["--training.epochs"]
    assert rows["--training.seed"].split()[3] == rows["--training.loader.seed"].split()[3] == "5"


@pytest.mark.parametrize("flag", ["--parallel.ranks-a-host", "--parallel.ranks_a_host"])
def test_the_old_name_of_a_setting_works_with_a_notice(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "movielens_dlrm", flag, "2", "--settings"]) == 0
    shown = capsys.readouterr()
    rows = {line.split()[0]: line for line in shown.out.splitlines() if line.startswith("--")}
    assert rows["--parallel.ranks-per-host"].split()[1:4] == ["int", "0", "2"]
    assert "--parallel.ranks-a-host" not in rows
    assert "is called --parallel.ranks-per-host now" in shown.err


@pytest.mark.parametrize(
    ("given", "notice"),
    [
        (["--seed", "1", "--seed", "7"], "--seed is given twice, 1 and 7: the last counts, 7"),
        (["--seed", "1", "--seed=2", "--seed", "7"], "--seed is given 3 times, 1, 2 and 7: the last counts, 7"),
        (["--seed", "1", "--training.seed=7"], "--seed 1 and --training.seed 7: the full name counts, 7"),
        (["--training.seed", "1", "--training.seed", "7"], "--training.seed is given twice, 1 and 7: the last counts"),
        (
            ["--model.embedding-dim=1", "--model.embedding_dim", "7"],
            "--model.embedding-dim is given twice, 1 and 7: the last counts, 7",
        ),
        (
            ["--data.train", "a.csv", "--data.train", "7"],
            "--data.train is given twice, a.csv and 7: the last counts, 7; --data.train a.csv,7 takes both",
        ),
        (["--seed", "7", "--seed", "7", "--training.seed", "7"], ""),
        (["--model.embedding-dim=7", "--model.embedding_dim", "7"], ""),
    ],
)
def test_of_a_flag_that_is_given_again_the_last_value_counts_with_a_notice(
    given: list[str], notice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "movielens_dlrm", *given, "--settings"]) == 0
    shown = capsys.readouterr()
    path = "--training.seed" if given[0] == "--seed" else given[0].partition("=")[0]
    row = next(line for line in shown.out.splitlines() if line.startswith(f"{path} "))
    assert "7" in row.split()
    assert shown.err.startswith(f"notice: {notice}" if notice else "")
    assert shown.err.count("notice") == bool(notice)


def test_a_name_in_two_spellings_is_one_setting() -> None:
    given = ["--a.b-c", "1", "--a.b_c", "2", "--a.b-c", "3"]
    assert settings_given(given) == {"a.b-c": "3"}


def test_a_role_without_a_column_names_the_schema_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.csv").write_text("user,at,like\n1,5,1\n2,6,0\n")
    Path("my.toml").write_text(
        '[[feature]]\nname = "user"\nkind = "categorical"\n[[label]]\nname = "like"\n[roles]\ntime = "att"\n'
    )
    assert main(["prepare", "table_dlrm", "--data.train", "log.csv", "--schema", "my.toml"]) == 2
    where = [line for line in capsys.readouterr().err.splitlines() if line.startswith("where:")]
    assert where[0].startswith("where:    my.toml, [roles] time of the schema, in ")


def test_a_schema_that_was_cut_before_its_label_is_named_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.csv").write_text("user,like\n1,1\n2,0\n")
    Path("my.toml").write_text('[[feature]]\nname = "user"\nkind = "categorical"\n')
    assert main(["train", "table_dlrm", "--data.train", "log.csv", "--schema", "my.toml"]) == 2
    said = capsys.readouterr().err
    assert "at least one label" in said
    assert "where:    my.toml\n" in said


def test_settings_of_a_table_recipe_need_no_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "table_dlrm", "--data.train", "absent.parquet", "--settings"]) == 0  # rows are not needed
    assert main(["train", "table_dlrm", "--settings"]) == 0
    assert "--training.loader.batch-size" in capsys.readouterr().out


def test_every_setting_says_what_it_means() -> None:
    from ziggurat.recipes.catalogue import RECIPES

    for recipe in RECIPES:
        for setting in described(recipe_named(recipe.__name__, schema=any_schema())):
            assert len(setting.about) > 3, setting


def test_descriptions_come_from_the_docstring() -> None:
    @dataclasses.dataclass(frozen=True)
    class Shape:
        """A shape.

        Args:
            width: of it,
                in metres.
            height, depth: of it.

        Raises:
            ValueError: never.
        """

        width: float = 1.0
        height: float = 1.0

    assert arguments_of(Shape) == {"width": "of it, in metres", "height": "of it"}


def test_the_order_of_settings_does_not_matter() -> None:
    """A share that is too large by itself fits beside the other one that is given."""
    changes = {"data.split.valid-fraction": "0.9", "data.split.test-fraction": "0.05"}
    for given in (changes, dict(reversed(changes.items()))):
        split = override(recipe_named("movielens_dlrm"), given).data.split
        assert (split.valid_fraction, split.test_fraction) == (0.9, 0.05)


def test_the_value_of_a_setting_is_not_taken_for_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_json(recipe_named("movielens_dlrm"))))
    assert main(["train", "--config", str(config), "--training.epochs", "7", "--settings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["--training.epochs", "int", "5", "7"] for line in lines)


def test_recipes_lists_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    from ziggurat.recipes.catalogue import RECIPES

    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    for recipe in RECIPES:
        assert recipe.__name__ in shown


def test_a_run_in_place_of_a_recipe_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    assert main(["train", str(tmp_path / "a")]) != 0
    assert "--resume" in capsys.readouterr().err


def test_without_a_recipe_ways_out_are_a_recipe_and_a_few_models(capsys) -> None:
    assert main(["train", "--data.train", "shop.parquet"]) == 2
    shown = capsys.readouterr().err
    assert "ziggurat train movielens_dlrm" in shown
    assert "ziggurat train auto --data.train FILE --schema SCHEMA" in shown


@pytest.mark.parametrize(
    ("number", "text", "first_way"),
    [(24, "Too many open files", "free space"), (2, "No such file", "correct the path")],
)
def test_what_the_system_refuses_and_nobody_explains_is_an_error_in_four_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, text: str, first_way: str
) -> None:
    def refuses(options: object, rest: object) -> int:
        raise OSError(number, text, "some/file")

    others = (verb for verb in OWN_VERBS if verb.name != "recipes")
    refusing = dataclasses.replace(RECIPES, run=refuses)
    monkeypatch.setattr("ziggurat.cli.main.OWN_VERBS", (*others, refusing))
    assert main(["recipes"]) == 2
    said = capsys.readouterr().err
    assert f"found:    {text}" in said
    assert "where:    some/file" in said
    assert f"ways out:\n  1. {first_way}" in said


def test_code_of_a_verb_that_ends_the_program_does_not_look_like_a_verb_that_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(options: object, rest: object) -> int:
        sys.exit()

    others = (verb for verb in OWN_VERBS if verb.name != "recipes")
    monkeypatch.setattr("ziggurat.cli.main.OWN_VERBS", (*others, dataclasses.replace(RECIPES, run=ends)))
    assert main(["recipes"]) == 2
    said = capsys.readouterr().err
    assert "found:    SystemExit" in said
    assert f"where:    {__file__}:" in said


def test_a_benchmark_ends_with_its_own_status() -> None:
    assert main(["bench", "no_such_benchmark"]) == 1


BROKEN = """
from __future__ import annotations
from dataclasses import dataclass
from examples.extensions.matrix_factorisation import MatrixFactorisation, MatrixFactorisationConfig

class Broken(MatrixFactorisation):
    def loss(self, outputs, batch):
        return divided(0)

def divided(number):
    return 1 / number

@dataclass(frozen=True, kw_only=True)
class BrokenConfig(MatrixFactorisationConfig):
    kind: str = "broken"
    def build(self, inputs, *, embeddings, towers):
        return Broken(self, inputs=inputs, embeddings=embeddings)
"""


def test_an_error_of_a_users_loss_shows_the_users_lines_and_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_loss.py").write_text(BROKEN)
    rows = range(400)
    columns = {"who": [row % 7 for row in rows], "what": [row % 5 for row in rows], "click": [row % 2 for row in rows]}
    pl.DataFrame(columns).write_parquet("likes.parquet")
    schema = ziggurat.Schema(
        features=(ziggurat.Categorical(name="who"), ziggurat.Categorical(name="what")),
        labels=(ziggurat.Label(name="click"),),
    )
    ziggurat.write_schema(schema, "my.toml")
    command = ["train", "table_dlrm", "--model", "broken_loss:BrokenConfig", "--data.train", "likes.parquet"]
    command += ["--schema", "my.toml", "--model.user", "who", "--model.item", "what", "--threads", "1"]
    assert main([*command, "--out", "first"]) == 2
    said = capsys.readouterr().err
    error = said[said.index("ConfigError\n") :]
    assert "found:    ZeroDivisionError: division by zero" in error
    assert f"where:    {tmp_path}/broken_loss.py:8 in loss, {tmp_path}/broken_loss.py:11 in divided" in error
    assert "ziggurat/training" not in error
    assert "Traceback" not in error
    # Whoever looks for a mistake of the package's sees all of it.
    assert main([*command, "--out", "second", "--verbose"]) == 2
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert "ziggurat/training" in said


def test_an_error_of_the_package_itself_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from ziggurat.errors import nearest_names

    def fails(options: object, rest: object) -> int:
        nearest_names("a", None)  # type: ignore[arg-type]
        return 0

    others = (verb for verb in OWN_VERBS if verb.name != "recipes")
    monkeypatch.setattr("ziggurat.cli.main.OWN_VERBS", (*others, dataclasses.replace(RECIPES, run=fails)))
    monkeypatch.setattr("ziggurat.errors._PACKAGE", Path(__file__).parents[2])  # this file counts as ours
    with pytest.raises(TypeError):
        main(["recipes"])
