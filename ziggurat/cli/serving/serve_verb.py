"""`ziggurat serve`: an export behind HTTP, and what is said when it is up."""

from __future__ import annotations

import argparse
import functools
import json
from typing import TYPE_CHECKING

from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.settings import refuse_unknown, settings_given
from ziggurat.cli.tables import print_line
from ziggurat.cli.verb import Takes, Verb
from ziggurat.commands import pasted
from ziggurat.config import override, settings
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.serving.server.config import ServerConfig
    from ziggurat.serving.server.processes.worker import Loaded

_LISTED = "docs/guides/server.md, or `ziggurat serve --help`"
SERVE_SUMMARY = "answer over HTTP from an export: /recommend, /rank, a web page, /metrics"
SERVE_EPILOG = """Listens on this machine alone, unless --host says otherwise. Requests that cannot be answered within
the deadline get less effort (the answer says so), then 503 with Retry-After. SIGTERM answers what was taken in, and
ends; SIGHUP loads the export again, beside the old one, and swaps when it is ready. Every limit and timeout can be set:
  --server.deadline-ms 50 --server.max-body-bytes 65536 …     all of them: docs/guides/server.md
examples:
  ziggurat serve exports/films
  ziggurat serve exports/films --port 8000 --workers 4 --api-key-file key.txt
  ziggurat serve exports/current --watch                      swaps when the link leads elsewhere
  ziggurat serve exports/live                                 what a stream publishes, version after version
  ziggurat serve exports/films --server.admin-socket a.sock   curl --unix-socket a.sock localhost/admin/swap …
  ziggurat serve exports/films --shards 4                     four processes that share the search
  ziggurat serve exports/films --shard 0/2 --port 9000        one shard, for a server elsewhere:
  ziggurat serve exports/films --shard-addresses 10.0.0.1:9000,10.0.0.2:9000"""


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `serve`."""
    parser.add_argument("export", help="folder of an export, a link to one, or a folder that a stream publishes into")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes a free one (default: 8080)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that answer (default: 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each (default: the cores / N)")
    parser.add_argument("--deadline-ms", type=float, metavar="MS", help="time for an answer (default: 200)")
    parser.add_argument("--api-key-file", metavar="FILE", default="", help="requests must bring the key in this file")
    parser.add_argument("--shards", type=int, metavar="N", help="processes that share the search (default: 1)")
    parser.add_argument(
        "--shard-addresses", metavar="A,B", help="host:port of shards that run elsewhere, in their order"
    )
    parser.add_argument(
        "--shard", metavar="I/N", default="", help="be one shard of N, from 0, and answer searches alone"
    )
    parser.add_argument("--watch", action="store_true", help="swap when the folder or link changes")
    add_model_argument(parser)


def serve(options: argparse.Namespace, rest: list[str]) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from ziggurat.serving.export.export_folder import read_manifest
    from ziggurat.serving.recommender import Recommender
    from ziggurat.serving.server.serve import check_packages, read_api_key
    from ziggurat.serving.server.serve import serve as serve_export

    check_packages()
    config = config_of(options, rest)
    read_manifest(options.export)
    if options.shard:
        return _serve_shard(options, config)
    load = functools.partial(Recommender.load, models=own_models(options))
    report = functools.partial(_report, options.export, config, bool(options.api_key_file))
    serve_export(options.export, config=config, load=load, api_key=read_api_key(options.api_key_file), on_ready=report)
    return 0


def _serve_shard(options: argparse.Namespace, config: ServerConfig) -> int:
    from ziggurat.serving.server.serve import read_api_key, serve_shard

    shard, _, num_shards = options.shard.partition("/")
    if not (shard.isdecimal() and num_shards.isdecimal()) or config.shards > 1 or config.shard_addresses:
        raise ConfigError(
            expected="--shard I/N alone: one of N shards, from 0",
            found=f"--shard {options.shard}" + (", and shards to ask" if num_shards.isdecimal() else ""),
            where="command line",
            ways_out=("--shard 0/2 for the first of two", "--shards 2: a server that starts both"),
        )

    def report(address: str) -> None:
        print_line(f"{options.export}: shard {int(shard)} of {int(num_shards)} at {address.removeprefix('http://')}")
        print_line(_reach(config, bool(options.api_key_file)))

    serve_shard(
        options.export,
        shard=int(shard),
        num_shards=int(num_shards),
        config=config,
        api_key=read_api_key(options.api_key_file),
        on_ready=report,
    )
    return 0


def config_of(options: argparse.Namespace, rest: list[str]) -> ServerConfig:
    """The settings that flags and --server.NAME VALUE give."""
    from ziggurat.serving.server.config import ServerConfig

    names = ("host", "port", "workers", "threads", "deadline_ms", "shards", "shard_addresses")
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    given = settings_given(rest)
    refuse_unknown(given, known=[f"server.{path}" for path, _, _ in settings(ServerConfig())], listed=_LISTED)
    changes = {name: str(getattr(options, name)) for name in flags if getattr(options, name) is not None}
    if options.watch:
        changes["watch"] = "true"
    also = dict(flags)
    for path, text in given.items():
        name = path.partition(".")[2]
        if not name:
            raise ConfigError(
                expected="the name of one setting of a server: --server.NAME VALUE",
                found=f"--{path}",
                where="command line",
                ways_out=("--server.deadline-ms 50", f"see all settings: {_LISTED}"),
            )
        changes[name], also[name] = text, f"--{path}"
    return override(ServerConfig(), changes, also=also)


def _report(export: str, config: ServerConfig, has_key: bool, address: str, loaded: Loaded) -> None:
    items = f"{loaded.num_items:,} items" if loaded.num_items else "no catalogue"
    labels = f", scores for {', '.join(loaded.labels)}" if loaded.labels else ""
    packed = ", ".join(f"{part} {format}" for part, format in loaded.products.items() if format != "fp32")
    in_few_bits = f", dense products packed ({packed})" if packed else ""
    version = f"{loaded.published} ({loaded.version})" if loaded.published else f"version {loaded.version}"
    print_line(f"{export}: {version}, {items}{labels}{in_few_bits}")
    spares = f", {config.spares} in reserve" if config.spares else ""
    print_line(f"{config.workers} worker(s) of {config.threads_of_worker} thread(s){spares}; {_reach(config, has_key)}")
    where = f"{config.shards} processes" if config.shards > 1 else config.shard_addresses
    if where:
        print_line(f"the index is searched by {where}; a shard has {config.shard_deadline_ms:g} ms")
    less = "with less effort under load" if config.degrade else "always with full effort"
    print_line(f"answers within {config.deadline_ms:g} ms, {less}; later ones are refused with 503")
    body = json.dumps(loaded.example, ensure_ascii=False)
    print_line(f"the page, and all routes: {address}")
    print_line(f"curl -s {pasted(address + loaded.path)} -d {pasted(body)}")


def _reach(config: ServerConfig, has_key: bool) -> str:
    from ziggurat.serving.server.hosts import is_local

    if is_local(config.host):
        return "this machine alone reaches it" + (", with the API key" if has_key else "")
    return "every machine that reaches this one may ask" + (
        ", with the API key" if has_key else ": there is no API key (--api-key-file)"
    )


SERVE = Verb(
    name="serve",
    summary=SERVE_SUMMARY,
    epilog=SERVE_EPILOG,
    add_arguments=add_serve_arguments,
    run=serve,
    takes=Takes.WORDS,
)
