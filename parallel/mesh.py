"""The device mesh: six named axes, and which device sits where in it."""

import math
import sys
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from parallel import distributed
from parallel.axes import AXES
from parallel.errors import UserError

INNER = ("context", "expert", "tensor")  # these want the fastest links


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all six axes (absent ones have size 1) over the first devices that it needs.

    On several nodes they are placed by `arrange`; a warning says when tensor does not stay inside a node. Raises UserError
    when devices are too few."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < math.prod(shape):
        wanted = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape) if size > 1)
        raise UserError(
            f"the mesh {wanted} needs {math.prod(shape)} devices but there are {len(devices)}; "
            "change the mesh axes so that their product is the number of devices"
        )
    devices = devices[: math.prod(shape)]
    nodes = distributed.nodes(devices)
    order = arrange(dict(zip(AXES, shape)), nodes)
    if (text := crossing(dict(zip(AXES, shape)), [nodes[i] for i in order.flat])) and jax.process_index() == 0:
        print(f"warning: {text}", file=sys.stderr)
    grid = np.empty(len(devices), object)
    grid[:] = devices
    return Mesh(grid[order], AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(sizes: Mapping[str, int], nodes: Sequence[int]) -> np.ndarray:
    """Which device sits at each place of the mesh, as numbers in the shape of AXES. nodes: the node of each device.

    A node first takes tensor, expert and context, then as much of data as divides it, then of pipe: the reduction of the
    gradients is large and waited for, a hop between stages is small and hidden behind compute, and since all ranks move in
    lockstep, one hop over the network costs as much as if all of them did. What does not fit goes across nodes between
    devices that have the same place in theirs, and so the same network card: data by the order itself, pipe by walking
    through every second node backwards. Devices of uneven nodes stay in order."""
    shape = [sizes[axis] for axis in AXES]
    by_node = sorted(range(len(nodes)), key=lambda i: nodes[i])
    count = len(set(nodes))
    size, inner = len(nodes) // count, math.prod(sizes[axis] for axis in INNER)
    even = all(len({nodes[i] for i in by_node[n * size : (n + 1) * size]}) == 1 for n in range(count))
    if count == 1 or not even or size % inner:
        return np.array(by_node).reshape(shape)
    data = math.gcd(sizes["data"], size // inner)
    pipe = math.gcd(sizes["pipe"], size // inner // data)
    across = (sizes["replica"], sizes["data"] // data, sizes["pipe"] // pipe)
    places = np.array(by_node).reshape(*across, pipe, data, inner)
    if pipe * data * inner == size:
        places[:, :, 1::2] = places[:, :, 1::2, ::-1]
    return places.transpose(0, 1, 4, 2, 3, 5).reshape(shape)


def crossing(sizes: Mapping[str, int], nodes: Sequence[int]) -> str | None:
    """Says that groups of tensor lie on several nodes, if they do. nodes: of the devices in the order of the mesh."""
    groups = np.array(nodes).reshape(-1, sizes["tensor"])
    split = int((groups != groups[:, :1]).any(axis=1).sum())
    if not split:
        return None
    largest = max(np.bincount(np.array(nodes)))
    return (
        f"mesh.tensor={sizes['tensor']} goes across nodes of {largest} devices in {split} of its {len(groups)} groups: every "
        f"layer waits for the network; choose a mesh.tensor (times context and expert) that divides {largest}"
    )
