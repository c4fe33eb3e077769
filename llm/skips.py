"""Which updates are skipped, and when so many are skipped in a row that training goes back to an earlier checkpoint.

What is not finite is skipped inside the step. The limit on the gradient norm is a number that the step is given: it
knows the norms up to two updates before, because the metrics of a step are read while the next one runs.
"""

import statistics
from typing import Any

WINDOW = 64  # norms whose median is the usual one
FEWEST = 16  # norms without which nothing is unusual


class Skips:
    """spike: an update is skipped when its gradient norm is above this multiple of the median of the last WINDOW finite
    ones; 0: never. rollback: how many skipped updates in a row are too many; 0: any number is fine.

    saved: what `meta` returned when the checkpoint that training goes on from was saved, or None."""

    def __init__(self, spike: float, rollback: int, saved: dict[str, Any] | None = None):
        self.spike, self.rollback = spike, rollback
        self.norms: list[list] = list((saved or {}).get("norms", []))  # [step, norm]
        self.row: int = (saved or {}).get("row", 0)

    def limit(self, step: int) -> float | None:
        """The largest gradient norm with which update `step` is made; None without `spike`."""
        if not self.spike:
            return None
        known = [norm for at, norm in self.norms if at <= step - 2][-WINDOW:]
        return self.spike * statistics.median(known) if len(known) >= FEWEST else float("inf")

    def note(self, step: int, norm: float, skipped: bool) -> None:
        """Take account of update `step`."""
        self.row = self.row + 1 if skipped else 0
        if self.spike and abs(norm) < float("inf"):
            self.norms = [*self.norms[-WINDOW:], [step, norm]]

    @property
    def too_many(self) -> bool:
        """Whether training has to go back."""
        return bool(self.rollback) and self.row >= self.rollback

    def meta(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as plain JSON."""
        return {"norms": self.norms, "row": self.row}
