"""`export`, `recommend`, `index`: from a run to a folder that answers, and its answers in bulk."""

from __future__ import annotations

import argparse

from ziggurat.cli.outputs import add_output
from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.parser import add_verbose
from ziggurat.cli.settings import reading_settings
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Takes, Verb
from ziggurat.config import override
from ziggurat.errors import ConfigError

EXPORT_SUMMARY = "make one folder of a trained run that answers: ranks items, or recommends them"
EXPORT_EPILOG = """The folder holds everything: models, fitted preprocessing, catalogue, index, value model, golden
requests, and checksums of all of it. Before it is published, it is compared with the run on up to 100,000
raw rows: no score may differ by more than 1e-5 (tables in few bits: no AUC may fall by more than 1e-4).

A run of a ranking model makes an export that ranks given items. A run of a two_tower, next_item or lightgcn makes one
that recommends: its vectors are indexed, and --ranker names a run that scores the candidates. The schema says which
columns describe the item ([items]); the catalogue is what was last seen of each item in the data, or a file of yours
(--items).

A value model orders by a formula over the tasks: --value 'like + 2 * buy if price > 0 else like'. Without one, formulas
are tried on validation likes, every item ranked, and the best is taken if it is ahead of retrieval alone.
In Python: zg.export_run(...), zg.Recommender.load(...).
examples:
  ziggurat export runs/movielens_dcn_v2 --out exports/ranker
  ziggurat export runs/movielens_two_tower --ranker runs/movielens_dcn_v2 --out exports/films
  ziggurat export runs/movielens_two_tower --out exports/small --tables int8 --keep title"""

RECOMMEND_SUMMARY = "the best items for every user of a file, by an export"
RECOMMEND_EPILOG = """Users are rows with the columns of users that the run was trained on; columns that a row leaves
out are those that the export knows of the user. One row a user comes out: row, the user's id, items and scores, best
first. Killed at any instant, the same command goes on where it was. Numbers in texts are written as in the files of the
run; of files that are written in another way say --data.decimal comma, --data.thousands point (1.234,5) or
--data.signs strip ($12, 12%).
examples:
  ziggurat recommend exports/films users.parquet --k 100 --out lists.parquet
  ziggurat recommend exports/films users.parquet --filter 'genres:Drama AND year:>=1990' --out drama.parquet"""

RECALL_SUMMARY = "what the index of an export finds of the exact answer, and how long it takes"
RECALL_EPILOG = """Asks for known users of the export, without a filter and with each --filter, for 1, 2, 4 …
clusters. Exact is a scan of all vectors. The plot shows where more clusters stop paying.
examples:
  ziggurat index recall exports/films --k 100
  ziggurat index recall exports/films --filter genres:Drama --filter 'year:>=1995' --plot recall.png"""


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `index recall`."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    add_recall_arguments(
        actions.add_parser("recall", help=RECALL_SUMMARY, description=RECALL_SUMMARY, epilog=RECALL_EPILOG)
    )


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `export`."""
    parser.add_argument("run", help="folder of a trained run: of a ranking model, two_tower, next_item or lightgcn")
    add_output(parser, "--out", metavar="FOLDER", required=True, help="folder of the export; an older one is replaced")
    parser.add_argument("--ranker", metavar="RUN", help="ranking run that scores what the first one finds")
    parser.add_argument(
        "--tables",
        metavar="FORMAT",
        default="fp32",
        help="what the rows of embedding tables are kept as: fp32, bf16, int8 or int4 (default: %(default)s);"
        " `ziggurat quantise RUN` says what each format costs",
    )
    parser.add_argument(
        "--by-table",
        metavar="NAME=FORMAT,...",
        default="",
        help="another format for some tables: user_id=int4,country=fp32",
    )
    parser.add_argument(
        "--products",
        metavar="FORMAT",
        default="",
        help="pack the weights of dense products for CPUs: mx6, mx9 or int8 (default: as the run has them);"
        " `ziggurat quantise RUN --products FORMAT` says what it costs",
    )
    parser.add_argument(
        "--dispatch",
        metavar="FILE",
        default="",
        help="pack each product in the format of a file, or leave it in FP32:"
        " `ziggurat numerics dispatch RUN --for scoring --out FILE` makes one",
    )
    parser.add_argument(
        "--value",
        metavar="FORMULA",
        default="",
        help="what orders answers, over the tasks; auto: chosen on validation likes (default: auto where there are any,"
        " else retrieval, or the one task)",
    )
    parser.add_argument(
        "--value-likes",
        metavar="N",
        type=int,
        default=4_000,
        help="validation likes that formulas are tried on, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--items",
        metavar="FILE",
        action="append",
        default=[],
        help="the catalogue, one row an item (default: the data)",
    )
    parser.add_argument(
        "--keep",
        metavar="A,B",
        default="",
        help="further columns for the catalogue: for filters, people and the value model; with --items and without "
        "--keep all of its columns",
    )
    parser.add_argument("--no-users", action="store_true", help="leave out what the data says of known users")
    parser.add_argument(
        "--candidates", metavar="C", type=int, default=500, help="items that the ranker scores (default: %(default)s)"
    )
    parser.add_argument(
        "--candidates-overarch",
        metavar="C",
        type=int,
        default=2000,
        help="items that the OverArch scores before, where the run has one (default: %(default)s)",
    )
    parser.add_argument(
        "--parity-rows",
        metavar="N",
        type=int,
        default=100_000,
        help="raw rows to compare with the run on (default: %(default)s)",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="also compile the dense network ahead for this processor, for other runtimes (takes a minute)",
    )
    parser.add_argument(
        "--allow",
        action="store_true",
        help="publish although scores differ from the run's, or the ranker knows few items",
    )
    add_model_argument(parser)
    add_verbose(parser)


def export(options: argparse.Namespace, rest: list[str]) -> int:
    """Make an export of a run, and say where it differs from it."""
    from ziggurat.config import override
    from ziggurat.runs.export import ExportConfig, export_run
    from ziggurat.training.report.progress import show_progress

    config = ExportConfig(
        products=options.products,
        dispatch=options.dispatch,
        value=options.value,
        value_likes=options.value_likes,
        items=tuple(options.items),
        keep=tuple(name.strip() for name in options.keep.split(",") if name.strip()),
        users=not options.no_users,
        num_candidates=options.candidates,
        num_over_arch=options.candidates_overarch,
        parity_rows=options.parity_rows,
        compiled=options.compiled,
        allow=options.allow,
    )
    config = override(config, {"tables": options.tables, "by-table": options.by_table})
    made = export_run(
        options.run,
        out=options.out,
        ranker=options.ranker,
        config=config,
        models=own_models(options),
        progress=show_progress(verbose=options.verbose),
    )
    size = sum(entry.bytes for entry in made.manifest.files.values())
    print_line(f"{options.out}: version {made.version}, {len(made.manifest.files)} files, {size / 2**20:.1f} MiB")
    return 0


def add_recommend_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `recommend`."""
    parser.add_argument("export", help="folder of an export that recommends")
    parser.add_argument("users", nargs="+", help="files or globs, one row a user: Parquet, JSON Lines, CSV, TSV (.gz)")
    add_output(
        parser,
        "--out",
        metavar="FILE",
        required=True,
        help="lists of items and scores, one row a user: .parquet; one line an item: .csv or .tsv",
    )
    parser.add_argument("--k", type=int, default=100, help="items for each user (default: %(default)s)")
    parser.add_argument("--filter", default="", help="which items may be in the lists (default: all)")
    parser.add_argument("--separator", metavar="X", default="", help="of text files: a character, semicolon, tab …")
    seen = parser.add_mutually_exclusive_group()
    seen.add_argument(
        "--include-seen",
        dest="exclude_seen",
        action="store_false",
        default=None,
        help="also items that the user has had in the data of the export (default: as the schema of its run says)",
    )
    seen.add_argument(
        "--exclude-seen", dest="exclude_seen", action="store_true", default=None, help="leave out such items"
    )
    add_model_argument(parser)
    add_verbose(parser)


def recommend(options: argparse.Namespace, rest: list[str]) -> int:
    """Lists of items in bulk."""
    from ziggurat.serving.bulk import BulkConfig, recommend_in_bulk, users_of
    from ziggurat.serving.first_look import look_at_export
    from ziggurat.serving.recommender import Recommender
    from ziggurat.training.report.progress import show_progress

    config = BulkConfig(
        k=options.k, filter=options.filter, exclude_seen=options.exclude_seen, separator=options.separator
    )
    known = {f"data.{name}": name for name in ("separator", "decimal", "thousands", "signs")}
    told = reading_settings(rest, known=known, where="command line: how files of users are read")
    config = override(config, told, also={name: f"--{path}" for path, name in known.items()})
    look_at_export(options.export, filters=[config.filter])
    users_of(options.users, out=options.out, config=config)
    loaded = Recommender.load(options.export, models=own_models(options))
    progress = show_progress(verbose=options.verbose)
    progress.begin("recommend", total=None)
    result = recommend_in_bulk(
        loaded,
        options.users,
        out=options.out,
        config=config,
        on_progress=progress.update,
        say=progress.say,
    )
    progress.end()
    notes = [
        f"{_counted(result.num_short, 'user')} with fewer than {options.k} items" if result.num_short else "",
        f"{_counted(result.num_unknown, 'user')} that the export does not know" if result.num_unknown else "",
        f"{_counted(result.num_equal, 'user')} whose items all have one score: nothing that is known of them tells "
        "items apart, and the order says nothing"
        if result.num_equal
        else "",
        f"{_counted(result.resumed, 'user')} done before" if result.resumed else "",
    ]
    info = loaded.info()
    leaves_out = info.exclude_seen if config.exclude_seen is None else config.exclude_seen
    said = f"repeats = {info.repeats}" if config.exclude_seen is None else "as the command says"
    notes.append(f"items that a user had {'are left out' if leaves_out else 'may be in the list'} ({said})")
    lists = _counted(result.num_users, "user")
    items = _counted(result.num_items, "item")
    print_line(f"lists of {lists}, {items}, in {options.out}")
    for note in filter(None, notes):
        print_line(note)
    return 0


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def add_recall_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `index recall`."""
    parser.add_argument("export", help="folder of an export that recommends")
    parser.add_argument("--k", type=int, default=100, help="items that are looked for (default: %(default)s)")
    parser.add_argument(
        "--filter", action="append", default=[], help="also with this filter; may be given several times"
    )
    parser.add_argument("--users", type=int, default=256, metavar="N", help="users to ask for (default: %(default)s)")
    add_output(parser, "--plot", metavar="FILE", help="picture of recall against time")
    add_model_argument(parser)


def index(options: argparse.Namespace, rest: list[str]) -> int:
    """Recall of an index against time."""
    from pathlib import Path

    from ziggurat.retrieval.recall import check_plot, measure_recall, plot_recall
    from ziggurat.serving.first_look import look_at_export
    from ziggurat.serving.recommender import Recommender

    for name in ("k", "users"):
        if getattr(options, name) < 1:
            raise ConfigError(
                expected=f"--{name} of at least 1",
                found=f"{getattr(options, name)}",
                where="command line",
                ways_out=f"--{name} 100",
            )
    if options.plot:
        check_plot(Path(options.plot))
    look_at_export(options.export, filters=options.filter)
    loaded = Recommender.load(options.export, models=own_models(options))
    search, queries = loaded.search_and_queries(num_users=options.users)
    wanted = [None, *(search.parse(text) for text in options.filter)]
    for note in (note for text in options.filter for note in loaded.notes(text)):
        print_line(f"filter: {note}")
    k = min(options.k, loaded.info().num_items)
    points = measure_recall(search.index, queries, k=k, filters=wanted)
    rows = [
        (point.filter or "none", f"{point.probes:,}", f"{point.recall:.4f}", f"{point.us_per_query:.0f}", point.plan)
        for point in points
    ]
    print_table(("filter", "clusters", f"recall@{k}", "µs a query", "plan"), rows)
    print_line(f"{len(queries):,} known users; answers look into {search.index.vectors.probes_for(k):,} clusters")
    if options.plot:
        plot_recall(points, Path(options.plot), k=k)
        print_line(f"plot {options.plot}")
    return 0


EXPORT = Verb(
    name="export",
    summary=EXPORT_SUMMARY,
    epilog=EXPORT_EPILOG,
    add_arguments=add_export_arguments,
    run=export,
)

RECOMMEND = Verb(
    name="recommend",
    summary=RECOMMEND_SUMMARY,
    epilog=RECOMMEND_EPILOG,
    add_arguments=add_recommend_arguments,
    run=recommend,
    takes=Takes.SETTINGS,
)

INDEX = Verb(
    name="index",
    summary="look into the index of an export",
    epilog=RECALL_EPILOG,
    add_arguments=add_index_arguments,
    run=index,
)
