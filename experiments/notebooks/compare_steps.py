# %% [markdown]
# # A pipelined step and a plain one
#
# The same model, batch and update, once with all layers on one device and once on a pipeline of 4 stages: the loss, the
# gradient norm and every parameter after the step agree to rounding, whatever the schedule. Every cell calls what `train`
# calls.

# %%
import os
import sys
from pathlib import Path

ROOT = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "main.py").is_file())
sys.path.insert(0, str(ROOT))
FOLDER = Path(os.environ.get("CONVOY_RUNS", ROOT / "runs")) / "notebook-steps"

from experiments.configs.demo import get_config
from llm import overrides
from llm.devices import request_devices

# %% [markdown]
# Plain SGD: a parameter changes by its gradient times the rate, so a wrong scale would show. The rate is so large that the
# changes are far above the rounding of the parameters.

# %%
SMALL = {
    "model.layers": "8",
    "model.width": "32",
    "model.vocab": "384",
    "batch.rows": "8",
    "batch.length": "32",
    "data.paths": "llm/data/text/197[0-4]*.txt",
    "data.held_out": "1",
    "optimizer.name": "sgd",
    "optimizer.lr": "100",
    "optimizer.momentum": "0",
    "optimizer.clip": "0",
    "optimizer.warmup": "0",
    "optimizer.weight_decay": "0",
    "mesh.data": "1",
    "train.samples_every": "0",
}
pipelined = request_devices(overrides.apply(get_config(), {**SMALL, "mesh.pipe": "4"}.items()))
plain = overrides.apply(get_config(), {**SMALL, "mesh.pipe": "1", "pipeline.microbatches": "1"}.items()).validate()

import jax
import numpy as np

from llm.data.corpus import open_corpus
from llm.step import build

corpus = open_corpus(pipelined.data, pipelined.model.vocab, FOLDER / "corpus")
batch = corpus.batch(seed=0, step=0, rows=8, length=32)

# %% [markdown]
# ## One step each
#
# Parameters are initialised by global layer, so both start from the same bits; `stored` says where a layer is in memory, and
# puts the layers of both in the order of the model.


# %%
def canonical(program, params):
    """The parameters with layers in order and without padding, as a checkpoint has them."""

    def one(form, a):
        a, index_CPL = np.asarray(a), form.index_CPL
        if index_CPL is not None:
            layers = np.empty((form.shape[0], *a.shape[3:]), a.dtype)
            layers[index_CPL[index_CPL >= 0]] = a[index_CPL >= 0]
            a = layers
        return a[tuple(slice(n) for n in form.shape)]

    return jax.tree.map(one, program.stored()["params"], params)


def one_step(config):
    """(program, parameters before, parameters after, metrics) of one update."""
    program = build(config, jax.devices()[: config.mesh.product])
    state = program.init()
    before = canonical(program, state["params"])
    state, metrics = program.train_step(state, program.put(batch))
    return program, before, canonical(program, state["params"]), {name: float(value) for name, value in metrics.items()}


program, start, after, metrics = one_step(pipelined)
_, plain_start, plain_after, plain_metrics = one_step(plain)
for name in ("loss", "grad_norm", "tokens"):
    print(f"{name:<10} pipelined {metrics[name]:.7f}   plain {plain_metrics[name]:.7f}")

# %% [markdown]
# ## Parameter by parameter
#
# The largest difference of each change over the largest change.

# %%
paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(start)]
trees = zip(*map(jax.tree.leaves, (start, after, plain_start, plain_after)))
differences = {}
for path, (a, b, c, d) in zip(paths, trees):
    assert np.array_equal(a, c), "the two start from other parameters"
    differences[path] = float(np.abs((b - a) - (d - c)).max() / np.abs(d - c).max())
    print(f"{path:<36}{differences[path]:.1e}")
print("largest:", f"{max(differences.values()):.1e}")
assert max(differences.values()) < 1e-4

# %% [markdown]
# ## The schedule behind it
#
# The ticks that the step ran; rows are ranks, time goes right.

# %%
import matplotlib.pyplot as plt

from llm.step import COSTS
from parallel.schedule.draw import draw_ticks

for name, value in program.describe().items():
    print(f"{name:<24}{value}")
FOLDER.mkdir(parents=True, exist_ok=True)
picture = draw_ticks(program.tick_table, FOLDER / "ticks.png", costs=COSTS["selective"], idle=program.idle)
figure, axis = plt.subplots(figsize=(12, 3))
axis.imshow(plt.imread(picture))
axis.axis("off")
plt.show()

# %% [markdown]
# ## Another schedule, the same step

# %%
other, _, _, other_metrics = one_step(
    overrides.apply(pipelined, [("pipeline.schedule", "1f1b"), ("pipeline.chunks", "1")]).validate()
)
print(f"{'':<14}{'loss':>12}{'grad_norm':>12}{'ticks':>8}{'bubble':>8}")
for found, numbers in ((program, metrics), (other, other_metrics)):
    facts = (found.table.name, numbers["loss"], numbers["grad_norm"], found.tick_table.length, found.bubble())
    print("{:<14}{:>12.6f}{:>12.6f}{:>8}{:>8.1%}".format(*facts))
