"""Random configurations on 1 to 4 ranks against an FP64 reference that shares no code with what is tested.

    python -m tests.attacks.parity --count 500 --seed 0

Drawn are model, dense mode, optimizers, parts of a batch, precision, placement of every table, towers, hosts, sizes,
the order of ranks, each rank's share of a batch (some have none), clipping and the weight of positives. Two training
steps run as a run does them (`TrainStep`). Compared are both losses and, after the second step, every weight and every
table row, each rank its own. A case ends as

    equal       within the tolerance of its precision
    different   with numbers
    refused     with an error of four parts, on all ranks
    crashed     with anything else, or without an answer

BF16 has no exact answer: its error may be twice that of the same model on one device, under BF16, and a tenth of the
update more. (A ReLU that another order of rounding flips, in one of 13 samples, is 0.09; wrong gradients are 0.4 to 1.)
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.attacks.fp64_reference import NETWORKS, Reference
from tests.parallel.test_parity import FIELDS, TOWERS, inputs
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import TableOptimizerKind
from ziggurat.errors import ZigguratError
from ziggurat.models import MODEL_CONFIGS, AttentionActivation, HistoryInput, build_model
from ziggurat.models.blocks.mlp import Normalization
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import RankFailure, run_ranks
from ziggurat.training.config import DenseOptimizer, Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

OTHER_ROWS = ("next_item", "sequence_ranker", "lightgcn")  # they read other rows than random ones of any features
KINDS = tuple(config().kind for config in MODEL_CONFIGS if config().kind not in OTHER_ROWS)
TOWER_KINDS = ("dlrm", "dcn_v2", "dnn", "wukong", "dhen")
RATES = (0.05, 0.05)
LIMIT = 5e-3  # of the length of an update; deep networks add up to 2e-3 of noise, wrong gradients are 0.1 and more
BF16_NOISE = 0.1  # of the length of an update
CHUNK = 10  # cases in one start of ranks
# What is added before an exponential multiplies behind it, and a norm takes it out: its gradient is rounding alone.
IDLE = {"afn": "neurons.log_norm.bias"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration, as plain data."""

    seed: int
    world_size: int
    ranks_per_host: int
    tower_size: int  # 0: flat
    modules: bool
    kind: str
    dense: str
    optimizer: str
    table_optimizer: str
    num_parts: int
    precision: str
    batch_size: int
    tables: tuple[tuple[str, str, tuple[int, ...]], ...]
    order: tuple[int, ...]  # the launcher's rank at every place
    cuts: tuple[int, ...]  # where the shares of a batch end, place by place
    clip_norm: float
    positive_weight: float


def draw(seed: int, *, world_size: int) -> Case:
    """A case that depends on the seed alone."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    has_towers = kind != "logistic_regression" and rng.random() < 0.5
    sizes = [size for size in (1, 2, 4) if world_size % size == 0 and 4 % (world_size // size) == 0]
    if world_size == 3:
        sizes = [3]
    tower_size = rng.choice(sizes) if has_towers else 0
    hosts = rng.choice([n for n in (1, 2, 4) if world_size % n == 0])
    is_bf16 = rng.random() < 0.25
    plan = Plan(world_size=world_size, tables=(), towers=TOWERS if has_towers else None, tower_size=tower_size)
    group = {field: tuple(range(world_size)) for field in FIELDS}
    if has_towers:
        group = {name: tuple(plan.tower_ranks(t)) for t, tower in enumerate(TOWERS.towers) for name in tower}
    spec, tables = inputs(), []
    for table in spec.tables:
        ranks = group[next(field.name for field in spec.fields if field.table == table.name)]
        placement = rng.choice(list(Placement))
        some = tuple(rng.sample(ranks, rng.randint(1, len(ranks))))
        host = world_size // hosts
        near = tuple(rank for rank in ranks if rank // host == some[0] // host)
        chosen = {Placement.TABLE_WISE: some[:1], Placement.DATA_PARALLEL: ranks, Placement.TABLE_ROW_WISE: near}
        if placement is Placement.COLUMN_WISE and len(some) == 3 and rng.random() < 0.9:
            some = some[:2]  # three ranks do not divide 8 columns: refused
        tables.append((table.name, placement.value, chosen.get(placement, some)))
    case = Case(
        seed=seed,
        world_size=world_size,
        ranks_per_host=world_size // hosts,
        tower_size=tower_size,
        modules=has_towers and kind in TOWER_KINDS and rng.random() < 0.8,
        kind=kind,
        dense=rng.choice([each.value for each in DenseParallelism]),
        optimizer="sgd" if is_bf16 else rng.choice(["sgd", "adam", "adagrad"]),
        table_optimizer="sgd" if is_bf16 else rng.choice(["sgd", "rowwise_adagrad", "sparse_adam"]),
        num_parts=rng.choice([1, 1, 2, 3]),
        precision="bf16" if is_bf16 else "fp32",
        batch_size=rng.choice([1, 2, 7, 13, 32]),
        tables=tuple(tables),
        order=tuple(range(world_size)),
        cuts=(),
        clip_norm=0.0,
        positive_weight=1.0,
    )
    return _varied(case, random.Random(f"{seed}/more"))


def _varied(case: Case, rng: random.Random) -> Case:
    """The case with an order of ranks, shares of the batch, clipping and weight of positives."""
    others, size = range(1, case.world_size), case.batch_size
    cuts = [size * place // case.world_size for place in others]
    return dataclasses.replace(
        case,
        order=(0, *rng.sample(others, len(others))) if rng.random() < 0.4 else case.order,
        cuts=tuple(sorted(rng.randint(0, size) for _ in cuts) if rng.random() < 0.4 else cuts),
        clip_norm=rng.choice([0.0, 0.0, 0.05, 1.0]),
        positive_weight=rng.choice([1.0, 1.0, 0.25, 5.0]),
    )


def model_of(case: Case) -> Any:
    """The model of a case, small, on the kernel whose sums have one order."""
    config = next(each() for each in MODEL_CONFIGS if each().kind == case.kind)
    kind = TableOptimizerKind(case.table_optimizer)
    tables = dataclasses.replace(config.embedding, kernel=KernelChoice.TORCH, optimizer=kind)
    changes: dict[str, Any] = {"embedding": tables}
    names = {each.name for each in dataclasses.fields(config)}
    if "embedding_dim" in names:
        changes["embedding_dim"] = 8
    for name in names:
        value = getattr(config, name)
        if hasattr(value, "hidden_dims") and value.hidden_dims:
            changes[name] = dataclasses.replace(value, hidden_dims=(6,), dropout=0.0, normalization=Normalization.NONE)
    if case.kind == "din":
        changes |= {"histories": ("tags",), "attention_activation": AttentionActivation.RELU}
    if case.kind in ("bst", "dien", "transact", "onetrans"):
        changes["history"] = HistoryInput(lists=("tags",))
    zero = {"dien": "alpha", "transact": "dropout", "qnn": "dropout"}.get(case.kind)  # drawn by each rank
    changes |= {} if zero is None else {zero: 0.0}
    if case.kind == "two_tower":  # without counts of items: nothing observed these samples
        changes |= {"negatives_block": 3, "correction": "none", "temperature_is": "learned"}
    if "tower_module" in names and config.tower_module.kind.value == "linear":
        changes["tower_module"] = dataclasses.replace(config.tower_module, compression=2.0)
    config = dataclasses.replace(config, **changes)
    label = dataclasses.replace(inputs().labels[0], positive_weight=case.positive_weight)
    spec = dataclasses.replace(inputs(), labels=(label,))
    return build_model(config, spec, seed=case.seed, towers=TOWERS if case.modules else None)


def run_case(case: Case) -> dict[str, float]:
    """The largest errors on this rank; collective."""
    batches = [random_batch(inputs(), case.batch_size, seed=case.seed + step) for step in range(2)]
    written_out = case.kind in NETWORKS and (not case.modules or case.kind in ("dlrm", "dnn"))
    reference = Reference(
        model_of(case), kind=case.kind, rates=RATES, rules=(case.optimizer, case.table_optimizer),
        clip_norm=case.clip_norm, written_out=written_out,
    )  # fmt: skip
    losses = [reference.step(batch)[0] for batch in batches]
    entries = tuple(TablePlacement(table=n, placement=Placement(p), ranks=tuple(r)) for n, p, r in case.tables)
    towers = TOWERS if case.tower_size else None
    plan = Plan(world_size=case.world_size, tables=entries, towers=towers, tower_size=case.tower_size)
    hosts = [case.order.index(rank) // case.ranks_per_host for rank in range(case.world_size)]
    topology = Topology.create(tower_size=plan.ranks_per_group, hosts=hosts, order=case.order)
    settings = TrainingConfig(
        optimizer=DenseOptimizer(case.optimizer), learning_rate=RATES[0], table_learning_rate=RATES[1],
        precision=Precision(case.precision), clip_norm=case.clip_norm, loader=LoaderConfig(batch_size=case.batch_size),
    )  # fmt: skip
    many = model_of(case)
    config = ParallelConfig(dense=DenseParallelism(case.dense), num_parts=case.num_parts)
    step = TrainStep(many, settings, parallel=parallelize(many, plan, topology, config=config))
    cuts = [cut // many.coupled_samples * many.coupled_samples for cut in case.cuts]
    first, last = (0, *cuts, case.batch_size)[topology.rank : topology.rank + 2]
    found = [step(batch.rows(first, last)).loss for batch in batches]
    errors = {"loss": max(abs(f - w) / max(1.0, abs(w)) for f, w in zip(found, losses, strict=True))}
    held = _weights(many)
    held.pop(IDLE.get(case.kind, ""), None)
    errors |= _errors(held, reference)
    if case.precision == "bf16":
        one = model_of(case)
        alone = TrainStep(one, settings)
        for batch in batches:
            alone(batch)
        whole = _whole_weights(one)
        plain = _errors({name: (whole[name][place], place) for name, (_, place) in held.items()}, reference)
        return {name: max(0.0, error - 2 * plain.get(name, 0.01) - BF16_NOISE) for name, error in errors.items()}
    return errors


def _weights(model: Any) -> dict[str, tuple[torch.Tensor, Any]]:
    """What this rank holds, by name, and where it lies in the whole."""
    held: dict[str, tuple[torch.Tensor, Any]] = {}
    for name, weight in model.named_parameters():
        whole = weight.detach()
        held[name] = (whole.full_tensor() if isinstance(whole, DTensor) else whole, ...)
    tables = model.embeddings.tables
    for group in tables.mine.groups:
        for shard in group.shards:
            held[shard.table] = (tables.part(shard).detach(), (shard.rows, shard.columns))
    return held


def _whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """Everything, of a model on one device."""
    held = {n: weight.detach() for n, weight in model.named_parameters() if not n.startswith("embeddings.")}
    return {**held, **{table.name: model.embeddings.tables.view(table.name) for table in model.inputs.tables}}


def _errors(held: dict[str, tuple[torch.Tensor, Any]], reference: Reference) -> dict[str, float]:
    """The error of each weight, as a part of the update that it should have got."""
    errors, wanted = {}, {**reference.tables, **reference.dense}
    for name, (value, place) in held.items():
        whole, start = wanted[name][place], reference.start[name][place]
        if whole.numel():
            error, length = value.double() - whole, float((whole - start).norm()) + 1e-4 * float(whole.norm()) + 1e-7
            if name in reference.unseen:
                error = error.masked_fill(reference.unseen[name], 0.0)
            errors[name] = float(error.norm()) / length
    return errors


def run_cases(rank: int, cases: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Outcome and words of each case, on this rank."""
    del rank
    outcomes = []
    for each in cases:
        try:
            errors = run_case(Case(**each))
        except ZigguratError as error:
            outcomes.append(("refused", f"{error.expected} | {error.found}"))
            continue
        name, worst = max(errors.items(), key=lambda item: item[1])
        outcomes.append(("equal" if worst <= LIMIT else "different", f"{name}: {worst:.2e}"))
    return outcomes


def attack(cases: list[Case]) -> list[tuple[Case, str, str]]:
    """Outcomes of cases of one number of ranks; a chunk that crashes is tried again case by case."""
    found: list[tuple[Case, str, str]] = []
    for start in range(0, len(cases), CHUNK):
        chunk = cases[start : start + CHUNK]
        try:
            by_rank = run_ranks(run_cases, chunk[0].world_size, [dataclasses.asdict(case) for case in chunk])
        except RankFailure as failure:
            if len(chunk) == 1:
                found.append((chunk[0], "crashed", str(failure).strip().splitlines()[-2][:300]))
            else:
                for case in chunk:
                    found += attack([case])
            continue
        for index, case in enumerate(chunk):
            each = [outcomes[index] for outcomes in by_rank]
            worst = next((one for one in each if one[0] == "different"), each[0])
            found.append((case, *worst))
    return found


def main() -> int:
    """Draw, run, print; 1 if a case is different or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    for world_size in (1, 2, 3, 4):
        seeds = range(options.seed + world_size - 1, options.seed + options.count, 4)
        for case, outcome, words in attack([draw(seed, world_size=world_size) for seed in seeds]):
            outcomes[outcome] += 1
            if outcome != "equal":
                print(f"{outcome}  {words}\n    {case}", flush=True)
    words = ", ".join(f"{name} {outcomes[name]}" for name in ("equal", "different", "refused", "crashed"))
    print(f"tried {sum(outcomes.values())}: {words}")
    return 1 if outcomes["different"] or outcomes["crashed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
