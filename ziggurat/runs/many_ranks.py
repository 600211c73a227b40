"""A run on the ranks that torchrun started: who prepares, who plans, and what happens if that fails.

    all          compare settings, versions, command line; then, once it is there, the data
    rank 0       prepare data ─► plan ─┐ verdict to all ─► every rank: open the data, build the model, parallelize
    the others   wait ─────────────────┘ (the same error on all ranks if rank 0 failed)

The plan comes from `--plan FILE`, else on resume from the run's folder if it fits the number of ranks, else from
`place_tables`, in tower groups of the size that `runs/planning/tower_size.py` chooses. Training keeps it in the run's
folder (`plan.json`), for people and for the next start; a checkpoint does not depend on it, and a finished run is
scored on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypedDict, TypeVar

from ziggurat.config import JSON, flattened, from_json, to_json
from ziggurat.data.balance.partition import Balance
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.errors import ConfigError
from ziggurat.models import Model
from ziggurat.parallel.agreement import Agreement, require_equal
from ziggurat.parallel.device import choose_device, device_of_finished_run
from ziggurat.parallel.parallelize import Parallel, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Plan
from ziggurat.planning.placement import place_tables
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.dispatched import content_of
from ziggurat.runs.fingerprint import fingerprint
from ziggurat.runs.planning.tower_size import choose_tower_size, cluster_of_ranks
from ziggurat.training.records.run_folder import TRAFFIC, RunFolder
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.training.report.ranks import traffic_report

T = TypeVar("T")


def on_any_ranks(config: RunConfig) -> RunConfig:
    """The settings of a run as it is scored on the ranks that there are: its scores depend on none of these.

    Tower groups are as the ranks ask for, and histories are divided as in training where that divides the ranks.

    Args:
        config: of the run.
    """
    with Topology.create() as topology:
        size = topology.world_size
    parallel = config.parallel
    context = 1 if size % parallel.context else parallel.context
    # The order was of the ranks that trained.
    parallel = replace(parallel, tower_size=0, context=context, rank_order="")
    return replace(config, parallel=parallel, device=device_of_finished_run(config.device))


class _ChosenPlan(TypedDict):
    """Plan as JSON, and why its tower groups have the size that they have."""

    plan: JSON
    reason: str


class _Places(TypedDict):
    """The launcher's rank at every place, and the host of every rank of the launcher; () where nobody found them."""

    order: tuple[int, ...]
    hosts: tuple[int, ...]


class Ranks:
    """The ranks of a run; one device if torchrun started none. Constructing is collective.

    Args:
        config: of the run.
        plan: where tables go; None makes a plan.
        given: what else the command line says, by flag: it must be the same on every rank, too.

    Raises:
        TopologyError: hosts have different numbers of ranks, or histories are to be divided between a number that does
            not divide the ranks; on every rank.
        ConfigError: a plan, or histories to divide, without ranks to do it; or ranks that were started with different
            settings.
    """

    def __init__(self, config: RunConfig, *, plan: Plan | None, given: Mapping[str, object] | None = None) -> None:
        self._config = config
        self._plan = plan
        self.tower_size_reason = ""
        self.order_reason = ""
        self._agreement = Agreement(patience_s=config.parallel.prepare_timeout_s)
        self._places = self._found_places(config.parallel.rank_order)
        size = config.parallel.context  # refused here where it does not divide the ranks, before data is prepared
        self._hosts = Topology.create(ranks_per_host=config.parallel.ranks_per_host, context_size=size, **self._places)
        self._topologies = [self._hosts]
        if self.are_many and config.towers is not None and config.parallel.cluster:
            ranks_per_host = self._hosts.ranks_per_host
            cluster_of_ranks(config.parallel.cluster, world_size=self.world_size, ranks_per_host=ranks_per_host)
        if self.are_many:
            stated = {f"--{name}": str(value) for name, value in (given or {}).items()}
            # `job` has compared devices, unless the process group was made by somebody else.
            kinds = self._agreement.everywhere(lambda: choose_device(config.device).device.type)
            stated["--device, as chosen"] = kinds[self._agreement.rank]
            settled = fingerprint(config) | ({} if plan is None else flattened(plan, prefix="plan"))
            require_equal(settled | content_of(config) | stated, where="settings, before anything is read")
        if config.parallel.context > 1 and not self.are_many:
            raise ConfigError(
                expected="several ranks to divide histories between them",
                found="one device",
                where=f"--context {config.parallel.context}",
                ways_out=("torchrun --nproc-per-node N -m ziggurat train …", "--context 1"),
            )
        if plan is not None and not self.are_many:
            raise ConfigError(
                expected="several ranks to execute a plan",
                found="one device",
                where="--plan",
                ways_out=("start the run with torchrun --nproc-per-node N -m ziggurat train …", "leave --plan out"),
            )

    def close(self) -> None:
        """End what the ranks of the run communicate over; collective. A process may go on with another run."""
        for topology in self._topologies:
            topology.close()
        self._agreement.close()

    @property
    def are_many(self) -> bool:
        """True if there is more than one."""
        return self._hosts.world_size > 1

    @property
    def is_first(self) -> bool:
        """True on the rank that writes."""
        return self._agreement.is_first

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; its result (plain data), or its error, on every rank."""
        return self._agreement.on_first(action)

    def first_then_all(self, action: Callable[[Progress], T], *, progress: Progress) -> T:
        """Run `action` on rank 0, then on the others, which find its result in the cache; all fail if one does."""
        made: list[T] = []

        def run(shown: Progress) -> None:
            made.append(action(shown))

        self._agreement.on_first(lambda: run(progress))
        # Only now is there a result that the others can find.
        self._agreement.everywhere(lambda: None if self.is_first else run(NoProgress()))
        return made[0]

    def require_same_data(self, prepared: PreparedData) -> None:
        """Compare what every rank has prepared or opened; collective.

        Raises:
            ConfigError: it is not the same data, on every rank; names what differs.
        """
        if self.are_many:
            datasets = {"train": prepared.train, "valid": prepared.valid, "test": prepared.test}
            vocabulary = prepared.preprocessing.fingerprint
            facts = fingerprint({}, inputs=prepared.inputs, datasets=datasets, vocabulary=vocabulary, versions=False)
            require_equal(facts, where="data, before the first step")

    def parallelize(self, model: Model, *, run: RunFolder, resume: bool) -> Parallel | None:
        """Plan on rank 0, and make the model parallel on all; None on one device.

        Args:
            model: built the same way on every rank. Open tables stay open: they are drawn or loaded next.
            run: its folder.
            resume: take the plan that is kept there, if it fits.
        """
        if not self.are_many:
            return None
        made = self._agreement.on_first(lambda: self._make_plan(model, run=run, resume=resume))
        plan = from_json(Plan, made["plan"], where="plan of rank 0")
        self.tower_size_reason = made["reason"]
        config = self._config
        topology = Topology.create(
            tower_size=plan.ranks_per_group,
            ranks_per_host=config.parallel.ranks_per_host,
            context_size=config.parallel.context,
            **self._places,
        )
        self._topologies.append(topology)
        training = config.training
        counted = training.balance is not Balance.NONE and not training.balance_cost
        return parallelize(model, plan, topology, config=config.parallel.parallel, count_costs=counted)

    def keep_plan(self, parallel: Parallel, *, run: RunFolder) -> None:
        """Write the plan into the run's folder."""

        def keep() -> None:
            run.path.mkdir(parents=True, exist_ok=True)
            parallel.plan.save(run.plan)

        self._agreement.on_first(keep)

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._hosts.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._hosts.world_size

    def write_traffic(self, parallel: Parallel, *, run: RunFolder) -> None:
        """Write down what all ranks have sent."""
        report = traffic_report(parallel, self._agreement)
        self._agreement.on_first(lambda: str(TRAFFIC.write(run.traffic, report)))

    def _found_places(self, path: str) -> _Places:
        """The order and hosts of `--rank-order`, nothing without one; collective.

        Raises:
            ConfigError: it is of another job, stale or damaged, or there is one rank; on every rank.
        """
        # Before the file is read: ranks that were given none would not come to the reading.
        require_equal({"parallel.rank-order": path}, where="settings, before ranks are put in order")
        if not path:
            return {"order": (), "hosts": ()}
        if self._agreement.world_size == 1:
            raise ConfigError(
                expected="several ranks to put in order",
                found="one device",
                where=f"--rank-order {path}",
                ways_out=("torchrun --nproc-per-node N -m ziggurat train …", '--rank-order "" trains without one'),
            )
        # Here: scipy is not needed by those who train without an order.
        from ziggurat.runs.planning.rank_order import read_order

        found = read_order(path, self._agreement)
        self.order_reason = found.describe()
        # Where none gains, ranks still go host after host, by the hosts that were found: towers need them together.
        order = () if found.order == found.given else found.order
        return {"order": order, "hosts": found.hosts}

    def _make_plan(self, model: Model, *, run: RunFolder, resume: bool) -> _ChosenPlan:
        """The plan as JSON, and why its tower groups have the size that they have."""
        config = self._config
        world_size = self._hosts.world_size
        plan = self._plan
        source = "--plan"
        if plan is None and resume and run.plan.exists():
            kept = Plan.load(run.plan)
            # A plan for another number of ranks, or other groups, is of no use: a new one is made.
            if kept.world_size == world_size and config.parallel.tower_size in (0, kept.ranks_per_group):
                plan = kept
                source = "the plan in the run's folder"
        if plan is not None:
            reason = "" if plan.towers is None else f"{plan.ranks_per_group} ranks, as {source} says"
            return {"plan": to_json(plan), "reason": reason}
        chosen = choose_tower_size(
            config, model.inputs, world_size=world_size, ranks_per_host=self._hosts.ranks_per_host
        )
        dim = model.embeddings.config.dim
        plan = place_tables(model.inputs, dim=dim, world_size=world_size, towers=config.towers, tower_size=chosen.size)
        return {"plan": to_json(plan), "reason": chosen.reason}
