"""Towers inside TorchRec's `DistributedModelParallel`, for a model that is written for TorchRec.

    model.embeddings = TowerEmbedding(model.embeddings, towers, TowerModuleConfig(compression=4))   # one device
    topology = Topology.create(tower_size=2)
    sharder = TowerEmbeddingSharder(topology, fused_params={...})
    plan = ShardingPlan({"embeddings": tower_plan(model.embeddings, topology)})
    model = DistributedModelParallel(model, plan=plan, sharders=[sharder])

Of TorchRec it uses the distribution of ids, the fused lookups, their optimizer and their state dicts; the two hops of
the tower transform are ours (`ziggurat.parallel.exchange.blocks`), with our wire formats and our counts of bytes. Luo
et al., "Disaggregated Multi-Tower", arXiv 2403.00877.

TorchRec has towers of its own (`EmbeddingTowerCollection`). These differ: the columns come out in the order of the
towers wherever these are placed; `DistributedModelParallel.load_state_dict` loads what `state_dict` saves; a tower may
have any number of ranks that divides the world; tables may be whole inside a tower; the plan is not changed; CPU works.

A guide: docs/guides/torchrec.md. Needs torchrec 1.8.0, which is not among the dependencies of this package.
"""

from __future__ import annotations

from ziggurat.errors import MissingDependencyError

try:
    import torchrec.distributed  # pyright: ignore[reportMissingImports]  # noqa: F401
except (ImportError, OSError) as error:  # OSError: the libraries of another build of FBGEMM
    raise MissingDependencyError(
        expected="TorchRec 1.8.0 beside torch and FBGEMM 1.8.0",
        found=f"{type(error).__name__}: {error}",
        where="import ziggurat.bridges.torchrec",
        ways_out=(
            "pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 (or fbgemm-gpu==1.8.0 for CUDA), and what "
            "requirements/bench.txt lists for them; without --no-deps pip adds a second build of FBGEMM",
            "benchmarks/setup.sh makes such an environment (.venv-bench)",
            "train with ziggurat itself: its towers need no TorchRec",
        ),
    ) from error

from ziggurat.bridges.torchrec.embedding import TowerEmbedding
from ziggurat.bridges.torchrec.plan import tower_plan
from ziggurat.bridges.torchrec.sharded import ShardedTowerEmbedding
from ziggurat.bridges.torchrec.sharder import TowerEmbeddingSharder

__all__ = ["TowerEmbedding", "TowerEmbeddingSharder", "ShardedTowerEmbedding", "tower_plan"]
