"""The documentation is true where a machine can tell: links, commands, settings, paths, test names, and its Python."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from ziggurat.cli.main import build_parser
from ziggurat.data.synthetic.drift import DriftConfig
from ziggurat.features.schema_io import read_schema
from ziggurat.serving.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
MADE = (
    ROOT / "docs" / "files.md",
    ROOT / "docs" / "cli.md",
    ROOT / "docs" / "experiments" / "list.md",
)  # by `make index`, from what lies in files
SCHEMA_BLOCKS = {"missing", "feature", "label", "table", "extra", "number", "roles", "items", "events"}
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {*MADE})
SHELLS = ("", "console", "sh", "bash", "shell")


def blocks(document: Path) -> Iterator[tuple[str, str]]:
    """(language, content) of every fenced block."""
    for found in re.finditer(r"^ *```([^\n]*)\n(.*?)^ *```$", document.read_text(), re.MULTILINE | re.DOTALL):
        yield found[1].strip(), found[2]


def prose(document: Path) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def command_lines(document: Path) -> Iterator[str]:
    """Every `ziggurat …` and `make …` line of shell blocks, and every inline span that begins like one."""
    for language, content in blocks(document):
        if language in SHELLS:
            for line in content.replace("\\\n", " ").splitlines():
                yield line.strip().removeprefix("$ ")
    for found in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", prose(document)):
        yield found[1]


def commands(document: Path, program: str) -> list[list[str]]:
    """Arguments of every command line of `program`; abstract ones (`ziggurat <verb>`) are left out."""
    lines = [line for line in command_lines(document) if line.startswith(f"{program} ") and "<" not in line]
    lines = [re.split(r"&&|\||;| &$", line)[0] for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MkDocs make it."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", plain))


def anchored(text: str) -> set[str]:
    """Anchors of all headings of a page."""
    return {slug(found[1]) for found in re.finditer(r"^#+ (.+)$", text, re.MULTILINE)}


def anchors(document: Path) -> set[str]:
    """Anchors of all headings of a document."""
    return anchored(prose(document))


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    for found in re.finditer(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"https?:|mailto:", found[1]):
            continue
        path, _, anchor = found[1].partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), found[1]
        assert not anchor or anchor in anchors(target), found[1]
        if document.is_relative_to(ROOT / "docs"):
            assert target.is_relative_to(ROOT / "docs"), f"{found[1]} leaves docs/, where the built site ends"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_command_parses_with_settings_that_exist(document: Path) -> None:
    from benchmarks.main import NAMES, WITH_OPTIONS
    from ziggurat.cli.settings import settings_given
    from ziggurat.config import override
    from ziggurat.recipes.catalogue import RECIPES, recipe_named

    by_name, known_schema = {recipe.__name__ for recipe in RECIPES}, recipe_named("movielens_dlrm").table_schema
    for arguments in commands(document, "ziggurat"):
        try:
            options, rest = build_parser().parse_known_args(arguments)
        except SystemExit as stopped:  # --help and --version stop too, with status 0
            if stopped.code:
                pytest.fail(f"ziggurat {shlex.join(arguments)} does not parse")
            continue
        if options.verb == "bench":
            name = options.name.replace("-", "_")
            assert name in {*NAMES, "all", "list"}, arguments
            if name in WITH_OPTIONS:  # it knows its own options, and refuses others
                importlib.import_module(f"benchmarks.{name}").parse_options(rest)
                continue
        if options.verb in ("plan", "simulate"):
            recipe = options.run if options.run in by_name and not options.run.startswith("table_") else "mlperf_dlrm"
            override(recipe_named(recipe), settings_given(rest))
            continue
        if options.verb in ("compare", "tune", "scale"):
            asked = getattr(options, "models", "").split(",")[0]
            recipe = f"table_{asked}" if f"table_{asked}" in by_name else "table_dnn"  # settings of its model count
            override(recipe_named(recipe, schema=known_schema), settings_given(rest))
            continue
        if options.verb == "towers":
            override(recipe_named("table_dlrm", schema=known_schema), settings_given(rest))
            continue
        if options.verb == "serve":
            given = {name.removeprefix("server."): value for name, value in settings_given(rest).items()}
            override(ServerConfig(), given)
            continue
        if options.verb == "drift":
            override(DriftConfig(), settings_given(rest))
            continue
        if options.verb not in ("train", "prepare", "stream"):
            assert not rest, arguments
            continue
        assert (
            options.recipe is None or vars(options).get("resume") or options.recipe in {*by_name, "RECIPE", "auto"}
        ), arguments
        known = options.recipe in by_name
        override(
            recipe_named(options.recipe, schema=known_schema) if known else recipe_named("movielens_dlrm"),
            settings_given(rest),
        )


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_setting_that_is_named_exists(document: Path) -> None:
    """Spans like `--training.non-finite skip`; with a dot: a setting of a run (on a model.s page: its own)."""
    from ziggurat.config import override
    from ziggurat.recipes.catalogue import RECIPES, recipe_named
    from ziggurat.serving.server.config import ServerConfig

    config, own = recipe_named("movielens_dlrm"), f"table_{document.stem.replace('-', '_')}"
    if own in {recipe.__name__ for recipe in RECIPES}:
        config = recipe_named(own, schema=config.table_schema)
    for found in re.finditer(r"`--(\w[\w-]*\.[\w.-]+) ([^`\s]+)`", prose(document)):
        if found[2].isupper():  # a placeholder, as in `--group.name VALUE`
            continue
        if found[1].startswith("server."):
            override(ServerConfig(), {found[1].removeprefix("server."): found[2]})
        else:
            override(config, {found[1]: found[2]})


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_schema_can_be_read(document: Path, tmp_path: Path) -> None:
    for number, (language, content) in enumerate(blocks(document)):
        names = set(tomllib.loads(content)) if language == "toml" else set()
        if not names & SCHEMA_BLOCKS:
            continue
        assert names <= SCHEMA_BLOCKS
        # Others are parts of one, which the text explains by themselves.
        if {"feature", "label"} <= names:
            (tmp_path / f"{number}.toml").write_text(content)
            read_schema(tmp_path / f"{number}.toml")


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_make_target_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for arguments in commands(document, "make"):
        assert set(arguments) <= targets | {word for word in arguments if "=" in word}, arguments


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_file_that_is_named_exists(document: Path) -> None:
    """Paths with a folder, as `data/encoded/loader.py`: from the root or the package. `runs/…` are made by runs."""
    for found in re.finditer(r"`([\w.-]+/[\w./-]*(?:\.(?:py|md|txt|toml|cpp|sh)|/))`", prose(document)):
        is_made = (
            found[1].startswith(("runs/", "checkpoints/", "quarantine/", "step-", "site/", "stream/"))
            or ROOT / found[1] in MADE
        )
        if not is_made:
            assert (ROOT / found[1]).exists() or (ROOT / "ziggurat" / found[1]).exists(), found[1]


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_test_that_is_named_exists(document: Path) -> None:
    for found in re.finditer(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text()):
        assert found[2] in functions_of(ROOT / found[1]), found[0]


@functools.cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_index_has_every_file_with_a_sentence() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_index.py"))["index_of_files"]()
    entries = dict(re.findall(r"^- `([^`]+)`: (.*)$", page, re.MULTILINE))
    files = {str(path.relative_to(ROOT / "ziggurat")) for path in (ROOT / "ziggurat").rglob("*.py")}
    assert {name for name in files if not name.endswith("__init__.py")} <= entries.keys()
    assert not [name for name, sentence in entries.items() if len(sentence.split()) < 4]


def test_page_of_the_command_line_has_every_verb_and_flag_with_what_it_means() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_index.py"))
    page = made["page_of_the_command_line"]()
    sections = dict(re.findall(r"^## (ziggurat[^\n]*)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for parser in made["every_parser"](build_parser()):
        rows = dict(re.findall(r"^\| \[?`(.+?)`\S* \| (.*) \|$", sections[parser.prog], re.MULTILINE))
        meanings = {word: about for spelling, about in rows.items() for word in re.split(r"[ ,]+", spelling)}
        for action in parser._actions:
            words = action.choices if isinstance(action, argparse._SubParsersAction) else action.option_strings
            for word in words or ():
                assert len(meanings[word].split()) > 1, f"{parser.prog} {word}"
            if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
                assert f"{action.metavar or action.dest}" in " ".join(rows), f"{parser.prog} {action.dest}"
    assert "%(" not in page
    assert anchored(page) >= {found[1] for found in re.finditer(r"\]\(#([^)]+)\)", page)}


def test_tour_stops_at_nine_places_and_names_their_files() -> None:
    """Its headings name the files to read; functions that it names there exist in them."""
    text = (ROOT / "docs" / "tour.md").read_text()
    stops = re.findall(r"^## (\d)\. (.*)$", text, re.MULTILINE)
    assert [number for number, _ in stops] == list("123456789")
    for number, heading in stops:
        files = [ROOT / "ziggurat" / name for name in re.findall(r"`([^`]+\.py)`", heading)]
        assert files, heading
        assert all(path.exists() for path in files), heading
        known = set().union(*(names_in(path) for path in files))
        reading = text.split(f"\n## {number}. ")[1].split("\n\n")[1]  # "Read the module docstring, `RawChunk` and …"
        to_read = re.findall(r"`([A-Za-z_.]+)`", reading.split(". ")[0])
        assert {name.split(".")[-1] for name in to_read if not name.endswith(".py")} <= known, heading


def test_readme_of_benchmarks_lists_every_one() -> None:
    from benchmarks.main import NAMES

    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "benchmarks" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)


def test_changelog_begins_with_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    sections = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == version
    assert len(sections) == len(set(sections))


@functools.cache
def names_in(path: Path) -> set[str]:
    defined = ast.ClassDef | ast.FunctionDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, defined)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache folder for both stories: the C++ kernel is compiled once."""
    return str(tmp_path_factory.mktemp("cache"))


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    python = [content for language, content in blocks(ROOT / "README.md") if language == "python"]
    assert sum(bool(line.strip()) for line in python[0].splitlines()) == 12, "it says twelve lines"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", cache)
    ratings().write_parquet("ratings.parquet")
    names: dict[str, object] = {}
    for number, content in enumerate(python):
        exec(compile(content, f"README.md, Python block {number + 1}", "exec"), names)
    scores = pl.read_parquet("scores.parquet")
    assert scores.columns == ["row", "user_id", "movie_id", "like"]
    assert scores.height == ratings().height
    assert scores["like"].is_between(0, 1).all()


def test_python_of_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", cache)
    ratings().write_parquet("ratings.parquet")
    names: dict[str, object] = {}
    for language, content in blocks(ROOT / "docs" / "tour.md"):
        if language == "python":
            exec(compile(content, "docs/tour.md", "exec"), names)
    assert names


@pytest.mark.parametrize("page", ["formats.md", "own-loss.md"])
def test_python_of_a_maintainers_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = ROOT / "docs" / "maintainers" / page
    python = [content for language, content in blocks(path) if language == "python"]
    assert python
    for content in python:
        exec(compile(content, page, "exec"), {})


def ratings(num_rows: int = 2000) -> pl.DataFrame:
    """A table like the one in the README: people, movies, genres, ratings in order of time."""
    rows = pl.int_range(num_rows, eager=True)
    user, movie = rows * 7 % 40, (rows * 11 + rows // 40) % 25
    genres = [["Drama", "Comedy"][: 1 + number % 2] for number in movie.to_list()]
    columns = {
        "user_id": user.cast(pl.Int32),
        "movie_id": "m" + movie.cast(pl.String),
        "genres": genres,
        "rating": (1 + (user + movie) % 5).cast(pl.Int32),
        "timestamp": 978_300_000 + 60 * rows,
    }
    return pl.DataFrame(columns)


def test_lock_files_agree() -> None:
    """The same package has the same version in every lock file; the two builds of torch differ in their suffix only.

    A bare machine has the oldest torch that is allowed, its Triton, and a numpy that this Triton can interpret with.
    """
    versions: dict[str, dict[str, str]] = {}
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                name, _, version = line.partition("==")
                assert version, f"{path.name}: {line} has no exact version"
                name = re.sub(r"[-_.]+", "-", name).lower()
                versions.setdefault(name, {})[path.name] = version.partition("+")[0]
    differing = {name: files for name, files in versions.items() if len(set(files.values())) > 1}
    old = {"torch", "triton", "numpy"}
    oldest = {name: files.pop("bare.txt") for name, files in differing.items() if name in old}
    assert oldest.keys() == old
    assert f'"torch>={oldest["torch"].removesuffix(".0")},' in (ROOT / "pyproject.toml").read_text()
    assert not {name: files for name, files in differing.items() if len(set(files.values())) > 1}


def test_every_extra_that_is_named_is_one_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    places = [*DOCUMENTS, *(ROOT / "ziggurat").rglob("*.py")]
    named = {found[0] for path in places for found in re.finditer(r"ziggurat(-rec)?\[[\w-]+\]", path.read_text())}
    # `pip install ziggurat[…]` would fetch what another owner of that name has there.
    known = {f"{project['name']}[{extra}]" for extra in (*project["optional-dependencies"], "torchrec")}
    assert {f"ziggurat-rec[{extra}]" for extra in ("drift", "redis", "serve")} <= named <= known


def test_commands_name_every_verb() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    parser = build_parser()
    (verbs,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    missing = [name for name in verbs.choices if not re.search(rf"(ziggurat|-m ziggurat) {name}\b", page)]
    assert missing == []


def test_site_leads_to_every_page() -> None:
    import yaml

    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, list):
            for item in entry:
                yield from pages(item)
        elif isinstance(entry, dict):
            yield from pages(list(entry.values()))

    listed = set(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    in_nav = [page for page in DOCUMENTS if page.is_relative_to(ROOT / "docs") and not page.name.startswith("20")]
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (*in_nav, *MADE)}


def test_no_machine_is_named() -> None:
    for document in DOCUMENTS:
        assert not re.search(r"/(work|tmp|home|root|opt)/", document.read_text()), document
