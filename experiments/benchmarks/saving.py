"""How long a save keeps training waiting, over the time that a synchronous save takes, at two sizes of the state.

    python experiments/benchmarks/saving.py

For the demo's state (13 MB in 31 arrays) and for one of 1 GiB on the same mesh (or --gib=N), the median of five each:

  plain     a step of its own: everything in the state is changed in place, as an optimiser does
  call      how long the training thread is held up by a save in the background: until everything is copied to the host
  blocked   the same, and what the next step takes longer; the writing threads take cores from a CPU device, not from a GPU
  save      the same save, waited for until it is committed

The bound is the copy: memory bandwidth on a CPU device (into buffers that are used again: fresh memory would cost several
times as much), the link to the host on a GPU. Prints one JSON line: {demo, large: {state_bytes, plain_s, call_s, blocked_s,
save_s, ratio (call over save), ratio_blocked}}; the bars are ratio < 0.30 at demo size and < 0.10 at 1 GiB.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.configs.demo import get_config
from llm.checkpoint import Checkpoints
from llm.step import build
from parallel.mesh import make_mesh
from parallel.sharding import Stored

REPEATS, LAYERS, ARRAYS = 5, 8, 16


def demo_state():
    program = build(get_config(), jax.devices()[:8])
    return program.init(), program.stored()


def large_state(gib: float):
    """Stacked arrays over a pipe of 4, as a model of 8 layers has them."""
    devices = min(4, len(jax.devices()))
    rows = int(gib * 2**30) // (ARRAYS * LAYERS * 1024 * 4)
    index = np.arange(LAYERS).reshape(1, devices, LAYERS // devices)
    shape = (*index.shape, rows, 1024)
    sharding = NamedSharding(make_mesh({"pipe": devices}), PartitionSpec(None, "pipe"))
    one = jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=sharding)
    state = {f"array{i}": one(jax.random.key(i)) for i in range(ARRAYS)}
    return state, {name: Stored((LAYERS, rows, 1024), index) for name in state}


def measure(state, stored, folder: Path) -> dict[str, float]:
    """The figures of one size."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    change = lambda leaf: leaf + 1 if leaf.dtype == np.int32 else leaf * 0.999
    update = jax.jit(lambda state: jax.tree.map(change, state), donate_argnums=0, out_shardings=shardings)
    checkpoints = Checkpoints(folder, keep=1)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    plain, call, blocked, whole = [], [], [], []

    def step(state):
        began = time.perf_counter()
        state = jax.block_until_ready(update(state))
        return state, time.perf_counter() - began

    for _ in range(3):
        state, _ = step(state)
    for number in range(REPEATS + 1):  # the first save opens the folder
        state, seconds = step(state)
        plain.append(seconds)
        began = time.perf_counter()
        checkpoints.save(2 * number + 1, state, stored, {})
        call.append(time.perf_counter() - began)
        state, seconds = step(state)
        blocked.append(call[-1] + max(0.0, seconds - plain[-1]))
        checkpoints.wait()
        state, _ = step(state)
        began = time.perf_counter()
        checkpoints.save(2 * number + 2, state, stored, {})
        checkpoints.wait()
        whole.append(time.perf_counter() - began)
    checkpoints.close()
    middle = lambda values: statistics.median(values[1:])
    result = dict(state_bytes=size, plain_s=middle(plain), call_s=middle(call), blocked_s=middle(blocked), save_s=middle(whole))
    over = lambda values: middle([value / seconds for value, seconds in zip(values, whole)])
    return result | dict(ratio=over(call), ratio_blocked=over(blocked))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the large state")
    parser.add_argument("--folder", default="", help="where to save; default: a temporary folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="saving", dir=options.folder or None))
    try:
        result = dict(demo=measure(*demo_state(), folder / "demo"), large=measure(*large_state(options.gib), folder / "large"))
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result))
    return 0 if result["demo"]["ratio"] < 0.30 and result["large"]["ratio"] < 0.10 else 1


if __name__ == "__main__":
    sys.exit(main())
