"""The device mesh: six named axes, the outermost first."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from parallel.axes import AXES
from parallel.errors import UserError


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all six axes (absent ones have size 1) over the first devices that it needs.

    `tensor` varies fastest, so that it stays inside one fast domain. Raises UserError when devices are too few."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < math.prod(shape):
        wanted = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape) if size > 1)
        raise UserError(
            f"the mesh {wanted} needs {math.prod(shape)} devices but there are {len(devices)}; "
            "change the mesh axes so that their product is the number of devices"
        )
    grid = np.array(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
