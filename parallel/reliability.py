"""Failures, checkpoints and goodput of a long run on many nodes."""

from __future__ import annotations

import math

FAILURES = 3.79
"""Unexpected interruptions per 1,000 node-days: 419 in 54 days on 2,048 nodes (Llama 3, arXiv 2407.21783). Others: 6.50 (Meta
RSC-1, 2410.21680), 2.3 to 16. The inverse law holds from about 4,000 GPUs up; smaller jobs fail more often than it says."""
RESTART_S = 600.0
"""Seconds from a failure to the first new step: detection, scheduling, start, reading the checkpoint (assumed)."""
OVERHEAD = 1.35
"""Power of a node, its network and cooling over the boards' own (assumed)."""


def mean_time_to_failure(nodes: float, rate: float = FAILURES) -> float:
    """Seconds between failures of a job on `nodes` nodes."""
    return 86400 / (nodes * rate / 1000)


def checkpoint_interval(write_s: float, failure_s: float) -> float:
    """The best time between checkpoints: Daly 2006, for a blocking write of write_s and failures every failure_s."""
    if write_s >= 2 * failure_s:
        return failure_s
    ratio = math.sqrt(write_s / (2 * failure_s))
    return math.sqrt(2 * write_s * failure_s) * (1 + ratio / 3 + ratio**2 / 9) - write_s


def goodput(write_s: float, failure_s: float, interval_s: float, restart_s: float = RESTART_S) -> float:
    """Share of the time that trains: less the writes, and for every failure half an interval and a restart."""
    return max(0.0, 1 - write_s / (interval_s + write_s) - (interval_s / 2 + restart_s) / failure_s)


def run_cost(
    tokens: float,
    tokens_per_s: float,
    gpus: int,
    gpus_per_node: int,
    state_bytes: float,
    nvme_gbs: float,
    pcie_gbs: float,
    watts: float,
) -> dict[str, float]:
    """Days, GPU-hours, energy, failures, checkpoint interval and goodput of a run, as a dictionary.

    state_bytes: of a checkpoint, copied by all GPUs to their hosts at pcie_gbs each and written by all nodes to their local
    disks at nvme_gbs each, while training waits. watts: of one GPU with its
    share of the node.
    """
    nodes = max(1.0, gpus / gpus_per_node)
    failure = mean_time_to_failure(nodes)
    write = state_bytes / gpus / (pcie_gbs * 1e9) + state_bytes / nodes / (nvme_gbs * 1e9)
    write = max(1.0, write)  # a second at least: stopping and starting all ranks
    interval = checkpoint_interval(write, failure)
    good = goodput(write, failure, interval)
    training = tokens / tokens_per_s
    seconds = training / good if good else math.inf
    return dict(
        tokens=tokens,
        days=seconds / 86400,
        days_without_failures=training / 86400,
        gpu_hours=seconds / 3600 * gpus,
        watts_per_gpu=watts,
        energy_mwh=seconds / 3600 * gpus * watts / 1e6,
        failures=seconds / failure,
        checkpoint_write_s=write,
        checkpoint_interval_s=interval,
        goodput=good,
    )
