"""Memory of every pipeline rank: parameters, gradients, optimiser, activations in flight, logits, workspace."""

from __future__ import annotations

import dataclasses

from parallel.bubble import Pipeline
from parallel.frameworks import Framework
from parallel.operators import Operators

GIB = 2**30
WORKSPACE = 1.0
"""GiB of a CUDA context, cuBLAS and NCCL buffers inside the process's allocation."""


def kept_bytes(model: Operators, length: int, layout, f: Framework) -> float:
    """Bytes that one microbatch leaves in one layer of one GPU, from F until its backward.

    Korthikanti et al. 2022 (arXiv 2205.05198), with the model's own shapes: full keeps the layer's input, selective all
    but attention's core, none all. Scores that are written cost 5 bytes a pair (softmax, mask, dropout).
    """
    tokens = layout.rows * length / layout.context
    whole = 1 / layout.tensor if f.sequence_parallel else 1.0
    if layout.remat == "full":
        return 2 * tokens * model.width * whole
    split, rest = model.kept
    kept = 2 * tokens * (split / layout.tensor + rest * whole)
    if layout.remat == "none" and not f.flash:
        kept += 5 * tokens * length * model.heads / layout.tensor
    return kept * (0.42 if layout.remat == "half" else 1.0)


def passing_bytes(model: Operators, length: int, layout, f: Framework) -> float:
    """Bytes that a layer's backward needs for a moment: gradients of the MLP's and of attention's insides, and what sequence
    parallelism gathers (the input, its gradient, the output's gradient)."""
    tokens, t = layout.rows * length / layout.context, layout.tensor
    inside = 2 * tokens * model.ffn * (3 if model.gated else 2) / t
    if not f.flash:
        inside += 4 * tokens * length * model.heads / t
    return inside + (3 * 2 * tokens * model.width if t > 1 and f.sequence_parallel else 0.0)


def rank_memory(model: Operators, length: int, layout, f: Framework, pipe: Pipeline, precision: str) -> tuple[dict, ...]:
    """For every pipeline rank, GiB by kind.

    What comes and goes peaks either at the loss (`logits`) or in a layer's backward (`layer`, with what it computes again):
    the larger of the two counts, the other is 0.
    """
    if f.ticks:
        return (executor_memory(model, length, layout, pipe),) * layout.pipe
    t, d, p = layout.tensor, layout.data * layout.context, layout.pipe
    tokens = layout.rows * length / layout.context
    one = kept_bytes(model, length, layout, f)
    again = layout.remat in ("full", "half")
    full = kept_bytes(model, length, dataclasses.replace(layout, remat="none"), f) if again else 0.0
    passing = full + passing_bytes(model, length, layout, f)
    zero = (
        1 if layout.zero >= 3 and p > 1 else layout.zero
    )  # what was gathered stays for all microbatches, with whole gradients
    copies = max(1, d * t // layout.expert)
    out = []
    for r in range(p):
        mine = pipe.layers[r] * model.layer_parameters
        last = model.head_parameters or (model.embedding_parameters if p > 1 else 0)
        mine += (model.embedding_parameters if r == 0 else 0) + (last if r == p - 1 else 0)
        mine /= t
        routed = _sparse_layers(model, layout, pipe, r) * model.expert_parameters / layout.expert
        weights, gradients, state = 2.0, f.gradient_bytes, 12.0
        if f.frozen:
            gradients = state = 0.0
        weights += f.extra_bytes
        gathered = 2 * 2 * (model.layer_parameters / t + model.expert_parameters / layout.expert) if zero >= 3 else 0
        held = pipe.held[r] * pipe.layers[r] * one
        if f.outputs and p > 1:  # whole, as they are sent
            held += pipe.held[r] * 2 * tokens * model.width
        logits = 0.0
        if r == p - 1:
            logits = tokens * model.vocab / t * f.logit_bytes
            logits += 3 * 2 * tokens * model.width if t > 1 and f.sequence_parallel else 0.0
        parts = dict(
            parameters=weights * (mine / d + routed / copies if zero >= 3 else mine + routed) + gathered,
            gradients=gradients * (mine / d + routed / copies if zero >= 2 else mine + routed),
            optimizer=state * (mine / d + routed / copies if zero >= 1 else mine + routed),
            activations=held,
            layer=passing if passing > logits else 0.0,
            logits=logits if logits >= passing else 0.0,
            fragmentation=f.fragmentation * (held + max(passing, logits)),
        )
        out.append({k: v / GIB for k, v in parts.items()} | {"workspace": WORKSPACE})
    return tuple(out)


def stash_bytes(model: Operators, tensor: int, remat: str) -> dict[str, float]:
    """Bytes a token and layer of the executor's three stashes, as its cut of a layer in bfloat16 makes them: `a` what only B
    reads, `aw` what W reads, `cut` what B hands to W. Norms, residuals and their gradients are in float32 and not divided.
    """
    w, q, kv = model.width, model.heads * model.head_dim / tensor, model.kv_heads * model.head_dim / tensor
    up, lse = model.ffn / tensor * (2 if model.gated else 1), 4 * model.heads / tensor
    if remat == "full":
        return dict(a=2.0 * w, aw=0.0, cut=0.0)
    if remat == "selective":
        return dict(a=2 * w + lse + up, aw=2 * q + up, cut=22 * w + 3 * up + 4 * kv + 2 * q)
    return dict(a=16 * w + 2 * q + 4 * kv + lse + 5 * up, aw=12 * w + 2 * q + up, cut=12 * w + 2 * up + 4 * kv + 2 * q)


WORKING = 0.65
"""Share of all that a layer's F and B make that is alive at once, beside the stashes (XLA's own schedule)."""


def executor_memory(model: Operators, length: int, layout, pipe: Pipeline) -> dict[str, float]:
    """GiB by kind on every rank of this repository's executor: all ranks allocate what the fullest one needs.

    Each buffer has one place more than its slots, a waste bin. Checked against compiled programs by
    experiments/benchmarks/planner_memory.py.
    """
    t, p, d = layout.tensor, layout.pipe, layout.data * layout.context
    tokens = layout.rows * length / layout.context
    mine = pipe.layers[0] * model.layer_parameters / t
    mine += (model.embedding_parameters + model.head_parameters) / p / t
    slots, stash = pipe.slots, stash_bytes(model, t, layout.remat)
    if "aw" not in slots:  # B and W are one program: what W reads waits for B too
        stash = dict(a=stash["a"] + stash["aw"])
    held = sum((slots.get(kind, 0) + 1) * pipe.chunk * size for kind, size in stash.items())
    held += sum((slots.get(kind, 0) + 1) * 2 * model.width for kind in "xg")
    working = WORKING * sum(stash_bytes(model, t, "none").values())
    logits = 12 * model.vocab / t / p
    shared = d if layout.zero else 1
    parts = dict(
        parameters=(2 + 4 / shared) * mine,  # a 16-bit copy for the step beside the float32 masters
        gradients=4 * mine,
        optimizer=8 / shared * mine,
        activations=held * tokens,
        layer=working * tokens if working > logits else 0.0,
        logits=logits * tokens if logits >= working else 0.0,
        fragmentation=0.0,
    )
    return {k: v / GIB for k, v in parts.items()} | {"workspace": WORKSPACE}


def _sparse_layers(model: Operators, layout, pipe: Pipeline, r: int) -> float:
    """Mean layers' worth of experts on a rank: the first layers of a model may have none."""
    share = model.experts.share if model.experts else 1.0
    if share == 1.0 or layout.chunks > 1:
        return pipe.layers[r]
    first, dense = sum(pipe.layers[:r]), round(model.layers * (1 - share))
    return max(0, first + pipe.layers[r] - max(first, dense)) / share
