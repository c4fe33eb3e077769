"""What a kernel is told at compile time."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Options:
    """scale and softcap: as in llm.attention. backend: which kernel. device: the kind of GPU, "" for others, where Pallas
    interprets. mask: causal, full, window or packed. tensor: over how many devices of the tensor axis the heads are split.
    block, block_k, warps, stages: rows of queries and of keys in a tile, warps and stages of the pipeline that loads tiles,
    for tests and for tuning (0: the kernel's own; block_k: as those of queries)."""

    scale: float
    softcap: float | None = None
    backend: str = "chunked"
    device: str = ""
    mask: str = "causal"
    tensor: int = 1
    block: int = 0
    block_k: int = 0
    warps: int = 4
    stages: int = 1
