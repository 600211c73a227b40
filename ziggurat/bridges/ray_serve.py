"""An export behind Ray Serve: many machines, replicas that come and go with the load, one address.

    from ziggurat.bridges.ray_serve import application
    from ray import serve

    serve.run(application("/exports/films", replicas=8), name="films")

    Ray's proxies ──► replica ─► ServerApp ─► engine ─► Recommender        (one export, loaded by each replica)
                  └─► replica ─► …

Each replica is the app of the server on one machine: the same routes, limits, batches, deadlines and figures, and the
same answers. Ray does what the supervisor does there: it starts, replaces and counts replicas, and spreads requests
over them. Another version is another `serve.run` under the same name, which Ray rolls out one by one; /admin/swap
is not there, since it would change one replica alone. Every machine needs the export under the same path.

Needs ray[serve] (tested with 2.60.0), which is none of the dependencies of this package. A guide:
docs/guides/server.md.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.errors import ConfigError, MissingDependencyError
from ziggurat.serving.export.export_folder import open_export
from ziggurat.serving.server.config import ServerConfig

if TYPE_CHECKING:  # torch comes with it
    from ziggurat.serving.server.app import ServerApp

try:
    from ray import serve  # pyright: ignore[reportMissingImports]
except (ImportError, OSError) as error:
    raise MissingDependencyError(
        expected="Ray Serve beside ziggurat",
        found=f"{type(error).__name__}: {error}",
        where="import ziggurat.bridges.ray_serve",
        ways_out=(
            "pip install 'ray[serve]==2.60.0'",
            "benchmarks/setup.sh makes an environment that has it (.venv-bench)",
            "on one machine `ziggurat serve` needs no Ray",
        ),
    ) from error


def application(
    export: str | Path,
    *,
    config: ServerConfig | None = None,
    replicas: int = 1,
    cpus: float = 1.0,
    api_key: str = "",
    load_models: tuple[type, ...] = (),
) -> object:
    """An application of Ray Serve that answers from an export.

    Args:
        export: its folder, under the same path on every machine.
        config: limits and deadlines of each replica; its address and processes are Ray's.
        replicas: how many answer.
        cpus: of each replica, for Ray's placement; also the threads that it computes with, at least one.
        api_key: that requests must bring, or "".
        load_models: config classes of models of your own.

    Returns:
        What `serve.run` takes.

    Raises:
        ConfigError: a number of replicas or CPUs that is not positive.
        ExportError, MissingFileError: the export is damaged or absent; found here, before any replica starts.
    """
    if replicas < 1 or cpus <= 0:
        raise ConfigError(
            expected="at least one replica, and CPUs above 0",
            found=f"replicas = {replicas}, cpus = {cpus}",
            where="bridges.ray_serve.application",
            ways_out="replicas=1, cpus=1.0 for a first try",
        )
    folder = Path(export).resolve()
    version = open_export(folder).version
    settings = dataclasses.replace(config or ServerConfig(), admin=False)

    def build() -> ServerApp:
        return _app(folder, settings, api_key=api_key, threads=max(1, int(cpus)), models=load_models)

    replica = serve.ingress(build)(
        type("ZigguratReplica", (), {"__doc__": f"Answers from {folder}, version {version}."})
    )
    return serve.deployment(
        replica,
        num_replicas=replicas,
        ray_actor_options={"num_cpus": cpus},
        max_ongoing_requests=settings.max_connections,
    ).bind()


def _app(folder: Path, config: ServerConfig, *, api_key: str, threads: int, models: tuple[type, ...]) -> ServerApp:
    """The app of one replica, in its process."""
    import torch

    from ziggurat.serving.recommender import Recommender
    from ziggurat.serving.server.app import ServerApp

    torch.set_num_threads(threads)
    return ServerApp(answerer=Recommender.load(folder, models=models), config=config, api_key=api_key)
