"""Floating-point operations of the model, and its operator table for the planner."""

import dataclasses

from llm.config import ModelConfig
from parallel.operators import Experts, Matmul, Operators, Pass


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What makes a model a mixture of experts, for the planner.

    experts, active: routed experts of a layer and of a token; ffn: hidden size of one; shared: that of the experts which see
    every token, together; dense: first layers without experts. query_rank, key_rank: of latent attention (DeepSeek-V2, arXiv
    2405.04434), 0: ordinary attention; there the model's head_dim is that of the values and 64 rotary columns come on top.
    """

    experts: int
    active: int
    ffn: int
    shared: int = 0
    dense: int = 0
    query_rank: int = 0
    key_rank: int = 0


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that multiply an activation: all matrices, the head once, not the input embedding (a lookup)."""
    model = model.resolved()
    attention = 2 * model.width * model.head_dim * (model.heads + model.kv_heads)
    mlp = (3 if model.gated else 2) * model.width * model.ffn
    return model.layers * (attention + mlp) + model.vocab * model.width


def train_flops_per_token(model: ModelConfig, length: int) -> int:
    """Model FLOPs of forward and backward per token of a row of `length` tokens.

    6 N for the matmuls and 6 L H K (S + 1) for causal attention (half of the full square, diagonal included);
    recomputation is not counted (PaLM, arXiv 2204.02311, appendix B, with causal attention).
    """
    model = model.resolved()
    attention = 6 * model.layers * model.heads * model.head_dim * (length + 1)
    return 6 * matmul_parameters(model) + attention


ROTARY = 64
"""Columns of a query and key that carry the position in latent attention."""


def _attention(m: ModelConfig, mixture: Mixture | None) -> tuple[Matmul, ...]:
    queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
    if not mixture or not mixture.key_rank:
        return Matmul("qkv", queries + 2 * keys, m.width, "n"), Matmul("out", m.width, queries, "k")
    wide, rank = queries + m.heads * ROTARY, mixture.query_rank
    first = (
        (Matmul("q down", rank, m.width, ""), Matmul("q up", wide, rank, "n")) if rank else (Matmul("q", wide, m.width, "n"),)
    )
    kv = Matmul("kv down", mixture.key_rank + ROTARY, m.width, ""), Matmul("kv up", 2 * queries, mixture.key_rank, "n")
    return *first, *kv, Matmul("out", m.width, queries, "k")


def operators(model: ModelConfig, name: str = "", mixture: Mixture | None = None) -> Operators:
    """The operator table of a model: matmuls, memory-bound passes, parameters and kept activations of one layer.

    Bytes per token count each kernel's reads and writes at two bytes an element; fused: norm with the residual addition,
    bias with the activation, as flash attention, Apex or a compiler does it. mixture: with it the layers are mean ones: a
    router, the shared and the routed experts, and the MLP of the layers that have none.
    """
    m = model.resolved()
    gates = 2 if m.gated else 1
    queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
    sparse = 1 - mixture.dense / m.layers if mixture else 0.0
    sizes = [(m.ffn, 1 - sparse)] + ([(mixture.shared, sparse)] if mixture else [])  # hidden size of an MLP, share of layers
    matmuls, inside = list(_attention(m, mixture)), 0.0
    for size, share in sizes:
        if size and share:
            matmuls += [Matmul("up", gates * size, m.width, "n", share), Matmul("down", m.width, size, "k", share)]
            inside += share * (gates + 1) * size
    routed, experts = 0.0, None
    if mixture:
        experts = Experts(mixture.experts, mixture.active, gates * mixture.ffn, mixture.ffn, sparse)
        matmuls.append(Matmul("router", mixture.experts, m.width, "", sparse))
        inside += sparse * mixture.active * (gates + 1) * mixture.ffn
        routed = sparse * mixture.active * m.width
    dropped = 3 if m.dropout else 0  # mask and output of a dropout, in bytes per element
    passes = [
        Pass("norms", 2 * 4 * m.width, 2 * 4 * m.width, False),
        Pass("residuals", 2 * (6 + dropped) * m.width, 2 * (4 + dropped) * m.width, False),
        Pass("heads", 2 * 2 * (queries + 2 * keys), (4 if m.positions == "rotary" else 0) * (queries + keys), True),
        Pass("activation", 2 * inside + 4 * inside * m.bias * gates / (gates + 1), 2 * inside, True),
    ]
    if mixture:  # gathered by expert and put back, each read and written; scores of the router in float32
        passes += [Pass("experts", 8 * routed, 8 * routed, True), Pass("router", *[12 * sparse * mixture.experts] * 2, True)]
    up = sum(x.share * x.n for x in matmuls if x.name == "up")
    norms = {"pre": 2, "post": 2, "both": 4}[m.norm_place] * m.width * (2 if m.norm == "layer" else 1)
    biases = (queries + 2 * keys + up + 2 * m.width) if m.bias else (queries + 2 * keys) * m.qkv_bias
    layer = sum(x.share * x.n * x.k for x in matmuls) + norms + biases
    positions = m.max_length * m.width if m.positions == "learned" else 0
    # kept for the backward: q, k, v, attention's output, the MLP's before and after; the inputs of norms and matmuls
    split = queries + 2 * keys + queries + inside + 2 * routed
    whole = 4 * m.width + (m.width if m.dropout else 0)
    return Operators(
        name=name,
        layers=m.layers,
        width=m.width,
        ffn=m.ffn,
        heads=m.heads,
        kv_heads=m.kv_heads,
        head_dim=m.head_dim,
        vocab=m.vocab,
        gated=m.gated,
        tied=m.tied,
        matmuls=tuple(matmuls),
        passes=tuple(passes),
        layer_parameters=round(layer),
        embedding_parameters=m.vocab * m.width + positions,
        head_parameters=0 if m.tied else m.vocab * m.width,
        kept=(split, whole),
        experts=experts,
    )
