"""What the planner knows of a model: a neutral table of its operators, made elsewhere and handed over as data."""

from __future__ import annotations

from typing import NamedTuple


class Matmul(NamedTuple):
    """Tokens x k times k x n. split: the dimension that tensor parallelism divides, 'n' (column), 'k' (row) or '' (none; the
    tokens are divided instead). share: of the layers that have it."""

    name: str
    n: int
    k: int
    split: str
    share: float = 1.0


class Experts(NamedTuple):
    """The routed experts of a layer. count, active: in all and of one token; up, ffn: columns of an expert's first matmul and
    its hidden size; share: of the layers that have experts; busiest: tokens of the fullest GPU over the mean one's."""

    count: int
    active: int
    up: int
    ffn: int
    share: float = 1.0
    busiest: float = 1.0


class Pass(NamedTuple):
    """A memory-bound operator of the forward pass.

    plain, fused: bytes moved per token at two bytes an element, as separate kernels and as fused or compiled ones.
    split: divided by tensor parallelism always; else only with sequence parallelism.
    """

    name: str
    plain: float
    fused: float
    split: bool


class Operators(NamedTuple):
    """A decoder of equal layers; where some have experts and some have not, of mean ones.

    matmuls, passes: of one layer. layer_parameters, embedding_parameters, head_parameters: of one layer without its routed
    experts, of the embedding, of the head (0 when tied). heads, kv_heads, head_dim: of attention. kept: activation elements
    that one token leaves in one layer for the backward, (divided by tensor, not divided), with nothing computed again.
    """

    name: str
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    tied: bool
    matmuls: tuple[Matmul, ...]
    passes: tuple[Pass, ...]
    layer_parameters: int
    embedding_parameters: int
    head_parameters: int
    kept: tuple[float, float]
    experts: Experts | None = None

    @property
    def expert_parameters(self) -> float:
        """Of all routed experts of a mean layer."""
        e = self.experts
        return e.share * e.count * self.width * (e.up + e.ffn) if e else 0.0

    @property
    def parameters(self) -> int:
        """All of the model's."""
        layers = self.layers * (self.layer_parameters + self.expert_parameters)
        return round(layers) + self.embedding_parameters + self.head_parameters

    def model_flops(self, tokens: float, length: int) -> float:
        """6 N and causal attention, recomputation not counted; the head once, the embedding not (PaLM, 2204.02311)."""
        weights = self.layers * sum(m.n * m.k * m.share for m in self.matmuls) + self.vocab * self.width
        if self.experts:
            weights += self.layers * self.expert_parameters * self.experts.active / self.experts.count
        return tokens * (6 * weights + 6 * self.layers * self.heads * self.head_dim * (length + 1))
