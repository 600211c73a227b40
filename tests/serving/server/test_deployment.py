"""The server's guide and its files: settings, metrics and fields are those that there are, commands parse."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.test_deployment import NAME, check
from ziggurat.cli.main import build_parser
from ziggurat.cli.serving.serve_verb import config_of
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.metrics import Metrics
from ziggurat.serving.server.shards.app import ShardMetrics

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "server.md"
FOLDER = GUIDE.parent / "deploy"

# What Kubernetes accepts where, as far as the file uses it: key → keys below; None: a value.
HTTP_GET = {"httpGet": {"path": None, "port": None}, "periodSeconds": None, "timeoutSeconds": None}
CONTAINER: dict[str, Any] = {"name": None, "image": None, "command": [None], "env": [{"name": None, "value": None}]}
CONTAINER |= dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), HTTP_GET | {"failureThreshold": None})
CONTAINER |= {"ports": [{"name": None, "containerPort": None}], "lifecycle": {"preStop": {"sleep": {"seconds": None}}}}
CONTAINER |= {"resources": {"requests": {"cpu": None, "memory": None}, "limits": {"memory": None}}}
CONTAINER |= {"volumeMounts": [{"name": None, "mountPath": None, "readOnly": None}]}
CONTAINER["securityContext"] = dict.fromkeys(("runAsNonRoot", "allowPrivilegeEscalation", "readOnlyRootFilesystem"))
VOLUME: dict[str, Any] = {"name": None, "persistentVolumeClaim": {"claimName": None}, "secret": {"secretName": None}}
VOLUME |= {"emptyDir": {"medium": None, "sizeLimit": None}}
POD = {"terminationGracePeriodSeconds": None, "containers": [CONTAINER], "volumes": [VOLUME]}
LABELS = {"labels": {"app": None}, "annotations": {"prometheus.io/scrape": None, "prometheus.io/port": None}}
ROLLING = {"type": None, "rollingUpdate": {"maxUnavailable": None, "maxSurge": None}}
DEPLOYMENT = {"replicas": None, "selector": {"matchLabels": {"app": None}}, "strategy": ROLLING}
DEPLOYMENT |= {"template": {"metadata": LABELS, "spec": POD}}
SERVICE = {"selector": {"app": None}, "ports": [{"name": None, "port": None, "targetPort": None}]}
KINDS = {("v1", "Service"): SERVICE, ("apps/v1", "Deployment"): DEPLOYMENT}
FROM_POD = {"name": None, "value": None, "valueFrom": {"fieldRef": {"fieldPath": None}}}
SHARD_POD = POD | {"containers": [CONTAINER | {"env": [FROM_POD]}]}
STATEFUL = {"serviceName": None, "podManagementPolicy": None, "replicas": None, "selector": DEPLOYMENT["selector"]}
STATEFUL |= {"template": {"metadata": LABELS, "spec": SHARD_POD}}
HEADLESS = SERVICE | {"clusterIP": None, "publishNotReadyAddresses": None}
SHARDED = KINDS | {("v1", "Service"): HEADLESS, ("apps/v1", "StatefulSet"): STATEFUL}


@pytest.fixture
def documents() -> dict[str, Any]:
    loaded = list(yaml.safe_load_all((FOLDER / "server.yaml").read_text()))
    return {document["kind"]: document for document in loaded}


def test_manifest_has_the_fields_that_kubernetes_knows(documents: dict[str, Any]) -> None:
    assert set(documents) == {"Service", "Deployment"}
    for kind, document in documents.items():
        assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert NAME.fullmatch(document["metadata"]["name"])
        check(document["spec"], KINDS[document["apiVersion"], kind], kind)


def test_fields_of_the_manifest_fit_together(documents: dict[str, Any]) -> None:
    deployment = documents["Deployment"]["spec"]
    template = deployment["template"]
    pod, container = template["spec"], template["spec"]["containers"][0]
    assert deployment["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert documents["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    options, rest = build_parser().parse_known_args(container["command"][1:])
    config = config_of(options, rest)
    assert options.verb == "serve"
    assert container["ports"][0]["containerPort"] == config.port
    assert documents["Service"]["spec"]["ports"][0]["targetPort"] == config.port
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(config.port)
    assert int(container["resources"]["requests"]["cpu"]) == config.workers * config.threads
    needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + config.linger_s + config.drain_s
    assert pod["terminationGracePeriodSeconds"] > needed
    assert all(isinstance(entry["value"], str) for entry in container["env"]), "Kubernetes takes text alone"
    probes = {container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"/livez", "/readyz"}


def test_shards_of_the_sharded_manifest_are_those_that_its_servers_ask() -> None:
    loaded = list(yaml.safe_load_all((FOLDER / "server-sharded.yaml").read_text()))
    named = {(document["kind"], document["metadata"]["name"]): document["spec"] for document in loaded}
    for document in loaded:
        assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert NAME.fullmatch(document["metadata"]["name"])
        check(document["spec"], SHARDED[document["apiVersion"], document["kind"]], document["kind"])
    shards, headless = named["StatefulSet", "ziggurat-shard"], named["Service", "ziggurat-shards"]
    front, service = named["Deployment", "ziggurat-front"], named["Service", "ziggurat-front"]
    assert shards["serviceName"] == "ziggurat-shards"
    assert headless["clusterIP"] == "None"  # the text: headless
    for pods, its in ((shards, headless), (front, service)):
        assert pods["selector"]["matchLabels"] == pods["template"]["metadata"]["labels"] == its["selector"]
    configs, addresses = [], []
    for pods, its in ((shards, headless), (front, service)):
        pod, container = pods["template"]["spec"], pods["template"]["spec"]["containers"][0]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        words = [word.replace("$(SHARD)", "1") for word in container["command"][1:]]
        options, rest = build_parser().parse_known_args(words)
        config = config_of(options, rest)
        assert its["ports"][0]["targetPort"] == container["ports"][0]["containerPort"] == config.port
        assert pods["template"]["metadata"]["annotations"]["prometheus.io/port"] == str(config.port)
        assert config.watch, "a version comes to all pods by the link"
        configs.append(config)
        addresses.append(options.shard)
    names = [f"ziggurat-shard-{number}.ziggurat-shards:{configs[0].port}" for number in range(shards["replicas"])]
    assert configs[1].shard_addresses == ",".join(names)
    assert addresses == [f"1/{shards['replicas']}", ""]
    assert shards["template"]["spec"]["containers"][0]["env"][0]["name"] == "SHARD"


def test_the_container_serves_what_the_manifest_expects() -> None:
    lines = (FOLDER / "Containerfile").read_text().splitlines()
    (entry,) = [yaml.safe_load(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT ")]
    (words,) = [yaml.safe_load(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD ")]
    options, rest = build_parser().parse_known_args([*entry[1:], *words])
    assert (config_of(options, rest).host, options.export) == ("0.0.0.0", "/exports/current")
    assert f"EXPOSE {ServerConfig().port}" in lines


def test_the_guide_lists_every_setting_with_its_default_and_every_metric() -> None:
    text = GUIDE.read_text()
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| `?([^|`]+)`? \|", text, re.MULTILINE))
    defaults = {entry.name.replace("_", "-"): entry.default for entry in dataclasses.fields(ServerConfig)}
    assert rows.keys() == defaults.keys()
    for name, default in defaults.items():
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        assert rows[name].strip().replace(",", "") == (shown.removesuffix(".0")), name
    collected = {family.name for own in (Metrics(), ShardMetrics()) for family in own.registry.collect()}
    assert set(re.findall(r"`(ziggurat_\w+?)(?:_total|_bucket)?`", text)) == collected
