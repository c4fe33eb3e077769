"""Bandwidth along a mesh axis, by timed collectives, and which of its links are slow."""

import dataclasses
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel import distributed

BYTES = dict(cpu=1 << 20, gpu=1 << 26)  # that each device sends
REPEATS = 8
SLOW = 4.0  # times as long as the usual link of its kind


@dataclasses.dataclass(frozen=True)
class Measured:
    """gb_per_s: 10^9 bytes/s that each device sends. slow: sentences that name links."""

    collective: str
    bytes: int
    gb_per_s: float
    slow: list[str]


def measure(mesh: Mesh, axis: str) -> Measured:
    """Measures an axis of the mesh. All processes call it together; all get the same answer.

    Stages exchange messages, so `pipe` is timed by a permutation; the other axes by an all-reduce, whose n ranks send
    2 (n - 1) / n of their bytes. Links are timed by a permutation around every ring of the axis: how long each device
    waits for the bytes of the one before it."""
    size, platform = mesh.shape[axis], mesh.devices.flat[0].platform
    numbers = BYTES.get(platform, BYTES["gpu"]) // 4
    x = _filled(mesh, numbers)
    around = [(i, (i + 1) % size) for i in range(size)]
    permute = _compiled(mesh, lambda a: lax.ppermute(a, axis, around))
    times = _times(mesh, permute, x)
    seconds, moved = float(np.max(times)), 4 * numbers
    collective = "permutation"
    if axis != "pipe":
        reduce = _compiled(mesh, lambda a: lax.psum(a, axis))
        seconds, moved = float(np.max(_times(mesh, reduce, x))), 4 * numbers * 2 * (size - 1) / size
        collective = "all-reduce"
    return Measured(collective, 4 * numbers, moved / seconds / 1e9, _slow(mesh, axis, times))


def _filled(mesh: Mesh, numbers: int) -> jax.Array:
    every = NamedSharding(mesh, P(mesh.axis_names))
    return jax.jit(lambda: jnp.ones((mesh.size, numbers), jnp.float32), out_shardings=every)()


def _compiled(mesh: Mesh, run):
    """The jitted function of one device's part."""
    every = P(mesh.axis_names)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=every, out_specs=every, check_vma=False))


def _times(mesh: Mesh, run, x: jax.Array) -> np.ndarray:
    """Seconds until each device of the mesh had its result, the best of REPEATS: an array in the mesh's shape."""
    place = {device: number for number, device in enumerate(mesh.devices.flat)}
    best = np.full(mesh.size, np.inf)
    with ThreadPoolExecutor(len(x.addressable_shards)) as pool:
        for turn in range(REPEATS + 1):
            distributed.barrier("links")
            began = time.perf_counter()

            def ready(shard, began=began):
                shard.data.block_until_ready()
                return place[shard.device], time.perf_counter() - began

            for number, seconds in pool.map(ready, run(x).addressable_shards):
                if turn:  # the first one compiles
                    best[number] = min(best[number], seconds)
    known = distributed.gather([None if np.isinf(s) else s for s in best.tolist()])
    return np.array([min(s for s in column if s is not None) for column in zip(*known)]).reshape(mesh.devices.shape)


def _slow(mesh: Mesh, axis: str, times: np.ndarray) -> list[str]:
    """The links of the axis that took SLOW times as long as the median of those within nodes, or of those across."""
    along = mesh.axis_names.index(axis)
    nodes = np.array(distributed.nodes(list(mesh.devices.flat))).reshape(times.shape)
    across = np.roll(nodes, 1, along) != nodes
    sources = np.roll(mesh.devices, 1, along)
    slow = []
    for kind in (across, ~across) if mesh.devices.flat[0].platform != "cpu" else (across,):  # memory has no links
        usual = statistics.median(times[kind].tolist()) if kind.any() else np.inf
        for place in np.argwhere(kind & (times > SLOW * usual)):
            here = tuple(place)
            names = " to ".join(f"device {d.local_hardware_id} of {_host(d)}" for d in (sources[here], mesh.devices[here]))
            slow.append(f"slow link: {names} takes {times[here] / usual:.1f} times as long as the usual one")
    return slow


def _host(device: jax.Device) -> str:
    facts = distributed.facts()
    return f"process {device.process_index}" + (f" ({facts[device.process_index]['host']})" if facts else "")
