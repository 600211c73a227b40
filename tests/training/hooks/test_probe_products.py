"""The probe of a run changes no bit of it, goes on where the run does, and keeps the files of checkpoints alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.hooks.test_hooks import log_of, same, trainer_in, weights_of
from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.numerics.probe.record import newest_probe, probes_of
from ziggurat.precision.dispatch import plan_dispatch
from ziggurat.training.hooks.hook import hooks_named
from ziggurat.training.hooks.probe_products import ProbeProducts


def test_probed_run_has_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    plain = trainer_in(tmp_path / "plain")
    plain.fit()
    probed = trainer_in(tmp_path / "probed")
    probed.fit(hooks=[ProbeProducts(every=2)])
    assert same(weights_of(plain), weights_of(probed))
    assert log_of(tmp_path / "plain") == log_of(tmp_path / "probed")
    record = newest_probe(tmp_path / "probed" / "probe")
    assert (record.step, record.num_passes) == (8, 4)
    assert record.products
    assert set(probes_of(tmp_path / "probed" / "probe")) == set(probed.store.steps())


def test_resumed_probe_is_that_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    settings = {"checkpoint_every": 3}
    trainer_in(tmp_path / "whole", **settings).fit(hooks=[ProbeProducts(every=2)])
    trainer_in(tmp_path / "cut", **settings, max_steps=5).fit(hooks=[ProbeProducts(every=2)])
    trainer_in(tmp_path / "cut", **settings).fit(resume=True, hooks=[ProbeProducts(every=2)])
    whole = newest_probe(tmp_path / "whole" / "probe")
    cut = newest_probe(tmp_path / "cut" / "probe")
    assert (whole.step, whole.num_passes) == (cut.step, cut.num_passes)
    for name, product in whole.products.items():
        other = cut.products[name]
        for first, second in ((product.left, other.left), (product.right, other.right)):
            ours, theirs = first.tensors(), second.tensors()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours), name


def test_a_run_that_is_too_short_for_the_interval_says_that_nothing_was_kept(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "short")
    said: list[str] = []
    trainer.progress.say = said.append
    trainer.fit(hooks=[ProbeProducts(every=100)])
    (line,) = [line for line in said if "probe_products" in line]
    assert "every 100th step, and there were 8" in line
    assert f"ziggurat numerics probe {tmp_path / 'short'} --measure" in line
    record = newest_probe(tmp_path / "short" / "probe")
    with pytest.raises(ConfigError, match="none: 0 batches were looked at") as caught:
        plan_dispatch(record, device=torch.device("cpu"), folder=tmp_path / "short")
    assert f"ziggurat numerics dispatch {tmp_path / 'short'} --measure" in caught.value.ways_out[0]
    with pytest.raises(MissingFileError) as missing:
        newest_probe(tmp_path / "none" / "probe")
    assert f"ziggurat numerics probe {tmp_path / 'none'} --measure" in " ".join(missing.value.ways_out)


def test_hook_is_found_by_its_name_and_refuses_no_interval() -> None:
    assert isinstance(hooks_named(["probe_products"])[0], ProbeProducts)
    with pytest.raises(ConfigError, match="every >= 1"):
        ProbeProducts(every=0)
