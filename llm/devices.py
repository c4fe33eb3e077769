"""Which devices a run uses."""

import os
from collections.abc import Sequence
from typing import Any

from llm.config import Config
from llm.fields import check_fields
from parallel.cluster import SPARE
from parallel.errors import UserError

COUNT_FLAG = "--xla_force_host_platform_device_count"


def request_devices(config: Config, devices: int = 0, processes: int = 1) -> Config:
    """Validate, and ask for as many virtual CPU devices as the mesh has (or `devices`), before jax makes its devices.

    Of several processes each makes its share. A machine with GPUs uses those; the number of virtual CPU devices does not
    touch them. Raises UserError.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(SPARE))  # jax itself takes three quarters of a GPU
    if devices < 0:
        raise UserError(f"--devices={devices}: give a positive number of devices")
    if not devices and -1 in config.mesh.sizes().values():
        check_fields(config)
        return config  # only jax can tell how many GPUs are left
    if config.plan:  # the mesh only says how many virtual devices there are
        check_fields(config)
        count = devices or config.mesh.product
    else:
        count = devices or config.validate().mesh.product
        config = config.validate(count)
    if count % processes:
        raise UserError(f"{count} devices cannot be shared out over {processes} processes: each has as many as the others")
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{COUNT_FLAG}={count // processes}"])
    return config


def select_devices(config: Config, devices: Sequence[Any] | None = None) -> tuple[Config, list[Any]]:
    """The validated configuration and the devices of its mesh: the given ones, or all that jax has.

    Virtual CPU devices of one process cost nothing, so of those only as many as the mesh asks for are taken; all others must
    all be used.
    """
    import jax

    devices = list(jax.devices() if devices is None else devices)
    if config.plan:
        from llm.layout import auto_layout

        config, _ = auto_layout(config, devices)
    sizes = config.mesh.sizes().values()
    if devices[0].platform == "cpu" and -1 not in sizes and jax.process_count() == 1:
        devices = devices[: config.mesh.product] if min(sizes) > 0 else devices
    return config.validate(len(devices)), devices
