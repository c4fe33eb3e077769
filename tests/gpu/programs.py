"""What the tests compile for GPUs: functions (target, document) that run in the compile environment."""

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from parallel import deviceless
from parallel.errors import UserError


def on_one_gpu(target, function, *shapes):
    """`function` of arrays of these ShapeDtypeStructs, compiled for one GPU."""
    device = deviceless.devices(target, 1)[0]
    where = SingleDeviceSharding(device)
    given = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where) for s in shapes]
    with jax.default_device(device):
        return jax.jit(function).trace(*given).lower().compile()


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
    Path(file).write_text(str(os.getpid()))
    time.sleep(60)
