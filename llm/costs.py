"""Floating-point operations of the model."""

from llm.config import ModelConfig


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
