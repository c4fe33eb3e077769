"""Measures what the planner takes from data sheets otherwise: large matmuls and a copy on the device at hand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel.errors import UserError

SIZES = (512, 1024, 2048, 4096, 8192)
REPEATS = 5


def calibrate(output: str, seconds: float = 60.0) -> tuple[dict[str, Any], str]:
    """Measure and write `output`, a JSON file for `plan --calibration`: (document, text).

    matmul_tflops: the best large square matmul in bfloat16; copy_tbs: bytes read and written per second, in TB/s; sizes: every
    matmul measured. seconds: no larger size is begun after this time. Raises UserError when the folder is not there.
    """
    import jax
    import jax.numpy as jnp

    if not Path(output).absolute().parent.is_dir():
        raise UserError(f"--output={output}: there is no such folder")
    if seconds <= 0:
        raise UserError(f"--seconds={seconds}: must be above 0")
    device, begin, sizes = jax.devices()[0], time.perf_counter(), {}
    for n in SIZES:
        if sizes and time.perf_counter() - begin > seconds / 4:
            break
        x = jnp.ones((n, n), jnp.bfloat16)
        sizes[n] = 2e-12 * n**3 / best_time(jax.jit(lambda a: a @ a), x)
    count = 2**26 if device.platform != "cpu" else 2**22
    y = jnp.ones(count, jnp.float32)
    copy = 8e-12 * count / best_time(jax.jit(lambda a: a + 1.0), y)
    document = dict(
        device=device.device_kind,
        platform=device.platform,
        matmul_tflops={"bf16": max(sizes.values())},
        copy_tbs=copy,
        sizes={str(n): value for n, value in sizes.items()},
    )
    Path(output).write_text(json.dumps(document, indent=1) + "\n")
    lines = [f"matmul {n:5} x {n:<5} {value:8.3f} TFLOP/s" for n, value in sizes.items()]
    lines.append(f"copy {copy:.4f} TB/s on {device.device_kind}; written: {output}")
    return document, "\n".join(lines)


def best_time(function: Callable, argument: Any) -> float:
    """The least seconds of a call, compiled and warm."""
    function(argument).block_until_ready()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function(argument).block_until_ready()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
