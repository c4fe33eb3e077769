"""What the planner knows of a model: a neutral table of its operators, made elsewhere and handed over as data."""

from __future__ import annotations

from typing import NamedTuple


class Matmul(NamedTuple):
    """Tokens x k times k x n. split: the dimension that tensor parallelism divides, 'n' (column) or 'k' (row)."""

    name: str
    n: int
    k: int
    split: str


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
    """A decoder of equal layers.

    matmuls, passes: of one layer. layer_parameters, end_parameters: of one layer, and of embedding and head together
    (`head_parameters` of the head alone, 0 when tied). heads, kv_heads, head_dim: of attention. kept: activation elements
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

    @property
    def parameters(self) -> int:
        """All of the model's."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters

    def model_flops(self, tokens: float, length: int) -> float:
        """6 N and causal attention, recomputation not counted; the head once, the embedding not (PaLM, 2204.02311)."""
        weights = self.layers * sum(m.n * m.k for m in self.matmuls) + self.vocab * self.width
        return tokens * (6 * weights + 6 * self.layers * self.heads * self.head_dim * (length + 1))
