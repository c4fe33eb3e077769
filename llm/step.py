"""One training step as one compiled program: schedule, reduction, clip, non-finite check, optimiser, donated buffers.

`build` joins a configuration, a model, a schedule and a mesh into a `Program`; commands and notebooks use nothing below it."""

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llm import attention
from llm.config import Config
from llm.model import REMAT, Transformer
from llm.objective import CrossEntropy
from llm.optimizer import learning_rate, like_params, make_optimizer
from parallel import pipeline, schedule, xla_flags
from parallel.mesh import make_mesh
from parallel.sharding import Stored, make_layout, memory_shape, pad, stored

Tree = Any
_place = jax.make_array_from_callback  # in several processes each makes only its own part
COSTS = dict(none=(6.0, 10.0, 4.0), selective=(6.0, 12.0, 4.0), full=(6.0, 15.0, 4.0))
"""Remat -> relative times of F, B and W: the matmuls of an attention and MLP layer in each."""
UNROLLED = 4  # layers of a chunk: with more, compiling takes minutes
DTYPES = dict(float32=jnp.float32, bfloat16=jnp.bfloat16)


def build(config: Config, devices: list | None = None) -> "Program":
    """The program of a configuration on the given devices (all by default). Raises UserError before compiling anything."""
    devices = list(jax.devices() if devices is None else devices)
    return Program(config.validate(len(devices)), tuple(devices))


def make_table(config: Config, idle: str) -> schedule.Table:
    """The schedule table that a resolved configuration asks for, for the executor's idle mode."""
    c, pipe = config.pipeline, config.mesh.pipe
    backward = c.backward
    if backward == "auto" and c.schedule.endswith(".csv"):
        backward = ""
    elif backward == "auto":  # deferring W fills bubbles; under full remat it would stash ten times the layer's input
        whole = pipe == 1 or c.remat == "full"
        backward = "whole" if whole else "split" if schedule.SCHEDULES[c.schedule].deferred else ""
    chunks = c.chunks or len(c.layers_per_chunk) // pipe
    fitted = dict(costs=COSTS[c.remat], memory=c.memory, idle=idle)
    return schedule.make(c.schedule, pipe, c.microbatches, chunks=chunks, group=c.group, backward=backward, **fitted)


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything that a run compiles. config is resolved; state = {step, skipped, params, optimizer}."""

    config: Config
    devices: tuple
    stamp: Callable[[Any, Any, Any], None] | None = None  # see parallel.pipeline.Plan

    # ------------------------------------------------------------------------------------------- what it is made of
    @functools.cached_property
    def mesh(self):
        return make_mesh(self.config.mesh.sizes(), self.devices)

    @functools.cached_property
    def table(self) -> schedule.Table:
        return make_table(self.config, self.idle)

    @functools.cached_property
    def tick_table(self) -> schedule.TickTable:
        """The table in the shape whose ticks cost less in this idle mode; each rank keeps its order, and so its memory."""
        c = self.config.pipeline
        return schedule.best_ticks(self.table.validate(c.memory), COSTS[c.remat], self.idle).validate()

    @functools.cached_property
    def layout(self):
        c, t = self.config, self.table
        return make_layout(c.model.layers, t.placement, t.stages, t.chunks, c.pipeline.layers_per_chunk)

    @functools.cached_property
    def idle(self) -> str:
        asked = self.config.pipeline.idle
        return asked if asked != "auto" else "skip" if self.devices[0].platform == "cpu" else "compute"

    @property
    def unroll(self) -> bool:
        """Whether the layers of a chunk stand one after another in the program. Only so can XLA run sums over `tensor` behind
        other products of the slot; a loop compiles faster, and on a CPU nothing would overlap."""
        asked = self.config.pipeline.unroll
        few = self.devices[0].platform != "cpu" and self.layout.slots <= UNROLLED
        return few if asked == "auto" else asked == "yes"

    def model(self, **changes) -> Transformer:
        """The model as the executor takes it; changes: of fields of its configuration."""
        c = self.config
        model = dataclasses.replace(c.model, **changes)
        kernel = dict(backend=c.train.attention, strict=c.train.attention_strict)
        return Transformer(model, DTYPES[c.train.dtype], c.mesh.tensor, CrossEntropy(model.z_loss), **kernel)

    @functools.cached_property
    def specs(self) -> Tree:
        return self.model().specs()

    @functools.cached_property
    def plan(self) -> pipeline.Plan:
        c = self.config
        return pipeline.make_plan(
            self.mesh,
            self.layout,
            self.specs,
            self.tick_table,
            idle=self.idle,
            remat=REMAT[c.pipeline.remat],
            zero=c.zero,
            stamp=self.stamp,
            dtype=DTYPES[c.train.dtype],
            unroll=self.unroll,
        )

    @functools.cached_property
    def forward_plan(self) -> pipeline.Plan:
        t = self.table
        ticks = schedule.pack(schedule.make_forward(t.placement, t.stages, t.microbatches, t.chunks))
        return dataclasses.replace(self.plan, ticks=ticks, rows=pipeline.lower(ticks))

    @functools.cached_property
    def optimizer(self):
        return make_optimizer(self.config.optimizer, self.specs, self.plan.param_specs())

    # ------------------------------------------------------------------------------------------- state
    @functools.cached_property
    def _param_shapes(self) -> Tree:
        shape = lambda s: jax.ShapeDtypeStruct(memory_shape(s, self.layout, self.mesh.shape), jnp.float32)
        return jax.tree.map(shape, self.specs)

    def _like_state(self, params: Tree, other: Callable[[Any], Any]) -> Tree:
        """A tree like the state: the entries of `params` for parameters and moments, other(leaf) for all else."""
        optimizer = like_params(self.optimizer, jax.eval_shape(self.optimizer.init, self._param_shapes), params, other)
        counter = other(jax.ShapeDtypeStruct((), jnp.int32))
        return dict(step=counter, skipped=counter, params=params, optimizer=optimizer)

    @functools.cached_property
    def shardings(self) -> Tree:
        """The NamedSharding of every leaf of the state."""
        named = lambda spec: NamedSharding(self.mesh, spec)
        return self._like_state(jax.tree.map(named, self.plan.param_specs()), lambda _: named(P()))

    def stored(self) -> Tree:
        """How every leaf of the state maps to its canonical array on disk."""
        return self._like_state(jax.tree.map(lambda s: stored(s, self.layout), self.specs), lambda leaf: Stored(leaf.shape))

    def abstract_state(self) -> Tree:
        """Shapes, types and shardings of the state, as a restore wants them."""
        shapes = jax.eval_shape(self._init)
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.shardings)

    def _init(self) -> Tree:
        """Keys are folded with the part and the global layer, so that every layout starts from the same bits; each rank of
        the pipe makes its own layers only."""
        model, key = self.model(), jax.random.key(self.config.train.seed)
        keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(("layers", "embed", "head"))}

        def own_layers(index_CPL):
            def one(index):
                w = model.init_part("layers", jax.random.fold_in(keys["layers"], index))
                return jax.tree.map(lambda a: jnp.where(index >= 0, a, 0), w)

            return jax.vmap(jax.vmap(jax.vmap(one)))(index_CPL)

        along = P(None, "pipe")
        layers = jax.shard_map(
            own_layers, mesh=self.mesh, in_specs=along, out_specs=along, axis_names={"pipe"}, check_vma=False
        )(jnp.asarray(self.layout.index_CPL, jnp.int32))
        params = {name: model.init_part(name, keys[name]) for name in ("embed", "head")} | {"layers": layers}
        params = jax.tree.map(lambda a, s: pad(a, s.shape), params, self._param_shapes)
        zero = jnp.zeros((), jnp.int32)
        return dict(step=zero, skipped=zero, params=params, optimizer=self.optimizer.init(params))

    @functools.cached_property
    def compiled_init(self):
        """The jitted initialisation; no device computes or holds more than its share."""
        return jax.jit(self._init, out_shardings=self.shardings)

    def init(self) -> Tree:
        """A fresh state on the mesh."""
        with jax.set_mesh(self.mesh):
            return self.compiled_init()

    # ------------------------------------------------------------------------------------------- batches
    @property
    def batch_shape(self) -> tuple[int, int]:
        """Rows and length of a global batch."""
        return self.config.batch.rows, self.config.batch.length

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, pipeline.SIDE)

    @functools.cached_property
    def own_rows(self) -> np.ndarray:
        """The rows of a global batch that the devices of this process hold, in order: int64 numbers."""
        shape = (self.config.pipeline.microbatches, self.config.batch.rows // self.config.pipeline.microbatches)
        numbers_MR = np.arange(self.config.batch.rows).reshape(shape)
        parts = self.batch_sharding.addressable_devices_indices_map(shape).values()
        return np.unique(np.concatenate([numbers_MR[part].ravel() for part in parts]))

    def put(self, batch: dict[str, np.ndarray], rows: np.ndarray | None = None) -> Tree:
        """A global batch of R rows on the devices as microbatches [M, R / M, ...].

        batch: leaves [R, ...], or only those of the `rows` with these numbers, in their order, `own_rows` among them."""

        def one(a):
            a = np.asarray(a)
            count = len(a) if rows is None else self.config.batch.rows
            where = np.full(count, -1)  # in `a`, of each row of the global batch
            where[slice(None) if rows is None else rows] = np.arange(len(a))
            where_MR = where.reshape(self.config.pipeline.microbatches, -1)
            return _place((*where_MR.shape, *a.shape[1:]), self.batch_sharding, lambda index: a[where_MR[index[:2]]])

        return {name: one(a) for name, a in batch.items()}

    def side(self, batch: Tree, step: jax.Array | int) -> Tree:
        """What the model reads: the batch and one dropout key a row, from (seed, step, row of the global batch)."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.train.seed), 2**31 - 1), step)
        row_key = jax.vmap(jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i))))
        return {name: a for name, a in batch.items() if name != "example"} | {"key": row_key(batch["example"])}

    # ------------------------------------------------------------------------------------------- steps
    def _update(self, state: Tree, grads: Tree, factor: jax.Array, rate: jax.Array, keep: jax.Array) -> Tree:
        """Optimiser on each device's part of the state (what Muon communicates is written there); nothing changes unless
        keep."""
        params, moments = (jax.tree.map(lambda s: s.spec, self.shardings[name]) for name in ("params", "optimizer"))

        def update(params, moments, grads, factor, rate, keep):
            grads = jax.tree.map(lambda g: g * factor, grads)
            updates, new = self.optimizer.update(grads, moments, params)
            stepped = jax.tree.map(lambda p, u: p - rate * u, params, updates)
            choose = lambda new, old: jax.tree.map(lambda n, o: jnp.where(keep, n, o), new, old)
            return choose(stepped, params), choose(new, moments)

        specs = (params, moments, params, P(), P(), P())
        run = jax.shard_map(update, mesh=self.mesh, in_specs=specs, out_specs=specs[:2], check_vma=False)
        return run(state["params"], state["optimizer"], grads, factor, rate, keep)

    def gradients(self, state: Tree, batch: Tree, table: Tree) -> tuple[Tree, Tree]:
        """(sums, gradients) of a batch, before the clip; to be called under jit."""
        model = self.model()
        run = pipeline.gradients(model, self.plan, model.objective.denominator)
        sums, grads, _ = run(state["params"], {}, self.side(batch, state["step"]), table)
        return dict(sums, tokens=model.objective.denominator(batch)), grads

    def apply(self, state: Tree, sums: Tree, grads: Tree, limit: jax.Array | float = math.inf) -> tuple[Tree, Tree]:
        """(state, metrics) after the update with these gradients, left out when their norm is above `limit`; under jit."""
        clip = self.config.optimizer.clip
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"])
        factor = jnp.where(finite & (norm > clip), clip / norm, 1) if clip else jnp.ones(())
        rate = learning_rate(self.config.optimizer, self.config.train.steps)(state["step"])
        keep = finite & (norm <= limit)
        params, moments = self._update(state, grads, factor, rate, keep)
        skipped = 1 - keep.astype(jnp.int32)
        new = dict(step=state["step"] + 1, skipped=state["skipped"] + skipped, params=params, optimizer=moments)
        return new, dict(sums, grad_norm=norm, lr=rate, skipped=skipped)

    def _train_step(self, state: Tree, batch: Tree, table: Tree, limit: jax.Array | float = math.inf) -> tuple[Tree, Tree]:
        return self.apply(state, *self.gradients(state, batch, table), limit)

    @functools.cached_property
    def compiled_train_step(self):
        """The jitted (state, batch, table[, limit of the gradient norm]) -> (state, metrics); the state is donated."""
        return self.jit(self._train_step, donate_argnums=0, out_shardings=(self.shardings, NamedSharding(self.mesh, P())))

    def put_table(self, plan: pipeline.Plan) -> Tree:
        """The tick table of a plan on the devices, an argument of the steps that run it."""
        return {n: _place(a.shape, NamedSharding(self.mesh, pipeline.TABLE[n]), a.__getitem__) for n, a in plan.table.items()}

    @functools.cached_property
    def device_table(self) -> Tree:
        return self.put_table(self.plan)

    def train_step(self, state: Tree, batch: Tree, limit: float | None = None) -> tuple[Tree, Tree]:
        """(state, metrics) after one update; `state` must not be used again. batch: from `put`.

        metrics: loss, grad_norm (before the clip), lr (of this update), skipped (1 when something was not finite or the
        norm was above `limit`: then only the counters change), tokens (counted in the loss)."""
        limits = () if limit is None else (np.float32(limit),)
        with jax.set_mesh(self.mesh):
            return self.compiled_train_step(state, batch, self.device_table, *limits)

    @functools.cached_property
    def jit(self) -> Callable:
        """jax.jit with the compiler options that this mesh needs."""
        if self.devices[0].platform == "gpu":
            return functools.partial(jax.jit, compiler_options=xla_flags.options())
        if self.devices[0].platform != "cpu" or self.config.train.dtype == "float32":
            return jax.jit
        # XLA:CPU aborts when it widens a bf16 all-reduce whose reduction holds a copy (seen in jax 0.10.2 and 0.12)
        return functools.partial(jax.jit, compiler_options={"xla_disable_hlo_passes": "all-reduce-promotion"})

    @functools.cached_property
    def _forward(self):
        model, table = self.model(dropout=0.0), self.put_table(self.forward_plan)

        def run(predict, params, batch, table):
            out, _ = pipeline.outputs(model, self.forward_plan, predict)(params, {}, self.side(batch, 0), table)
            return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out)

        whole = NamedSharding(self.mesh, P())  # every process reads all rows
        jitted = [self.jit(functools.partial(run, f), out_shardings=whole) for f in (model.score, model.likelihood)]
        return [lambda *args, f=f: f(*args, table) for f in jitted]

    def eval_step(self, params: Tree, batch: Tree) -> dict[str, jax.Array]:
        """nll [R] (sum over the counted tokens of a row) and tokens [R], by the forward-only pipeline."""
        with jax.set_mesh(self.mesh):
            return self._forward[0](params, batch)

    def likelihood(self, params: Tree, batch: Tree) -> dict[str, jax.Array]:
        """logprob [R] (sum over the counted targets of a row) and greedy [R] (each of them is the most likely token)."""
        with jax.set_mesh(self.mesh):
            return self._forward[1](params, batch)

    # ------------------------------------------------------------------------------------------- facts
    @functools.cached_property
    def arguments(self) -> tuple:
        """Shapes, types and shardings of what `train` gives compiled_train_step; nothing is allocated."""
        m, (rows, length) = self.config.pipeline.microbatches, self.batch_shape
        row = lambda dtype, *shape: jax.ShapeDtypeStruct((m, rows // m, *shape), dtype, sharding=self.batch_sharding)
        batch = {name: row(np.int32, length) for name in ("tokens", "targets", "segments", "positions")}
        batch |= dict(weights=row(np.float32, length), example=row(np.int32))
        named = lambda name: NamedSharding(self.mesh, pipeline.TABLE[name])
        table = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=named(n)) for n, a in self.plan.table.items()}
        limit = [jax.ShapeDtypeStruct((), np.float32)] if self.config.train.spike else []
        return self.abstract_state(), batch, table, *limit

    @functools.cached_property
    def traced(self):
        """The traced training step: `.jaxpr`, `.lower().compile()` (under the mesh)."""
        given = self.arguments
        with jax.set_mesh(self.mesh):
            return self.compiled_train_step.trace(*given)

    def fingerprint(self) -> str:
        """Hash of the jaxpr of the training step on this kind of device: equal programs have equal ones, in any process."""
        text = re.sub(r" at 0x[0-9a-f]+", "", str(self.traced.jaxpr))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def parameters(self) -> int:
        """Number of parameters, padding and empty slots not counted."""
        count = lambda s: math.prod(s.shape) * (self.layout.layers if s.stacked else 1)
        return sum(count(s) for s in jax.tree.leaves(self.specs))

    def bytes_per_device(self) -> int:
        """Bytes of parameters and optimiser state on one device."""
        share = lambda a: math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        return sum(share(a) for a in jax.tree.leaves(self.abstract_state()))

    def bubble(self) -> float:
        """Predicted share of idle time of the tick table: 1 - ideal / cost, with the relative times in COSTS."""
        times = COSTS[self.config.pipeline.remat]
        return 1 - self.table.microbatches * sum(times) / self.tick_table.cost(*times, idle=self.idle)

    def attention(self) -> str:
        """The attention back end that the model gets on these devices."""
        model = self.config.model
        features = {"packed", *["window"] * any(model.windowed), *["softcap"] * bool(model.attention_softcap)}
        train, backends = self.config.train, attention.backends
        need = backends.Need(train.dtype, model.head_dim, frozenset(features))
        target = backends.target(self.mesh.abstract_mesh)
        return attention.chosen(need, target, train.attention, train.attention_strict)

    def describe(self) -> dict[str, Any]:
        """The facts that a run prints when it starts."""
        c, t = self.config, self.tick_table
        return {
            "parameters": self.parameters,
            "devices": f"{len(self.devices)} {self.devices[0].device_kind}",
            "mesh": " x ".join(f"{a} {n}" for a, n in c.mesh.sizes().items() if n > 1) or "1 device",
            "state_bytes_per_device": self.bytes_per_device(),
            "schedule": f"{self.table.name}, {t.table.chunks} chunks a rank, {t.table.microbatches} microbatches",
            "backward": "whole" if t.fused else "split, W deferred",
            "ticks": f"{t.length} ({t.shape})",
            "bubble": round(self.bubble(), 4),
            "idle": self.idle,
            "remat": c.pipeline.remat,
            "layers_per_stage": [int((self.layout.index_CPL[k, r] >= 0).sum()) for r, k in t.table.places],
            "zero": c.zero,
            "dtype": c.train.dtype,
            "attention": self.attention(),
            "program": self.fingerprint(),
        }
