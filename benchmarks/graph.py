"""Propagation over a graph of users and items against torch.sparse, sparse-dot-mkl and PyG, and a step of LightGCN.

    ziggurat bench graph --json out.json [--source FOLDER] [--runs RUN …]       FOLDER: train.txt of LightGCN's Gowalla

Without a folder the graph is made: as many users, items and edges as Gowalla's, whose popularity falls as 1 / rank.
All contestants take turns in one process; times of one thread are CPU time of the process, of two threads wall time. A
round is one product (five steps of LightGCN) of each; ratios are of the same round. torch.sparse has int32 indices,
with which MKL is faster, and ids fall by popularity, as those of prepared data do. The plain LightGCN is written as the
paper's code is: a sparse tensor, three products, the mean of the stack, BPR, autograd, `torch.optim.Adam`.

sparse-dot-mkl and PyG are measured where they can be imported: `.venv-bench/bin/python -m benchmarks.main graph`.

Edge sampling (ES-SpMM) is timed at several widths against the product over all edges.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import percentiles, say
from benchmarks.report import Case, Report, by_round
from ziggurat import precision
from ziggurat.data.datasets.fetch import read_plain_or_gzip
from ziggurat.data.datasets.s3rec import read_s3rec
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.items import Items
from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.models import LayerDtype, LightGCNConfig, build_model
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.ops.graph.edge_sampling import EdgeSampling, EdgeStrategy
from ziggurat.ops.graph.graph import Graph, user_item_graph
from ziggurat.ops.graph.propagation import propagate
from ziggurat.ops.machine.allocator import keep_freed_memory
from ziggurat.ops.machine.huge_pages import advise_huge_pages
from ziggurat.testing.batches import random_batch
from ziggurat.training.config import TrainingConfig
from ziggurat.training.metrics.full_ranking import USER_NDCG, USER_RECALL
from ziggurat.training.step.train_step import TrainStep

USERS, ITEMS, EDGES = 29_858, 40_981, 810_128
DIM, LAYERS, BATCH = 64, 3, 2048
WIDTHS = (8, 16, 32, 64, 128, 256)
STEPS = 5
FP32_GOAL, EPOCH_GOAL = 3.0, 3.0
BF16_GOAL, BF16_GOAL_WITHOUT = 6.0, 4.5  # where the CPU has BF16, and where it has not
OURS = "Ziggurat"


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench graph")
    parser.add_argument("--source", default="", help="folder with train.txt of LightGCN's Gowalla, plain or .gz")
    parser.add_argument(
        "--runs",
        nargs="*",
        default=[],
        help="folders of finished runs of gowalla_lightgcn, whose test figures are added",
    )
    return parser.parse_args(arguments)


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """Measure products, steps and sampled products."""
    options = options or parse_options([])
    # As training does, and for all contestants: else it is up to chance who gives the pages of a result back to the
    # system and takes them anew with each product, 9 ms on a virtual machine.
    keep_freed_memory()
    users, items = pairs(options.source, quick=quick)
    num_users = int(users.max()) + 1
    num_items = int(items.max()) + 1
    graph = user_item_graph(users, items, num_users=num_users, num_items=num_items)
    rounds = 5 if quick else 21
    where = "Gowalla" if options.source else "a made graph"
    report = Report(
        benchmark="graph",
        claim=f"Products over {where} ({num_users:,} users, {num_items:,} items, {graph.num_edges:,} directed edges), "
        f"D = {DIM}, and steps of LightGCN ({LAYERS} layers, batches of {BATCH:,}), against torch.sparse and others.",
        command="ziggurat bench graph" + (" --source FOLDER" if options.source else ""),
    )
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            if threads > (os.cpu_count() or 1):
                report.skipped.append(f"{threads} threads: this machine has {os.cpu_count()} cores")
                continue
            torch.set_num_threads(threads)
            say(f"products, {threads} threads")
            report.cases += products(graph, threads=threads, rounds=rounds, skipped=report.skipped)
            report.figures += products_on_huge_pages(graph, threads=threads, rounds=rounds)
        torch.set_num_threads(1)
        say("steps of LightGCN")
        report.cases += steps(users, items, num_users=num_users, num_items=num_items, rounds=max(3, rounds // 3))
        say("sampled products")
        report.figures += sampled_products(graph, rounds=rounds)
    finally:
        torch.set_num_threads(before)
    report.figures += quality(options.runs)
    load = os.getloadavg()[0]
    report.notes.append(f"load average at the end: {load:.1f} on {os.cpu_count()} cores")
    report.notes += [f"{case.name}: {1e3 / case.ours:.1f} ms against {1e3 / case.peer:.1f} ms" for case in report.cases]
    return report


def pairs(source: str, *, quick: bool) -> tuple[Tensor, Tensor]:
    """Users and items of all edges, those of a file or made ones."""
    if source:
        file = Path(source) / "train.txt"
        frame = read_s3rec(read_plain_or_gzip(file, ways_out=("name the folder of train.txt",)), where=str(file))
        return by_popularity(frame["user_id"].to_torch().long()), by_popularity(frame["item_id"].to_torch().long())
    shrink = 10 if quick else 1
    rng = np.random.default_rng(0)
    num_users = USERS // shrink
    num_items = ITEMS // shrink
    popular = 1.0 / np.arange(1, num_items + 1)
    items = rng.choice(num_items, EDGES // shrink, p=popular / popular.sum())
    users = np.minimum((num_users * rng.random(EDGES // shrink) ** 1.5).astype(np.int64), num_users - 1)
    items[-1] = num_items - 1
    users[-1] = num_users - 1
    return by_popularity(torch.from_numpy(users)), by_popularity(torch.from_numpy(items.astype(np.int64)))


def by_popularity(ids: Tensor) -> Tensor:
    """Number ids anew: the most frequent is 0."""
    _, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    return order.argsort()[inverse]


def quality(runs: Sequence[str]) -> list[dict[str, object]]:
    """Recall and NDCG of users at 20, of the tests of runs, with their means."""
    if not runs:
        return []
    tests = [json.loads((Path(run) / "evaluations" / "test.json").read_text())["metrics"] for run in runs]
    found: list[dict[str, object]] = []
    for name, metric in (("gowalla_recall20_mean", USER_RECALL), ("gowalla_ndcg20_mean", USER_NDCG)):
        values = [float(metrics[metric]) for metrics in tests]
        found.append({"name": name, "value": statistics.mean(values), "values": values, "num_seeds": len(values)})
    return found


# ------------------------------------------------------------------------------------------------------------ products


def products(graph: Graph, *, threads: int, rounds: int, skipped: list[str]) -> list[Case]:
    """Compare one product over all edges with those of others."""
    x = torch.randn(graph.num_columns, DIM, generator=torch.Generator().manual_seed(0))
    x_bf16 = x.bfloat16()
    peers: dict[str, Callable[[], object]] = {f"torch.sparse {torch.__version__} (MKL)": of_torch(graph, x)}
    for name, make in (("sparse-dot-mkl", of_sparse_dot_mkl), ("PyG", of_pyg)):
        try:
            peers[name] = make(graph, x)
        except (ImportError, OSError, RuntimeError) as error:
            skipped.append(f"{name}, {threads} threads: {type(error).__name__}: {str(error)[:120]}")
    ours: dict[str, Callable[[], object]] = {
        "fp32": lambda: propagate(graph, x),
        "bf16": lambda: propagate(graph, x_bf16, dtype=torch.bfloat16),
    }
    wanted = of_torch(graph, x)()
    torch.testing.assert_close(propagate(graph, x), wanted, rtol=1e-4, atol=1e-4)
    times = taken({**ours, **peers}, rounds=rounds, clock=time.process_time if threads == 1 else time.perf_counter)
    thread_text = "1_thread" if threads == 1 else f"{threads}_threads"
    goals = {"fp32": FP32_GOAL, "bf16": BF16_GOAL if has_bf16() else BF16_GOAL_WITHOUT}
    cases = []
    for number, peer in enumerate(peers):
        short = ("", "_sparse_dot_mkl", "_pyg")[("torch", "spars", "PyG").index(peer[:5].strip()[:5])]
        for dtype in ours:
            # Peers beside torch.sparse have to be slower, by however little.
            goal = goals[dtype] if not number else 1.0
            cases.append(
                by_round(
                    f"spmm_{dtype}{short}_{thread_text}",
                    ours=(f"{OURS}, {dtype}", rates(times[dtype])),
                    peer=(peer, rates(times[peer])),
                    goal=goal,
                    unit="products/s",
                )
            )
    return cases


def products_on_huge_pages(graph: Graph, *, threads: int, rounds: int) -> list[dict[str, object]]:
    """Time products of ours and of torch.sparse with features on pages of 2 MiB, as tables and layers lie."""
    x = on_huge_pages(torch.randn(graph.num_columns, DIM, generator=torch.Generator().manual_seed(0)))
    x_bf16 = on_huge_pages(x.bfloat16())
    contestants: dict[str, Callable[[], object]] = {
        "fp32": lambda: propagate(graph, x),
        "bf16": lambda: propagate(graph, x_bf16, dtype=torch.bfloat16),
        "torch": of_torch(graph, x),
    }
    times = taken(contestants, rounds=rounds, clock=time.process_time if threads == 1 else time.perf_counter)
    found: list[dict[str, object]] = []
    for dtype in ("fp32", "bf16"):
        ratios = [theirs / ours for theirs, ours in zip(times["torch"], times[dtype], strict=True)]
        low, high = percentiles(ratios)
        found.append(
            {
                "name": f"huge_pages_{dtype}_{threads}_threads",
                "ratio": statistics.median(ratios),
                "ratio_p10": low,
                "ratio_p90": high,
                "ours_ms": 1e3 * statistics.median(times[dtype]),
                "torch_sparse_ms": 1e3 * statistics.median(times["torch"]),
            }
        )
    return found


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Copy a tensor to pages of 2 MiB, if the system gives them."""
    copy = torch.empty_like(tensor)
    advise_huge_pages(copy)
    return copy.copy_(tensor)


def of_torch(graph: Graph, x: Tensor) -> Callable[[], Tensor]:
    """A product by torch.sparse in CSR form."""
    size = (graph.num_rows, graph.num_columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = torch.sparse_csr_tensor(graph.offsets.int(), graph.columns, graph.weights, size)
    return lambda: matrix @ x


def of_sparse_dot_mkl(graph: Graph, x: Tensor) -> Callable[[], object]:
    """A product by MKL's own inspector and executor, through sparse-dot-mkl."""
    # The loader of a wheel's MKL looks in the system's folders alone.
    if found := sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*")):
        os.environ.setdefault("MKL_RT", str(found[-1]))
    from scipy.sparse import csr_matrix
    from sparse_dot_mkl import dot_product_mkl  # type: ignore[import-not-found]

    size = (graph.num_rows, graph.num_columns)
    matrix = csr_matrix((graph.weights.numpy(), graph.columns.numpy(), graph.offsets.int().numpy()), shape=size)
    features = x.numpy()
    dot_product_mkl(matrix, features)
    return lambda: dot_product_mkl(matrix, features)


def of_pyg(graph: Graph, x: Tensor) -> Callable[[], object]:
    """A product as PyG's LGConv makes it on a sparse tensor."""
    from torch_geometric.utils import spmm  # type: ignore[import-not-found]

    size = (graph.num_rows, graph.num_columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = torch.sparse_csr_tensor(graph.offsets, graph.columns.long(), graph.weights, size)
    spmm(matrix, x, reduce="sum")
    return lambda: spmm(matrix, x, reduce="sum")


# --------------------------------------------------------------------------------------------------- steps of LightGCN


class PlainLightGCN(nn.Module):
    """LightGCN in plain torch, on one sparse matrix."""

    def __init__(self, graph: Graph, *, num_users: int) -> None:
        super().__init__()
        indices = torch.stack([graph.rows_of_edges(), graph.columns.long()])
        size = (graph.num_rows, graph.num_columns)
        self.matrix = torch.sparse_coo_tensor(indices, graph.weights, size).coalesce()
        self.users = nn.Embedding(num_users, DIM)
        self.items = nn.Embedding(graph.num_rows - num_users, DIM)
        nn.init.normal_(self.users.weight, std=0.1)
        nn.init.normal_(self.items.weight, std=0.1)

    def loss(self, users: Tensor, items: Tensor, negatives: Tensor) -> Tensor:
        """BPR and the penalty of a batch."""
        layer = torch.cat([self.users.weight, self.items.weight])
        layers = [layer]
        for _ in range(LAYERS):
            layer = torch.sparse.mm(self.matrix, layer)
            layers.append(layer)
        means = torch.stack(layers, dim=1).mean(dim=1)
        of_users, of_items = means.split([self.users.num_embeddings, self.items.num_embeddings])
        user = of_users[users]
        item = of_items[items]
        negative = of_items[negatives]
        first = (self.users(users), self.items(items), self.items(negatives))
        penalty = 0.5 * sum(each.square().sum() for each in first) / len(users)
        return F.softplus((user * negative).sum(1) - (user * item).sum(1)).mean() + 1e-4 * penalty


def steps(users: Tensor, items: Tensor, *, num_users: int, num_items: int, rounds: int) -> list[Case]:
    """Compare whole training steps on the same batches: loss, backward pass, Adam."""
    spec = InputSpec(
        single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
        tables=(
            TableSpec(name="user", num_rows=num_users + NUM_RESERVED_ROWS),
            TableSpec(name="item", num_rows=num_items + NUM_RESERVED_ROWS),
        ),
        labels=(LabelSpec(name="took"),),
        items=Items(id="item"),
    )
    order = torch.randperm(len(users), generator=torch.Generator().manual_seed(0))
    batches = [batch_of(spec, users[some], items[some]) for some in order.split(BATCH)[: STEPS * 4]]
    whole = batch_of(spec, users, items)
    contestants: dict[str, Callable[[], object]] = {}
    for layers_in in LayerDtype:
        model = build_model(LightGCNConfig(embedding_dim=DIM, num_layers=LAYERS, layers_in=layers_in), spec, seed=0)
        model.observe([whole])
        step = TrainStep(model, TrainingConfig(learning_rate=1e-3, precision=precision.PLAIN))
        prepared = [model.shortened(batch, draw=StepDraw(seed=0, step=0)) for batch in batches]
        contestants[layers_in.value] = some_steps(prepared, step)
    graph = user_item_graph(users, items, num_users=num_users, num_items=num_items)
    plain = PlainLightGCN(graph, num_users=num_users)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
    negatives = torch.randint(num_items, (BATCH,))

    def plain_step(batch: Batch) -> None:
        optimizer.zero_grad()
        rows = batch.single - NUM_RESERVED_ROWS
        plain.loss(rows[0], rows[1], negatives[: batch.batch_size]).backward()
        optimizer.step()

    contestants["plain"] = some_steps(batches, plain_step)
    times = taken(contestants, rounds=rounds, clock=time.process_time)
    peer = (f"plain LightGCN, torch {torch.__version__}", [STEPS * each for each in rates(times["plain"])])
    return [
        by_round(
            f"lightgcn_step_{dtype}",
            ours=(f"{OURS}, layers in {dtype}", [STEPS * each for each in rates(times[dtype])]),
            peer=peer,
            goal=EPOCH_GOAL,
            unit="steps/s",
        )
        for dtype in ("fp32", "bf16")
    ]


def batch_of(spec: InputSpec, users: Tensor, items: Tensor) -> Batch:
    """Positive samples of these users and items."""
    batch = random_batch(spec, len(users))
    batch.single[0] = users + NUM_RESERVED_ROWS
    batch.single[1] = items + NUM_RESERVED_ROWS
    batch.labels.fill_(1.0)
    return batch


def some_steps(batches: Sequence[Batch], step: Callable[[Batch], object]) -> Callable[[], None]:
    """A function that makes a few steps, each time on the batches that follow."""
    position = [0]

    def make() -> None:
        for _ in range(STEPS):
            step(batches[position[0] % len(batches)])
            position[0] += 1

    return make


# ---------------------------------------------------------------------------------------------------- sampled products


def sampled_products(graph: Graph, *, rounds: int) -> list[dict[str, object]]:
    """Time products over sampled edges, against that over all edges."""
    torch.set_num_threads(1)
    x = torch.randn(graph.num_columns, DIM, generator=torch.Generator().manual_seed(0))
    lengths = graph.offsets.diff()
    found: list[dict[str, object]] = []
    for strategy in EdgeStrategy:
        contestants: dict[str, Callable[[], object]] = {"all": lambda: propagate(graph, x)}
        for width in WIDTHS:
            sampling = EdgeSampling(width=width, strategy=strategy)
            contestants[str(width)] = lambda sampling=sampling: propagate(graph, x, sampling=sampling)
        times = taken(contestants, rounds=max(3, rounds // 3), clock=time.process_time)
        for width in WIDTHS:
            ratios = [whole / some for whole, some in zip(times["all"], times[str(width)], strict=True)]
            low, high = percentiles(ratios)
            kept = float(lengths.clamp(max=width).sum() / lengths.sum())
            found.append(
                {
                    "name": f"sampled_{strategy.value}_{width}",
                    "edges_kept": kept,
                    "ratio": statistics.median(ratios),
                    "ratio_p10": low,
                    "ratio_p90": high,
                }
            )
    return found


# --------------------------------------------------------------------------------------------------------------- clocks


def taken(
    contestants: dict[str, Callable[[], object]], *, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each contestant by round, in turns; the first round warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, call in contestants.items():
            begin = clock()
            call()
            if number:
                times[name].append(clock() - begin)
    return times


def rates(times: Sequence[float]) -> list[float]:
    """Calls a second."""
    return [1.0 / each for each in times]


def has_bf16() -> bool:
    """Whether the CPU multiplies BF16 in hardware."""
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return sys.platform == "darwin"
