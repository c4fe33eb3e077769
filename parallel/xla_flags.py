"""Options of the GPU compiler that a training step is compiled with, by `train` and by `compile` alike.

Each is here because the compiled program shows what it does; what showed nothing is left at its default (among them the
latency-hiding scheduler, which is on, and pipelined point-to-point transfers)."""

from typing import NamedTuple


class Flag(NamedTuple):
    """An option of XLA, its value, and what it changes in the compiled program."""

    name: str
    value: bool | int
    reason: str


GPU = (
    Flag(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        4,
        "one collective may be in flight by default, and tensor parallelism takes that place: with more, a transfer along the "
        "pipe lasts through all of a chunk's compute, all-reduces and the joint work on the vocabulary included",
    ),
    Flag(
        "xla_gpu_enable_triton_gemm",
        False,
        "matrix products become calls of cuBLAS instead of Triton kernels whose tiles would have to be timed on the device "
        "(untimed, they are of 16 x 8), and the program compiles in less time",
    ),
)


def options() -> dict[str, bool | int]:
    """The flags as compiler_options of jax.jit."""
    return {flag.name: flag.value for flag in GPU}
