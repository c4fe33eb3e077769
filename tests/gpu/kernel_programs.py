"""Attention and the loss as the tests compile them: functions (target, document) that run in the compile environment."""

import re

import jax
import jax.numpy as jnp
from gpu.programs import on_one_gpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llm.attention import MaskSpec, attention
from llm.kernels import backends, cross_entropy
from llm.kernels.backends import FEATURES, TABLE, Need
from llm.objective import CrossEntropy
from parallel import deviceless, hlo
from parallel.axes import MANUAL_AXES
from parallel.mesh import make_mesh

LENGTH = 300  # no multiple of any tile, more than the single tile of the chunked back end
HEAD_DIMS = (32, 64, 96, 128, 256)


def claims(backend: str, device: str) -> list[Need]:
    """One thing at a time that a back end claims to do on this device, whether its library is there or not."""
    row = TABLE[backend]
    plain = "bfloat16", 128
    needs = [Need(*plain), *(Need(*plain, frozenset({name})) for name in FEATURES)]
    needs += [Need(dtype, 64) for dtype in row.dtypes if dtype != "float64"] + [Need("bfloat16", d) for d in HEAD_DIMS]
    without = lambda need: row.lacks(need, "gpu", device)
    return [need for need in dict.fromkeys(needs) if not without(need) or without(need).startswith("without")]


def both_passes(backend: str, need: Need, length: int = LENGTH, heads: int = 4, groups: int = 2):
    """(function of forward and backward, shapes of its arguments) that asks for `need`."""
    asked, keys = need.features, 2 * length if "cross" in need.features else length
    length, keys = (n + ("odd" in asked) for n in (length, keys))
    ids = lambda n: jnp.arange(n)[None] * 3 // n
    packed = dict(q_segment_ids=ids(length), kv_segment_ids=ids(keys)) if "packed" in asked else {}
    window, at = (100, 0) if "window" in asked else None, 7 if "offset" in asked else 0
    mask = MaskSpec("full" not in asked, window, **packed, q_offset=at)
    dtype = "bfloat16" if need.dtype == "mixed" else need.dtype
    shape = lambda t, n, d, dtype=dtype: jax.ShapeDtypeStruct((1, t, n, d), dtype)
    value = shape(keys, groups, 64 if "value" in asked else need.head_dim)
    key = shape(keys, groups, need.head_dim, "float32" if need.dtype == "mixed" else dtype)
    how = dict(
        softcap=30.0 if "softcap" in asked else None,
        alibi_slopes=jnp.ones(heads) if "alibi" in asked else None,
        return_lse="lse" in asked,
        deterministic="deterministic" in asked,
        backend=backend,
    )

    def run(q, k, v):
        o, pull = jax.vjp(lambda *a: attention(*a, mask, **how), q, k, v)
        return o, pull(o)

    return run, (shape(length, heads, need.head_dim), key, value)


def called(text: str) -> list[str]:
    """The attention kernels that a compiled program calls."""
    return sorted(name for _, name in _calls(text))


def _calls(text: str) -> list[tuple[str, str]]:
    """(line, kernel) of each."""
    lines = [line for line in text.splitlines() if " custom-call(" in line]
    found = [(line, re.search(r"attention_(?:forward\w*|dq|dkv)|fmha\w+|flash_attention\w*", line)) for line in lines]
    return [(line, kernel[0]) for line, kernel in found if kernel]


def cells(target: str, document: dict) -> dict:
    """Every claim of the back ends asked for: those compiled, with their kernels, and those whose library is not here.

    The cells of a back end are one program, which compiles in half the time of as many; a scope's name tells them apart.
    """
    asks_this_machine = lambda need: need.head_dim > 128  # jax.nn, whether its GPU is a Hopper
    found = dict(compiled=[], missing=[])
    for backend in document["backends"]:
        needs = claims(backend, deviceless.TARGETS[target].device)[: document["most"] or None]
        needs = [need for need in needs if not (backend == "cudnn" and asks_this_machine(need))]
        told = [dict(backend=backend, dtype=n.dtype, head_dim=n.head_dim, features=sorted(n.features)) for n in needs]
        if not backends._found(TABLE[backend].module):
            found["missing"] += told
            continue
        if not needs:
            continue
        functions, shapes = zip(*(both_passes(backend, need) for need in needs))
        named = [jax.named_scope(f"cell_{i}")(function) for i, function in enumerate(functions)]
        together = lambda *given, named=named: [function(*arrays) for function, arrays in zip(named, given)]
        calls = _calls(on_one_gpu(target, together, *shapes).as_text())
        for i, cell in enumerate(told):
            kernels = sorted(kernel for line, kernel in calls if re.search(rf"\bcell_{i}\b", line))
            found["compiled"].append(cell | dict(kernels=kernels))
            print(found["compiled"][-1], flush=True)
    return found


def temporaries(target: str, document: dict) -> dict:
    """Bytes beside arguments and results of packed causal attention, forward and backward, by length."""
    need = Need("bfloat16", 128, frozenset({"packed"} & TABLE[document["backend"]].features))
    sizes = {}
    for length in document["lengths"]:
        run, shapes = both_passes(document["backend"], need, length, 8)
        sizes[length] = on_one_gpu(target, run, *shapes).memory_analysis().temp_size_in_bytes
    return sizes


def loss(target: str, document: dict) -> dict:
    """Bytes of the loss and its gradients in bf16 on one GPU, that of the weights added to what is there already."""
    tokens, vocab, width = (document[name] for name in ("tokens", "vocab", "width"))
    mesh = make_mesh({}, deviceless.devices(target, 1))
    where = NamedSharding(mesh, P())
    shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype, sharding=where)
    given = (
        shape("bfloat16", 1, tokens, width),
        shape("bfloat16", vocab, width),  # the executor casts weights once a step
        shape("int32", 1, tokens),
        shape("float32", 1, tokens),
        shape("float32", vocab, width),
    )

    def run(h, w, targets, weights, into):
        objective = lambda logp, lse: CrossEntropy(1e-4)(logp, lse, dict(weights=weights))
        return cross_entropy.loss_and_gradients(
            h, w, targets, vocab, objective, 30.0, separable=document["separable"], into=into
        )

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
        compiled = jax.jit(mapped, donate_argnums=4).trace(*given).lower().compile()
    memory = compiled.memory_analysis()
    return dict(temporary=memory.temp_size_in_bytes, output=memory.output_size_in_bytes, alias=memory.alias_size_in_bytes)


def by_heads(target: str, document: dict) -> dict:
    """Communication and kernels of a call inside the region that is manual over data and pipe, its heads over tensor."""
    mesh = make_mesh(dict(data=2, pipe=2, tensor=2), deviceless.devices(target, 8))
    heads = NamedSharding(mesh, P("data", None, "tensor"))
    shape = lambda n: jax.ShapeDtypeStruct((2, 256, n, 64), "bfloat16", sharding=heads)
    packed = "packed" in TABLE[document["backend"]].features
    ids = jnp.arange(256)[None] // 100
    mask = MaskSpec(True, None, ids, ids) if packed else MaskSpec()

    def run(q, k, v):
        o, pull = jax.vjp(lambda *a: attention(*a, mask, backend=document["backend"]), q, k, v)
        return o, *pull(o)

    inside = jax.shard_map(run, in_specs=P("data"), out_specs=P("data"), axis_names=set(MANUAL_AXES), check_vma=False)
    with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
        text = jax.jit(inside, out_shardings=heads).trace(shape(4), shape(2), shape(2)).lower().compile().as_text()
    return dict(collectives=[c.kind for c in hlo.collectives(text)], kernels=called(text))
