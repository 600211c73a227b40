"""Launches that are tried reach every thread: autograd's backward pass on a GPU has one of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from ziggurat.ops.attention.launches import AttentionLaunch, AttentionPart, kind_of, launch_of, launched_as


def test_a_launch_that_is_tried_is_that_of_other_threads_until_it_is_over() -> None:
    kind = kind_of(torch.bfloat16, width=128, is_biased=False, precision="ieee")
    tried = AttentionLaunch(rows=16, columns=16, warps=2, stages=1)
    inner = AttentionLaunch(rows=32, columns=16, warps=2, stages=1)
    own = launch_of(AttentionPart.KEYS, kind)
    with ThreadPoolExecutor(1) as pool:

        def elsewhere(part: AttentionPart) -> AttentionLaunch:
            return pool.submit(launch_of, part, kind).result()

        with launched_as({AttentionPart.KEYS: tried}):
            assert elsewhere(AttentionPart.KEYS) == tried
            with launched_as({AttentionPart.KEYS: inner, AttentionPart.QUERIES: inner}):
                assert elsewhere(AttentionPart.KEYS) == inner
                assert elsewhere(AttentionPart.QUERIES) == inner
            assert elsewhere(AttentionPart.KEYS) == tried
        assert elsewhere(AttentionPart.KEYS) == own
