"""Texts read once: the keys and values of what was read stay in a cache, and every step goes on from there.

The cache is the executor's `state` of each chunk and microbatch, written in the F slot of a forward-only table, so it works
in any layout. The texts of a batch are aligned at their ends: row r begins at place first_R[r], and every row writes at the
same place. What lies behind the current place is never seen, so that a step may be padded at its end, and going back is to
set the place."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llm.config import Config
from llm.step import Program
from parallel import pipeline, schedule
from parallel.errors import UserError
from parallel.sharding import make_layout

SIZES = (1, 16, 64, 256)
"""Tokens of a compiled step: a prompt is read in pieces of these, the last one padded."""
PLACES = 64  # a cache has a multiple of so many places
NOWHERE = 2**30  # where a row that holds no text begins


def text_limit(config: Config) -> int:
    """Tokens of the longest text: the positions the model is made for, or, if these are rotary, the longest training row."""
    model = config.model
    return model.max_length if model.positions == "learned" else max(model.max_length, config.batch.length)


def piece(tokens: int, places: int, sizes: Sequence[int]) -> int:
    """The size of the next step of so many tokens: the smallest that holds them all, or the largest that fits the places."""
    fit = [size for size in sizes if size <= places]
    return min((size for size in fit if size >= tokens), default=max(fit, default=0))


class Decoder:
    """Reads up to `rows` texts of at most `places` tokens (rounded up; `reserve` makes more) in the layout of a program.

    `load` parameters, `start` with prompts, `feed` more tokens. A single text that begins like the one before it is read
    from where they part. sizes: see SIZES."""

    def __init__(self, program: Program, rows: int, places: int = 0, sizes: Sequence[int] = SIZES):
        self.program, self.rows, self.sizes = program, rows, tuple(sorted(sizes))
        shards, table = program.config.mesh.batch_shards, program.table
        per_shard = -(-rows // shards)
        self.microbatches = min(per_shard, table.stages)
        self.shape = (self.microbatches, shards * -(-per_shard // self.microbatches))  # microbatches and rows of each
        # Without a pipeline, a token costs a CPU what reading the weights costs, so these are never copied: see Plan.apart.
        self.apart = program.devices[0].platform == "cpu" and table.stages == 1
        placement, chunks = ("linear", 1) if self.apart else (table.placement, table.chunks)
        self.layout = make_layout(program.layout.layers, placement, 1, 1) if self.apart else program.layout
        ticks = schedule.pack(schedule.make_forward(placement, table.stages, self.microbatches, chunks))
        changes = dict(ticks=ticks, rows=pipeline.lower(ticks), zero=0, state_per_microbatch=True, stamp=None)
        changes |= dict(layout=self.layout, apart=self.apart)
        layers = program.specs["layers"]
        specs = dict(program.specs, layers=(layers,) * self.layout.slots if self.apart else layers)
        self.plan = dataclasses.replace(program.plan, **changes, specs=specs)
        self.model = program.model(dropout=0.0)
        self.limit = text_limit(program.config)
        self.places = self._rounded(places)
        self.params = self.cache = None
        self.forget()

    def _rounded(self, places: int) -> int:
        return -(-places // PLACES) * PLACES

    def forget(self) -> None:
        """Nothing of what was read is used again."""
        self.place, self.text, self.first_R = 0, [], np.full(self.rows, NOWHERE, np.int32)

    # ------------------------------------------------------------------------------------------- arrays on the mesh
    def load(self, params: Any) -> None:
        """Use these parameters of the program, in compute precision and whole over `data`."""
        self.forget()
        types, shardings, cast = self._wanted
        fits = lambda a, t, s: a.dtype == t and a.sharding == s
        ready = not self.apart and all(jax.tree.leaves(jax.tree.map(fits, params, types, shardings)))
        self.params = params if ready else cast(params)

    @functools.cached_property
    def _wanted(self) -> tuple[Any, Any, Any]:
        """Types and shardings of the parameters, and the jitted function that gives parameters both."""
        types = jax.tree.map(lambda s: np.dtype(np.float32 if s.kind == "vector" else self.plan.dtype), self.plan.specs)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.program.mesh, spec), self.plan.param_specs())

        def cast(params):
            if self.apart:
                where = [tuple(np.argwhere(self.program.layout.index_CPL == layer)[0]) for layer in range(self.layout.slots)]
                one = lambda chunk, slot: jax.tree.map(lambda a: a[chunk, :, slot][None, :, None], params["layers"])
                params = dict(params, layers=tuple(one(chunk, slot) for chunk, _, slot in where))
            return jax.tree.map(lambda a, t: a.astype(t), params, types)

        return types, shardings, jax.jit(cast, out_shardings=shardings)

    def close(self) -> None:
        """Give the memory back; what was compiled stays."""
        self.params = self.cache = None
        self.forget()

    def _empty_cache(self) -> Any:
        chunks, pipe, slots = self.layout.index_CPL.shape
        lead = () if self.apart else (chunks, pipe, self.microbatches, slots)
        one = self.model.cache(self.shape[1], self.places)
        zeros = lambda: jax.tree.map(lambda s: jnp.zeros((*lead, *s.shape), s.dtype), one)
        make = lambda: tuple(zeros() for _ in range(slots)) if self.apart else zeros()
        return jax.jit(make, out_shardings=self._cache_sharding)()

    @functools.cached_property
    def _state_spec(self) -> P:
        return pipeline.STATE_APART if self.apart else pipeline.STATE_OF_ROWS

    @functools.cached_property
    def _cache_sharding(self) -> NamedSharding:
        heads, ways = self.model.config.kv_heads, self.program.mesh.shape["tensor"]
        return NamedSharding(self.program.mesh, P(*self._state_spec, *(["tensor"] if heads % ways == 0 else [])))

    def reserve(self, places: int) -> None:
        """Make room for texts of so many tokens; what was read stays.

        Another size is compiled anew, so a cache that was there before becomes twice as large, up to the longest text."""
        if places <= self.places:
            return
        missing = self._rounded(max(places, min(2 * self.places, self.limit))) - self.places
        self.places += missing
        if self.cache is not None:
            grow = lambda a: jnp.pad(a, [(0, missing if d == a.ndim - 2 else 0) for d in range(a.ndim)])
            self.cache = jax.jit(lambda c: jax.tree.map(grow, c), out_shardings=self._cache_sharding)(self.cache)

    # ------------------------------------------------------------------------------------------- reading
    def start(self, prompts: Sequence[Sequence[int]], every: bool = False) -> np.ndarray:
        """Read new texts (ids, none of them empty); the same as `feed` of the rest of it."""
        if not 0 < len(prompts) <= self.rows or not all(len(ids) for ids in prompts):
            raise ValueError(f"{self.rows} prompts at most, and none of them empty")
        known = 0
        if self.cache is None:
            self.cache = self._empty_cache()
        if self.rows == 1 and not every:
            while known < min(len(self.text), len(prompts[0]) - 1) and self.text[known] == prompts[0][known]:
                known += 1
        width = max(len(ids) for ids in prompts)
        self.place, self.text = known, self.text[:known]
        self.first_R[:] = NOWHERE
        tokens_RS = np.zeros((len(prompts), width), np.int32)
        for row, ids in enumerate(prompts):
            self.first_R[row] = width - len(ids)
            tokens_RS[row, width - len(ids) :] = ids
        return self.feed(tokens_RS[:, known:], every)

    def drop(self, row: int) -> None:
        """A row whose text is finished: what it is fed is not looked at any more."""
        self.first_R[row] = NOWHERE

    def feed(self, tokens_RS: np.ndarray, every: bool = False) -> np.ndarray:
        """Read the next tokens of every row: the logits [R, vocab] after the last, or [R, S, vocab] after every one of them.

        fp32. Raises UserError when the texts become longer than the cache, or than the model's learned positions."""
        rows, number = tokens_RS.shape
        self._check(number)
        found, done = [], 0
        while done < number:
            size = piece(number - done, self.places - self.place, self.sizes)
            if not size:
                raise UserError(f"steps of {self.sizes[0]} tokens do not fit the last places of the cache of {self.places}")
            count = min(size, number - done)
            padded = np.zeros((self.shape[0] * self.shape[1], size), np.int32)
            padded[:rows, :count] = tokens_RS[:, done : done + count]
            logits = self._step(padded, count, every)
            found.append(logits[:rows, :count] if every else logits[:rows])
            self.text += tokens_RS[0, done : done + count].tolist() if self.rows == 1 else []
            self.place, done = self.place + count, done + count
        return np.concatenate([np.asarray(a) for a in found], 1) if every else np.asarray(found[-1], np.float32)

    def _check(self, number: int) -> None:
        if self.place + number > self.places:
            raise UserError(f"a text of {self.place + number} tokens does not fit the cache of {self.places}")
        longest = self.place + number - int(self.first_R.min())
        if self.model.config.positions == "learned" and longest > self.limit:
            raise UserError(f"a text of {longest} tokens does not fit the {self.limit} learned positions of the model")

    def _step(self, tokens_RS: np.ndarray, count: int, every: bool) -> jax.Array:
        first_R = np.full(len(tokens_RS), NOWHERE, np.int32)
        first_R[: self.rows] = self.first_R
        inputs = dict(tokens=tokens_RS.reshape(*self.shape, -1), first=first_R.reshape(self.shape))
        numbers = np.array([self.place, count], np.int32)
        with jax.set_mesh(self.program.mesh):
            logits, self.cache = self._jitted[every](self.params, self.cache, inputs, numbers, self._table)
        return logits.reshape(-1, *logits.shape[2:])

    @functools.cached_property
    def _table(self) -> Any:
        return self.program.put_table(self.plan)

    @functools.cached_property
    def _jitted(self) -> dict[bool, Any]:
        """The jitted step, by whether it gives the logits after every token."""

        def step(predict, params, cache, inputs, numbers, table):
            tokens_MBS, first_MB = inputs["tokens"], inputs["first"]
            place, count = numbers
            place_S = place + jnp.arange(tokens_MBS.shape[-1])
            positions_MBS = place_S - first_MB[..., None]
            text_MBS = (positions_MBS >= 0) & (place_S < place + count)
            side = dict(
                tokens=tokens_MBS,
                segments=jnp.where(text_MBS, 0, -1),
                positions=jnp.where(text_MBS, positions_MBS, 0),
                first=first_MB,
                place=jnp.broadcast_to(place, first_MB.shape),
                last=jnp.broadcast_to(count - 1, first_MB.shape),
                key=jnp.zeros((*first_MB.shape, 2), jnp.uint32),
            )
            run = pipeline.outputs(self.model, self.plan, predict, self._state_spec)
            return run(params, cache, side, table)

        shardings = (NamedSharding(self.program.mesh, pipeline.SIDE), self._cache_sharding)
        predicts = {False: self.model.next_logits, True: self.model.logits}
        jit = functools.partial(self.program.jit, donate_argnums=1, out_shardings=shardings)
        return {every: jit(functools.partial(step, predict)) for every, predict in predicts.items()}
