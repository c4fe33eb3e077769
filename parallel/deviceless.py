"""GPUs to compile for on a machine that has none.

XLA compiles for GPUs that are described, not present: a compiler plugin and an assembler suffice. They live in an
environment of their own (`make setup-gpu-compile`), since in the main one the plugin makes every command look for CUDA, and
each target gets a process of its own, since the compiler keeps the first architecture that it meets and may abort.
`call` runs a function there; `devices` are the devices that it can put into a mesh."""

import dataclasses
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel import errors
from parallel.errors import CheckError, UserError


class CompilerError(UserError):
    """The compiler failed, and this is what it said. Exit code 1."""

    code = 1


ROOT = Path(__file__).parents[1]
ENVIRONMENT = ".venv-gpu-compile"
PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
CUDA = "cuda/nvidia/cu13"  # the assembler and the device library, in a folder that the compiler does not find by itself
PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of GPU, as its driver reports it.

    device: its name. capability: compute capability, major and minor. cores: streaming multiprocessors. lanes: fp32 units of
    each. memory_bytes, bandwidth: of the device memory (bytes/s). shared, shared_block: bytes of shared memory of a core, and
    of a block that asks for the most. links: NVLink links."""

    device: str
    capability: tuple[int, int]
    cores: int
    lanes: int
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    clock_ghz: float
    shared: int
    shared_block: int
    links: int

    def proto(self) -> str:
        """XLA's GpuTargetConfigProto as text."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
              shared_memory_per_block: 49152  shared_memory_per_core: {self.shared}
              shared_memory_per_block_optin: {self.shared_block}
              core_count: {self.cores}  fpus_per_core: {self.lanes}
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
              registers_per_core_limit: 65536  registers_per_block_limit: 65536
              memory_bandwidth: {self.bandwidth}  l2_cache_size: {self.l2_bytes}  clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory_bytes}
              cuda_compute_capability {{
                major: {major}  minor: {minor}  feature_extension: {"ACCELERATED_FEATURES" if major >= 9 else "NONE"}
              }}
              device_vendor: "NVIDIA Corporation"  device_address_bits: 64  name: "{self.device}"
              driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
              dnn_version: "9.10.0"  device_interconnect_info {{ active_links: {self.links} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9  minor: 10 }}
            device_description_str: "{self.device}"
            """


def _ampere(device: str, memory_bytes: int, bandwidth: int) -> Target:
    return Target(device, (8, 0), 108, 64, memory_bytes, bandwidth, 41943040, 1.41, 167936, 166912, 12)


def _hopper(device: str, memory_bytes: int, bandwidth: int) -> Target:
    return Target(device, (9, 0), 132, 128, memory_bytes, bandwidth, 52428800, 1.98, 233472, 232448, 18)


TARGETS = {
    "a100-40g": _ampere("NVIDIA A100-SXM4-40GB", 42331013120, 1555200000000),
    "a100-80g": _ampere("NVIDIA A100-SXM4-80GB", 85100068864, 2039040000000),
    "h100": _hopper("NVIDIA H100 80GB HBM3", 84942979072, 3352320000000),
    "h200": _hopper("NVIDIA H200", 151397597184, 4800000000000),
    "b200": Target(
        "NVIDIA B200", (10, 0), 148, 128, 191514411008, 7672320000000, 132644864, 1.965, 233472, 232448, 18
    ),
}  # fmt: skip


def find_target(name: str) -> Target:
    """The target of that name. Raises UserError."""
    if name not in TARGETS:
        raise UserError(f"{name} is not a GPU to compile for: there are {', '.join(TARGETS)}")
    return TARGETS[name]


# ----------------------------------------------------------------------------------------------- in the calling process
def environment() -> Path:
    """The interpreter of the compile environment that belongs to the running one. Raises UserError when there is none, or
    when its plugin is of another version of jax."""
    here = Path(sys.prefix).name
    suffix = here.removeprefix(".venv") if here.startswith(".venv-") else ""
    make = "make setup-gpu-compile" + (f" PYTHON={suffix[1:]}" if suffix else "")
    folder = ROOT / (ENVIRONMENT + suffix)
    python = folder / "bin" / "python"
    if not python.is_file():
        raise UserError(f"compiling for GPUs needs the environment {folder.name}: {make} makes it (250 MB of downloads)")
    site = _site(folder)
    found = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions(path=[str(site)])}
    jax = importlib.metadata.version("jax")
    for package in PACKAGES:
        if found.get(package) != jax:
            held = f"{package} {found[package]}" if package in found else f"no {package}"
            raise UserError(f"the environment {folder.name} has {held} and jax here is {jax}: {make} brings it up to date")
    if not (folder / CUDA / "bin" / "ptxas").is_file():
        raise UserError(f"the environment {folder.name} has no assembler in {CUDA}: {make} brings it up to date")
    return python


def _site(folder: Path) -> Path:
    return folder / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"


def call(
    target: str,
    function: str,
    document: Any,
    progress: Callable[[float], None] | None = None,
    cpus: int = 1,
) -> Any:
    """function(target, document) in a child process of the compile environment; JSON goes in and comes out.

    function: "package.module:name". progress: called about once a second with the seconds so far. cpus: CPU devices of
    the child. Raises UserError and CheckError as the function does, UserError when the environment is missing, and
    CompilerError, with the end of what the child wrote, when it failed otherwise."""
    find_target(target)
    python = environment()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-compile-") as folder:
        given, answer, log = (Path(folder) / name for name in ("given.json", "answer.json", "log"))
        given.write_text(json.dumps(document))
        variables = _variables(python.parents[1], Path(folder), cpus)
        with log.open("wb") as said:
            code = "from parallel import deviceless; deviceless._child()"
            child = subprocess.Popen(
                [python, "-c", code, target, function, given, answer],
                stdin=subprocess.PIPE,  # stays open and empty: the child ends when it closes, however this process ends
                stdout=said,
                stderr=said,
                env=variables,
            )
            try:
                while child.poll() is None:
                    try:
                        child.wait(1)
                    except subprocess.TimeoutExpired:
                        if progress:
                            progress(time.monotonic() - start)
            finally:
                child.kill()
                child.communicate()
        if answer.is_file():
            return _unpacked(json.loads(answer.read_text()))
        end = log.read_text(errors="replace").strip().splitlines()[-15:]
        why = f"was ended by signal {-child.returncode}" if child.returncode < 0 else f"failed with code {child.returncode}"
        memory = " (9 is what a system without memory sends)" if child.returncode == -9 else ""
        raise CompilerError("\n".join([f"compiling for {target} {why}{memory}", *end]))


def _unpacked(answer: dict) -> Any:
    if "raised" in answer:
        raise getattr(errors, answer["raised"], CompilerError)(answer["message"])
    return answer["result"]


REPORTS = "CONVOY_ASSEMBLER_REPORTS"
ASSEMBLER = """#!/bin/sh
# The assembler, asked to say what registers each kernel uses.
report="$REPORTS/$$.ptxas"
"PTXAS" -v "$@" 2> "$report"
code=$?
cat "$report" >&2
exit $code
"""


def _variables(environment: Path, folder: Path, cpus: int) -> dict[str, str]:
    """The child's variables: no accelerator of this machine is touched, and the assembler is the environment's own."""
    assembler = folder / "bin" / "ptxas"
    assembler.parent.mkdir()
    cuda = environment / CUDA
    (folder / "nvvm").symlink_to(cuda / "nvvm")
    assembler.with_name("nvlink").symlink_to(cuda / "bin" / "nvlink")
    assembler.write_text(ASSEMBLER.replace("PTXAS", str(cuda / "bin" / "ptxas")).replace("REPORTS", REPORTS))
    assembler.chmod(0o755)
    flags = [f"--xla_gpu_cuda_data_dir={folder}", f"--xla_force_host_platform_device_count={cpus}", *_asked()]
    first = lambda path, name: os.pathsep.join([str(path), *filter(None, [os.environ.get(name)])])
    found = {name: first(path, name) for name, path in dict(PATH=assembler.parent, PYTHONPATH=ROOT).items()}
    mine = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "TF_CPP_MIN_LOG_LEVEL": "2", REPORTS: str(folder)}
    return dict(os.environ) | found | mine


def _asked() -> list[str]:
    """The flags for GPUs that the user's own XLA_FLAGS hold."""
    words = os.environ.get("XLA_FLAGS", "").split()
    return [w for w in words if w.startswith(("--xla_gpu", "--xla_dump")) and "cuda_data_dir" not in w]


# ---------------------------------------------------------------------------------------------------- in the child
def _child() -> None:
    target, function, given, answer = sys.argv[1:]

    def end_with_parent():
        sys.stdin.buffer.read()
        shutil.rmtree(Path(answer).parent, ignore_errors=True)  # a parent that was killed could not
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    module, _, name = function.partition(":")
    try:
        document = json.loads(Path(given).read_text())
        out = dict(result=getattr(importlib.import_module(module), name)(target, document))
    except (UserError, CheckError) as error:
        out = dict(raised=type(error).__name__, message=str(error))
    except Exception as error:
        traceback.print_exc()
        out = dict(raised=type(error).__name__, message="".join(traceback.format_exception(error)).strip())
    part = Path(answer).with_suffix(".part")
    part.write_text(json.dumps(out))
    part.rename(answer)
    os._exit(0)  # nothing is left to tidy, and the compiler takes long over it


def topology(count: int, per_host: int = PER_HOST) -> str:
    """slices x hosts x GPUs of a host, as JAX names a topology. Raises UserError when the GPUs do not fill their hosts."""
    hosts, rest = divmod(count, per_host)
    if count < 1 or (hosts and rest):
        raise UserError(f"{count} GPUs do not fill hosts of {per_host}: take fewer than {per_host}, or a multiple of it")
    return f"1x{hosts}x{per_host}" if hosts else f"1x1x{count}"


def devices(target: str, count: int, per_host: int = PER_HOST) -> list:
    """`count` devices of a target, for a mesh to compile for. Only in a process that `call` started. Raises UserError."""
    from jax.experimental import topologies

    shape, config = topology(count, per_host), find_target(target).proto()
    return topologies.get_topology_desc(platform="cuda", topology_name="", target_config=config, topology=shape).devices


def asked_flags() -> dict[str, str]:
    """The flags for GPUs that the user's own XLA_FLAGS hold, by name."""
    return dict(word.removeprefix("--").partition("=")[::2] for word in _asked())


def spills() -> list[dict[str, Any]]:
    """Kernels of what this process has compiled that spill registers: {kernel, bytes} (stores and loads), the most first."""
    worst: dict[str, int] = {}
    for report in sorted(Path(os.environ[REPORTS]).glob("*.ptxas")):
        name = ""
        for line in report.read_text(errors="replace").splitlines():
            if found := re.search(r"(?:Function properties for|Compiling entry function) '?([\w.$]+)", line):
                name = found[1]
            if found := re.search(r"frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
                worst[name] = max(int(found[1]) + int(found[2]), worst.get(name, 0))
    return [dict(kernel=name, bytes=size) for name, size in sorted(worst.items(), key=lambda row: -row[1]) if size]
