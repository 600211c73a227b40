"""How many ranks share a tower: the size of tower groups with the shortest predicted step, and whether any gains.

A group of S ranks holds the same towers. A large S keeps more of the exchange inside groups, but where a group spans
hosts its own exchange crosses the link that towers were meant to spare: with two hosts of a rack as one group a tower
model was slower than the flat one (214 ms against 172). The size therefore follows the machines:

    --parallel.tower-size S       the user's choice
    --parallel.cluster NAME       for each S that the towers allow, the step of its balanced plan is simulated on that
                                  cluster (`planning/simulator/`); the shortest wins, and the flat step stands beside it
    neither                       the ranks of a host, where the towers allow it, else the smallest S; not predicted

The towers are part of the model, so a run that asks for them gets them also where none gains; the start-up report says
so, and it says where nothing was predicted, and that towers cannot gain where all ranks share one host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models import TowerModelConfig
from ziggurat.plan import Towers, possible_tower_sizes
from ziggurat.planning.cluster.catalogue import find_cluster
from ziggurat.planning.cluster.cluster import Cluster
from ziggurat.planning.placement import place_tables
from ziggurat.planning.simulator.step_simulator import StepSimulator
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.planning.plan_inputs import PlanInputs, measured_lengths, prepared_data
from ziggurat.runs.planning.plan_run import model_to_place, step_settings

_NOT_PREDICTED = (
    "no gain over a flat model was predicted: --parallel.cluster FILE takes the size with the shortest predicted step, "
    "and `ziggurat plan RECIPE --cluster FILE --towers FILE` compares sizes and the flat model before a run"
)
_SINGLE_HOST = (
    "towers cannot spare traffic here: they spare links between hosts, and all ranks share one host; a model without "
    "--towers is flat"
)


@dataclass(frozen=True, kw_only=True)
class ChosenSize:
    """A size of tower groups and the reason for it.

    Args:
        size: S; 0 for a flat model.
        reason: one line for the start-up report; "" for a flat model.
    """

    size: int
    reason: str


def choose_tower_size(config: RunConfig, inputs: InputSpec, *, world_size: int, ranks_per_host: int) -> ChosenSize:
    """Choose the size of tower groups; see the module's docstring for the order of who decides.

    Args:
        config: of the run.
        inputs: features and tables as the data has them.
        world_size: ranks.
        ranks_per_host: of them on one host.

    Raises:
        ConfigError: `parallel.cluster` describes other machines, or is not known.
        PlanError: no size, or not the size that was asked for, shares the towers out evenly.
    """
    towers = config.towers
    asked = config.parallel.tower_size
    if towers is None:
        return ChosenSize(size=0, reason="")
    shares_host = ranks_per_host >= world_size
    if asked:
        note = f"; {_SINGLE_HOST}" if shares_host else ""
        return ChosenSize(size=asked, reason=f"{asked} ranks, as --parallel.tower-size says{note}")
    if config.parallel.cluster:
        cluster = cluster_of_ranks(config.parallel.cluster, world_size=world_size, ranks_per_host=ranks_per_host)
        return _fastest(config, inputs, cluster, towers=towers)
    possible = possible_tower_sizes(world_size, len(towers))
    fits = ranks_per_host in possible
    size = ranks_per_host if fits else possible[0]
    why = "the ranks of a host" if fits else f"the smallest of {possible}: the {ranks_per_host} of a host do not fit"
    note = _SINGLE_HOST if shares_host else _NOT_PREDICTED
    return ChosenSize(size=size, reason=f"{size} ranks, {why}; {note}")


def cluster_of_ranks(name: str, *, world_size: int, ranks_per_host: int) -> Cluster:
    """The cluster of `parallel.cluster`, which must have the hosts and ranks of this job.

    Raises:
        ConfigError: it has others, or is not known.
        MissingFileError: a file that is not there.
    """
    cluster = find_cluster(name)
    if (cluster.world_size, cluster.devices_per_host) != (world_size, ranks_per_host):
        raise ConfigError(
            expected=f"a cluster of {world_size} devices, {ranks_per_host} a host, as the ranks of this job",
            found=f"{cluster.world_size} devices, {cluster.devices_per_host} a host ({cluster.describe()})",
            where=f"--parallel.cluster {name}",
            ways_out=(
                "describe these machines in a file: ziggurat cluster show h100x64 --out cluster.toml",
                "leave --parallel.cluster out: tower groups then have the ranks of a host",
            ),
        )
    return cluster


def _fastest(config: RunConfig, inputs: InputSpec, cluster: Cluster, *, towers: Towers) -> ChosenSize:
    # Only lists have lengths to measure: without them no data is read.
    prepared = prepared_data(config) if inputs.jagged else None
    lengths = {} if prepared is None else measured_lengths(prepared)
    data = PlanInputs(inputs=inputs, list_lengths=lengths)
    sizes = possible_tower_sizes(cluster.world_size, len(towers))
    steps = {size: _step_ms(config, data, cluster, tower_size=size) for size in sizes}
    best = min(sizes, key=lambda size: (steps[size], size))
    flat_ms = _step_ms(replace(config, towers=None), data, cluster)
    others = ", ".join(f"{size}: {steps[size]:.2f} ms" for size in sizes if size != best)
    reason = f"{best} ranks: {steps[best]:.2f} ms a step predicted on {cluster.name}, the shortest"
    reason += f" ({others})" if others else " (no other size shares the towers evenly)"
    if steps[best] < flat_ms:
        return ChosenSize(size=best, reason=f"{reason}; flat {flat_ms:.2f} ms")
    return ChosenSize(
        size=best, reason=f"{reason}; no size gains: a flat model takes {flat_ms:.2f} ms, without --towers"
    )


def _step_ms(config: RunConfig, data: PlanInputs, cluster: Cluster, *, tower_size: int = 0) -> float:
    """The predicted step of the balanced plan that the run would execute."""
    assert isinstance(config.model, TowerModelConfig)  # it takes towers
    plan = place_tables(
        data.inputs,
        dim=config.model.embedding_dim,
        world_size=cluster.world_size,
        towers=config.towers,
        tower_size=tower_size,
        list_lengths=data.list_lengths,
    )
    model = model_to_place(config, data)
    simulator = StepSimulator(cluster, model.work, settings=step_settings(config, cluster))
    return 1e3 * simulator.timeline(plan).step_s
