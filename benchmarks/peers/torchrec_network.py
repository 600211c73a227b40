"""The workload's network in TorchRec's own words, for every TorchRec contestant; tables on the meta device, whole."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.workload import ModelKind, Workload


def torchrec_network(workload: Workload) -> nn.Module:
    """`DLRM` or `DLRM_DCN` over an EmbeddingBagCollection of tables t0, t1 … for features c0, c1 …"""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
    from torchrec.models.dlrm import DLRM, DLRM_DCN

    tables = [
        EmbeddingBagConfig(
            name=f"t{index}",
            embedding_dim=workload.dim,
            num_embeddings=workload.num_rows,
            feature_names=[f"c{index}"],
            pooling=PoolingType.SUM,
        )
        for index in range(len(workload.lengths))
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    shape = {
        "dense_in_features": workload.num_dense,
        "dense_arch_layer_sizes": list(workload.bottom_mlp),
        "over_arch_layer_sizes": [*workload.top_mlp, 1],
        "dense_device": torch.device("cpu"),
    }
    if workload.model is ModelKind.DLRM:
        return DLRM(collection, **shape)
    cross = {"dcn_num_layers": workload.cross_layers, "dcn_low_rank_dim": workload.cross_rank}
    return DLRM_DCN(collection, **shape, **cross)
