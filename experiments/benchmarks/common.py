"""What several benchmarks need: a batch without text, and the time that a process computes."""

import resource

import numpy as np


def random_batch(rows: int, length: int, vocab: int, documents: int = 1) -> dict[str, np.ndarray]:
    """A global batch of random tokens, whose rows hold so many documents of equal length."""
    tokens, targets = np.random.default_rng(0).integers(0, vocab, (2, rows, length)).astype(np.int32)
    place = np.arange(length, dtype=np.int32)
    return dict(
        tokens=tokens,
        targets=targets,
        segments=np.tile(place * documents // length, (rows, 1)),
        positions=np.tile(place % (length // documents), (rows, 1)),
        weights=np.ones((rows, length), np.float32),
        example=np.arange(rows, dtype=np.int32),
    )


def cpu_seconds() -> float:
    """Seconds that all threads of this process have computed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
