"""Facts about hardware."""

PEAK_TFLOPS = {
    # name in jax's device_kind: (bfloat16, float32 as tensor cores run it), dense, from NVIDIA's data sheets
    "GB200": (2500, 1250),
    "B200": (2250, 1125),
    "H200": (989, 494),
    "H100 NVL": (835, 417),
    "H100 PCIe": (756, 378),
    "H100": (989, 494),
    "A100": (312, 156),
}
"""Dense peak of one GPU in TFLOP/s; the first name found in the device kind counts, so longer names stand first."""


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device for `dtype` (float32 or bfloat16), or None when it is not known, as on a CPU."""
    for name, (bfloat16, float32) in PEAK_TFLOPS.items():
        if name in device_kind:
            return 1e12 * (bfloat16 if dtype == "bfloat16" else float32)
    return None
