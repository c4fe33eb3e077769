# %% [markdown]
# # A checkpoint, layer by layer
#
# Trains a small model on a pipeline, or takes the run that is there, and looks into what was saved: which arrays there are,
# how much each layer has changed, which rank holds it in another layout, and what the held-out loss is without it. Every cell
# calls what the commands call.

# %%
import os
import sys
from pathlib import Path

ROOT = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "main.py").is_file())
sys.path.insert(0, str(ROOT))
WORKDIR = Path(os.environ.get("CONVOY_RUNS", ROOT / "runs")) / "notebook"

from experiments.configs.demo import get_config
from llm import overrides
from llm.devices import request_devices

# %% [markdown]
# The number of virtual devices must be set before jax starts: `request_devices` does that. Values are written as on the
# command line.

# %%
SMALL = {
    "model.layers": "6",
    "model.width": "32",
    "model.vocab": "384",
    "mesh.pipe": "2",
    "mesh.data": "1",
    "pipeline.microbatches": "4",
    "batch.rows": "8",
    "batch.length": "32",
    "data.paths": "llm/data/text/197[0-4]*.txt",
    "data.held_out": "1",
    "train.steps": "32",
    "optimizer.name": "adamw",
    "optimizer.lr": "1e-2",
    "train.samples_every": "0",
    "checkpoint.every": "8",
    "checkpoint.keep": "4",
    "evaluate.every": "0",
}
config = request_devices(overrides.apply(get_config(), SMALL.items()))

from llm.train import train

train(config, WORKDIR)

# %% [markdown]
# ## What is in it
#
# One array per parameter under a name that no layout changes; parameters of layers are stacked in the order of the model. No
# mesh is needed to read them.

# %%
import numpy as np

from llm.checkpoint import names, read
from llm.workdir import CHECKPOINTS

folder = WORKDIR / CHECKPOINTS
steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
shapes = {name: info.shape for name, info in names(folder, steps[-1]).items() if name.startswith("params/")}
print("steps", steps)
for name, shape in shapes.items():
    print(f"{name:<40}{shape}")

# %% [markdown]
# ## How far each layer went
#
# Root mean square of the change between the first and the last checkpoint over that of the parameter, read one layer at a
# time.

# %%
import matplotlib.pyplot as plt

rms = lambda a: float(np.sqrt(np.mean(np.square(a, dtype=np.float64))))
matrices = [name for name, shape in shapes.items() if name.startswith("params/layers/") and len(shape) > 2]
moved = {}
for name in matrices:
    pairs = ([read(folder, step, name, layer) for step in (steps[0], steps[-1])] for layer in range(config.model.layers))
    moved[name] = [rms(after - before) / rms(before) for before, after in pairs]

figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
for name, change in moved.items():
    axis.plot(change, marker="o", label=name.removeprefix("params/layers/").removesuffix("/kernel"))
axis.set(xlabel="layer", ylabel="relative change", title=f"steps {steps[0]} to {steps[-1]}")
axis.legend(ncols=2, fontsize=8, frameon=False)
plt.show()

# %% [markdown]
# ## Where a layer lives
#
# Any layout reads the checkpoint. `index_CPL` has the layer in each slot of each chunk and pipeline rank (-1: an empty slot).

# %%
from llm.run import open_run

run = open_run(WORKDIR, config=config)
index_CPL = run.program.layout.index_CPL
for rank in range(index_CPL.shape[1]):
    print(f"rank {rank}:", ", ".join(f"chunk {chunk} has layers {index_CPL[chunk, rank]}" for chunk in range(len(index_CPL))))

# %% [markdown]
# ## What a layer is worth
#
# With the two output matrices of a layer set to zero, the layer passes its input on. The loss is computed by the function
# that `evaluate` calls, by one compiled program.

# %%
import dataclasses

import jax
import jax.numpy as jnp

from llm.evaluate import evaluate_run


def without(params, layer):
    """The parameters with the residual branches of a layer switched off."""
    keep_CPL = jnp.asarray(index_CPL != layer)
    off = lambda a: jnp.where(keep_CPL.reshape(*keep_CPL.shape, *[1] * (a.ndim - 3)), a, 0)
    layers = {name: jax.tree.map(off, part) if name in ("out", "down") else part for name, part in params["layers"].items()}
    return dict(params, layers=layers)


whole = evaluate_run(run)["loss"]
losses = [
    evaluate_run(dataclasses.replace(run, params=without(run.params, layer)))["loss"] for layer in range(config.model.layers)
]
print(f"held-out loss {whole:.4f}")
for layer, loss in enumerate(losses):
    print(f"  without layer {layer}: {loss:.4f} ({loss - whole:+.4f})")
