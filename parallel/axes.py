"""The names of the six mesh axes, the outermost first, and what each group of them is for."""

AXES = ("replica", "data", "pipe", "context", "expert", "tensor")
BATCH_AXES = ("replica", "data", "expert")  # the rows of a batch are split over these
SUM_AXES = ("replica", "data", "context", "expert")  # a gradient is summed over these unless its parameter adds to them
MANUAL_AXES = AXES[:-1]  # collectives over these are written in parallel/; `tensor` belongs to the compiler
