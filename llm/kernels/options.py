"""What a kernel is told at compile time."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Options:
    """scale and softcap: as in llm.attention. backend: which kernel. device: the kind of GPU, "" for others; tensor: over how
    many devices of the tensor axis the heads are split. block: a size of all tiles, for tests (0: the kernel's own)."""

    scale: float
    softcap: float | None = None
    backend: str = "chunked"
    device: str = ""
    tensor: int = 1
    block: int = 0
