"""The faster of two implementations is found, kept, and asked for again where the answer no longer holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ziggurat.ops.interactions import dot_interaction, fm_norm
from ziggurat.ops.machine import measured_choice
from ziggurat.ops.machine.measured_choice import MEASURED, Answer, fastest, kept_line, timed_size
from ziggurat.testing.pretend_cuda import pretend_cuda

CPU = torch.device("cpu")
KERNELS = "ziggurat.ops.interactions.fm_norm"  # any module with a source


def contestants(calls: list[str], *, slow: str) -> dict[str, Callable[[], object]]:
    def run(name: str) -> None:
        calls.append(name)
        time.sleep(0.003 if name == slow else 0.0)

    return {name: lambda name=name: run(name) for name in ("triton", "torch")}


def ask(folder: Path, calls: list[str], *, slow: str, shape: str = "8 samples") -> Answer:
    work = contestants(calls, slow=slow)
    return fastest("sums", work, shape=shape, kernels=KERNELS, device=CPU, folder=folder)


def test_of_two_processes_that_measure_at_once_the_first_decides_for_both(tmp_path: Path) -> None:
    others: list[Answer] = []

    def torch_is_slow() -> None:
        if not others:  # another process is done before this one
            others.append(ask(tmp_path, [], slow="triton"))
        time.sleep(0.003)

    work: dict[str, Callable[[], object]] = {"triton": lambda: None, "torch": torch_is_slow}
    mine = fastest("sums", work, shape="8 samples", kernels=KERNELS, device=CPU, folder=tmp_path)
    assert mine.name == others[0].name == "torch"
    assert ask(tmp_path, [], slow="torch").name == "torch"


def test_the_faster_one_is_found_and_kept_for_its_shape(tmp_path: Path) -> None:
    calls: list[str] = []
    found = ask(tmp_path, calls, slow="triton")
    assert found.name == "torch"
    assert found.times_ms["triton"] > found.times_ms["torch"]
    assert {"triton", "torch"} == set(calls)
    calls.clear()
    again = ask(tmp_path, calls, slow="torch")  # would be the other one, if it was measured again
    assert (again.name, dict(again.times_ms)) == (found.name, dict(found.times_ms))
    assert not calls
    assert "before" in str(again)
    assert ask(tmp_path, calls, slow="torch", shape="16 samples").name == "triton"
    assert calls


def test_doctor_says_what_is_kept(tmp_path: Path) -> None:
    assert "none yet" in kept_line(CPU, folder=tmp_path)
    for shape in ("8", "16"):
        ask(tmp_path, [], slow="triton", shape=shape)
    ask(tmp_path, [], slow="torch", shape="32")
    (tmp_path / "choice-1.json").write_text("{")
    assert kept_line(CPU, folder=tmp_path) in (
        "sums: torch for 2 shapes, triton for 1 shapes",
        "sums: triton for 1 shapes, torch for 2 shapes",
    )


def test_an_answer_that_is_damaged_or_names_nobody_is_measured_again(tmp_path: Path) -> None:
    calls: list[str] = []
    ask(tmp_path, calls, slow="triton")
    (path,) = tmp_path.iterdir()
    for write in (
        lambda: MEASURED.write(path, {"name": "fbgemm", "times_ms": {}, "shape": ""}),
        lambda: path.write_text("{"),
    ):
        write()
        calls.clear()
        assert ask(tmp_path, calls, slow="triton").name == "torch"
        assert calls


def test_what_does_not_run_is_left_out_and_named(tmp_path: Path) -> None:
    calls: list[str] = []

    def fails() -> None:
        raise RuntimeError("out of shared memory")

    work = contestants(calls, slow="triton") | {"large": fails}
    found = fastest("sums", work, shape="8", kernels=KERNELS, device=CPU, folder=tmp_path)
    assert found.name == "torch"
    assert "large" in found.reason
    assert "shared memory" in found.reason
    alone = fastest("sums", {"large": fails, "torch": work["torch"]}, shape="9", kernels=KERNELS, device=CPU)
    assert alone.name == "torch"


def test_another_serves_only_where_it_gains_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for time_ms, expected in ((0.8, "torch"), (0.76, "triton"), (1.2, "torch")):
        times = {"torch": 1.0, "triton": time_ms}
        monkeypatch.setattr(measured_choice, "times_in_turns", lambda work, device, times=times: times)
        work = {name: lambda: None for name in times}
        options = {"shape": f"{time_ms}", "kernels": KERNELS, "device": CPU, "folder": tmp_path}
        found = [fastest("sums", work, **options, least_gain=1.3) for _ in range(2)]
        assert [each.name for each in found] == [expected, expected]
        assert ("less than 1.3 times" in found[0].reason) is (time_ms == 0.8)
        assert fastest("sums", work, **options).name == min(times, key=lambda name: times[name])


def test_nothing_is_measured_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    with pretend_cuda() as device:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(measured_choice, "machine_line", lambda device: "a GPU")
        work = contestants(calls, slow="triton")
        found = fastest("sums", work, shape="8", kernels=KERNELS, device=device, folder=tmp_path)
    assert found.name == "triton"
    assert not calls
    assert not list(tmp_path.iterdir())


def test_few_sizes_of_batches_are_timed() -> None:
    assert {timed_size(size) for size in range(1, 20_000)} == {2**power for power in range(4, 14)}


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_kernels_follow_the_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DLRM's dots, and Wukong's norm where it is to choose, on tensors that pretend to be on a GPU."""
    asked: list[str] = []

    def answered(what: str, *_: object, **__: object) -> Answer:
        asked.append(what)
        launches = {"dots": "triton", "fm_norm": next(iter(fm_norm._LAUNCHES))}
        return Answer(name=launches[what] if name == "triton" else name, times_ms={}, reason="of a test")

    served: list[str] = []
    for module in (dot_interaction, fm_norm):
        monkeypatch.setattr(module, "fastest", answered)
        monkeypatch.setattr(module, "why_not_triton", lambda *_, **__: "")
    monkeypatch.setattr(dot_interaction, "_interaction", lambda *_: served.append("triton"))
    monkeypatch.setattr(dot_interaction, "dot_interaction_reference", lambda *_, **__: served.append("torch"))
    monkeypatch.setattr(fm_norm._FusedFMNorm, "apply", lambda *_: served.append("triton"))
    monkeypatch.setattr(fm_norm, "fm_norm_reference", lambda *_, **__: served.append("torch"))
    with pretend_cuda() as device:
        pieces = [torch.zeros(4, 8, device=device), torch.zeros(4, 16, device=device)]
        shape = dot_interaction.DotShape(3, 8)
        places = dot_interaction.pair_places(3, device="cpu")
        dot_interaction.dot_interaction(pieces, shape=shape, dtype=torch.float32, places=places)
        fields, weight, affine = (torch.zeros(size, device=device) for size in ((4, 3, 8), (3, 2), (6,)))
        affines = {"scale_P": affine, "shift_P": affine}
        fm_norm.fm_norm(fields, weight, **affines, eps=1e-5, kernel=fm_norm.FMKernel.AUTO)
    assert served == [name, name]
    assert asked == ["dots", "fm_norm"]
