"""What training minimises: a sum over tokens of a function of their log-probabilities, and what it is divided by."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Mean over the counted tokens of the global batch of -log p + z_loss * lse^2 (z-loss: PaLM, arXiv 2204.02311, 5)."""

    z_loss: float = 0.0
    separable: ClassVar[bool] = True
    """Its derivative by a token's numbers depends on these only: the loss is computed in one pass over the tokens."""

    def denominator(self, side: dict[str, Any]) -> jax.Array:
        """This shard's share of the number that the sum is divided by."""
        return side["weights"].sum()

    def __call__(self, logp_BS: jax.Array, lse_BS: jax.Array, side: dict[str, Any]) -> jax.Array:
        """The sum over the tokens of a microbatch."""
        return (side["weights"] * (self.z_loss * jnp.square(lse_BS) - logp_BS)).sum()
