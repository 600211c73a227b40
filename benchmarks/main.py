"""`ziggurat bench NAME [--json FILE] [--quick]`: run one benchmark, or all, and write its report.

Also `python -m benchmarks.main …` from the root of a checkout. `list` shows the names.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NAMES = {
    "train": "training against TorchRec and plain torch, batches in memory",
    "peer_versions": "training against TorchRec as pinned and as new as it loads, both in one run",
    "against": "the step on a CPU against that of an older commit, in turns: nothing became slower",
    "multi_hot": "the same with lists of ids, and the lookup's share",
    "scoring": "forward only, against TorchRec and plain torch",
    "parquet": "the whole training loop from Parquet, against batches in memory",
    "fuxictr": "training from Parquet, against FuxiCTR's own loop",
    "preprocess": "Criteo text to Parquet, against a polars script",
    "loss_curves": "recommended settings against FP32 eager and TorchRec: the same loss",
    "compile_cost": "start-up time of torch.compile, cold and cached",
    "wukong": "training Wukong and DHEN, against FuxiCTR's Wukong",
    "towers": "steps on an emulated data centre: towers against flat models, ours and TorchRec's",
    "collectives": "orders of ranks on an emulated data centre: all-reduces and steps as launched and as found",
    "exchange": "steps on an emulated data centre: rows of the next batch ahead, against the plain exchange",
    "ranks": "four ranks against one process on the same cores, and small steps against TorchRec",
    "simulator": "predicted steps against measured and published ones, error by error",
    "planning_measured": "plans by measured costs against additive plans, run on four ranks",
    "planning": "plans found against NeuroShard's, the optimum of small cases, 1,000 tables on 128 devices",
    "quality": "test metrics over seeds: MovieLens-1M, Frappe (BARS), synthetic teacher",
    "first_model": "what `ziggurat train auto` reaches on small tables, against logistic regression and LightGBM",
    "two_tower": "retrieval on MovieLens-1M: all movies ranked, against factorisation and popularity; its chain",
    "compare": "models compared on one data set over seeds, with tests of their differences",
    "tune": "a study of `ziggurat tune`: its cost beside tries, and its best against random search and the recipe",
    "scaling": "loss against compute for growing models, with the fitted law",
    "sequences": "next-item models: quality over seeds on MovieLens-1M and Beauty, speed against RecTools",
    "gpu": "one GPU: lookups against its memory, a step against plain and tuned torch, the CPU's losses, resume",
    "attention": "attention over histories of real lengths, against padded torch and the machine's products",
    "context": "histories divided between ranks: length at a fixed memory, speed, and the choice of what travels",
    "growing": "a growing table against a fixed hash in the same memory, over a stream whose users come and go",
    "stream": "training window after window, each scored first, against one batch run over the same rows",
    "delayed": "labels that come later: waiting, assumed negatives, four losses, on streams whose truth is known",
    "warm_start": "ten million rows carried over by raw id, and runs that begin from another one beside cold ones",
    "distil": "students of stale and biased teachers in four worlds: single head, auxiliary head, scalings, adapter",
    "self_distil": "SMC-2 against labels alone on Frappe with labels turned round, and the cost of its steps",
    "distil_history": "a teacher's vectors of users' earlier rows (LoopFM) beside logged scores, on two made sets",
    "graph": "products over a graph against torch.sparse and PyG, steps of LightGCN, and sampled edges",
    "stream_history": "streams that read a teacher's vectors beside its scores, window by window, on two made sets",
    "filters": "masks of filters over a million items, against polars on the same columns",
    "retrieval": "filtered vector search on one core: queries a second at recall@100 of 0.95, against faiss and ScaNN",
    "serve": "the server against the module without one, and against a plain FastAPI server",
    "shards": "search of an index by one process, by one shard behind HTTP, and by two",
    "data": "what repeats within a session, stored, read and computed once, against the plain way",
    "tables": "tables in few bits behind a cache: bytes with everything counted, and test AUC over seeds",
    "numerics": "dense products in few bits: error of formats, time of steps, dispatch, and the cost of a probe",
    "images": "vectors of pictures: FLOPs and bytes by a scale model, against fixed resolutions that are as accurate",
    "several_labels": "MMoE, PLE, ESMM and PEPNet beside plain networks, on made rows whose truth is known",
    "tower_quality": "test AUC of towers against flat models, over compression and partition",
}
# These have `parse_options`.
WITH_OPTIONS = (
    "peer_versions",
    "against",
    "towers",
    "collectives",
    "exchange",
    "data",
    "tower_quality",
    "simulator",
    "planning",
    "planning_measured",
    "compare",
    "tune",
    "scaling",
    "wukong",
    "retrieval",
    "graph",
    "serve",
    "shards",
    "first_model",
    "two_tower",
    "sequences",
    "gpu",
    "tables",
    "numerics",
    "distil",
    "several_labels",
    "self_distil",
    "warm_start",
    "images",
)
# These write what they have found after each case: their `run` takes `save`.
SAVED_BY_CASE = ("distil", "gpu")


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ziggurat bench", description=__doc__.splitlines()[0])
    parser.add_argument("name", type=lambda name: name.replace("-", "_"), help="see `ziggurat bench list`")
    parser.add_argument("--json", default="", help="also write the JSON there (with `all`: a folder)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and workloads; not to be quoted")
    options, rest = parser.parse_known_args(arguments)
    if options.name not in (*NAMES, "all", "list"):
        print(_no_such(options.name), file=sys.stderr)
        return 1
    if rest and options.name not in WITH_OPTIONS:
        parser.error(f"`ziggurat bench {options.name}` has no options of its own: {' '.join(rest)}")
    if options.name == "list":
        for name, meaning in NAMES.items():
            print(f"{name:14} {meaning}")
        return 0
    from benchmarks.report import write_report
    from ziggurat.errors import ZigguratError

    try:
        for name in NAMES if options.name == "all" else [options.name]:
            module = importlib.import_module(f"benchmarks.{name}")
            own = {"options": module.parse_options(rest)} if name in WITH_OPTIONS else {}
            target = options.json
            if target and options.name == "all":
                Path(target).mkdir(parents=True, exist_ok=True)
                target = str(Path(target) / f"{name}.json")
            if name in SAVED_BY_CASE:
                own["save"] = functools.partial(write_report, json_path=target, quick=options.quick)
            report = module.run(quick=options.quick, **own)
            print(write_report(report, json_path=target, quick=options.quick).read_text())
    except ZigguratError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 1
    return 0


def _no_such(name: str) -> str:
    from ziggurat.errors import ConfigError
    from ziggurat.typed import nearest

    ways_out = nearest(name, NAMES, instead="see what each measures: ziggurat bench list")
    error = ConfigError(
        expected=f"a benchmark out of {', '.join(NAMES)}, or all",
        found=repr(name),
        where="command line",
        ways_out=ways_out,
    )
    return f"ConfigError\n{error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
