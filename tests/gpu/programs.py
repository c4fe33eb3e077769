"""What the tests compile for GPUs: functions (target, document) that run in the compile environment."""

import os
import re
import time
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from llm import attention
from llm.compile import facts, share, weight_stacks
from llm.config import Config
from llm.fields import from_dict
from llm.kernels import cross_entropy
from llm.step import build
from parallel import deviceless, gpu_program, hlo, xla_flags
from parallel.errors import UserError
from parallel.executor import Executor
from parallel.mesh import make_mesh


def on_one_gpu(target, function, *shapes):
    """`function` of arrays of these ShapeDtypeStructs (or trees of them), compiled for one GPU."""
    device = deviceless.devices(target, 1)[0]
    where = SingleDeviceSharding(device)
    given = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes)
    with jax.default_device(device):
        return jax.jit(function, compiler_options=xla_flags.options()).trace(*given).lower().compile()


def matmul(target, document):
    """Facts of a compiled matrix product, and of the devices."""
    found = deviceless.devices(target, document["gpus"])
    print("what is printed does not disturb the answer")
    shape = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    text = on_one_gpu(target, jnp.matmul, shape, shape).as_text()
    return dict(kind=found[0].device_kind, hosts=found[-1].process_index + 1, gpus=len(found), text=text)


def wrong(target, document):
    raise UserError(f"{document} cannot be")


def broken(target, document):
    raise ZeroDivisionError("of all things")


def aborted(target, document):
    print("the compiler gives up", flush=True)
    os.abort()


def sleeping(target, file):
    Path(file).write_text(f"{os.getpid()} {os.environ[deviceless.REPORTS]}")
    time.sleep(60)


# ----------------------------------------------------------------------------------------------- memory of kernels
def attention_temporaries(target, lengths, head_dim=128):
    """Bytes that causal attention and its gradients need beside arguments and results, for each length."""

    def loss(q, k, v):
        mask = attention.MaskSpec(causal=True)
        return attention.attention(q, k, v, mask).astype(jnp.float32).sum()

    def one(length):
        q, k = (jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16) for heads in (8, 2))
        return hlo.memory(on_one_gpu(target, jax.grad(loss, (0, 1, 2)), q, k, k)).temporaries

    return [one(length) for length in lengths]


def assembled(target, head_dim):
    """The kernels of causal attention and its gradients that the assembler has seen, and those that spill registers."""
    attention_temporaries(target, [512], head_dim)
    reports = [file.read_text() for file in Path(os.environ[deviceless.REPORTS]).glob("*.ptxas")]
    return dict(seen=re.findall(r"Compiling entry function '(\w+)'", "".join(reports)), spills=deviceless.spills())


def cross_entropy_memory(target, shape):
    """Bytes of temporaries and results of the loss with both gradients, for [tokens, vocabulary, width] in bf16."""
    tokens, vocab, width = shape
    device = deviceless.devices(target, 1)[0]
    mesh = make_mesh({}, [device])

    def run(h, w, t):
        objective = lambda logp, lse: -(logp * 1e-3).sum()
        return cross_entropy.loss_and_gradients(h, w, t, vocab, objective, separable=True)

    whole = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P()))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    given = whole(1, tokens, width), whole(vocab, width), whole(1, tokens, dtype=jnp.int32)
    with jax.default_device(device):
        compiled = jax.jit(mapped, compiler_options=xla_flags.options()).trace(*given).lower().compile()
    memory = hlo.memory(compiled)
    return dict(temporaries=memory.temporaries, results=memory.results)


# ----------------------------------------------------------------------------------------------- the training step
def step(target, document):
    """Facts of the compiled training step of a configuration, and where its permutes, gathers and copies of weights lie."""
    if document.get("planted"):
        Executor._f_slot = gathering(Executor._f_slot)
    program = described(target, document["config"])
    with jax.default_device(program.devices[0]), jax.set_mesh(program.mesh):
        text = program.traced.lower().compile().as_text()
    found = hlo.instructions(text)
    steady = max((i.loops for i in found if len(i.loops) == 1), key=lambda loops: loops[0])
    hidden = {start: sum(i.flops for i in between) for start, between in gpu_program.overlaps(found).items()}
    permutes = [hidden[c.begun] for c in found if c.kind == "collective-permute" and c.loops == steady]
    stacks = weight_stacks(program)
    copied = defaultdict(int)
    for copy in gpu_program.parameter_copies(found, stacks):
        if copy.loops == steady:
            copied[next(slot for slot in ("f_slot", "b_slot", "w_slot") if slot in copy.source)] += copy.bytes
    layer = sum(hlo.bytes_of(dtype, (1, 1, *dims[2:])) for dtype, dims in stacks)
    phases = program.tick_table.phases()
    return dict(
        facts=facts(found, program, share(program)),
        permutes=permutes,
        copied=copied,
        layer=layer,
        slots=[sum(stop - start for start, stop, held in phases if held[i]) for i in range(3)],
        fingerprint=program.fingerprint(),
        steady=steady[0],
    )


def described(target, config):
    """The program of a configuration on described GPUs."""
    config = from_dict(config, Config)
    program = build(config, deviceless.devices(target, config.mesh.product))
    program.arguments  # noqa: B018 - see llm/compile.py
    return program


def fingerprint(target, config):
    program = described(target, config)
    with jax.default_device(program.devices[0]):
        return program.fingerprint()


def gathering(slot):
    """The F slot with the fault that what has arrived is gathered over `data` in every tick."""

    def f_slot(self, k, s):
        return slot(self, k, dict(s, x=jax.tree.map(lambda x: jax.lax.all_gather(x, "data")[::-1].max(0), s["x"])))

    f_slot.__name__ = slot.__name__
    return f_slot
