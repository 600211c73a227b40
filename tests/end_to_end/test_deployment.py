"""The files of the guide to Slurm and Kubernetes: shell and YAML parse, fields fit together, commands parse."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ziggurat.cli.main import build_parser
from ziggurat.recipes.catalogue import RECIPES

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "guides" / "deploy"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

# What Kubernetes accepts where, as far as the file uses it: key → keys below; None: a value.
CONTAINER = {"name": None, "image": None, "env": [{"name": None, "value": None}], "command": [None]}
CONTAINER |= {"resources": {"requests": {"cpu": None, "memory": None}, "limits": {"cpu": None, "memory": None}}}
CONTAINER |= {"volumeMounts": [{"name": None, "mountPath": None}]}
VOLUME = {"name": None, "persistentVolumeClaim": {"claimName": None}, "emptyDir": {"medium": None, "sizeLimit": None}}
POD = {"subdomain": None, "restartPolicy": None, "containers": [CONTAINER], "volumes": [VOLUME]}
JOB = {"completionMode": None, "completions": None, "parallelism": None, "backoffLimit": None}
JOB |= {"template": {"metadata": {"labels": {"app": None}}, "spec": POD}}
SERVICE = {"clusterIP": None, "publishNotReadyAddresses": None, "selector": {"app": None}}
SERVICE |= {"ports": [{"name": None, "port": None}]}
KINDS = {("v1", "Service"): SERVICE, ("batch/v1", "Job"): JOB}


def check(data: Any, schema: Any, where: str) -> None:
    """Raise AssertionError where a key is not one that the schema knows, or a value is of another form."""
    if isinstance(schema, dict):
        assert isinstance(data, dict), where
        assert data.keys() <= schema.keys(), f"{where}: {sorted(data.keys() - schema.keys())}"
        for key, value in data.items():
            check(value, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(data, list), where
        for index, value in enumerate(data):
            check(value, schema[0], f"{where}[{index}]")
    else:
        assert isinstance(data, (str, int, bool)), f"{where}: {data!r}"


@pytest.fixture
def documents() -> dict[str, Any]:
    loaded = list(yaml.safe_load_all((FOLDER / "indexed-job.yaml").read_text()))
    return {document["kind"]: document for document in loaded}


def test_manifest_has_the_fields_that_kubernetes_knows(documents: dict[str, Any]) -> None:
    assert set(documents) == {"Service", "Job"}
    for kind, document in documents.items():
        assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert NAME.fullmatch(document["metadata"]["name"])
        check(document["spec"], KINDS[document["apiVersion"], kind], kind)


def test_a_misspelt_field_is_found(documents: dict[str, Any]) -> None:
    documents["Job"]["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(AssertionError, match="restartpolicy"):
        check(documents["Job"]["spec"], JOB, "Job")


def test_pods_find_each_other_and_their_volumes(documents: dict[str, Any]) -> None:
    service, job = documents["Service"], documents["Job"]["spec"]
    pod, container = job["template"]["spec"], job["template"]["spec"]["containers"][0]
    script = container["command"][-1]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(re.search(r"--nnodes (\d+)", script)[1])
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    assert service["spec"]["clusterIP"] == "None"  # the text: headless
    assert service["spec"]["selector"] == job["template"]["metadata"]["labels"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr {documents['Job']['metadata']['name']}-0.{pod['subdomain']} " in script
    assert f"--master-port {service['spec']['ports'][0]['port']} " in script
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert all(isinstance(value, str) for value in environment.values()), "Kubernetes takes text alone"
    assert set(re.findall(r"\$\{?([A-Z_]+)", script)) <= environment.keys() | {"JOB_COMPLETION_INDEX"}


def scripts() -> dict[str, str]:
    batch = (FOLDER / "train.sbatch").read_text()
    manifest = yaml.safe_load_all((FOLDER / "indexed-job.yaml").read_text())
    job = next(document for document in manifest if document["kind"] == "Job")
    return {"sbatch": batch, "job": job["spec"]["template"]["spec"]["containers"][0]["command"][-1]}


@pytest.mark.parametrize("name", ["sbatch", "job"])
@pytest.mark.parametrize("holds_a_run", [False, True])
def test_scripts_start_a_run_or_resume_it(name: str, holds_a_run: bool, tmp_path: Path) -> None:
    """Run for real, with programs that print in the place of torchrun, srun and scontrol."""
    programs, run = tmp_path / "programs", tmp_path / "run"
    programs.mkdir()
    run.mkdir()
    if holds_a_run:
        (run / "config.json").touch()
    for program, content in {
        "torchrun": 'echo "$@"',
        "srun": 'shift; "$@"',
        "scontrol": "echo host0; echo host1",
    }.items():
        (programs / program).write_text(f"#!/bin/sh\n{content}\n")
        (programs / program).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "RUN": str(run), "RECIPE": "criteo_dlrm"}
    environment |= {"JOB_COMPLETION_INDEX": "1", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "16"}
    environment["SLURM_JOB_NODELIST"] = "host[0-1]"
    done = subprocess.run(["bash", "-euc", scripts()[name]], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    launcher, _, arguments = done.stdout.strip().partition(" -m ziggurat ")
    options, rest = build_parser().parse_known_args(arguments.split())
    assert not rest
    assert options.verb == "train"
    assert bool(options.resume) is holds_a_run
    assert options.recipe == (str(run) if holds_a_run else "criteo_dlrm")
    assert "criteo_dlrm" in {recipe.__name__ for recipe in RECIPES}
    assert ("host0:29400" if name == "sbatch" else "--node-rank 1") in launcher


def test_batch_script_names_options_once() -> None:
    options = re.findall(r"^#SBATCH --([a-z-]+)", scripts()["sbatch"], re.MULTILINE)
    assert len(options) == len(set(options))
    assert {"nodes", "ntasks-per-node", "requeue"} <= set(options)
