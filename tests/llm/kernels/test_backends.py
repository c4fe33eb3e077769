"""Which back end serves a call, what is refused, what the start of a run says, and heads split over the tensor axis."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from llm.attention import BACKENDS, MaskSpec, attention
from llm.config import ATTENTION, BatchConfig, Config, ModelConfig, PipelineConfig, TrainConfig
from llm.kernels import backends
from llm.kernels.backends import FEATURES, ORDER, TABLE, Need, select
from llm.step import build
from parallel import hlo
from parallel.errors import UserError
from parallel.mesh import make_mesh


@pytest.fixture(autouse=True)
def fresh():
    select.cache_clear()


def test_a_cpu_gets_the_chunked_back_end_whatever_is_asked():
    everything = Need("bfloat16", 48, frozenset(FEATURES))
    assert select(everything, "cpu", strict=True) == "chunked"
    assert select(Need("float64", 8), "cpu") == "reference"  # nothing else keeps its precision


def test_every_platform_has_an_order_that_ends_with_what_does_everything():
    assert set(ORDER) == set(backends.PLATFORMS)
    for platform, order in ORDER.items():
        assert not TABLE[order[-1]].lacks(Need("float32", 48, frozenset(FEATURES)), platform)
        assert all(platform in TABLE[name].platforms for name in order)


def test_a_strict_call_does_not_fall_back():
    with pytest.raises(UserError, match=r"fall back to reference on a cpu \(chunked cannot do the type float64\)"):
        select(Need("float64", 8), "cpu", strict=True)
    with pytest.raises(UserError, match="fall back to chunked on a tpu"):
        select(Need("float32", 8), "tpu", strict=True)


def test_who_cannot_do_it_refuses():
    with pytest.raises(UserError, match=r"chunked cannot do the type float64; these can: reference"):
        select(Need("float64", 8), "cpu", "chunked")
    with pytest.raises(
        UserError, match=r"no attention back end 'flash'; choose auto or one of reference, chunked, pallas, mosaic"
    ):
        select(Need("float32", 8), "cpu", "flash")


def test_what_a_gpu_gets_depends_on_what_is_asked_and_which_it_is(monkeypatch):
    monkeypatch.setattr(backends, "_found", lambda module: True)
    h100, a100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    chosen = lambda *need, device=h100, **how: select(Need(*need), "gpu", device=device, **how)
    assert chosen("bfloat16", 128) == chosen("float16", 64, frozenset({"full"})) == chosen("bfloat16", 256) == "cudnn"
    assert chosen("bfloat16", 256, device=a100) == "pallas"  # cuDNN has 128 there
    assert chosen("bfloat16", 128, frozenset({"packed"}), strict=True) == "pallas"
    assert chosen("float32", 128) == chosen("bfloat16", 96) == "pallas"
    assert chosen("float32", 512) == "chunked"
    assert chosen("bfloat16", 64, asked="mosaic") == "mosaic"
    for device, name in ((a100, "mosaic"), ("NVIDIA B200", "mosaic"), (a100, "tokamax")):
        with pytest.raises(UserError, match=f"{name} cannot do attention on a {device}"):
            chosen("bfloat16", 64, device=device, asked=name)


def test_a_library_that_is_not_there_is_refused_and_not_chosen(monkeypatch):
    monkeypatch.setattr(backends, "_found", lambda module: module not in ("nvidia.cudnn", "tokamax"))
    assert select(Need("bfloat16", 128), "gpu", device="NVIDIA H100") == "pallas"
    with pytest.raises(UserError, match=r"tokamax cannot do without tokamax, which is not there; these can: .*pallas"):
        select(Need("bfloat16", 128), "gpu", "tokamax", device="NVIDIA H100")


def test_a_module_is_looked_for_without_importing_it():
    assert backends._found("jax.experimental.pallas.triton")
    assert not backends._found("no_such_package.inside")
    assert not backends._found("no_such_package")


@pytest.mark.parametrize("asked", ["auto", "chunked"])
def test_the_choice_is_logged_once(caplog, asked):
    with caplog.at_level(logging.INFO, logger="llm.kernels.backends"):
        for _ in range(3):
            select(Need("float32", 64, frozenset({"packed"})), "cpu", asked)
    as_asked = "" if asked == "auto" else ", as asked for"
    assert [r.getMessage() for r in caplog.records] == [
        f"attention on cpu: chunked (tiles in plain JAX, O(T) memory){as_asked}"
    ]


def test_a_run_names_the_back_end_and_takes_the_one_it_is_asked_for():
    assert ("auto", *BACKENDS) == ATTENTION
    model = ModelConfig(layers=1, width=8, heads=2, vocab=11)
    config = Config(model=model, batch=BatchConfig(2, 8), pipeline=PipelineConfig(microbatches=1))
    names = lambda program: [e.params["name"] for e, _ in hlo.equations(program.traced.jaxpr.jaxpr) if "name" in e.params]
    for asked, name in (("auto", "chunked"), ("pallas", "pallas")):
        train = TrainConfig(attention=asked, attention_strict=True)
        program = build(dataclasses.replace(config, train=train), jax.devices()[:1])
        assert program.describe()["attention"] == f"{name} ({TABLE[name].what})"
        assert ("attention_forward" in names(program)) == (name == "pallas")
    program = build(dataclasses.replace(config, train=TrainConfig(attention="cudnn")), jax.devices()[:1])
    with pytest.raises(UserError, match="cudnn cannot do attention on a cpu"):
        program.describe()


# ----------------------------------------------------------------------------------------------- heads over the tensor axis
@functools.cache
def by_tensor(backend: str, tensor: int, groups: int):
    """o and gradients with queries, keys and values split over the tensor axis where they divide."""
    mesh = make_mesh(dict(tensor=tensor), jax.devices()[:tensor])
    r = np.random.default_rng(0)
    q, k, v = (r.normal(size=(2, 9, n, 8)).astype(np.float32) for n in (4, groups, groups))
    ids = jnp.asarray([[0] * 4 + [1] * 5, [0] * 7 + [-1] * 2], jnp.int32)

    def run(q, k, v):
        attend = lambda q, k, v: attention(q, k, v, MaskSpec(True, None, ids, ids), backend=backend)
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(jnp.cos(o))

    inside = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data", "pipe"}, check_vma=False)
    with jax.set_mesh(mesh):
        split = lambda heads: P(None, None, "tensor" if heads % tensor == 0 else None)
        args = [jax.device_put(a, split(a.shape[2])) for a in (q, k, v)]
        out = jax.jit(inside, out_shardings=tuple(split(n) for n in (4, 4, groups, groups)))(*args)
        return [np.asarray(a) for a in out]


@pytest.mark.parametrize("groups", [1, 2])
def test_keys_that_do_not_divide_are_repeated_and_their_gradients_summed(groups):
    for a, b in zip(by_tensor("chunked", 4, groups), by_tensor("reference", 1, groups)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
