"""Rotary position embedding (RoFormer, arXiv 2104.09864) and the ways to stretch it to longer texts."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from llm.config import ModelConfig


def frequencies(c: ModelConfig, windowed: bool = False) -> np.ndarray:
    """Radians per position of each pair of a head, [K / 2] in fp32; `windowed`: of the layers that have the window.

    linear: every wave is rope_factor times as long (arXiv 2306.15595). llama3: only long waves are; those between
    rope_low and rope_high turns in rope_original positions are blended (as in Llama 3.1's reference code)."""
    half = c.head_dim // 2
    own_base = windowed and c.rope_theta_window
    frequency_K = (own_base or c.rope_theta) ** (-np.arange(half) / half)
    if own_base or c.rope_scaling == "none":
        return frequency_K.astype(np.float32)
    unchanged_K = 0.0  # share of the original frequency
    if c.rope_scaling == "llama3":
        turns_K = c.rope_original * frequency_K / (2 * math.pi)
        unchanged_K = np.clip((turns_K - c.rope_low) / (c.rope_high - c.rope_low), 0, 1)
    return (frequency_K * (unchanged_K + (1 - unchanged_K) / c.rope_factor)).astype(np.float32)


def rotary(x_BSHK: jax.Array, positions_BS: jax.Array, frequency_K: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + K / 2) of each head by position times frequency; angles in fp32 whatever x is."""
    half = x_BSHK.shape[-1] // 2
    angle_BS1K = positions_BS[..., None, None].astype(jnp.float32) * frequency_K
    cos, sin = jnp.cos(angle_BS1K), jnp.sin(angle_BS1K)
    a, b = x_BSHK[..., :half].astype(jnp.float32), x_BSHK[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BSHK.dtype)
