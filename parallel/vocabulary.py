"""The vocabulary split over the pipe axis: what every rank does for the embedding and for the output head.

All functions run inside the manual region. A table holds this rank's rows [V/p, D] of a vocabulary padded to V rows; the
rows may be split further over `tensor` by the compiler. Collectives over `pipe` for the vocabulary are written here only."""

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "pipe"


def local_ids(ids: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Global ids -> (row of this rank's table, whether this rank has it)."""
    i = ids - lax.axis_index(AXIS) * rows
    return jnp.clip(i, 0, rows - 1), (i >= 0) & (i < rows)


def lookup(table_VD: jax.Array, ids_BS: jax.Array) -> jax.Array:
    """This rank's part of the embeddings [B, S, D]: zero where another rank has the row."""
    i, mine = local_ids(ids_BS, table_VD.shape[0])
    return jnp.where(mine[..., None], table_VD[i], 0)


def add_rows(grads_VD: jax.Array, ids_BS: jax.Array, d_BSD: jax.Array) -> jax.Array:
    """Adds the gradients of embeddings to this rank's rows."""
    i, mine = local_ids(ids_BS, grads_VD.shape[0])
    return grads_VD.at[i].add(jnp.where(mine[..., None], d_BSD, 0).astype(grads_VD.dtype))


def total(x: jax.Array) -> jax.Array:
    """The sum over the ranks of the pipe."""
    return lax.psum(x, AXIS)


def largest(x: jax.Array) -> jax.Array:
    """The maximum over the ranks of the pipe."""
    return lax.pmax(x, AXIS)


def from_rank(x: jax.Array, rank: int) -> jax.Array:
    """The value of one rank on all ranks; what the others hold is never read."""
    return lax.psum(jnp.where(lax.axis_index(AXIS) == rank, x, 0), AXIS)


def gather(x_BV: jax.Array) -> jax.Array:
    """The slices of all ranks side by side in the last dimension."""
    return lax.all_gather(x_BV, AXIS, axis=x_BV.ndim - 1, tiled=True)
