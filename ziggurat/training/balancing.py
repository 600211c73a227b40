"""Balancing: the samples of the step after the next are distributed to ranks while this step computes.

    main thread      step k              step k + 1          step k + 2
    ids                  of k + 1 ──►        of k + 2 ──►
    this thread      exchange k + 2      exchange k + 3

Samples must be exchanged before ids are sent, which happens a step early; so they are exchanged two steps early. The
thread works on copies of its own and communicates through a process group of its own (`parallel/exchange/samples.py`),
and its result depends on lengths alone. So a resumed run distributes samples as one that was not: batches are taken
from the source again, and exchanged again. The source's position, the ledger and the loss are not aware of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from ziggurat.data.balance.cost import cost_of_terms
from ziggurat.data.balance.partition import Balance, straggler_share
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.models import Model
from ziggurat.parallel.context.history_exchange import HistoryExchange
from ziggurat.parallel.exchange.samples import BalancedBatch, SampleExchange
from ziggurat.parallel.parallelize import Parallel
from ziggurat.training.config import Compile, TrainingConfig

_OFF = "--training.balance none"


class Balancer:
    """Exchanges the samples of upcoming batches in a thread; one batch at a time, on all ranks alike.

    Args:
        exchange: distributes the samples of a batch; collective.
        lines: how, for the start-up report.
        balances: whether samples are distributed by their cost, so that loads have a meaning.
    """

    def __init__(
        self, exchange: Callable[[Batch], BalancedBatch], *, lines: dict[str, str] | None = None, balances: bool = True
    ) -> None:
        self._exchange = exchange
        self.lines = lines or {}
        self.balances = balances
        self._started: deque[Future[BalancedBatch]] = deque(maxlen=1)
        self._loads = np.zeros(2)  # Σ mean / max over steps, before and after
        self._steps = 0

    def start(self, batch: Batch) -> None:
        """Start the exchange of a batch; the one before must have been finished."""
        assert not self._started, "one at a time"
        future: Future[BalancedBatch] = Future()
        self._started.append(future)
        # A daemon, which no executor of the library starts: a process must not wait at its end for lost ranks.
        threading.Thread(target=self._work, args=(batch, future), name="ziggurat-balance", daemon=True).start()

    def finish(self) -> Batch:
        """This rank's samples of the batch that was started.

        Raises:
            TopologyError: another rank is gone.
        """
        result = self._started.popleft().result()
        self._steps += 1
        self._loads += straggler_share(result.loads_before), straggler_share(result.loads)
        return result.batch

    def drain(self) -> None:
        """Wait for what was started for a step that will not come; all ranks drain at the same step."""
        if self._started:
            self.finish()

    def planned_shares(self) -> tuple[float, float]:
        """Share of time lost to the slowest rank by planned cost, unbalanced and balanced: the mean over steps."""
        before, after = (self._loads / max(self._steps, 1)).tolist()
        return before, after

    def _work(self, batch: Batch, future: Future[BalancedBatch]) -> None:
        try:
            future.set_result(self._exchange(batch.map(lambda tensor: tensor.cpu())))
        except BaseException as error:  # raised by `finish`, in the thread that trains
            future.set_exception(error)


def balancer_of(config: TrainingConfig, *, model: Model, parallel: Parallel | None) -> Balancer | None:
    """Return the balancer of samples, and of pieces of their histories; None where they are trained as they come.

    Collective.

    Raises:
        ConfigError: a setting of balance that can take no effect, or would change the result; or histories in pieces
            for a compiled network.
    """
    balance, lines = _balance_of(config, model=model, parallel=parallel)
    if parallel is None or parallel.topology.context.size == 1:
        return None if balance is None else Balancer(balance, lines=lines)
    size = parallel.topology.context.size
    if config.compile is not Compile.OFF:
        ways = ("--training.compile off", "--context 1")
        raise _refused("a network that is not compiled", config.compile.value, ways, f"compile, with --context {size}")
    cut = HistoryExchange(model, topology=parallel.topology, traffic=parallel.traffic)

    def exchange(batch: Batch) -> BalancedBatch:
        if balance is None:
            return BalancedBatch(batch=cut(batch), loads=np.ones(1), loads_before=np.ones(1))
        balanced = balance(batch)
        return replace(balanced, batch=cut(balanced.batch))

    lines |= {"histories are cut": f"into {2 * size} pieces each, two for each of {size} ranks"}
    return Balancer(exchange, lines=lines, balances=balance is not None)


def _balance_of(
    config: TrainingConfig, *, model: Model, parallel: Parallel | None
) -> tuple[SampleExchange | None, dict[str, str]]:
    """Return the exchange of samples by their cost, and its start-up lines; None where samples stay."""
    if config.token_budget and config.compile is not Compile.OFF:
        ways = ("--training.token-budget 0", "--training.compile off")
        found = f"token-budget {config.token_budget}, compile {config.compile.value}"
        raise _refused("batches of one size, for a compiled network", found, ways, "token-budget")
    if config.balance is Balance.NONE:
        _check_unused(config)
        return None, {}
    if parallel is None or parallel.topology.world_size == 1:
        raise _refused("several ranks, whose work is balanced", "one device", (_OFF, "--training.token-budget TOKENS"))
    world_size = parallel.topology.world_size
    block = model.coupled_samples
    if block > 1:
        raise _refused(
            "a loss of single samples", f"one that looks at {block} consecutive samples together", (_OFF,), "balance"
        )
    if config.balance is Balance.VARIABLE and config.compile is not Compile.OFF:
        ways = ("--training.balance karmarkar_karp (or zigzag)", "--training.compile off")
        raise _refused("batches of one size, for a compiled network", f"variable, compile {config.compile.value}", ways)
    shares = config.balance_shares
    if shares and (config.balance is not Balance.VARIABLE or len(shares) != world_size):
        ways = (f"--training.balance variable, with {world_size} shares", "leave balance-shares out")
        raise _refused(
            f"{world_size} shares, for variable", f"{len(shares)} for {config.balance.value}", ways, "balance-shares"
        )
    cost = cost_of_terms(config.balance_cost) if config.balance_cost else parallel.cost
    source = "as given" if config.balance_cost else parallel.cost_source
    if cost.is_constant:
        ways = (_OFF, "--training.balance-cost NAME_OF_A_LIST")
        raise _refused("samples of different cost", f"{cost.describe()} for every sample ({source})", ways)
    exchange = SampleExchange(
        parallel.topology,
        traffic=parallel.traffic,
        inputs=model.inputs,
        balance=config.balance,
        cost=cost,
        shares=shares,
    )
    lines = {
        "samples are dealt": f"{config.balance.value}, two steps early, beside the computation",
        "cost of a sample": f"{cost.describe()} ({source})",
        "samples travel through": exchange.medium,
    }
    return exchange, lines


def _check_unused(config: TrainingConfig) -> None:
    """Refuse settings of balance without balance."""
    for name in ("balance_cost", "balance_shares"):
        if getattr(config, name):
            flag = name.replace("_", "-")
            ways = (f"leave --training.{flag} out", "--training.balance variable")
            raise _refused("--training.balance to be one of zigzag, variable, karmarkar_karp", "none", ways, flag)


def _refused(expected: str, found: str, ways_out: tuple[str, ...], setting: str = "balance") -> ConfigError:
    return ConfigError(expected=expected, found=found, where=f"training settings, {setting}", ways_out=ways_out)
