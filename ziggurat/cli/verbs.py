"""Verbs of a run and of the machine: demo, train, recipes, report, verify, doctor, bench.

Heavy imports stand inside the functions, so that `ziggurat --help` stays fast.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import runpy
import shlex
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.cli.outputs import add_output
from ziggurat.cli.own_models import add_model_argument, model_words, own_models
from ziggurat.cli.parser import add_hook, add_verbose
from ziggurat.cli.settings import add_short_forms, apply_settings, print_settings, settings_from
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Takes, Verb, no_arguments
from ziggurat.commands import pasted
from ziggurat.config import from_json, override
from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.files.streams import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ziggurat.features.schema import Schema
    from ziggurat.recipes.run_config import RunConfig
    from ziggurat.runs.demo.towers import RanksRow
    from ziggurat.runs.execute import RunResult
    from ziggurat.runs.teachers.student import TeacherHistoryConfig
    from ziggurat.training.records.run_folder import RunFolder

AUTO = "auto"
FIRST_MODEL = "first_model"
_PATIENCE = "training.early-stop.patience"


def demo(options: argparse.Namespace, rest: list[str]) -> int:
    """MovieLens-1M with DLRM and DCNv2, beside logistic regression and popularity."""
    if options.serve:
        return _demo_serve(options)
    if options.sequences:
        return _demo_sequences(options)
    if options.stream:
        return _demo_stream(options)
    from ziggurat.runs.demo.models import run_demo
    from ziggurat.runs.demo.towers import run_tower_demo
    from ziggurat.training.report.progress import show_progress

    progress = show_progress(verbose=options.verbose)
    folder = Path(options.out)
    result = run_demo(folder, progress=progress)
    print_line(f"\nMovieLens-1M, time split, like = rating of 4 or more ({result.num_test_rows:,} test rows)\n")
    print_table(("model", "test AUC", "test log loss", "calibration", "weights", "samples/s"), result.rows)
    reports = dict(result.reports)
    if not options.no_ranks:
        ranks = run_tower_demo(folder, probe=folder / "movielens_dlrm", progress=progress)
        _print_ranks(ranks)
        reports |= {entry.name: entry.report for entry in ranks}
    print_table(("report of", "file"), [(name, str(path)) for name, path in reports.items()])
    return 0


def _print_ranks(ranks: Sequence[RanksRow]) -> None:
    """Print what flat model and towers send between hosts, and how long their steps take over which link."""
    from ziggurat.runs.demo.links import bars, emulated, explained, simulated
    from ziggurat.runs.demo.towers import NUM_HOSTS, RANKS_PER_HOST

    print_line(f"\nDLRM on {NUM_HOSTS} emulated hosts × {RANKS_PER_HOST} ranks, embeddings and their gradients\n")
    drawn = bars([entry.cross_host_bytes for entry in ranks])
    rows = [
        (entry.name, f"{entry.test_auc:.4f}", f"{entry.cross_host_bytes / 1024:,.0f}", bar)
        for entry, bar in zip(ranks, drawn, strict=True)
    ]
    print_table(("model", "test AUC", "KiB between hosts a step", "between hosts"), rows)
    flat, towers = [(entry.step_ms, entry.leaving_bytes) for entry in ranks]
    links = [*emulated(flat, towers), *simulated()]
    print_line("how long a step takes, by what is between the hosts\n")
    print_table(
        ("between hosts", "flat, ms", "towers, ms", ""),
        [(each.link, f"{each.flat_ms:.1f}", f"{each.towers_ms:.1f}", each.verdict) for each in links],
    )
    for line in explained(flat, towers):
        print_line(line)
    print_line("")


def _demo_sequences(options: argparse.Namespace) -> int:
    """SASRec and HSTU on MovieLens-1M: what each person watches next."""
    from ziggurat.runs.demo.sequences import METRICS, run_sequence_demo
    from ziggurat.training.report.progress import show_progress

    result = run_sequence_demo(Path(options.out), progress=show_progress(verbose=options.verbose))
    print_line("\nMovieLens-1M, the last film of each user, all films ranked but those seen before\n")
    print_table(("model", *(f"test {name.removeprefix('full_')}" for name in METRICS), "samples/s"), result.rows)
    for each in result.shown:
        print_line(f"\nuser {each.user}, last seen: {', '.join(each.last)}")
        print_table(tuple(each.answers), list(zip(*each.answers.values(), strict=True)))
    print_line(f"\nplot: {result.plot}")
    for name, path in result.reports.items():
        print_line(f"{name} report: {path}")
    return 0


def _demo_stream(options: argparse.Namespace) -> int:
    """Drift, a teacher and students, a stream that is published, a server that follows it."""
    from ziggurat.runs.demo.streaming import run_stream_demo
    from ziggurat.training.report.progress import show_progress

    result = run_stream_demo(Path(options.out), progress=show_progress(verbose=options.verbose))
    print_line("")
    print_table(("what was shown", "figures", "where to look"), result.summary())
    print_line(f"plots: {result.plots[0]}, {result.plots[1]}")
    return 0


def _demo_serve(options: argparse.Namespace) -> int:
    """Encoders and a ranker on MovieLens-1M, exported, behind a server that is asked."""
    import statistics

    from ziggurat.runs.demo import serving
    from ziggurat.training.report.progress import show_progress

    export = serving.export_for_serving(Path(options.out), progress=show_progress(verbose=options.verbose))
    with serving.served(export) as address:
        for answer in serving.ask(address):
            print_line(f"\nfor {answer.user}" + (f", {answer.filter}" if answer.filter else ""))
            print_table(("score", "film"), [(f"{s:.4f}", i) for i, s in zip(answer.items, answer.scores, strict=True)])
        spent = sorted(serving.latencies_ms(address, users=[str(user) for user in range(1, 501)]))
        print_line(
            f"\n{len(spent)} users, one after the other: median {statistics.median(spent):.1f} ms, "
            f"p99 {spent[int(0.99 * len(spent))]:.1f} ms"
        )
        if sys.stdout.isatty():
            print_line(f"the page: {address}  (Ctrl-C ends the server)")
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
    print_line(f"serve it again: ziggurat serve {pasted(export)}")
    return 0


def train(options: argparse.Namespace, rest: list[str]) -> int:
    """Train a recipe, a config, or resume."""
    from ziggurat.features.labels import linear_model_name
    from ziggurat.plan import Plan
    from ziggurat.recipes.run_config import with_model
    from ziggurat.runs.execute import train_run
    from ziggurat.runs.quality.baselines import check_baseline
    from ziggurat.training.hooks.hook import hooks_named
    from ziggurat.training.report.progress import show_progress

    if not options.out and not options.resume and not options.config:
        options.out = _default_out(options, rest)
    if _names_no_recipe(options):
        return _train_first_model(options, rest)
    stored, folder = run_to_train(options)
    stored = with_model(stored, own_models(options))
    changes = settings_from(options, rest) | _rank_overrides(options)
    if options.warm_start:
        changes["warm-start.run"] = options.warm_start
    changes |= {} if options.distil is None else {"distil.head": options.distil}
    if options.resume and not options.config and "device" not in changes:
        stored = _on_this_machine(stored)
    if not options.resume and not options.config:
        # Settings are listed without the files too; those that would fit their rows are then not known.
        with contextlib.suppress(MissingFileError) if options.settings else contextlib.nullcontext():
            stored = fitted(stored, changes)
        if options.warm_start:
            stored = _with_model_of(stored, parent_config(options))
    config = _with_towers(apply_settings(stored, changes), options)
    if options.settings:
        print_settings(stored, config)
        return 0
    config = taught(config, options, by="ziggurat train")
    if options.baseline:
        check_baseline(config)
    hooks = hooks_named(options.hook)
    plan = Plan.load(options.plan) if options.plan else None
    progress = show_progress(verbose=options.verbose)
    result = train_run(config, folder=folder, resume=options.resume, plan=plan, progress=progress, hooks=hooks)
    if not result.is_first:
        return 0
    _print_result(result, verbose=options.verbose)
    if options.baseline:
        _train_baseline(options, folder)
    elif _has_baseline(config):
        name = linear_model_name(label.task for label in config.table_schema.labels)
        words = shlex.join([str(folder), "--baseline", *model_words(options)])
        print_line(f"next     better than {name}? ziggurat report {words}")
    elif next_step := _next_step(config, folder, words=model_words(options)):
        print_line(f"next     {next_step}")
    _print_files(result)
    return 0


def taught(config: RunConfig, options: argparse.Namespace, *, by: str, is_stream: bool = False) -> RunConfig:
    """Return the config of a run with the teachers that arguments name, if they do.

    Args:
        config: of the run.
        options: with those of `add_teacher`.
        by: the command, for errors.
        is_stream: the side table may grow while the run goes on.

    Raises:
        ConfigError: a history without a side table, or a setting that cannot be.
    """
    history = _teacher_history(options, by=by)
    if options.teacher:
        from ziggurat.runs.teachers.student import with_teacher

        return with_teacher(config, options.teacher, history=history, is_stream=is_stream)
    if history is not None:
        raise ConfigError(
            expected="a side table, whose vectors are the history",
            found=f"--teacher-history {options.teacher_history}, and no --teacher",
            where=by,
            ways_out=("--teacher FOLDER, of `ziggurat teacher log`", "leave --teacher-history out"),
        )
    return config


def _teacher_history(options: argparse.Namespace, *, by: str) -> TeacherHistoryConfig | None:
    """Return the settings of a history of a teacher's vectors; None where none is asked for."""
    from ziggurat.runs.teachers.student import TeacherHistoryConfig

    if not options.teacher_history:
        for flag in ("--teacher-history-length", "--teacher-history-pooling"):
            value = getattr(options, flag[2:].replace("-", "_"))
            if value is not None:
                raise ConfigError(
                    expected=f"--teacher-history beside {flag}, which says of what a history consists",
                    found=f"{flag} {value}, and no --teacher-history",
                    where=by,
                    ways_out=(f"--teacher-history COLUMN {flag} {value}", f"leave {flag} out"),
                )
        return None
    given: dict[str, object] = {"key": options.teacher_history}
    if options.teacher_history_length is not None:
        given["length"] = options.teacher_history_length
    if options.teacher_history_pooling is not None:
        given["pooling"] = options.teacher_history_pooling
    return from_json(TeacherHistoryConfig, given, where=f"{by}, --teacher-history", error=ConfigError)


def _next_step(config: RunConfig, folder: Path, *, words: Sequence[str]) -> str:
    """Return a command that uses a run which no linear model is compared with; "" where nothing can be named.

    Args:
        config: of the run.
        folder: of the run.
        words: that name the user's own model, where it is one.
    """
    from ziggurat.models.contract.reads import finds_items

    schema = config.table_schema
    own = shlex.join([str(folder), *words])
    if schema.events is not None and not schema.labels and config.data.train:
        files = shlex.join(config.data.train)
        return f"what comes next: ziggurat predict {own} {files} --out {pasted(folder / 'next.parquet')}"
    if schema.events is None and finds_items(config.model) and schema.items is not None:
        return f"let it recommend: ziggurat export {own} --out {pasted(folder.with_name(folder.name + '_export'))}"
    if schema.events is None and config.data.train and not config.dataset.name:
        files = shlex.join(config.data.train)
        return f"score rows: ziggurat predict {own} {files} --out {pasted(folder / 'scores.parquet')}"
    return ""


def _print_files(result: RunResult) -> None:
    """Print where the report is, and all that was said."""
    from ziggurat.training.records.run_folder import RunFolder

    log = RunFolder(result.folder).said
    print_line(f"report   {result.report}" + (f"  log {log}" if log.exists() else ""))


def _default_out(options: argparse.Namespace, rest: list[str]) -> str:
    """Return the folder of a run that the command line does not name; "" where it names no recipe either."""
    from ziggurat.training.records.run_folder import default_folder

    recipe = FIRST_MODEL if _names_no_recipe(options) else options.recipe
    return str(default_folder(recipe, train=train_files(rest))) if recipe else ""


def train_files(rest: Sequence[str]) -> str:
    """Return the last value of --data.train among words of a command line; "" if there is none."""
    found = ""
    for place, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--data.train":
            found = value if equals else "".join(rest[place + 1 : place + 2])
    return found


def _print_result(result: RunResult, *, verbose: bool) -> None:
    """Print metrics, steps and the end of a run."""
    from ziggurat.training.evaluation.evaluate import result_line, unknown_text

    for split, evaluation in result.evaluations.items():
        shown = evaluation.line() if verbose else result_line(evaluation, metric=result.metric)
        print_line(f"{split:<7}  {shown}")
        if unknown := unknown_text(evaluation.unknown):
            print_line(f"{'':<7}  {unknown}")
    fit = result.fit
    parts = [f"{fit.steps:,} (best {fit.best_step:,})" if fit.best_step else f"{fit.steps:,}"]
    if fit.samples_per_s:
        parts.append(f"{fit.samples_per_s:,.0f} samples/s")
    if fit.first_step_s:
        parts.append(f"first step {fit.first_step_s:.1f} s")
    print_line(f"steps    {', '.join(parts)}")
    print_line(f"end      {fit.end}")


def _names_no_recipe(options: argparse.Namespace) -> bool:
    """Return whether a schema is given and nothing that says which model; `auto` says so in a word."""
    if options.resume or options.config or not options.schema or options.settings or options.warm_start:
        return False
    return options.recipe in (None, AUTO)


def _train_first_model(options: argparse.Namespace, rest: list[str]) -> int:
    """Try a few models on a table, and train the best."""
    from ziggurat.features.schema_io import read_schema
    from ziggurat.studies.first_model import candidates_of, settings_of_models, train_first_model
    from ziggurat.training.hooks.hook import hooks_named
    from ziggurat.training.records.run_folder import RunFolder
    from ziggurat.training.report.progress import show_progress

    changes = settings_from(options, rest) | _rank_overrides(options)
    given = settings_of_models(changes)
    given += [
        f"--{name}"
        for name in ("model", "towers", "compression", "plan", "distil", "teacher")
        if getattr(options, name, None)
    ]
    if given:
        raise ConfigError(
            expected="settings that all models have, where the best of several is looked for",
            found=", ".join(given),
            where="command line",
            ways_out=("name a recipe: ziggurat train table_dlrm …", f"leave {given[0]} out"),
        )
    hooks = hooks_named(options.hook)
    folder = Path(options.out)
    run = RunFolder(folder)
    run.refuse_old_run()
    run.refuse_files_of_others()
    candidates = candidates_of(
        read_schema(options.schema), change=lambda config: apply_settings(fitted(config, changes), changes)
    )
    progress = show_progress(verbose=options.verbose)
    found = train_first_model(candidates, folder=folder, progress=progress, hooks=hooks)
    # Of a number they are judged by another metric than the one that decides.
    judged = next((each.pairs.metric for each in found.tried if each.pairs is not None), found.metric)
    pairs_head = "pairs add" if judged == found.metric else f"pairs add ({judged})"
    head = ("model", f"valid {found.metric}", pairs_head, "steps", "best step", "seconds")
    rows = [
        (
            each.name,
            f"{each.valid:.5f}",
            found.pairs_text(each),
            f"{each.steps:,}",
            f"{each.best_step:,}",
            f"{each.seconds:.1f}",
        )
        for each in found.tried
    ]
    if found.trees is not None:
        name = f"trees ({found.trees.library}), compared only"
        rows.append((name, f"{found.trees.valid:.5f}", "–", f"{found.trees.trees}", "–", f"{found.trees.seconds:.1f}"))
    print_table(head, rows)
    print_line(f"the best one's whole training, {found.config.recipe}:")
    _print_result(found.result, verbose=options.verbose)
    if next_step := _next_step(found.config, folder, words=()):
        print_line(f"next     {next_step}")
    _print_files(found.result)
    return 0


def _has_baseline(config: RunConfig) -> bool:
    """Is there a baseline worth naming: for files of the user's own, of samples?"""
    from ziggurat.models.contract.reads import finds_items

    is_table = config.recipe.startswith("table_") and config.recipe != "table_logistic_regression"
    is_table = is_table and not finds_items(config.model)
    return is_table and config.table_schema.events is None


def _train_baseline(options: argparse.Namespace, folder: Path) -> None:
    """Train the linear model on the rows of a run, and print how the run compares."""
    from ziggurat.runs.quality.baselines import train_baseline
    from ziggurat.runs.quality.trees import trees_library
    from ziggurat.training.evaluation.evaluate import versus_baseline
    from ziggurat.training.records.run_folder import CONFIG, RunFolder, read_evaluation
    from ziggurat.training.report.page import trees_text
    from ziggurat.training.report.progress import show_progress

    run = RunFolder(folder)
    found = train_baseline(folder, models=own_models(options), progress=show_progress(verbose=options.verbose))
    print_line(f"{found.name} on the same rows, {found.epochs:.1f} passes ({found.seconds:.1f} s):")
    metric = CONFIG.read(run.config)["training"]["early_stop"]["metric"]
    for split, evaluation in found.evaluations.items():
        print_line(f"  {split:<6} {evaluation.line()}")
    split = "test" if "test" in found.evaluations else "valid"
    if split in found.evaluations and run.evaluation(split).exists():
        ours = read_evaluation(run.evaluation(split))["metrics"]
        text = versus_baseline(
            ours,
            found.evaluations[split].metrics,
            metric=metric,
            name=found.name,
            half_widths=found.half_widths.get(split),
        )
        print_line(f"  {split:<6} {text}" if text else f"  {split:<6} {metric} is not known of both")
        why_not = f"there are no validation rows to stop by, or they have no {metric}"
        if not trees_library():
            why_not = "no library is installed (pip install lightgbm, or scikit-learn)"
        print_line(f"  {split:<6} {trees_text(run, ours, split=split, why_not=why_not)}")


def recipes(options: argparse.Namespace, rest: list[str]) -> int:
    """Print the list of recipes."""
    from ziggurat.recipes.catalogue import RECIPES

    rows = [(recipe.__name__, (recipe.__doc__ or "").splitlines()[0]) for recipe in RECIPES]
    print_table(("recipe", "what it trains"), rows)
    return 0


def report(options: argparse.Namespace, rest: list[str]) -> int:
    """Write the report.html of a run again."""
    from ziggurat.training.records.run_folder import RunFolder
    from ziggurat.training.records.written import damage_of_log
    from ziggurat.training.report.page import write_report

    run = RunFolder(Path(options.run))
    # A run with packed products has no log of its own, but evaluations.
    is_packed = run.products.exists()
    if not is_packed and not run.metrics.exists():
        raise MissingFileError(
            expected="the folder of a run", found="no metrics.jsonl in it", where=options.run, ways_out="name another"
        )
    if is_packed and options.baseline:
        raise ConfigError(
            expected="a run that was trained, to compare with a linear model on the same rows",
            found="a run whose products were packed for scoring",
            where=f"{options.run}, --baseline",
            ways_out=("leave --baseline out", "name the run that it was packed of: products.json says which"),
        )
    if options.baseline:
        _train_baseline(options, Path(options.run))
    damage = "" if is_packed else damage_of_log(run)
    if options.beside:
        _print_windows(run, RunFolder(Path(options.beside)))
    print_line(str(write_report(options.run, damage=damage, beside=options.beside)))
    if damage:
        print_line(
            f"{damage}; the report says so; all that is wrong with the run: ziggurat verify {pasted(options.run)}"
        )
    return 1 if damage else 0


def _print_windows(run: RunFolder, control: RunFolder) -> None:
    """Print the windows of a stream beside those of another one, by the metric that compares windows best."""
    from ziggurat.training.metrics.metric import shown_name
    from ziggurat.training.records.windows import read_windows
    from ziggurat.training.report.windows import plotted_metrics, wins

    for each in (run, control):
        if not each.windows.is_file():
            raise MissingFileError(
                expected="the folder of a stream, with its windows.jsonl",
                found="no such file",
                where=str(each.path),
                ways_out=(
                    "name the folder of a stream: --beside runs/frozen",
                    "make one: ziggurat stream … --frozen --out runs/frozen",
                ),
            )
    ours = read_windows(run.windows)
    theirs = {record.name: record for record in read_windows(control.windows)}
    metrics = plotted_metrics(ours)
    shown = [name for name in metrics if name.partition("/")[0] in ("ne", "rmse")] or metrics[:1]
    head = ["window", "rows"]
    head += [f"{shown_name(name)}{which}" for name in shown for which in ("", f", {control.path.name}")]
    rows: list[tuple[str, ...]] = []
    for record in ours:
        if not record.metrics or record.name not in theirs:
            continue
        pairs = [(record.metrics.get(name), theirs[record.name].metrics.get(name)) for name in shown]
        cells = ["–" if value is None else f"{value:.5f}" for pair in pairs for value in pair]
        rows.append((record.name, f"{record.rows:,}", *cells))
    print_table(tuple(head), rows)
    for name in metrics:
        won, both = wins(ours, control=list(theirs.values()), metric=name)
        print_line(f"{shown_name(name)}: better than {control.path.name} in {won} of {both} windows")


def verify(options: argparse.Namespace, rest: list[str]) -> int:
    """Check checkpoints and ledger."""
    from ziggurat.runs.verify import verify_run

    result = verify_run(options.run, models=own_models(options))
    for line in result.lines:
        print_line(line)
    return 0 if result.good else 1


def doctor(options: argparse.Namespace, rest: list[str]) -> int:
    """Print what this machine and installation can do."""
    from ziggurat.runs.doctor import diagnose

    print_line(diagnose().text())
    return 0


def bench(options: argparse.Namespace, rest: list[str]) -> int:
    """Run a benchmark script of the checkout."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    script = folder / "main.py"
    if not script.is_file():
        raise MissingFileError(
            expected="the folder benchmarks/ of a checkout",
            found="an installed package without it",
            where=str(folder),
            ways_out="clone the repository and run `make bench` there",
        )
    arguments = [options.name, *(["--json", options.json] if options.json else []), *(["--quick"] * options.quick)]
    arguments += rest  # options of one benchmark alone: it knows them, and refuses others
    sys.path.insert(0, str(folder.parent))
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:  # the script's own status, or why it ends
        if isinstance(ended.code, str):
            say(f"{ended.code}\n")
            return 1
        return ended.code or 0
    return 0


def _for_example(options: argparse.Namespace) -> str:
    """A command that trains: of the user's own table, where a schema is given."""
    if options.schema:
        return shlex.join(["ziggurat", "train", "table_dlrm", "--data.train", "FILE", "--schema", options.schema])
    return "ziggurat train movielens_dlrm"


def run_to_train(options: argparse.Namespace) -> tuple[RunConfig, Path]:
    """The config and folder that the command line names."""
    from ziggurat.recipes.catalogue import recipe_named
    from ziggurat.recipes.run_config import load_config
    from ziggurat.training.records.run_folder import default_folder

    if options.resume:
        return _run_to_resume(options)
    if options.config:
        config = load_config(options.config, models=own_models(options))
        if options.recipe and options.recipe != config.recipe:
            raise ConfigError(
                expected=f"no recipe beside --config, or that of the file, {config.recipe!r}",
                found=repr(options.recipe),
                where=f"command line, --config {options.config}",
                ways_out=(
                    f"repeat the run: ziggurat train --config {pasted(options.config)} --out FOLDER",
                    f"train the recipe: ziggurat train {pasted(options.recipe)}, without --config",
                ),
            )
        own = "" if config.dataset.name else ",".join(config.data.train)
        return config, Path(options.out or default_folder(config.recipe or "run", train=own))
    if not options.recipe:
        raise ConfigError(
            expected="a recipe, --config FILE, or RUN --resume",
            found="none of them",
            where="command line",
            ways_out=(
                "see the recipes: ziggurat recipes",
                _for_example(options),
                "let a few models be tried: ziggurat train auto --data.train FILE --schema SCHEMA",
            ),
        )
    if (Path(options.recipe) / "config.json").is_file():
        raise ConfigError(
            expected="a recipe, --config FILE, or RUN --resume",
            found=f"{options.recipe}, the folder of a run",
            where="command line",
            ways_out=(
                f"go on: ziggurat train {pasted(options.recipe)} --resume",
                f"repeat it: ziggurat train --config {pasted(Path(options.recipe) / 'config.json')} --out FOLDER",
            ),
        )
    schema = None
    if options.schema:
        from ziggurat.features.schema_io import read_schema

        schema = read_schema(options.schema)
    elif getattr(options, "warm_start", "") and options.recipe.startswith("table_"):
        schema = parent_config(options).table_schema
    elif options.settings and options.recipe.startswith("table_"):
        schema = any_schema()  # settings do not depend on it
    return recipe_named(options.recipe, schema=schema), Path(options.out or f"runs/{options.recipe}")


def parent_config(options: argparse.Namespace) -> RunConfig:
    """Return the config of the run that `--warm-start` names.

    Raises:
        MissingFileError: there is no run.
    """
    from ziggurat.recipes.run_config import load_config
    from ziggurat.runs.warm_start.parent import require_run

    require_run(Path(options.warm_start))
    return load_config(options.warm_start, models=own_models(options))


def _with_model_of(config: RunConfig, parent: RunConfig) -> RunConfig:
    """The config with the sizes of the parent's model, where it is of the same kind; the kernel stays its own."""
    if type(config.model) is not type(parent.model):
        return config
    embedding = dataclasses.replace(parent.model.embedding, kernel=config.model.embedding.kernel)
    return dataclasses.replace(config, model=dataclasses.replace(parent.model, embedding=embedding))


def to_go_on(options: argparse.Namespace) -> str:
    """Return how an interrupted `train` goes on: a run that has begun is resumed, even before its first checkpoint."""
    from ziggurat.training.records.run_folder import RunFolder

    tries_models = _names_no_recipe(options)
    folder = Path(options.out or f"runs/{FIRST_MODEL}") if tries_models else run_to_train(options)[1]
    if RunFolder(folder).has_begun():
        words = shlex.join([str(folder), "--resume", *model_words(options)])
        hooks = "".join(f" --hook {pasted(name)}" for name in options.hook)
        return f"to go on: ziggurat train {words}{hooks}"
    if tries_models:
        return "to go on: give the same command again (models that were tried are kept)"
    return "no step was trained: give the same command again (prepared data is kept)"


def fitted(recipe: RunConfig, changes: Mapping[str, str]) -> RunConfig:
    """The recipe with sizes for the rows of the files that the command line names; nothing else of it changes."""
    from ziggurat.recipes.catalogue import fit_to_rows, with_soft_start

    given = apply_settings(recipe, changes)
    asked = dataclasses.replace(recipe, data=given.data, tables=given.tables)
    if given.model.embedding.optimizer is not recipe.model.embedding.optimizer:  # its rate stays that of the recipe
        asked = dataclasses.replace(asked, model=dataclasses.replace(recipe.model, embedding=given.model.embedding))
    found = fit_to_rows(asked)
    if _PATIENCE in {name.replace("_", "-") for name in changes}:  # whoever says it means it from the first step on
        stop = dataclasses.replace(found.training.early_stop, min_steps=0)
        found = dataclasses.replace(found, training=dataclasses.replace(found.training, early_stop=stop))
    if given.training.loader.batch_size != recipe.training.loader.batch_size:
        loader = dataclasses.replace(found.training.loader, batch_size=given.training.loader.batch_size)
        training = dataclasses.replace(found.training, loader=loader)
        found = with_soft_start(dataclasses.replace(found, training=training))
    return dataclasses.replace(found, data=recipe.data, tables=recipe.tables)


def any_schema() -> Schema:
    """A schema to list settings with, which do not depend on it."""
    from ziggurat.features.kinds import feature_of_ids
    from ziggurat.features.schema import Label, Schema

    return Schema(features=(feature_of_ids("feature"),), labels=(Label(name="label"),))


def _run_to_resume(options: argparse.Namespace) -> tuple[RunConfig, Path]:
    """The stored config of the run to resume, with what the command line names beside it; and its folder.

    `train RUN --resume`, or `train RECIPE --resume --out RUN`, which must be the recipe that the run was started with.
    """
    from ziggurat.recipes.run_config import load_config
    from ziggurat.training.records.run_folder import RunFolder

    folder = Path(options.out or options.recipe or "")
    run = RunFolder(folder)
    if folder.is_dir() and any(folder.iterdir()) and not run.config.exists() and not run.has_begun():
        raise MissingFileError(
            expected="a run that has begun, with its settings in config.json",
            found="no config.json and no step: it was ended before training began",
            where=f"{folder}, --resume",
            ways_out=(
                "give the command that started it again, without --resume: prepared data and models that were tried "
                "are kept",
                "name the folder of another run: ziggurat train RUN --resume",
            ),
        )
    stored = load_config(folder, models=own_models(options))
    recipe = options.recipe
    if options.out and recipe and Path(recipe) != folder and recipe != stored.recipe:
        raise ConfigError(
            expected=f"the recipe that the run was started with, {stored.recipe!r}",
            found=repr(recipe),
            where=f"{folder / 'config.json'}, --resume",
            ways_out=(
                f"go on with the run: ziggurat train {pasted(folder)} --resume",
                f"train {recipe} in another folder",
            ),
        )
    if options.config:
        stored = load_config(options.config, models=own_models(options))
    if options.schema:
        from ziggurat.features.schema_io import read_schema

        stored = dataclasses.replace(stored, table_schema=read_schema(options.schema))
    return stored, folder


def _on_this_machine(stored: RunConfig) -> RunConfig:
    """A run to resume whose command line names no device: what it asked for on another machine may be missing here."""
    from ziggurat.parallel.device import device_of_finished_run

    return dataclasses.replace(stored, device=device_of_finished_run(stored.device))


def _with_towers(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """The config with what `--towers` and `--compression` say."""
    from ziggurat.models.build import check_towers
    from ziggurat.plan import Towers

    if options.towers:
        config = dataclasses.replace(config, towers=Towers.load(options.towers))
    if options.compression is None:
        return config
    if config.towers is None:
        raise ConfigError(
            expected="towers to compress",
            found="none",
            where="command line, --compression",
            ways_out=("add --towers FILE", "leave --compression out"),
        )
    check_towers(config.model, config.towers)
    return override(config, {"model.tower-module.compression": options.compression})


def _rank_overrides(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings that the short flags for many ranks stand for."""
    given = {"dense": options.dense, "wire.between-towers": options.wire, "tower-size": options.tower_size}
    given["exchange"] = options.exchange
    given["context"] = options.context
    given["rank-order"] = options.rank_order
    return {f"parallel.{name}": text for name, text in given.items() if text is not None}


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `demo`."""
    parser.add_argument("--out", default="runs/demo", help="folder of the runs (default: %(default)s)")
    parser.add_argument("--no-ranks", action="store_true", help="leave out the towers on two emulated hosts")
    parser.add_argument(
        "--sequences", action="store_true", help="instead: SASRec and HSTU on histories, the next film of each user"
    )
    parser.add_argument(
        "--serve", action="store_true", help="instead: train encoders and a ranker, export them, serve them, ask them"
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="instead: data that drifts, a stream that is published, a server that follows",
    )
    add_verbose(parser)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `train`."""
    parser.add_argument(
        "recipe",
        nargs="?",
        help="name of a recipe (see `ziggurat recipes`), or with --resume a run folder; none, or auto, with a schema: "
        "a few models are tried, and the best goes on",
    )
    parser.add_argument("--config", metavar="FILE", help="config.json of a run: repeats it exactly")
    parser.add_argument("--schema", metavar="FILE", help="schema (TOML) for the recipes table_*")
    parser.add_argument("--towers", metavar="FILE", help="towers.json: groups of features, each behind a tower module")
    parser.add_argument(
        "--compression", metavar="X", help="N / D of the tower modules; short for --model.tower-module.compression"
    )
    add_model_argument(parser, about="config class of a model of your own, in the place of the recipe's model")
    parser.add_argument(
        "--out", metavar="FOLDER", help="folder of the run (default: runs/RECIPE, or runs/RECIPE_TABLE)"
    )
    _rank_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the newest intact checkpoint")
    parser.add_argument(
        "--warm-start",
        metavar="RUN",
        default="",
        help="begin from the weights of another run: its schema and model settings too, unless others are named; "
        "more: --warm-start.optimizers true, .step N, .dims cut",
    )
    add_teacher(parser, about="learn from its scores (--distil), or read its vectors (--teacher-history)")
    parser.add_argument(
        "--baseline", action="store_true", help="afterwards also a linear model on the same rows, for the report"
    )
    parser.add_argument("--settings", action="store_true", help="list every setting with what it means, and stop")
    add_hook(parser)
    add_verbose(parser)
    add_short_forms(parser)


def add_teacher(parser: argparse.ArgumentParser, *, about: str) -> None:
    """Declare the arguments of students: what learns or is read, and the side table, for what `about` says."""
    parser.add_argument(
        "--distil",
        metavar="HEAD",
        help="short for --distil.head: single-head or aux-head learns from logged scores of a teacher",
    )
    parser.add_argument("--teacher", metavar="FOLDER", help=f"side table of `ziggurat teacher log`: {about}")
    parser.add_argument(
        "--teacher-history",
        metavar="COLUMN",
        help="raw column of the user: what the teacher made of the user's earlier rows is one more feature",
    )
    parser.add_argument("--teacher-history-length", metavar="L", type=int, help="most vectors of a row (default: 16)")
    parser.add_argument(
        "--teacher-history-pooling", metavar="HOW", help="attention, or mean alone (default: attention)"
    )


def _rank_arguments(parser: argparse.ArgumentParser) -> None:
    ranks = parser.add_argument_group("on many ranks (torchrun --nproc-per-node N -m ziggurat train ...)")
    ranks.add_argument(
        "--plan", metavar="FILE", help="plan.json: where each table goes (default: balanced, table-wise)"
    )
    ranks.add_argument(
        "--tower-size", metavar="S", help="short for --parallel.tower-size: ranks that share their towers"
    )
    ranks.add_argument(
        "--context", metavar="N", help="short for --parallel.context: ranks that divide long histories between them"
    )
    ranks.add_argument(
        "--rank-order",
        metavar="FILE",
        help="short for --parallel.rank-order: order.json of `ziggurat cluster order`, for these ranks",
    )
    ranks.add_argument(
        "--dense", metavar="HOW", help="short for --parallel.dense: ddp, fsdp or hsdp, for the dense network"
    )
    ranks.add_argument(
        "--wire",
        metavar="FORMAT",
        help="short for --parallel.wire.between-towers: fp32, bf16, fp16, int8, fp8, mx9, mx6, …",
    )
    ranks.add_argument(
        "--exchange", metavar="WHEN", help="short for --parallel.exchange: plain, prioritised or prioritised_always"
    )


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `report`."""
    parser.add_argument("run", help="folder of a run")
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="first train a linear model on the run's rows, unless it was",
    )
    parser.add_argument("--beside", metavar="RUN", help="of a stream: another one over the same windows, its control")
    add_model_argument(parser)
    add_verbose(parser)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `verify`."""
    parser.add_argument("run", help="folder of a run")
    add_model_argument(parser)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench`."""
    parser.add_argument("name", help="a benchmark (`ziggurat bench list` shows them), or all")
    add_output(parser, "--json", metavar="FILE", help="write machine, versions, commit and cases there")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it works, not to be quoted")


DEMO = Verb(
    name="demo",
    summary="fetch MovieLens-1M, train DLRM and DCNv2, then towers on 2 × 2 ranks; tables, reports with plots",
    epilog=(
        "Needs no data of yours; the ranks run on this machine.\n"
        "examples:\n  ziggurat demo\n  ziggurat demo --no-ranks --out runs/demo\n  ziggurat demo --serve\n"
        "  ziggurat demo --sequences\n  ziggurat demo --stream --out runs/demo-stream"
    ),
    add_arguments=add_demo_arguments,
    run=demo,
)

TRAIN = Verb(
    name="train",
    summary="train a recipe, repeat a config, or resume a run",
    epilog=(
        "Every setting of a run can be given as --group.name VALUE; `ziggurat train RECIPE --settings` lists them\n"
        "with their defaults.\nexamples:\n"
        "  ziggurat train movielens_dlrm --epochs 2 --dim 32\n"
        "  ziggurat train auto --data.train ratings.parquet --schema my.toml\n"
        "  ziggurat train table_dlrm --data.train ratings.parquet --schema my.toml\n"
        "  ziggurat train runs/movielens_dlrm --resume\n"
        "  ziggurat train table_dlrm --data.train new.parquet --warm-start runs/last\n"
        "  ziggurat train movielens_dcn_v2 --training.seed 1 --out runs/dcn_v2_seed1\n"
        "  ziggurat train --config runs/demo/dlrm/config.json --out runs/again"
    ),
    add_arguments=add_train_arguments,
    run=train,
    takes=Takes.WORDS,
)

RECIPES = Verb(
    name="recipes",
    summary="list the recipes with one line each",
    epilog=(
        "A recipe is a complete run: data, model, training. table_* are for data of yours.\n"
        "examples:\n  ziggurat recipes\n  ziggurat train movielens_dcn_v2"
    ),
    add_arguments=no_arguments,
    run=recipes,
)

REPORT = Verb(
    name="report",
    summary="write report.html of a run again",
    epilog=(
        "It reads what the run has logged.\nexamples:\n  ziggurat report runs/first\n"
        "  ziggurat report runs/live --beside runs/frozen"
    ),
    add_arguments=add_report_arguments,
    run=report,
)

VERIFY = Verb(
    name="verify",
    summary="check every checkpoint of a run, and that each row was trained exactly once per epoch",
    epilog="Ends with status 1 where something is damaged or missing, and says what.\n"
    "example:\n  ziggurat verify runs/first",
    add_arguments=add_verify_arguments,
    run=verify,
)

DOCTOR = Verb(
    name="doctor",
    summary="what this machine and installation can do, and what is missing and why",
    epilog="Says which kernels look up embeddings and why not a faster one.\nexample:\n  ziggurat doctor",
    add_arguments=no_arguments,
    run=doctor,
)

BENCH = Verb(
    name="bench",
    summary="speed and quality against the peers; needs a checkout of the repository",
    epilog=(
        "examples:\n  ziggurat bench list\n  ziggurat bench towers --quick --json towers.json\n"
        "Options of a benchmark's own: benchmarks/README.md."
    ),
    add_arguments=add_bench_arguments,
    run=bench,
    takes=Takes.WORDS,
)
