"""The configuration of a run: one frozen dataclass per subject; defaults, meanings and ranges stand here only.

`resolved` fills what is derived (zeros and -1); `validate` refuses impossible values before anything is compiled.
"""

import dataclasses
import math
from dataclasses import dataclass

from llm.data.sources import parse_sources
from llm.fields import check_fields, listed, option
from parallel.errors import UserError
from parallel.schedule.registry import check_executable

ATTENTION = ("auto", "reference", "chunked", "pallas", "mosaic", "cudnn", "tokamax")

TOKENIZER = "tokenizer.json"  # of a run's folder


@dataclass(frozen=True)
class ModelConfig:
    """The decoder-only transformer."""

    layers: int = option(4, "transformer layers", low=1)
    width: int = option(128, "size of the residual stream", low=1)
    heads: int = option(4, "attention heads (queries)", low=1)
    kv_heads: int = option(0, "heads of keys and values; 0: as many as heads", low=0)
    head_dim: int = option(0, "size of one head; 0: width / heads", low=0)
    ffn: int = option(0, "hidden size of the MLP; 0: 4 width (gelu), 8/3 width in multiples of 8 (swiglu)", low=0)
    vocab: int = option(1024, "vocabulary size", low=2)
    tied: bool = option(True, "use the embedding as the output head")
    dropout: float = option(0.0, "dropout rate of the residual branches and the embedding", low=0, below=1)
    norm: str = option("rms", "normalisation", ("rms", "layer"))
    norm_eps: float = option(1e-5, "added to the variance in a norm", low=0)
    norm_offset: float = option(0.0, "added to the learned scale of a norm (1 in Gemma)")
    norm_place: str = option("pre", "norm before each residual branch, after it or both", ("pre", "post", "both"))
    qk_norm: str = option("none", "norm of queries and keys: of each head, or of all together", ("none", "head", "whole"))
    positions: str = option("rotary", "how positions enter", ("rotary", "learned"))
    rope_theta: float = option(10000.0, "base of the rotary wavelengths", low=1)
    rope_theta_window: float = option(0.0, "base in layers with a window, never scaled; 0: as in the others", low=0)
    rope_scaling: str = option("none", "how long texts stretch the rotary wavelengths", ("none", "linear", "llama3"))
    rope_factor: float = option(1.0, "rope_scaling: by how much", low=1)
    rope_low: float = option(1.0, "llama3: waves that fit fewer times into rope_original are stretched", low=0)
    rope_high: float = option(4.0, "llama3: waves that fit more times are left alone", low=0)
    rope_original: int = option(8192, "llama3: length of the texts before the stretch", low=1)
    max_length: int = option(1024, "positions the model is made for; a limit only when they are learned", low=1)
    window: int = option(0, "positions that a query sees, its own included; 0: all before it", low=0)
    window_pattern: tuple[int, ...] = option((), "1: this layer has the window, 0: not; repeated over the layers; empty: all")
    query_scalar: float = option(0.0, "scores are divided by its square root; 0: head_dim", low=0)
    attention_softcap: float = option(0.0, "scores s become c tanh(s / c); 0: no cap", low=0)
    logit_softcap: float = option(0.0, "the same of the output logits", low=0)
    scaled_embedding: bool = option(False, "multiply token embeddings by the square root of width")
    mlp: str = option(
        "swiglu",
        "kind of MLP; gated: swiglu, geglu; gelu by tanh or, -erf, exact",
        ("swiglu", "gelu", "geglu", "gelu-erf", "geglu-erf"),
    )
    bias: bool = option(False, "biases in the linear layers")
    qkv_bias: bool = option(False, "biases in query, key and value alone")
    z_loss: float = option(0.0, "weight of the squared log-partition in the loss", low=0)

    def resolved(self) -> "ModelConfig":
        """The same model with kv_heads, head_dim and ffn filled in."""
        ffn = -(-8 * self.width // 24) * 8 if self.gated else 4 * self.width
        return dataclasses.replace(
            self,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or self.width // max(self.heads, 1),
            ffn=self.ffn or ffn,
        )

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, a third matrix."""
        return "glu" in self.mlp

    @property
    def windowed(self) -> tuple[bool, ...]:
        """For each layer, whether it has the window."""
        pattern = self.window_pattern or (1,)
        return tuple(bool(self.window and pattern[i % len(pattern)]) for i in range(self.layers))


@dataclass(frozen=True)
class MeshConfig:
    """Devices per axis, outermost first."""

    replica: int = option(1, "plain data parallelism")
    data: int = option(1, "data parallelism that shares the optimiser state (with zero=1)")
    pipe: int = option(1, "pipeline stages")
    context: int = option(1, "context parallelism (1 for now)")
    expert: int = option(1, "expert parallelism (1 for now)")
    tensor: int = option(1, "tensor parallelism; -1 in one axis takes the devices that are left")

    def sizes(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return dataclasses.asdict(self)

    def resolved(self, devices: int | None) -> "MeshConfig":
        """The mesh with its -1 axis, if any, replaced by what is left of `devices`. Raises UserError."""
        sizes = self.sizes()
        free = [axis for axis, size in sizes.items() if size == -1]
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise UserError(f"mesh.{axis}={size}: an axis is a positive number, or -1 for the devices that are left")
        if not free:
            return self
        if len(free) > 1:
            raise UserError(f"mesh.{free[0]} and mesh.{free[1]} are both -1: only one can take the devices that are left")
        rest = math.prod(size for size in sizes.values() if size != -1)
        if devices is None:
            raise UserError(
                f"mesh.{free[0]}=-1 takes the devices that are left, and nothing says how many there are: "
                f"add --devices=N with N a multiple of {rest}"
            )
        if devices % rest:
            raise UserError(
                f"mesh.{free[0]}=-1 with {devices} devices: the other axes multiply to {rest}, which does not divide {devices} "
                "(on a CPU, --devices=N makes N virtual ones)"
            )
        return dataclasses.replace(self, **{free[0]: devices // rest})

    @property
    def product(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes().values())

    @property
    def batch_shards(self) -> int:
        """Over how many groups of devices the rows of a batch are split."""
        return self.replica * self.data * self.expert


@dataclass(frozen=True)
class PipelineConfig:
    """How layers and microbatches are scheduled."""

    schedule: str = option("interleaved", "name of the schedule (python main.py schedule --list), or a CSV file")
    chunks: int = option(0, "model chunks per pipeline rank; 0: the schedule's own", low=0)
    group: int = option(0, "microbatches per round of an interleaved schedule; 0: the schedule's own", low=0)
    microbatches: int = option(0, "per step; 0: 2 pipe (1 without a pipeline), fewer if the rows ask for it", low=0)
    idle: str = option("auto", "idle slots; auto: skip on a CPU, compute on a GPU", ("auto", "skip", "compute"))
    remat: str = option("selective", "what the backward computes again", ("none", "selective", "full"))
    unroll: str = option("auto", "layers of a chunk one by one, not as a loop; auto: if few, on a GPU", ("auto", "yes", "no"))
    layers_per_chunk: tuple[int, ...] = option((), "layers of each chunk in the order of the model; empty: even")
    memory: float = option(0.0, "microbatches of a full rank that a rank may hold; 0: any, or the schedule's own", low=0)
    backward: str = option("auto", "input and weight gradients in one action or two", ("auto", "whole", "split"))


@dataclass(frozen=True)
class BatchConfig:
    """The global batch."""

    rows: int = option(16, "rows of the global batch", low=1)
    length: int = option(128, "tokens per row", low=2)


@dataclass(frozen=True)
class DataConfig:
    """The text."""

    paths: tuple[str, ...] = option((), "text and JSONL files, folders or glob patterns, or one tokenised folder")
    mixture: tuple[str, ...] = option((), "instead of paths, sources drawn by weight: NAME=PATH@WEIGHT,NAME=PATH@WEIGHT")
    held_out: str = option("0.1", "documents kept for evaluation: a count, a fraction or patterns on names; empty: none")
    tokenizer: str = option("", "tokenizer.json to use; empty: a tokenised folder's, or train one of model.vocab entries")


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser and learning rate."""

    name: str = option("adamw", "optimiser", ("adamw", "muon", "sgd"))
    lr: float = option(1e-3, "peak learning rate", low=0)
    weight_decay: float = option(0.1, "decay of the weight matrices (not of norms, biases, embeddings)", low=0)
    clip: float = option(1.0, "largest global gradient norm; 0: no clipping", low=0)
    warmup: int = option(20, "steps of linear warm-up", low=0)
    decay: str = option("cosine", "after the warm-up", ("cosine", "wsd", "constant"))
    final: float = option(0.1, "learning rate of the last step as a share of the peak", low=0)
    stable: float = option(0.8, "wsd: share of the steps before the decay", low=0)
    b1: float = option(0.9, "Adam: decay of the first moment", low=0, below=1)
    b2: float = option(0.95, "Adam: decay of the second moment", low=0, below=1)
    eps: float = option(1e-8, "Adam: added to the denominator", low=0)
    momentum: float = option(0.95, "momentum of muon and sgd", low=0, below=1)


@dataclass(frozen=True)
class TrainConfig:
    """Length and precision of the run."""

    steps: int = option(100, "updates of the run", low=1)
    seed: int = option(0, "seed of initialisation, data order and dropout", low=0)
    dtype: str = option("float32", "compute precision; parameters and sums stay float32", ("float32", "bfloat16"))
    attention: str = option("auto", "attention kernel (docs/attention.md); auto: the fastest that can do it", ATTENTION)
    attention_strict: bool = option(False, "refuse a slow kernel that attention=auto would fall back to")
    spike: float = option(0.0, "skip updates with a gradient norm above this multiple of the usual one; 0: none", low=0)
    rollback: int = option(10, "skipped updates in a row that lead back to a checkpoint and past their text; 0: never", low=0)
    watchdog: float = option(-1.0, "seconds until a step hangs (exit 70); 0: never; -1: 20 usual steps, at least 300", low=-1)
    samples_every: int = option(0, "write a sample of text every N steps; 0: never", low=0)
    sample_prompt: str = option("The", "start of the samples")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving."""

    every: int = option(100, "save every N steps, and at the end; 0: only at the end", low=0)
    keep: int = option(2, "newest checkpoints to keep", low=1)
    best: int = option(0, "checkpoints with the lowest metric to keep besides", low=0)
    metric: str = option("eval_loss", "what the best are best at; of a step that has none, never", ("eval_loss", "loss"))


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation while training."""

    every: int = option(0, "held-out loss every N steps; 0: never", low=0)


@dataclass(frozen=True)
class Config:
    """A run."""

    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    batch: BatchConfig = BatchConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    zero: int = option(1, "ZeRO stage over mesh.data: 1 shares out the optimiser state", (0, 1))
    plan: str = option("", "auto: mesh and pipeline as the planner chooses for the devices; empty: as configured", ("", "auto"))
    init_from: str = option("", "RUN or RUN:STEP: begin with the parameters and the tokenizer of another run's checkpoint")
    profile: str = option("", "START:STOP writes a profiler trace of these steps; empty: off")
    wandb: str = option("", "Weights & Biases project to log to; empty: off")

    def resolved(self, device_count: int | None = None) -> "Config":
        """The same run with every derived number filled in (mesh -1, head sizes, microbatches).

        What depends on the machine or the schedule (idle=auto, chunks, group) stays as asked.
        """
        mesh = self.mesh.resolved(device_count)
        wanted = self.pipeline.microbatches or (2 * mesh.pipe if mesh.pipe > 1 else 1)
        if not self.pipeline.microbatches and self.batch.rows % mesh.batch_shards == 0:
            shard = self.batch.rows // mesh.batch_shards
            wanted = max((m for m in range(1, wanted + 1) if shard % m == 0), default=1)
        return dataclasses.replace(
            self,
            model=self.model.resolved(),
            data=dataclasses.replace(self.data, tokenizer=self.tokenizer()),
            mesh=mesh,
            pipeline=dataclasses.replace(self.pipeline, microbatches=wanted),
        )

    def tokenizer(self) -> str:
        """The tokenizer.json to use: data.tokenizer, or that of the run in init_from; empty: one is trained."""
        source = self.init_source()
        return self.data.tokenizer or (f"{source[0]}/{TOKENIZER}" if source else "")

    def init_source(self) -> tuple[str, int | None] | None:
        """The folder and the step (None: the newest) of init_from, or None without it."""
        run, _, step = self.init_from.rpartition(":")
        if run and step.isascii() and step.isdecimal():
            return run.rstrip("/"), int(step)
        return (self.init_from.rstrip("/"), None) if self.init_from else None

    def profile_range(self) -> tuple[int, int] | None:
        """First and last step of the profiler trace, or None. Raises UserError."""
        if not self.profile:
            return None
        start, colon, stop = self.profile.partition(":")
        if not (colon and start.isdigit() and stop.isdigit() and 0 < int(start) <= int(stop)):
            raise UserError(f"profile={self.profile}: expected START:STOP, the first and last step to trace, such as 10:12")
        return int(start), int(stop)

    def validate(self, device_count: int | None = None) -> "Config":
        """Check everything that can be known before compiling and return the resolved configuration.

        device_count: how many devices there are; None skips that check. Raises UserError, naming what would fit.
        """
        check_fields(self)
        config = self.resolved(device_count)
        parse_sources(config.data.paths, config.data.mixture)
        model, mesh, rows = config.model, config.mesh, config.batch.rows
        for axis in ("context", "expert"):
            if getattr(mesh, axis) != 1:
                raise UserError(f"mesh.{axis}={getattr(mesh, axis)} is not possible yet: set mesh.{axis}=1")
        if device_count is not None and mesh.product != device_count:
            asked = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes().items() if size > 1) or "1"
            raise UserError(
                f"the mesh ({asked}) needs {mesh.product} devices and there are {device_count}: "
                "change an axis (or set one to -1), or the number of devices"
            )
        if not self.model.head_dim and model.width % model.heads:
            raise UserError(
                f"model.width={model.width} is not divisible by model.heads={model.heads}: "
                f"heads that fit are {listed(_divisors(model.width))}, or set model.head_dim"
            )
        if model.heads % model.kv_heads:
            raise UserError(
                f"model.heads={model.heads} is not divisible by model.kv_heads={model.kv_heads}: "
                f"kv_heads that fit are {listed(_divisors(model.heads))}"
            )
        if model.positions == "rotary" and model.head_dim % 2:
            raise UserError(f"model.head_dim={model.head_dim} is odd: rotary positions turn pairs, use an even head_dim")
        if set(model.window_pattern) - {0, 1} or (model.window_pattern and not model.window):
            raise UserError(
                f"model.window_pattern={listed(model.window_pattern)} with model.window={model.window}: "
                "the pattern is of 0 and 1, such as 1,1,0, and needs a window"
            )
        if model.rope_theta_window and not any(model.windowed):
            raise UserError(f"model.rope_theta_window={model.rope_theta_window} is of layers with a window: set model.window")
        if model.rope_scaling == "llama3" and model.rope_low >= model.rope_high:
            raise UserError(f"model.rope_low={model.rope_low} must be below model.rope_high={model.rope_high}")
        if model.positions == "learned" and config.batch.length > model.max_length:
            raise UserError(
                f"batch.length={config.batch.length} is longer than the {model.max_length} learned positions of "
                "model.max_length: shorten the rows or raise model.max_length"
            )
        if model.heads % mesh.tensor:
            raise UserError(
                f"model.heads={model.heads} cannot be split over mesh.tensor={mesh.tensor}: "
                f"tensor sizes that fit are {listed(_divisors(model.heads))}"
            )
        unit = mesh.batch_shards * config.pipeline.microbatches
        if rows % unit:
            raise UserError(
                f"batch.rows={rows} is not divisible by replica x data x expert x microbatches = "
                f"{mesh.replica} x {mesh.data} x {mesh.expert} x {config.pipeline.microbatches} = {unit}: "
                f"rows that fit are {max(rows // unit, 1) * unit} or {(rows // unit + 1 + (rows < unit)) * unit}"
            )
        _check_layers(config)
        traced = config.profile_range()
        if traced and traced[1] > config.train.steps:
            raise UserError(f"profile={config.profile} goes past the last step, train.steps={config.train.steps}")
        if 0 < config.train.spike <= 1:
            raise UserError(f"train.spike={config.train.spike} would skip usual updates: a multiple above 1, or 0 for no limit")
        if config.train.samples_every and not config.train.sample_prompt:
            raise UserError("train.sample_prompt is empty: a sample continues the start of a text")
        return config


def _check_layers(config: Config) -> None:
    layers, counts, pipe = config.model.layers, config.pipeline.layers_per_chunk, config.mesh.pipe
    if min(counts, default=0) < 0:
        raise UserError(f"pipeline.layers_per_chunk={listed(counts)}: a chunk has at least 0 layers")
    if counts and sum(counts) != layers:
        raise UserError(
            f"pipeline.layers_per_chunk={listed(counts)} adds up to {sum(counts)} and model.layers={layers}: "
            "every layer must be in exactly one chunk"
        )
    chunks = config.pipeline.chunks
    if counts and (len(counts) % pipe or (chunks and len(counts) != pipe * chunks)):
        wanted = f"pipe x chunks = {pipe * chunks}" if chunks else f"a multiple of mesh.pipe={pipe}"
        raise UserError(f"pipeline.layers_per_chunk names {len(counts)} chunks: there must be {wanted}")
    p = config.pipeline
    check_executable(p.schedule, pipe, p.microbatches, chunks or len(counts) // pipe, p.group, p.memory)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
