"""Clusters: names, TOML there and back, sources, and errors that say the nearest known name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.planning.cluster.catalogue import KINDS, find_cluster, load_cluster, named_cluster
from ziggurat.planning.cluster.cluster import Cluster, Origin, Port, Source
from ziggurat.runs.planning.cluster_range import clusters_named


@pytest.mark.parametrize(("name", "hosts", "devices"), [("v100x4", 1, 4), ("a100x8", 1, 8), ("h100x64", 8, 8)])
def test_names_count_devices_eight_a_host(name: str, hosts: int, devices: int) -> None:
    cluster = named_cluster(name)
    assert (cluster.hosts, cluster.devices_per_host, cluster.world_size) == (hosts, devices, hosts * devices)
    assert cluster.host_of(cluster.world_size - 1) == hosts - 1


@pytest.mark.parametrize(
    ("name", "words"),
    [("h100", "h100xN"), ("h10x64", "did you mean 'h100x64'"), ("a100x12", "multiple of 8"), ("a100x0", "a100xN")],
)
def test_wrong_names_are_explained(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        named_cluster(name)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["v100x8", "a100x16", "h100x1024", "localx4"])
def test_toml_there_and_back(name: str, tmp_path: Path) -> None:
    cluster = named_cluster(name)
    cluster.save(tmp_path / "cluster.toml")
    assert load_cluster(tmp_path / "cluster.toml") == cluster
    assert find_cluster(str(tmp_path / "cluster.toml")) == cluster


def test_every_constant_of_a_named_cluster_says_where_it_comes_from() -> None:
    for kind in (*KINDS.values(), named_cluster("localx2")):
        for constant in kind.constants():
            assert constant.source != "nobody says where it comes from", (kind.name, constant.name)
    origins = {constant.name: constant.origin for constant in KINDS["a100"].constants()}
    assert origins["device.memory_bytes_per_s"] is Origin.PUBLISHED
    assert origins["between.efficiency"] is Origin.ASSUMED
    assert {c.name: c for c in named_cluster("local").constants()}["device.memory_bytes"].origin is Origin.MEASURED


def test_a_file_may_change_a_known_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'like = "a100x16"\nname = "ours"\nhosts = 4\n[between]\nbytes_per_s = 12.5e9\nport = "host"\n'
        '[sources]\n"between.bytes_per_s" = "measured: iperf between two hosts"\n'
    )
    cluster = load_cluster(path)
    assert (cluster.name, cluster.hosts, cluster.devices_per_host) == ("ours", 4, 8)
    assert cluster.device == named_cluster("a100x16").device
    assert cluster.between.port is Port.HOST
    assert cluster.between_bytes_per_s() == pytest.approx(12.5e9 * cluster.between.efficiency / 8)
    sources = {constant.name: constant for constant in cluster.constants()}
    assert sources["between.bytes_per_s"].origin is Origin.MEASURED
    assert sources["hosts"].source == "nobody says where it comes from"  # it was changed
    assert sources["inside.bytes_per_s"].origin is Origin.PUBLISHED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('like = "a100x16"\n[device]\nmemory_byte = 1', "memory"),
        ('like = "a100x16"\nhost = 4', 'did you mean "hosts"'),
        ('like = "a100x16"\nhosts = 0', "a host and a device"),
        ('like = "a100x16"\n[between]\nefficiency = 1.5', "efficiency of (0, 1]"),
        ('like = "a100x16"\n[sources]\n"device.memory" = "measured: x"', "device.memory"),
        ('like = "a100x16"\n[sources]\nhosts = "I think"', "measured: …"),
        ("hosts = ", "TOML"),
        ("hosts = 2", "ziggurat cluster show"),
    ],
)
def test_files_with_mistakes_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert words in str(caught.value)
    assert "train RECIPE" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        load_cluster("nowhere.toml")


def test_a_source_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device\.memory_bytes"):
        dataclasses.replace(
            KINDS["h100"], sources=(Source(constant="device.memory_byte", origin=Origin.ASSUMED, text=""),)
        )


@pytest.mark.parametrize(
    "words",
    [["a100x{2..16}"], [f"a100x{number}" for number in range(2, 17)], ["a100x16", "a100x32", "a100x64", "a100x128"]],
)
def test_ranges_double_hosts_also_after_a_shell(words: list[str]) -> None:
    assert [cluster.hosts for cluster in clusters_named(words)] == [2, 4, 8, 16]


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="smaller number first"):
        clusters_named(["h100x{8..2}"])


def test_hosts_can_be_changed() -> None:
    cluster: Cluster = named_cluster("h100x16").with_hosts(4)
    assert (cluster.name, cluster.world_size) == ("h100x32", 32)
