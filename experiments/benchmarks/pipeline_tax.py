"""What the pipeline costs beyond the work itself: CPU seconds of a training step with 4 stages over those without any.

    python experiments/benchmarks/pipeline_tax.py

The same model, microbatches and remat, three ways: 4 stages on 4 virtual devices; this executor with one stage; and plain
gradient accumulation (a scan over microbatches of jax.value_and_grad). The reference is the cheaper of the last two. CPU
seconds (user + system, all threads) of one optimiser step after a warm-up, seven alternations, medians. Virtual devices
share the cores, so wall time would not show the tax. Prints one JSON line; the bar is cpu_ratio <= 1.10.
"""

import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp

from experiments.benchmarks.common import cpu_seconds, random_batch
from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
from llm.model import REMAT
from llm.step import Program, build

STAGES, MICROBATCHES, REPEATS = 4, 16, 7
CONFIG = Config(
    model=ModelConfig(layers=16, width=256, heads=4, kv_heads=2, ffn=768, vocab=4096),
    pipeline=PipelineConfig(schedule="interleaved", chunks=2, microbatches=MICROBATCHES, remat="selective"),
    batch=BatchConfig(rows=MICROBATCHES, length=256),
    optimizer=OptimizerConfig(name="sgd", momentum=0.0),
)


def pipeline(stages: int) -> Program:
    changes = dict(mesh=MeshConfig(pipe=stages))
    if stages == 1:
        changes["pipeline"] = PipelineConfig(schedule="1f1b", microbatches=MICROBATCHES, remat="selective")
    config = Config(**{**vars(CONFIG), **changes})
    return build(config, jax.devices()[:stages])


def plain_accumulation(program: Program):
    """(state, batch) -> state with gradients accumulated by a scan over microbatches: what one writes without a pipeline."""
    model = program.model()
    keep = jax.checkpoint_policies.save_only_these_names(*REMAT["selective"])
    layer = jax.checkpoint(model.layer, policy=keep)

    def loss(params, side, scale):
        x = params["embed"]["tokens"][side["tokens"]]

        def body(x, xs):
            return layer(xs[0], (xs[1], side), {}, x)[0], None

        layers = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), params["layers"])
        x, _ = jax.lax.scan(body, x, (layers, jnp.arange(model.config.layers)))
        h = model.hidden(params["head"]["norm"], x)
        logits = jnp.einsum("bsd,vd->bsv", h, params["embed"]["tokens"])
        logp = jnp.take_along_axis(logits, side["targets"][..., None], -1)[..., 0] - jax.nn.logsumexp(logits, -1)
        return -(side["weights"] * logp).sum() * scale

    def step(state, batch):
        params, side = state["params"], program.side(batch, state["step"])
        scale = 1 / side["weights"].sum()

        def one(carry, side):
            value, grads = jax.value_and_grad(loss)(params, side, scale)
            return (carry[0] + value, jax.tree.map(jnp.add, carry[1], grads)), None

        (value, grads), _ = jax.lax.scan(one, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), side)
        return program.apply(state, dict(loss=value), grads)

    run = jax.jit(step, donate_argnums=0)

    def call(state, batch):
        with jax.set_mesh(program.mesh):
            return run(state, batch)

    return call


def main() -> None:
    rows, length = CONFIG.batch.rows, CONFIG.batch.length
    batch = random_batch(rows, length, CONFIG.model.vocab)
    piped, single = pipeline(STAGES), pipeline(1)
    runs = dict(pipeline=(piped, piped.train_step), one_stage=(single, single.train_step))
    runs["plain"] = (single, plain_accumulation(single))
    states = {name: program.init() for name, (program, _) in runs.items()}
    batches = {name: program.put(batch) for name, (program, _) in runs.items()}
    times, losses = {name: [] for name in runs}, {}
    for repeat in range(REPEATS + 1):
        for name, (_, step) in runs.items():
            start = cpu_seconds()
            states[name], metrics = jax.block_until_ready(step(states[name], batches[name]))
            if repeat:  # the first one compiles
                times[name].append(cpu_seconds() - start)
            losses[name] = float(metrics["loss"])
            print(f"{repeat} {name}: {cpu_seconds() - start:.2f} s, loss {losses[name]:.5f}", file=sys.stderr)
    median = {name: statistics.median(values) for name, values in times.items()}
    reference = min(median["one_stage"], median["plain"])
    ratio = [a / min(b, c) for a, b, c in zip(times["pipeline"], times["one_stage"], times["plain"])]
    print(
        json.dumps(
            dict(
                cpu_ratio=round(median["pipeline"] / reference, 4),
                cpu_ratio_min=round(min(ratio), 4),
                cpu_ratio_max=round(max(ratio), 4),
                **{f"{name}_cpu_s": round(value, 3) for name, value in median.items()},
                loss_spread=max(losses.values()) - min(losses.values()),
                stages=STAGES,
                microbatches=MICROBATCHES,
            )
        )
    )


if __name__ == "__main__":
    main()
