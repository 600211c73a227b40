"""Self-attention between fields: every field asks all others, and mixes what they answer.

    Q = X W_q, K = X W_k, V = X W_v         (n, A) each, cut into H heads of A/H columns
    A_h = softmax(Q_h K_hᵀ / s) V_h          s = √(A/H), or 1 where the scores are not scaled

    AutoInt          X' = ReLU(LN?(concat_h A_h + X W_res?))                        Song et al., arXiv 1810.11921
    transformer      Z = LN(X + concat_h A_h W_o),  X' = LN(Z + W_2 ReLU(W_1 Z))    Vaswani et al., arXiv 1706.03762

Fields have no order, so there are no positions. The same maps serve every field (`FieldsLinear`). AutoInt's form has no
bias anywhere and takes X itself as residual where the widths agree. The transformer layer is torch's encoder layer with
its norms after the sums; it is one of DHEN's modules.

Cost a sample: 2·n·d·A for each map, 4·n²·A for scores and mix. Written as products and a softmax, not as torch's fused
attention, whose kernels pay off from some hundreds of positions on: n is the number of fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.models.blocks.fieldwise import start_like_linear
from ziggurat.models.blocks.mlp import Init
from ziggurat.ops.dropout import dropout
from ziggurat.precision.products import DenseProducts
from ziggurat.typed import checked


class FieldsLinear(DenseProducts):
    """One linear map for every field of a stack: o_f = W x_f + b.

    Args:
        num_fields: n; only used to count FLOPs.
        input_dim: numbers of each x_f.
        output_dim: numbers of each o_f.
        has_bias: whether there is a b.
    """

    def __init__(self, num_fields: int, *, input_dim: int, output_dim: int, has_bias: bool = False) -> None:
        super().__init__()
        self.num_fields = num_fields
        self.weight = nn.Parameter(torch.empty(output_dim, input_dim))
        self.bias = nn.Parameter(torch.zeros(output_dim)) if has_bias else None
        self.initialise_own(Init.TORCH)

    def initialise_own(self, init: Init) -> None:
        """Start as an `nn.Linear(in, out)` would; the bias with zeros."""
        narrow, wide = self.weight.shape
        start_like_linear(self.weight, init, fan_in=wide, fan_out=narrow)

    def forward(self, fields_BFi: Float[Tensor, "B F i"]) -> Float[Tensor, "B F o"]:
        """Every field through the map, as one product."""
        # Fields as samples: one matrix product serves all of them.
        flat_Ni = fields_BFi.flatten(0, 1)
        return self.arithmetic.linear(flat_Ni, self.weight, self.bias).unflatten(0, fields_BFi.shape[:2])


@dataclass(frozen=True, kw_only=True)
@checked
class AttentionConfig:
    """Settings of self-attention between fields.

    Args:
        dim: A, columns of queries, keys and values, over all heads.
        num_heads: H; divides A.
        scaled: scores are divided by √(A/H).
        residual: the input is added to what attention gives (AutoInt's form).
        layer_norm: a norm before the ReLU (AutoInt's form).
        dropout: probability of dropping an attention weight.
    """

    dim: int = 16
    num_heads: int = 1
    scaled: bool = True
    residual: bool = True
    layer_norm: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.dim, self.num_heads) < 1 or self.dim % self.num_heads or not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                expected="dim and num_heads of 1 or more, num_heads dividing dim, and 0 <= dropout < 1",
                found=f"dim = {self.dim}, num_heads = {self.num_heads}, dropout = {self.dropout}",
                where="attention settings",
                ways_out="correct the number",
            )


class SelfAttention(DenseProducts):
    """concat_h softmax(Q_h K_hᵀ / s) V_h, without residual or norm.

    Args:
        num_fields: n.
        input_dim: d.
        config: A, heads, scale, dropout.
    """

    def __init__(self, num_fields: int, *, input_dim: int, config: AttentionConfig) -> None:
        super().__init__()
        self.num_fields = num_fields
        self.config = config
        self.query, self.key, self.value = (
            FieldsLinear(num_fields, input_dim=input_dim, output_dim=config.dim) for _ in range(3)
        )

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B F A"]:
        """Mix of the values of all fields."""
        # (B, n, A) to (B, H, n, A / H).
        query_BhFa, key_BhFa, value_BhFa = (
            each(fields_BFD).unflatten(2, (self.config.num_heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        if self.config.scaled:
            # Before the product: n·A numbers are scaled in place of n² scores a head.
            query_BhFa = query_BhFa * (self.config.dim // self.config.num_heads) ** -0.5
        weights_BhFF = self.arithmetic.matmul(query_BhFa, key_BhFa.mT).softmax(dim=3)
        weights_BhFF = dropout(weights_BhFF, p=self.config.dropout, training=self.training)
        # Heads side by side again: (B, n, A).
        return self.arithmetic.matmul(weights_BhFF, value_BhFa).transpose(1, 2).flatten(2)


class AutoIntLayer(nn.Module):
    """One attention layer of AutoInt, ReLU(LN?(SelfAttention(X) + residual)).

    Args:
        num_fields: n.
        input_dim: d.
        config: of the attention.
    """

    def __init__(self, num_fields: int, *, input_dim: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.attention = SelfAttention(num_fields, input_dim=input_dim, config=config)
        # Widths that agree need no map, as in FuxiCTR.
        projected = config.residual and input_dim != config.dim
        self.residual = FieldsLinear(num_fields, input_dim=input_dim, output_dim=config.dim) if projected else None
        self.norm = nn.LayerNorm(config.dim) if config.layer_norm else None

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B F A"]:
        """Apply the layer to a stack of fields."""
        mixed_BFA = self.attention(fields_BFD)
        if self.config.residual:
            mixed_BFA = mixed_BFA + (fields_BFD if self.residual is None else self.residual(fields_BFD))
        return F.relu(mixed_BFA if self.norm is None else self.norm(mixed_BFA))


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network for each field, each with residual and norm after the sum.

    Args:
        num_fields: n.
        dim: d.
        config: of the attention.
        hidden_dim: width of the feed-forward network.
        norm_eps: ε of the norms.
    """

    def __init__(
        self, num_fields: int, *, dim: int, config: AttentionConfig, hidden_dim: int, norm_eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.attention = SelfAttention(num_fields, input_dim=dim, config=config)
        self.output = FieldsLinear(num_fields, input_dim=config.dim, output_dim=dim)
        self.attention_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.widen = FieldsLinear(num_fields, input_dim=dim, output_dim=hidden_dim, has_bias=True)
        self.narrow = FieldsLinear(num_fields, input_dim=hidden_dim, output_dim=dim, has_bias=True)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B F D"]:
        """Apply the layer to a stack of fields."""
        fields_BFD = self.attention_norm(fields_BFD + self.output(self.attention(fields_BFD)))
        return self.norm(fields_BFD + self.narrow(F.relu(self.widen(fields_BFD))))
