"""What a training framework does and how well: facts of its design, and a few named constants for each generation.

Facts are read in the framework's code or paper. Constants start from a prior and are fitted on the rows that
`data/efficiencies.json` names, by `experiments/fit_planner.py`; nothing else is fitted.
"""

from __future__ import annotations

import dataclasses
import json
import math
from functools import lru_cache
from pathlib import Path

FILE = Path(__file__).parent / "data" / "efficiencies.json"


@dataclasses.dataclass(frozen=True)
class Framework:
    """Facts: flash (attention that writes no scores: 2 FlashAttention-2, 3 a newer kernel; 0 none), causal (it skips the
    masked half), fused (memory-bound passes are), sequence_parallel (norms are divided over tensor), scatter (a pipeline
    message is divided over tensor), gradient_bytes (kept of a gradient), reduced_bytes (sent of it), extra_bytes (kept per
    parameter on top of weights, gradients and optimiser), outputs (a stage's output is kept until its backward), logit_bytes
    (of one logit at the loss), fragmentation (share of the activations that the allocator holds on top; less where sources
    print what was allocated, not what was reserved), casts (bytes moved to quantise an element of a matmul's input), frozen
    (base weights have no gradient), overlap_gather (ZeRO-3 fetches the next layer while it computes), ticks (all pipeline
    ranks in lockstep, vocabulary spread over them).

    Constants: matmul and passes (speed as a share of what the hardware reaches), host_ms (the least time of a layer's
    forward, for the launches), tp_hidden, dp_hidden, pp_hidden (shares of communication under computation), step_ms (fixed
    time of a step: clipping, logging, data), noise (share of time lost for each doubling of the number of nodes), crowding
    (share of a pipeline's time lost for each other pipeline in its node and each further node of its stages).
    """

    name: str
    flash: int = 3
    causal: bool = True
    fused: bool = True
    sequence_parallel: bool = True
    scatter: bool = True
    gradient_bytes: float = 4.0
    reduced_bytes: float = 4.0
    extra_bytes: float = 0.0
    outputs: bool = False
    logit_bytes: float = 10.0
    fragmentation: float = 0.06
    casts: float = 4.0
    frozen: bool = False
    overlap_gather: bool = True
    ticks: bool = False
    matmul: float = 0.90
    passes: float = 0.80
    host_ms: float = 0.25
    tp_hidden: float = 0.3
    dp_hidden: float = 0.7
    pp_hidden: float = 0.3
    step_ms: float = 30.0
    noise: float = 0.003
    crowding: float = 0.0


CONSTANTS = ("matmul", "passes", "host_ms", "tp_hidden", "dp_hidden", "pp_hidden", "step_ms", "noise", "crowding")
_OLD = dict(matmul=1.05, flash=0, causal=False, sequence_parallel=False, tp_hidden=0.0, dp_hidden=0.0, pp_hidden=0.0)

FRAMEWORKS: dict[str, Framework] = {
    f.name: f
    for f in (
        Framework(
            "megatron-deepspeed",
            **_OLD,
            gradient_bytes=2.0,
            reduced_bytes=2.0,
            outputs=True,
            host_ms=1.1,
            step_ms=50.0,
            crowding=0.014,
        ),
        Framework(
            "megatron-deepspeed-bf16", **_OLD, gradient_bytes=4.0, extra_bytes=2.0, outputs=True, host_ms=0.8, step_ms=100.0
        ),
        Framework("megatron-2021", **_OLD, reduced_bytes=2.0, host_ms=0.5),
        Framework("megascale", flash=2, tp_hidden=0.7, dp_hidden=0.9, pp_hidden=0.9),
        Framework("zero-bubble", **_OLD, fragmentation=0.02, host_ms=0.4),
        Framework("megatron-core", fragmentation=0.02, reduced_bytes=2.0, tp_hidden=0.5, dp_hidden=0.9, pp_hidden=0.5),
        Framework("nemo", tp_hidden=0.6, dp_hidden=0.9, pp_hidden=0.5, gradient_bytes=2.0, reduced_bytes=2.0),
        Framework("nemo-mlperf", tp_hidden=0.5, dp_hidden=0.65, pp_hidden=0.5, gradient_bytes=2.0, reduced_bytes=2.0),
        Framework("mlperf-eos", tp_hidden=0.75, dp_hidden=0.65, pp_hidden=0.5, gradient_bytes=2.0, reduced_bytes=2.0),
        Framework("meta", tp_hidden=0.4, dp_hidden=0.9, pp_hidden=0.7),
        Framework(
            "torchtitan", flash=2, logit_bytes=16.0, outputs=True, tp_hidden=0.0, dp_hidden=0.9, pp_hidden=0.3, scatter=False
        ),
        Framework(
            "llm-foundry", flash=2, sequence_parallel=False, gradient_bytes=2.0, reduced_bytes=2.0, fused=False, passes=0.7
        ),
        Framework("deepspeed-zero3", **_OLD, gradient_bytes=2.0, reduced_bytes=2.0, host_ms=0.8, overlap_gather=True),
        Framework("xla", passes=0.85, host_ms=0.0, gradient_bytes=2.0, reduced_bytes=2.0, tp_hidden=0.2),
        Framework(
            "convoy",
            sequence_parallel=False,
            scatter=False,
            ticks=True,
            passes=0.85,
            host_ms=0.0,
            tp_hidden=0.3,
            dp_hidden=0.0,
            pp_hidden=1.0,
        ),
        Framework("other"),
    )
}


@lru_cache(maxsize=1)
def fitted() -> dict:
    """The committed constants: `constants` {key: {name: value}}, `rows` that were used, `spread` of the residuals."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {"constants": {}, "rows": [], "spread": {}}


def find(name: str, gpu: str, recipe: str, constants: dict | None = None) -> Framework:
    """A framework with the constants fitted for it, and for it on this GPU and number recipe (the narrowest key counts).

    On a GPU on which it was not fitted its matmuls are as fast as those of the frameworks that were.
    """
    table = fitted()["constants"] if constants is None else constants
    framework, chip = FRAMEWORKS[name], generation(gpu)
    narrow = f"{name}/{chip}/{recipe}"
    for key in (name, f"{name}/{chip}", narrow):
        framework = dataclasses.replace(framework, **table.get(key, {}))
    if narrow not in table:
        others = [v["matmul"] for k, v in table.items() if k.endswith(f"/{chip}/{recipe}")]
        others = others or [v["matmul"] for k, v in table.items() if f"/{chip}/" in k]
        if others:
            framework = dataclasses.replace(framework, matmul=math.exp(sum(map(math.log, others)) / len(others)))
    return framework


def generation(gpu: str) -> str:
    """GPUs that share constants: A100-40 and A100-80 are one generation, as are the Blackwells of one kind."""
    return gpu.partition("-")[0]


def spread(name: str, gpu: str, recipe: str) -> float:
    """Log-standard deviation of a prediction's unknown part: small where constants were fitted, larger where not."""
    known, table = fitted()["constants"], fitted()["spread"]
    if f"{name}/{generation(gpu)}/{recipe}" in known:
        return table.get(name, 0.06)
    return 0.10 if name in known else 0.14
