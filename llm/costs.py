"""Floating-point operations of the model, and its operator table for the planner."""

from llm.config import ModelConfig
from parallel.operators import Matmul, Operators, Pass


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


def operators(model: ModelConfig, name: str = "") -> Operators:
    """The operator table of a model: matmuls, memory-bound passes, parameters and kept activations of one layer.

    Bytes per token count each kernel's reads and writes at two bytes an element; fused: norm with the residual addition,
    bias with the activation, as flash attention, Apex or a compiler does it.
    """
    m = model.resolved()
    queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
    up = m.ffn * (2 if m.gated else 1)
    matmuls = (
        Matmul("qkv", queries + 2 * keys, m.width, "n"),
        Matmul("out", m.width, queries, "k"),
        Matmul("up", up, m.width, "n"),
        Matmul("down", m.width, m.ffn, "k"),
    )
    dropped = 3 if m.dropout else 0  # mask and output of a dropout, in bytes per element
    passes = (
        Pass("norms", 2 * 4 * m.width, 2 * 4 * m.width, False),
        Pass("residuals", 2 * (6 + dropped) * m.width, 2 * (4 + dropped) * m.width, False),
        Pass("heads", 2 * 2 * (queries + 2 * keys), (4 if m.positions == "rotary" else 0) * (queries + keys), True),
        Pass("activation", 2 * (up + m.ffn) + 4 * up * m.bias, 2 * (up + m.ffn), True),
    )
    norms = {"pre": 2, "post": 2, "both": 4}[m.norm_place] * m.width * (2 if m.norm == "layer" else 1)
    biases = (queries + 2 * keys + up + 2 * m.width) if m.bias else (queries + 2 * keys) * m.qkv_bias
    layer = sum(x.n * x.k for x in matmuls) + norms + biases
    positions = m.max_length * m.width if m.positions == "learned" else 0
    # kept for the backward: q, k, v, attention's output, the MLP's before and after; the inputs of norms and matmuls
    split = queries + 2 * keys + queries + up + m.ffn
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
        matmuls=matmuls,
        passes=passes,
        layer_parameters=layer,
        embedding_parameters=m.vocab * m.width + positions,
        head_parameters=0 if m.tied else m.vocab * m.width,
        kept=(split, whole),
    )
