"""How long collectives and messages take: rings over NVLink and over a node's network that several groups share."""

from __future__ import annotations

import bisect
import math

from parallel.cluster import Cluster

HOP_US = 3.0
"""Latency of a step of a ring inside NVLink, microseconds; 25 us for an all-reduce over 8 (Azure guide, small messages)."""


def ring_rate(cluster: Cluster, size: float) -> float:
    """Bytes/s of all-reduce bus bandwidth inside NVLink for a message of `size` bytes: the measured curve, in log size."""
    curve = cluster.gpu.ring
    i = bisect.bisect_left(curve, (size,))
    if i == 0:
        return 1e9 * curve[0][1]
    if i == len(curve):
        return 1e9 * curve[-1][1]
    (a, low), (b, high) = curve[i - 1], curve[i]
    return 1e9 * (low + (high - low) * math.log(size / a) / math.log(b / a))


def all_reduce(size: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Seconds of an all-reduce of `size` bytes over `ranks` GPUs that are `stride` apart.

    Inside one NVLink domain the measured curve counts. Across nodes a ring's bandwidth is what its GPUs of a node have of
    the node's network; the other GPUs of the node are in other rings at the same time.
    """
    if ranks <= 1 or size <= 0:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * size
    if ranks * stride <= cluster.domain:
        scale = ranks / 8 if ranks < 8 else 1.0  # fewer ranks: larger pieces, so the curve is reached at smaller sizes
        return moved / ring_rate(cluster, size / scale) + HOP_US * 1e-6 * 2 * (ranks - 1)
    inside = max(1, min(ranks, cluster.domain // stride))
    nodes = math.ceil(ranks / inside)
    rate = min(inside * cluster.gpu_nic_gbs * 1e9, ring_rate(cluster, size))
    hops = min(2 * (nodes - 1), 8 * math.log2(nodes) + 8)  # trees take over from rings when there are many
    return moved / rate + 1e-6 * cluster.latency_us * hops


def gather(size: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Seconds of an all-gather or reduce-scatter whose whole is `size` bytes: half of an all-reduce."""
    return all_reduce(size, ranks, stride, cluster) / 2


def all_to_all(size: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Seconds in which every GPU sends `size` bytes in equal parts to the others of its group."""
    if ranks <= 1:
        return 0.0
    inside = max(1, min(ranks, cluster.domain // stride))
    away = (ranks - inside) / ranks
    local = size * (inside - 1) / ranks / (0.6 * ring_rate(cluster, size))
    return max(local, size * away / (cluster.gpu_nic_gbs * 1e9)) + 1e-6 * cluster.latency_us * (ranks > inside)


def message(size: float, distance: int, cluster: Cluster) -> float:
    """Seconds of one message of `size` bytes to the GPU `distance` further on, when all GPUs of a node send at once."""
    crosses = distance >= cluster.domain
    rate = cluster.gpu_nic_gbs * 1e9 if crosses else ring_rate(cluster, 4 * size) * 0.8
    return size / rate + 1e-6 * (2 * cluster.latency_us if crosses else HOP_US)
