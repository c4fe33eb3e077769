"""Memory of every pipeline rank: parameters, gradients, optimiser, activations in flight, logits, workspace."""

from __future__ import annotations

from parallel.bubble import Pipeline
from parallel.frameworks import Framework
from parallel.operators import Operators

GIB = 2**30
WORKSPACE = 1.0
"""GiB of a CUDA context, cuBLAS and NCCL buffers inside the process's allocation."""
FRAGMENTATION = 0.03
"""Share of the activations that the caching allocator holds on top."""


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
    if f.ticks and layout.remat == "selective":  # attention's output, the MLP's first matmul, the layer's input
        queries, up = model.heads * model.head_dim, model.ffn * (2 if model.gated else 1)
        return 2 * tokens * ((queries + up) / layout.tensor + model.width)
    kept = 2 * tokens * (split / layout.tensor + rest * whole)
    if layout.remat == "none" and not f.flash:
        kept += 5 * tokens * length * model.heads / layout.tensor
    return kept * (0.42 if layout.remat == "half" else 1.0)


def rank_memory(model: Operators, length: int, layout, f: Framework, pipe: Pipeline, precision: str) -> tuple[dict, ...]:
    """For every pipeline rank, GiB by kind."""
    t, d, p = layout.tensor, layout.data * layout.context, layout.pipe
    tokens = layout.rows * length / layout.context
    one = kept_bytes(model, length, layout, f)
    full = kept_bytes(model, length, layout.__class__(**{**vars(layout), "remat": "none"}), f)
    out = []
    for r in range(p):
        mine = pipe.layers[r] * model.layer_parameters
        if f.ticks:
            mine += (model.embedding_parameters + model.head_parameters) / p
        else:
            last = model.head_parameters or (model.embedding_parameters if p > 1 else 0)
            mine += (model.embedding_parameters if r == 0 else 0) + (last if r == p - 1 else 0)
        mine /= t
        weights, gradients, state = 2.0, f.gradient_bytes, 12.0
        if f.ticks:  # float32 masters, a 16-bit copy for the step, float32 gradients
            weights, state = 6.0, 8.0
        if f.frozen:
            gradients = state = 0.0
        weights += f.extra_bytes
        shares = (d if layout.zero >= 3 else 1, d if layout.zero >= 2 else 1, d if layout.zero >= 1 else 1)
        gathered = 2 * 2 * model.layer_parameters / t if layout.zero >= 3 else 0
        if layout.zero >= 3 and p > 1:  # what was gathered stays for all microbatches, and so do whole gradients
            shares, gathered = (1, 1, d), 0
        logits = tokens * model.vocab / t / (p if f.ticks else 1) * f.logit_bytes if r == p - 1 or f.ticks else 0
        work = one + (full if layout.remat in ("full", "half") else 0.5 * full / max(1, pipe.layers[r]))
        held = pipe.held[r] * pipe.layers[r] * one
        if f.ticks:  # what B hands to W: a gradient of every matmul's output; and what has arrived
            cut = 2 * tokens * sum(x.n / (t if x.split == "n" else 1) for x in model.matmuls)
            held += pipe.cuts * pipe.layers[r] * cut + pipe.inbox * 2 * tokens * model.width
        if f.outputs and p > 1:
            held += pipe.held[r] * 2 * tokens * model.width
        parts = dict(
            parameters=weights * mine / shares[0] + gathered,
            gradients=gradients * mine / shares[1],
            optimizer=state * mine / shares[2],
            activations=held,
            layer=work if layout.remat in ("full", "half") else 0.0,
            logits=logits,
            fragmentation=FRAGMENTATION * (held + work),
        )
        out.append({k: v / GIB for k, v in parts.items()} | {"workspace": WORKSPACE})
    return tuple(out)
