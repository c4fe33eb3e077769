"""What one training step costs: time with its 90 % interval, bubble, exposed communication and memory.

    step = pipeline(schedule table, F, B, W of every stage) + exposed gradient reduction + optimiser + fixed time,
    times the noise of many nodes.

Each term is one function; `docs/planner.md` describes them.
"""

from __future__ import annotations

import dataclasses
import math

from parallel import bubble, communication
from parallel.cluster import Cluster
from parallel.frameworks import Framework
from parallel.memory import rank_memory
from parallel.operator_time import attention, matmul, memory
from parallel.operators import Operators

GIB = 2**30
RING = 1.15
"""How much longer attention's kernels take in a causal ring than in one piece (half-blocks of the two halves of a row)."""

FAR = 16
"""Nodes beyond which distance makes no difference: another part of the fabric."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a step is spread over GPUs.

    data: all data-parallel copies. expert: GPUs, of data x tensor, over which a layer's experts are divided. rows: sequences
    of a microbatch. zero: 0, 1 (optimiser state shared out), 2 (gradients too) or 3 (parameters too). remat: none, selective
    (attention's core; 'half': every other layer's or op's) or full. ends: layers that the first and last stage have fewer.
    """

    tensor: int = 1
    pipe: int = 1
    data: int = 1
    context: int = 1
    rows: int = 1
    microbatches: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    remat: str = "none"
    ends: int = 0
    expert: int = 1

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.tensor * self.pipe * self.data * self.context


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A predicted step. parts: seconds by term. exposed: seconds of communication that nothing hides, by axis."""

    layout: Layout
    step_time_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    bubble: float
    exposed_s: dict[str, float]
    parts: dict[str, float]
    memory_per_rank_gib: tuple[float, ...]
    memory_parts_gib: tuple[dict[str, float], ...]

    @property
    def peak_memory_gib(self) -> float:
        """Of the fullest GPU."""
        return max(self.memory_per_rank_gib)


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and one microbatch on one GPU: F, B (with what is computed again) and W; of these, exposed
    tensor, context and expert communication, and memory-bound passes."""

    forward: float
    backward: float
    weight: float
    tensor: float
    context: float
    expert: float
    passes: float


def layer_time(model: Operators, length: int, layout: Layout, cluster: Cluster, f: Framework, precision: str) -> LayerTime:
    """F, B and W of one layer from its operators' shapes."""
    gpu, t = cluster.gpu, layout.tensor
    tokens = layout.rows * length / layout.context
    gemm = [0.0, 0.0, 0.0]
    for op in model.matmuls:
        n, k = op.n / (t if op.split == "n" else 1), op.k / (t if op.split == "k" else 1)
        rows = tokens if op.split else tokens / t
        gemm[0] += op.share * matmul(rows, n, k, gpu, precision, f.matmul)
        gemm[1] += op.share * matmul(rows, k, n, gpu, precision, f.matmul)
        gemm[2] += op.share * matmul(k, n, rows, gpu, precision, f.matmul)
    queries = length / layout.context
    core = attention(layout.rows, queries, length, model.heads / t, model.head_dim, gpu, f.flash, f.causal)
    share = lambda p: 1 / t if p.split or f.sequence_parallel else 1.0
    moved = sum((p.fused if f.fused else p.plain) * share(p) for p in model.passes)
    if precision != "bf16":  # inputs of the matmuls are cast and transposed, with their largest values sought
        moved += sum(op.share * f.casts * (op.k / t if op.split == "k" else op.k) for op in model.matmuls)
    ep = 0.0
    if model.experts:
        own = experts_time(model, tokens / t, layout, cluster, f, precision)
        gemm, ep = [a + b for a, b in zip(gemm, own[:3])], own[3]
        if precision != "bf16":
            moved += f.casts * model.experts.share * model.experts.active * (model.width + model.experts.ffn) / t
    passes = memory(moved * tokens, gpu, f.passes)
    # two all-reduces of the activations each way, or a gather and a scatter in the place of each
    tp = 2 * communication.all_reduce(2 * tokens * model.width, t, 1, cluster) * (1 - f.tp_hidden)
    cp = 0.0
    if layout.context > 1:
        # a ring works in blocks: smaller kernels, and partial results that are merged in float32 in every round
        merged = 12 * tokens * model.heads / t * model.head_dim * (layout.context - 1)
        core = RING * core + memory(merged, gpu, f.passes)
        keys = 2 * 2 * tokens * model.kv_heads * model.head_dim / t * (layout.context - 1)
        cp = communication.message(keys, t, cluster)
        cp = max(0.15 * cp, cp - core)
    tp += ep  # both stand in the way of the same computation
    forward = gemm[0] + core + passes
    again = 0.0
    if layout.remat == "full":
        again = forward + tp + cp
    elif layout.remat == "half":
        again = 0.5 * (forward + tp)
    elif layout.remat == "selective":  # attention's core; the executor: norms, activation and the inputs of attention
        again = 0.3 * gemm[0] + passes if f.ticks else 0.0 if f.flash else core
    backward = gemm[1] + (2.8 if f.flash else 2.0) * core + 1.6 * passes
    host = 1e-3 * f.host_ms
    least = lambda gpu_time, launches: (gpu_time**4 + (launches * host) ** 4) ** 0.25  # the slower of the two, smoothly
    # the launches of a backward are those of B and W together
    F = least(forward + tp + cp, 1.0)
    if layout.microbatches > 1:  # a weight gradient is read, added to and written once a microbatch
        gradient = model.layer_parameters / t + model.expert_parameters / layout.expert
        gemm[2] += memory(2.5 * f.gradient_bytes * gradient, gpu)
    if f.frozen:
        gemm[2] = 0.0
    whole = backward + gemm[2] + tp + 2 * cp + again
    stretched = least(whole, 2.0 if layout.remat == "full" else 1.4 if layout.remat == "half" else 1.2)
    W = gemm[2] * stretched / whole
    again_tp = {"full": 1.0, "half": 0.5}.get(layout.remat, 0.0)
    rounds = 2 + again_tp
    return LayerTime(F, stretched - W, W, (tp - ep) * rounds, cp * (1 + rounds), ep * rounds, passes * (2.6 + again_tp))


def experts_time(
    model: Operators, tokens: float, layout: Layout, cluster: Cluster, f: Framework, precision: str
) -> tuple[float, float, float, float]:
    """Of the routed experts of a mean layer: F, B and W of their grouped matmuls, and the exchange of one direction.

    tokens: that this GPU owns. Each is sent to `active` experts and back: two all-to-alls over the expert group, whose GPUs are
    neighbours. An expert's tokens fill whole tiles of 128 rows.
    """
    e, gpu = model.experts, cluster.gpu
    mine = max(1.0, e.count / layout.expert)
    rows = tokens * e.active * e.busiest
    each = rows / mine
    padded = mine * 128 * math.ceil(each / 128)
    out = [0.0, 0.0, 0.0]
    for n, k in ((e.up, model.width), (model.width, e.ffn)):
        out[0] += matmul(padded, n, k, gpu, precision, f.matmul)
        out[1] += matmul(padded, k, n, gpu, precision, f.matmul)
        out[2] += matmul(mine * k, n, each, gpu, precision, f.matmul)
    sent = communication.all_to_all(2 * rows * model.width, layout.expert, 1, cluster)
    return *(e.share * x for x in out), 2 * e.share * sent


def head_time(model: Operators, length: int, layout: Layout, cluster: Cluster, f: Framework) -> tuple[float, float, float]:
    """F, B and W of the output head and its loss for one microbatch; bf16 in every recipe, logits in float32."""
    tokens, gpu = layout.rows * length / layout.context, cluster.gpu
    n, k = model.vocab / layout.tensor, model.width
    F = matmul(tokens, n, k, gpu, "bf16", f.matmul) + memory(16 * tokens * n, gpu, f.passes)
    B = matmul(tokens, k, n, gpu, "bf16", f.matmul) + memory(8 * tokens * n, gpu, f.passes)
    return F, B, matmul(k, n, tokens, gpu, "bf16", f.matmul)


def estimate(
    model: Operators,
    length: int,
    layout: Layout,
    cluster: Cluster,
    framework: Framework,
    precision: str = "bf16",
    with_memory: bool = True,
    spread: float = 0.0,
    quick: bool = False,
) -> Estimate:
    """Predict a step.

    spread: log-standard deviation of what the model does not know of this framework (0: a usual one). quick: the pipeline in
    closed form instead of its table, for the executor's interleaved schedule only.
    """
    f, gpu, t = framework, cluster.gpu, layout.tensor
    one = layer_time(model, length, layout, cluster, f, precision)
    head = head_time(model, length, layout, cluster, f)
    tokens = layout.rows * length / layout.context
    lookup = memory(3 * 2 * model.width * tokens, gpu, f.passes)
    embed = (lookup, 0.0, 2 * lookup)
    size = 2 * tokens * model.width / (t if f.scatter or f.sequence_parallel else 1)
    hop = communication.message(size, t * layout.context * layout.data, cluster) if layout.pipe > 1 else 0.0
    costs = (one.forward, one.backward, one.weight)
    if f.ticks:  # a message has the whole next slot to arrive
        blocking, delay = 0.0, max(0.0, hop - one.forward * model.layers / layout.pipe / layout.chunks)
    else:
        blocking, delay = hop * (1 - f.pp_hidden), hop * f.pp_hidden
    whole = not f.ticks or layout.remat == "full" or layout.pipe == 1  # as the trainer chooses; others never defer W
    if quick:
        ends = tuple(a + b for a, b in zip(embed, head))
        pipe = bubble.quick(layout.pipe, layout.microbatches, layout.chunks, model.layers, costs, ends, whole)
    else:
        pipe = bubble.run(
            layout.schedule, layout.pipe, layout.microbatches, layout.chunks, model.layers, costs, embed, head, layout.ends,
            bubble.Machine(blocking, delay, f.ticks, whole),
        )  # fmt: skip
    pipe = pipe._replace(seconds=pipe.seconds * (1 + crowding(layout, cluster, f)))
    per_rank = model.layers / layout.pipe
    m = layout.microbatches
    messages = 2 * layout.chunks * blocking * m if layout.pipe > 1 else 0.0

    data = reduction(model, pipe.work, layout, cluster, f)
    update = 0.0 if f.frozen else update_time(model, layout, cluster, f, precision)
    nodes = layout.gpus / cluster.gpus_per_node
    noise = 1 + f.noise * math.log2(max(1.0, nodes))
    step = (pipe.seconds + data) * noise + update + 1e-3 * f.step_ms
    exposed = {
        "tensor": one.tensor * per_rank * m,
        "context": one.context * per_rank * m,
        "expert": one.expert * per_rank * m,
        "pipe": messages,
        "data": data,
    }
    compute = pipe.work - exposed["tensor"] - exposed["context"] - exposed["expert"] - messages
    parts = dict(compute=compute, bubble=pipe.seconds - pipe.work, **exposed, optimizer=update, fixed=1e-3 * f.step_ms)
    parts["noise"] = step - sum(parts.values())
    # what is uncertain, in log time: the framework's own spread, and each term by how well such terms are known
    known = dict(
        compute=0.0, bubble=0.12, tensor=0.25, context=0.4, expert=0.4, pipe=0.5, data=0.4, optimizer=0.3, fixed=0.5, noise=1.0
    )
    deviation = math.sqrt((spread or 0.07) ** 2 + sum((known[k] * v / step) ** 2 for k, v in parts.items()))
    low, high = step * math.exp(-1.645 * deviation), step * math.exp(1.645 * deviation)
    per_gpu = layout.data * layout.rows * m * length / step / layout.gpus
    mfu = model.model_flops(per_gpu, length) / (gpu.peak["bf16" if precision not in gpu.peak else precision] * 1e12)
    ranks = rank_memory(model, length, layout, f, pipe, precision) if with_memory else ({"": 0.0},)
    totals = tuple(sum(r.values()) for r in ranks)
    return Estimate(layout, step, low, high, per_gpu, mfu, pipe.bubble, exposed, parts, totals, ranks)


def reduction(model: Operators, work: float, layout: Layout, cluster: Cluster, f: Framework) -> float:
    """Seconds of the gradient reduction, and of ZeRO's parameter gathers, that nothing hides."""
    d, stride = layout.data * layout.context, layout.tensor
    if d == 1 or f.frozen:
        return 0.0
    ends = max(model.embedding_parameters, model.head_parameters)
    mine = (model.layers * model.layer_parameters / layout.pipe + ends / (layout.pipe if f.ticks else 1)) / layout.tensor
    if layout.zero >= 3:  # every layer is gathered for F and for B, and its gradient scattered, in every microbatch
        mine = (model.parameters - model.layers * model.expert_parameters) / layout.pipe / layout.tensor
        mine += model.layers * model.expert_parameters / layout.pipe / layout.expert
        rounds = layout.microbatches if layout.pipe == 1 else 1
        gathers = (2 if layout.remat != "none" or layout.pipe == 1 else 1) * rounds
        each = communication.gather(2 * mine / model.layers * layout.pipe, d, stride, cluster) * model.layers / layout.pipe
        scatter = communication.gather(f.reduced_bytes * mine, d, stride, cluster) * rounds
        whole = gathers * each + scatter
        hidden = min(whole * f.dp_hidden, 0.85 * work) if f.overlap_gather else 0.0
        return whole - hidden
    there, back = f.reduced_bytes, 2.0 if layout.zero else f.reduced_bytes
    whole = communication.gather(there * mine, d, stride, cluster) + communication.gather(back * mine, d, stride, cluster)
    if model.experts:  # an expert has fewer copies, further apart
        copies, own = d * layout.tensor // layout.expert, model.layers * model.expert_parameters / layout.pipe / layout.expert
        whole += communication.gather((there + back) * own, copies, layout.expert, cluster)
    # what hides it is the last microbatch's backward (and, with chunks, most of the pipeline's cool-down)
    room = work / layout.microbatches * 0.66 * (layout.chunks if layout.pipe > 1 else 1)
    return whole - min(whole * f.dp_hidden, room)


def crowding(layout: Layout, cluster: Cluster, f: Framework) -> float:
    """Share of the pipeline's time that is lost where several pipelines share a node's network and messages block.

    A message of a stage that is split over `tensor` comes in parts, from GPUs that share their network with other pipelines
    at other points of their step; the slowest part counts, and the more nodes a stage fills, the longer and the more crowded
    is the way to the next.
    """
    width = layout.tensor * layout.context
    nodes, others = width * layout.data / cluster.domain, cluster.domain / width - 1
    if layout.pipe == 1 or width == 1 or nodes <= 1:
        return 0.0
    return f.crowding * max(0.0, others) * (min(nodes, FAR) - 1)


def update_time(model: Operators, layout: Layout, cluster: Cluster, f: Framework, precision: str) -> float:
    """Seconds of Adam, 30 bytes a parameter through memory (weights, two moments, gradient, the 16-bit copy), and of what all
    of a GPU's parameters need once a step: gradients set to zero, weights cast to fewer bits."""
    d, routed = layout.data * layout.context, model.layers * model.expert_parameters / layout.pipe
    dense = (model.parameters / layout.pipe - routed) / layout.tensor
    mine = dense + routed / layout.expert
    updated = dense / d + routed / layout.tensor / d if layout.zero else mine
    once = f.gradient_bytes + (4.0 if precision != "bf16" else 0.0)
    return memory(30 * updated + once * (updated if layout.zero >= 3 else mine), cluster.gpu, 0.9)
