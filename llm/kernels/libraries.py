"""Attention by kernels of others, for what they are known to do right; kernels/backends.py says what that is.

All take q [B, T, H, D], k and v [B, T, K, D] of one type, give o like q, and have gradients of their own."""

import jax

from llm.kernels.options import Options


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, options: Options) -> jax.Array:
    """cuDNN's fused attention, through the public function of JAX."""
    causal = options.mask == "causal"
    return jax.nn.dot_product_attention(q, k, v, scale=options.scale, is_causal=causal, implementation="cudnn")


def tokamax(q: jax.Array, k: jax.Array, v: jax.Array, options: Options) -> jax.Array:
    """The Mosaic kernels of tokamax, which is not among the requirements."""
    import tokamax

    return tokamax.dot_product_attention(
        q,
        k,
        v,
        scale=options.scale,
        is_causal=options.mask == "causal",
        logits_soft_cap=options.softcap,
        implementation="mosaic",
    )
