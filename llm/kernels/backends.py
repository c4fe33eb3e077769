"""Which attention back end serves a call: one static table, for forward and backward together."""

import dataclasses
import functools
import importlib.util
import logging

import jax
from jax.sharding import AbstractMesh, get_abstract_mesh

from parallel.errors import UserError

log = logging.getLogger(__name__)

FEATURES = dict(
    full="a mask that is not causal",
    window="a window",
    packed="segments",
    offset="offsets",
    cross="unequal numbers of queries and keys",
    odd="an odd number of queries or keys",
    softcap="a soft-cap",
    alibi="alibi slopes",
    lse="the log-sum-exp",
    value="values of another size than keys",
    deterministic="repeatable gradients",
)
"""What a call may ask for beyond plain causal attention."""


@dataclasses.dataclass(frozen=True)
class Need:
    """What a call asks for. dtype: of queries, keys and values ("mixed" when they differ). features: of FEATURES."""

    dtype: str
    head_dim: int
    features: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Capability:
    """What a back end does, forward and backward. head_dims: the smallest, the largest and what divides them; older: the
    largest on GPUs before Hopper (0: the same). devices: what the name of a device must contain one of (empty: any).
    module: what it needs beside jax, or of jax, which a later version may leave out."""

    what: str
    platforms: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    head_dims: tuple[int, int, int] = (1, 2**30, 1)
    features: frozenset[str] = frozenset(FEATURES)
    older: int = 0
    devices: tuple[str, ...] = ()
    module: str = "jax"

    def lacks(self, need: Need, platform: str, device: str = "") -> str:
        """The first thing of `need` that it cannot do on a device of this name, "" if it can do all."""
        low, high, step = self.head_dims
        if self.older and not _is(device, HOPPER + BLACKWELL):
            high = self.older
        missing = [what for name, what in FEATURES.items() if name in need.features - self.features]
        if platform not in self.platforms:
            return f"attention on a {platform}"
        if self.devices and not _is(device, self.devices):
            return f"attention on a {device or platform}"
        if need.dtype not in self.dtypes:
            return f"the type {need.dtype}"
        if not low <= need.head_dim <= high or need.head_dim % step:
            return f"heads of size {need.head_dim}"
        if missing:
            return missing[0]
        return "" if _found(self.module) else f"without {self.module}, which is not there"


def _is(device: str, names: tuple[str, ...]) -> bool:
    return any(name in device for name in names)


@functools.cache
def _found(module: str) -> bool:
    """Whether a module can be imported; nothing of it is, but for the packages around it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


HOPPER = ("H100", "H200", "H800", "H20")
BLACKWELL = ("B100", "B200", "B300")
TRITON = "jax.experimental.pallas.triton"
MOSAIC = "jax.experimental.pallas.mosaic_gpu"
HALF = ("bfloat16", "float16")
PLATFORMS = ("cpu", "gpu", "rocm", "tpu")
TABLE = dict(
    reference=Capability("dense, fp32 softmax", PLATFORMS, ("float64", "float32", *HALF, "mixed")),
    chunked=Capability("tiles in plain JAX, O(T) memory", PLATFORMS, ("float32", *HALF, "mixed")),
    pallas=Capability("own Pallas kernels, O(T) memory", ("cpu", "gpu"), head_dims=(1, 256, 1), module=TRITON),
    mosaic=Capability(
        "own Pallas forward for Hopper, O(T) memory",
        ("gpu",),
        HALF,
        (64, 128, 64),
        frozenset(FEATURES) - {"alibi", "value"},
        devices=HOPPER,
        module=MOSAIC,
    ),
    cudnn=Capability("cuDNN, O(T) memory", ("gpu",), HALF, (64, 256, 64), frozenset({"full"}), 128, module="nvidia.cudnn"),
    tokamax=Capability(
        "tokamax's Mosaic kernels, O(T) memory",
        ("gpu",),
        HALF,
        (64, 256, 64),
        frozenset({"full", "odd", "softcap"}),
        devices=HOPPER + BLACKWELL,
        module="tokamax",
    ),
)
"""cudnn: no packed rows and no windows (no public way that is right on every version), no log-sum-exp (its gradient would be
lost), gradients that do not repeat bit by bit. tokamax: no packed rows without a dense mask."""
ORDER = dict(cpu=("chunked",), gpu=("cudnn", "pallas", "chunked"), rocm=("chunked",), tpu=("chunked",))
"""What `auto` tries, the fastest first. Published times have cuDNN lead for plain masks; mosaic and tokamax are taken when
they are asked for, until they have been timed beside the others."""
FALL_BACK = dict(gpu="chunked", rocm="chunked", tpu="chunked")
"""What no one would ask for on a platform, but that does everything: refused when strict."""


def target(mesh: AbstractMesh | None = None) -> tuple[str, str]:
    """(platform, kind) of the device that a program is compiled for: that of the mesh (the one in force), else the default."""
    device = getattr(mesh or get_abstract_mesh(), "abstract_device", None) or jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    platform = getattr(device, "platform", None) or "cpu"
    return {"cuda": "gpu"}.get(platform, platform), device.device_kind


@functools.cache
def select(need: Need, platform: str, asked: str = "auto", strict: bool = False, device: str = "") -> str:
    """The name of the back end; device: what the device calls itself. The choice is logged the first time. Raises UserError
    when the one that is asked for cannot do it, and, when strict, instead of falling back to a slow one."""
    if asked not in ("auto", *TABLE):
        raise UserError(f"there is no attention back end {asked!r}; choose auto or one of {', '.join(TABLE)}")
    if asked != "auto":
        if lacks := TABLE[asked].lacks(need, platform, device):
            able = [name for name, row in TABLE.items() if not row.lacks(need, platform, device)]
            raise UserError(f"the attention back end {asked} cannot do {lacks}; these can: {', '.join(able) or 'none'}")
        log.info("attention on %s: %s (%s), as asked for", platform, asked, TABLE[asked].what)
        return asked
    lacking = {name: TABLE[name].lacks(need, platform, device) for name in (*ORDER[platform], "reference")}
    name = next((name for name, lacks in lacking.items() if not lacks), "")
    why = "; ".join(f"{other} cannot do {lacks}" for other, lacks in lacking.items() if lacks)
    if not name:
        raise UserError(f"no attention back end can do this: {why}")
    if strict and name in (FALL_BACK.get(platform), "reference"):
        raise UserError(
            f"attention would fall back to {name} on a {platform} ({why or 'there is no faster one'}); "
            "ask for less, or allow it with strict=False"
        )
    log.info("attention on %s: %s (%s)%s", platform, name, TABLE[name].what, f"; {why}" if why else "")
    return name
