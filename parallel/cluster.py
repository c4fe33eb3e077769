"""Facts about hardware: GPUs, nodes and clusters, each with its source. Data sheets and measured curves, nothing fitted."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from parallel.errors import UserError

SPARE = 0.94
"""Share of a GPU's memory that a program may use: the rest is the driver's, NCCL's and other processes'."""

SHEET = "NVIDIA data sheet"
GUIDE = "Azure/AI-benchmarking-guide Azure_Results (measured)"

PEAK_TFLOPS = {
    # name in jax's device_kind: (bfloat16, float32 as tensor cores run it), dense, from NVIDIA's data sheets
    "GB200": (2500, 1250),
    "B200": (2250, 1125),
    "H200": (989, 494),
    "H100 NVL": (835, 417),
    "H100 PCIe": (756, 378),
    "H100": (989, 494),
    "A100": (312, 156),
}
"""Dense peak of one GPU in TFLOP/s; the first name found in the device kind counts, so longer names stand first."""


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device for `dtype` (float32 or bfloat16), or None when it is not known, as on a CPU."""
    for name, (bfloat16, float32) in PEAK_TFLOPS.items():
        if name in device_kind:
            return 1e12 * (bfloat16 if dtype == "bfloat16" else float32)
    return None


# ----------------------------------------------------------------------------------------------------------------- GPUs
RING_A100 = ((64e3, 2.7), (1e6, 36.2), (4e6, 71.4), (16e6, 109.2), (64e6, 166.6), (256e6, 213.9), (1e9, 228.1), (8e9, 231.6))
RING_H100 = ((64e3, 2.7), (1e6, 43.7), (4e6, 128.7), (16e6, 215), (64e6, 310), (256e6, 350), (1e9, 365), (8e9, 370))
RING_B200 = tuple((size, rate * 1.8) for size, rate in RING_H100)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU.

    peak: dense TFLOP/s by precision (bf16 stands for fp16 too; fp4 for NVFP4). ceiling: share of the peak that the best
    large matmul reaches, by precision. hbm_gib: memory that the driver reports. hbm_tbs, hbm_share: peak TB/s and the share
    that a copy reaches. sms: multiprocessors, for wave quantisation. ring: (bytes, GB/s) all-reduce bus bandwidth over the
    GPUs that share NVLink, by message size. nvlink_gbs: GB/s of a GPU's NVLinks to the switch, both directions. watts: board
    power.
    """

    name: str
    peak: Mapping[str, float]
    ceiling: Mapping[str, float]
    hbm_gib: float
    hbm_tbs: float
    hbm_share: float
    sms: int
    ring: tuple[tuple[float, float], ...]
    watts: float
    source: str
    nvlink_gbs: float = 0.0

    def rate(self, precision: str) -> float:
        """FLOP/s of the best large matmul in this precision. Raises UserError when the GPU lacks it."""
        if precision not in self.peak:
            raise UserError(f"{self.name} has no {precision}: it has {', '.join(self.peak)}")
        return 1e12 * self.peak[precision] * self.ceiling.get(precision, self.ceiling["bf16"])


_AMPERE = dict(bf16=312.0)
_HOPPER = dict(bf16=989.0, fp8=1979.0)
_A = dict(bf16=0.82)
_H = dict(bf16=0.80, fp8=0.70)
_B = dict(bf16=0.78, fp8=0.72, fp4=0.60)
_UNVERIFIED = "data sheet; ceilings as on the same maker's nearest GPU (unverified)"


NVLINK_GBS = {"V100": 300, "A100": 600, "A800": 400, "H100": 900, "H800": 400, "H20": 900, "GH200": 900, "H200": 900}
NVLINK_GBS |= {"B200": 1800, "B300": 1800, "GB200": 1800, "GB300": 1800, "H100-PCIe": 600}
"""Of one GPU, both directions, from the data sheets; 130 TB/s in all over the 72 GPUs of a GB200 rack."""


def _gpu(name, peak, ceiling, gib, tbs, share, sms, ring, watts, source) -> tuple[str, Gpu]:
    nvlink = NVLINK_GBS.get(name, NVLINK_GBS.get(name.partition("-")[0], 0))
    return name, Gpu(name, peak, ceiling, gib, tbs, share, sms, ring, watts, source, nvlink)


def _slower(ring: tuple, factor: float) -> tuple:
    return tuple((size, rate * factor) for size, rate in ring)


GPUS: dict[str, Gpu] = dict(
    (
        _gpu("V100-32", dict(bf16=125.0), dict(bf16=0.75), 32, 0.9, 0.85, 80, _slower(RING_A100, 0.5), 300, _UNVERIFIED),
        _gpu("A100-40", _AMPERE, _A, 39.4, 1.555, 0.83, 108, RING_A100, 400, f"{SHEET}; {GUIDE}"),
        _gpu("A100-80", _AMPERE, _A, 79.2, 2.039, 0.79, 108, RING_A100, 400, f"{SHEET}; {GUIDE}"),
        _gpu("A800-80", _AMPERE, _A, 79.2, 2.039, 0.79, 108, _slower(RING_A100, 0.67), 400, _UNVERIFIED),
        _gpu("H100-80", _HOPPER, _H, 79.1, 3.35, 0.87, 132, RING_H100, 700, f"{SHEET}; {GUIDE}; stas00/ml-engineering"),
        _gpu("H100-96", _HOPPER, dict(bf16=0.62, fp8=0.52), 96, 2.4, 0.87, 132, RING_H100, 500, "pytorch/torchtitan: 500 W"),
        _gpu("H100-PCIe", dict(bf16=756.0, fp8=1513.0), _H, 80, 2.0, 0.87, 114, _slower(RING_H100, 0.5), 350, SHEET),
        _gpu("H800-80", _HOPPER, _H, 79.1, 3.35, 0.87, 132, _slower(RING_H100, 0.44), 700, _UNVERIFIED),
        _gpu("H20-96", dict(bf16=148.0, fp8=296.0), dict(bf16=0.9, fp8=0.9), 96, 4.0, 0.85, 78, RING_H100, 400, _UNVERIFIED),
        _gpu("GH200", _HOPPER, _H, 96, 4.0, 0.85, 132, RING_H100, 700, _UNVERIFIED),
        _gpu("H200", _HOPPER, dict(bf16=0.80, fp8=0.69), 141, 4.8, 0.84, 132, RING_H100, 700, f"{SHEET}; {GUIDE}"),
        _gpu("B200", dict(bf16=2250.0, fp8=4500.0, fp4=9000.0), _B, 178, 7.7, 0.90, 148, RING_B200, 1000, _UNVERIFIED),
        _gpu("B300", dict(bf16=2250.0, fp8=4500.0, fp4=13500.0), _B, 268, 7.7, 0.90, 148, RING_B200, 1100, _UNVERIFIED),
        _gpu("GB200", dict(bf16=2450.0, fp8=4900.0, fp4=9800.0), _B, 184, 8.0, 0.92, 148, RING_B200, 1200, _UNVERIFIED),
        _gpu("GB300", dict(bf16=2450.0, fp8=4900.0, fp4=14700.0), _B, 277, 8.0, 0.92, 148, RING_B200, 1400, _UNVERIFIED),
        _gpu(
            "MI250X", dict(bf16=191.5), dict(bf16=0.7), 64, 1.6, 0.80, 110, _slower(RING_A100, 0.6), 280, "one of its two dies"
        ),
        _gpu(
            "MI300X", dict(bf16=1307.0, fp8=2615.0), dict(bf16=0.5, fp8=0.45), 192, 5.3, 0.8, 304, RING_H100, 750, _UNVERIFIED
        ),
        _gpu(
            "MI325X", dict(bf16=1307.0, fp8=2615.0), dict(bf16=0.5, fp8=0.45), 256, 6.0, 0.8, 304, RING_H100, 1000, _UNVERIFIED
        ),
        _gpu("MI355X", dict(bf16=2516.0, fp8=5033.0, fp4=10066.0), _B, 288, 8.0, 0.8, 256, RING_B200, 1400, _UNVERIFIED),
    )
)

_GPU_WORDS = (  # the first pattern that is found names the GPU; memory sizes are in the names that sources write
    (r"GB300", "GB300"), (r"GB200", "GB200"), (r"B300", "B300"), (r"B200", "B200"), (r"GH200", "GH200"), (r"H200", "H200"),
    (r"H100.*(96|500 ?W)", "H100-96"), (r"H100.*PCI", "H100-PCIe"), (r"H100", "H100-80"), (r"H800", "H800-80"),
    (r"H20\b", "H20-96"),
    (r"A800", "A800-80"), (r"A100.*40", "A100-40"), (r"A100", "A100-80"), (r"V100", "V100-32"),
    (r"MI250", "MI250X"), (r"MI300", "MI300X"), (r"MI325", "MI325X"), (r"MI35[05]", "MI355X"),
)  # fmt: skip


def find_gpu(words: str) -> Gpu:
    """The GPU that a source names in its own words. Raises UserError for one that is not known."""
    for pattern, name in _GPU_WORDS:
        if re.search(pattern, words, re.IGNORECASE):
            return GPUS[name]
    raise UserError(f"the GPU {words!r} is not known: known are {', '.join(GPUS)}")


# ------------------------------------------------------------------------------------------------------------- clusters
@dataclasses.dataclass(frozen=True)
class Cluster:
    """Many nodes of one kind.

    gpus_per_node: GPUs of one virtual machine. domain: GPUs that share NVLink. nic_gbs: GB/s of a node's network, one
    direction. network: share of it that large messages reach. latency_us: of one hop between nodes. nvme_gbs: local write
    rate of a node. cpu: its processors. host_gib: its memory. pcie_gbs: measured rate from one GPU to it.
    """

    name: str
    gpu: Gpu
    gpus_per_node: int
    domain: int
    nic_gbs: float
    network: float = 0.92
    latency_us: float = 8.0
    nvme_gbs: float = 8.0
    source: str = ""
    cpu: str = ""
    host_gib: float = 0.0
    pcie_gbs: float = 25.0

    @property
    def gpu_nic_gbs(self) -> float:
        """GB/s that one GPU gets of its node's network when all send."""
        return self.nic_gbs * self.network / self.gpus_per_node


_AZURE = "MicrosoftDocs/azure-docs articles/virtual-machines; " + GUIDE
_DGX = "NVIDIA DGX user guides"


HOSTS = {  # processors, memory in GiB, GB/s from a GPU (Azure guide, measured; NVLink-C2C of Grace from its data sheet)
    "nd-a100-v4-40": ("96 cores of EPYC 7V12", 900, 26.3),
    "nd-a100-v4": ("96 cores of EPYC 7V12", 1900, 26.3),
    "nd-h100-v5": ("96 cores of Xeon 8480C", 1900, 51.5),
    "nd-h200-v5": ("96 cores of Xeon 8480C", 1850, 52.0),
    "nd-gb200-v6": ("128 cores of Grace", 864, 450.0),
    "dgx-a100-40": ("2 x 64 cores of EPYC 7742", 1000, 26.3),
    "dgx-a100": ("2 x 64 cores of EPYC 7742", 2000, 26.3),
    "dgx-h100": ("2 x 56 cores of Xeon 8480C", 2000, 51.5),
    "dgx-h200": ("2 x 56 cores of Xeon 8480C", 2000, 52.0),
    "dgx-b200": ("2 x 56 cores of Xeon 8570", 2000, 52.0),
    "dgx-b300": ("2 x 64 cores of Xeon 6776P", 2000, 52.0),
    "gb200-nvl72": ("2 x 72 cores of Grace", 960, 450.0),
    "gb300-nvl72": ("2 x 72 cores of Grace", 960, 450.0),
}


def _cluster(name, gpu, gpus, domain, nic, nvme, source) -> tuple[str, Cluster]:
    cpu, host, pcie = HOSTS.get(name, ("", 0.0, 25.0))
    return name, Cluster(
        name, GPUS[gpu], gpus, domain, nic, nvme_gbs=nvme, source=source, cpu=cpu, host_gib=host, pcie_gbs=pcie
    )


CLUSTERS: dict[str, Cluster] = dict(
    (
        _cluster("nd-a100-v4-40", "A100-40", 8, 8, 200, 8.2, f"ND96asr_v4; {_AZURE}"),
        _cluster("nd-a100-v4", "A100-80", 8, 8, 200, 8.2, f"ND96amsr_A100_v4; {_AZURE}"),
        _cluster("nd-h100-v5", "H100-80", 8, 8, 400, 33.9, f"ND96isr_H100_v5; {_AZURE}"),
        _cluster("nd-h200-v5", "H200", 8, 8, 400, 33.8, f"ND96isr_H200_v5; {_AZURE}"),
        _cluster("nd-gb200-v6", "GB200", 4, 72, 200, 16.0, f"ND128isr_NDR_GB200_v6; {_AZURE}"),
        _cluster("dgx-a100-40", "A100-40", 8, 8, 200, 8.0, _DGX),
        _cluster("dgx-a100", "A100-80", 8, 8, 200, 8.0, _DGX),
        _cluster("dgx-h100", "H100-80", 8, 8, 400, 25.0, _DGX),
        _cluster("dgx-h200", "H200", 8, 8, 400, 25.0, _DGX),
        _cluster("dgx-b200", "B200", 8, 8, 400, 25.0, _DGX),
        _cluster("dgx-b300", "B300", 8, 8, 800, 25.0, _DGX),
        _cluster("gb200-nvl72", "GB200", 4, 72, 200, 16.0, _DGX),
        _cluster("gb300-nvl72", "GB300", 4, 72, 400, 16.0, _DGX),
        _cluster("hgx-h100-96", "H100-96", 8, 8, 400, 25.0, "pytorch/torchtitan benchmarks"),
        _cluster("mi250x", "MI250X", 8, 8, 100, 2.0, "OLCF Frontier user guide: 8 dies and 4 x 200 Gb/s a node"),
        _cluster("mi300x", "MI300X", 8, 8, 400, 25.0, _UNVERIFIED),
    )
)


def of_gpu(gpu: Gpu, per_node: int) -> Cluster:
    """Nodes with so many of a GPU, otherwise as its usual cluster."""
    usual = next((c for c in CLUSTERS.values() if c.gpu.name == gpu.name), CLUSTERS["dgx-h100"])
    nic = usual.nic_gbs * per_node / usual.gpus_per_node
    return dataclasses.replace(usual, gpu=gpu, gpus_per_node=per_node, domain=max(per_node, usual.domain), nic_gbs=nic)


def of_cpu(devices: int, cores: int, memory_gib: float) -> Cluster:
    """Virtual devices that share a machine's cores, memory and memory bandwidth: 50 GFLOP/s and 5 GB/s a core (assumed)."""
    share = cores / devices
    chip = Gpu(
        "CPU", dict(bf16=0.05 * share), dict(bf16=0.8), memory_gib / devices, 0.005 * share, 0.8, 1,
        ((64e3, 0.2 * share), (1e6, 2.0 * share)), 20 * share, "assumed",
    )  # fmt: skip
    return Cluster("this machine", chip, devices, devices, 1.0, source="assumed")


def find_cluster(name: str) -> Cluster:
    """A cluster by name, or from a JSON file. Raises UserError with the nearest name.

    A file has the fields of `Cluster`, `gpu` being the name of a GPU or an object with the fields of `Gpu`; what it leaves
    out comes from the cluster that its field `like` names.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if not name.endswith(".json"):
        near = difflib.get_close_matches(name.lower(), CLUSTERS, 1)
        hint = f": did you mean {near[0]}?" if near else f": there are {', '.join(CLUSTERS)}"
        raise UserError(f"there is no cluster {name}{hint} (or name a JSON file)")
    if not Path(name).is_file():
        raise UserError(f"--cluster={name}: there is no such file")
    try:
        fields = json.loads(Path(name).read_text())
        base = find_cluster(fields.pop("like", "dgx-h100"))
        gpu = fields.pop("gpu", {})
        if isinstance(gpu, str):
            chip = GPUS[gpu] if gpu in GPUS else find_gpu(gpu)
        else:
            if "ring" in gpu:
                gpu["ring"] = tuple(tuple(point) for point in gpu["ring"])
            chip = dataclasses.replace(base.gpu, **gpu)
        return dataclasses.replace(base, **{"name": Path(name).stem, **fields, "gpu": chip})
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--cluster={name}: not a description of a cluster: {error}") from error
