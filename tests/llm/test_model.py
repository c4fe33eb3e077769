"""The model: sizes of known shapes, a layer against float64 numpy, packed rows, rotary angles, dropout, tensor parallelism."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig
from llm.model import EMBED_SALT, REMAT, Transformer, dropout
from llm.rotary import frequencies, rotary
from llm.step import build
from parallel.split import count_matmuls, split

GPT2 = ModelConfig(
    layers=2, width=16, heads=4, ffn=24, vocab=29, norm="layer", positions="learned", max_length=16, mlp="gelu", bias=True
)
LLAMA = ModelConfig(layers=2, width=12, heads=4, kv_heads=2, head_dim=4, ffn=20, vocab=29, tied=False)
SHAPES = dict(gpt2=GPT2, llama=LLAMA)


def random_params(config: ModelConfig, seed: int = 0, std: float = 0.3) -> dict:
    """Canonical parameters without any symmetry: no zero bias, no norm scale of 1."""
    r = np.random.default_rng(seed)
    draw = lambda s: (std * r.normal(size=(config.layers,) * s.stacked + s.shape)).astype(np.float32)
    return jax.tree.map(draw, Transformer(config.resolved()).specs())


def layer_of(params: dict, i: int) -> dict:
    return jax.tree.map(lambda a: a[i], params["layers"])


def side_of(tokens, segments=None, positions=None, seed: int = 0) -> dict:
    tokens = np.asarray(tokens, np.int32)
    rows, length = tokens.shape
    keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(jax.random.key(seed), i)))(jnp.arange(rows))
    along = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    segments = np.zeros_like(tokens) if segments is None else np.asarray(segments, np.int32)
    return dict(tokens=tokens, segments=segments, positions=along if positions is None else np.asarray(positions), key=keys)


# ----------------------------------------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            ModelConfig(12, 768, 12, vocab=50257, norm="layer", positions="learned", max_length=1024, mlp="gelu", bias=True),
            124_439_808,  # GPT-2
        ),
        (ModelConfig(32, 4096, 32, ffn=11008, vocab=32000, tied=False), 6_738_415_616),  # Llama 2 7B
        (ModelConfig(32, 4096, 32, kv_heads=8, ffn=14336, vocab=128256, tied=False), 8_030_261_248),  # Llama 3 8B
        (ModelConfig(16, 2048, 32, kv_heads=8, ffn=8192, vocab=128256, tied=True), 1_235_814_400),  # Llama 3.2 1B
    ],
)
def test_known_models_have_their_known_number_of_parameters(config, parameters):
    specs = Transformer(config.resolved()).specs()
    assert sum(math.prod(s.shape) * (config.layers if s.stacked else 1) for s in jax.tree.leaves(specs)) == parameters


def test_the_configuration_decides_which_parameters_there_are():
    gpt2, llama = (Transformer(c.resolved()).specs() for c in (GPT2, LLAMA))
    assert set(llama["layers"]) - set(gpt2["layers"]) == {"gate"}
    assert set(gpt2["embed"]) == {"tokens", "positions"}
    assert set(llama["embed"]) == {"tokens"}
    assert set(gpt2["head"]) == {"norm"}  # tied
    assert set(llama["head"]) == {"norm", "tokens"}
    assert set(gpt2["layers"]["query"]) == {"kernel", "bias"}
    assert set(llama["layers"]["query"]) == {"kernel"}
    assert llama["layers"]["query"]["kernel"].shape == (12, 4, 4)  # head_dim is not width / heads
    assert llama["layers"]["key"]["kernel"].shape == (12, 2, 4)
    assert llama["layers"]["out"]["kernel"].inputs == (0, 1)
    kinds = {name: {s.kind for s in jax.tree.leaves(part)} for name, part in gpt2["layers"].items()}
    assert kinds["attention_norm"] == kinds["mlp_norm"] == {"vector"}
    assert kinds["up"] == {"matrix", "vector"}
    assert all(s.kind == "embedding" for s in jax.tree.leaves(gpt2["embed"]))


@pytest.mark.parametrize("shape", SHAPES)
def test_fresh_parameters_are_as_declared(shape):
    config = dataclasses.replace(SHAPES[shape], width=64, ffn=256, layers=8).resolved()
    model = Transformer(config)
    draw = lambda i, name: jax.jit(functools.partial(model.init_part, name))(jax.random.key(i))
    parts = {name: draw(i, name) for i, name in enumerate(("layers", "embed", "head"))}
    jax.tree.map(lambda s, a: np.testing.assert_equal(a.shape, s.shape), model.specs(), parts)
    layer = parts["layers"]
    assert np.std(layer["up"]["kernel"]) == pytest.approx(0.02, rel=0.1)
    assert np.std(layer["down"]["kernel"]) == pytest.approx(0.02 / 4, rel=0.1)  # 1 / sqrt(2 layers)
    assert np.std(layer["out"]["kernel"]) == pytest.approx(0.02 / 4, rel=0.1)
    assert np.std(parts["embed"]["tokens"]) == pytest.approx(0.02, rel=0.1)
    assert (layer["mlp_norm"]["scale"] == 1).all()
    drawn = [np.ravel(a)[:4].tobytes() for a in jax.tree.leaves(parts) if np.std(a)]
    assert len(set(drawn)) == len(drawn), "two parameters were drawn from one key"


# ----------------------------------------------------------------------------------------------- a layer, in numpy
def numpy_layer(c: ModelConfig, w: dict, x, segments, positions):
    """One layer in float64, head by head; from the papers, with nothing of the model's code."""
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), w)

    def norm(x, p):
        if c.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * p["scale"] + p.get("bias", 0)

    def turned(a, i):
        """Rotary embedding as complex numbers: the first half are real parts, the second imaginary."""
        if c.positions != "rotary":
            return a
        half = c.head_dim // 2
        z = (a[..., :half] + 1j * a[..., half:]) * np.exp(1j * i[..., None] * c.rope_theta ** (-np.arange(half) / half))
        return np.concatenate([z.real, z.imag], -1)

    h, heads = norm(x, w["attention_norm"]), np.zeros((*x.shape[:2], c.heads, c.head_dim))
    for n in range(c.heads):
        take = lambda name, n: h @ w[name]["kernel"][:, n] + w[name].get("bias", np.zeros((c.heads, 1)))[n]
        group = n * c.kv_heads // c.heads
        q, k, v = turned(take("query", n), positions), turned(take("key", group), positions), take("value", group)
        for b, t in np.ndindex(*x.shape[:2]):
            seen = [j for j in range(t + 1) if segments[b, j] == segments[b, t] >= 0]
            if seen:
                e = np.exp(k[b, seen] @ q[b, t] / np.sqrt(c.head_dim))
                heads[b, t, n] = e @ v[b, seen] / e.sum()
    x = x + np.einsum("bshk,hkd->bsd", heads, w["out"]["kernel"]) + w["out"].get("bias", 0)
    h = norm(x, w["mlp_norm"])
    up = h @ w["up"]["kernel"] + w["up"].get("bias", 0)
    if c.mlp == "gelu":
        up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))  # GPT-2's approximation
    else:
        gate = h @ w["gate"]["kernel"] + w["gate"].get("bias", 0)
        up = gate / (1 + np.exp(-gate)) * up
    return x + up @ w["down"]["kernel"] + w["down"].get("bias", 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_is_what_the_papers_say(shape):
    c = SHAPES[shape].resolved()
    batch = reference.batch(4, 8, c.vocab)
    x = np.random.default_rng(1).normal(size=(4, 8, c.width)).astype(np.float32)
    w = layer_of(random_params(c), 1)
    side = side_of(batch["tokens"], batch["segments"], batch["positions"])
    got, state, sums = jax.jit(Transformer(c).layer)(w, (1, side), {}, x)
    assert state == sums == {}
    want = numpy_layer(c, w, x.astype(np.float64), batch["segments"], batch["positions"])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------- packed rows
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_documents_do_not_see_each_other(shape):
    """A (5 tokens) and B (7 tokens) in a row of 16: B's logits do not know A, and are those of B in a row of its own."""
    c = SHAPES[shape].resolved()
    params, model = random_params(c), Transformer(c)
    run = jax.jit(functools.partial(reference.forward, model))
    r = np.random.default_rng(2)
    segments = np.array([[0] * 5 + [1] * 7 + [-1] * 4])
    positions = np.array([[*range(5), *range(7), 0, 0, 0, 0]], np.int32)
    tokens = r.integers(0, c.vocab, (1, 16))
    other = tokens.copy()
    other[:, :5] = (tokens[:, :5] + 3) % c.vocab
    other[:, 12:] = 1  # padding is not seen either
    one, two = (np.asarray(run(params, side_of(t, segments, positions)))[0] for t in (tokens, other))
    assert np.abs(one[:5] - two[:5]).max() > 0.1
    np.testing.assert_array_equal(one[5:12], two[5:12])
    alone = np.zeros((1, 16), np.int32)
    alone[:, :7] = tokens[:, 5:12]
    logits = run(params, side_of(alone, [[0] * 7 + [-1] * 9], np.array([[*range(7), *[0] * 9]], np.int32)))
    np.testing.assert_allclose(logits[0, :7], one[5:12], rtol=1e-5, atol=1e-5)
    assert np.isfinite(one).all()


# ----------------------------------------------------------------------------------------------- rotary positions
def test_rotary_angles_are_fp32_under_bf16():
    """Of positions 0 to 32767 bf16 would keep a few hundred; the table may only show the rounding of the last cast."""
    head_dim, theta = 16, LLAMA.rope_theta
    positions = np.concatenate([np.arange(0, 4096, 7), np.arange(4096, 32768, 97), [257, 15962]]).astype(np.int32)
    x = np.zeros((1, len(positions), 1, head_dim), np.float32)
    x[..., : head_dim // 2] = 1  # turned, the halves are the cosine and the sine
    frequency = theta ** (-np.arange(head_dim // 2) / (head_dim // 2))
    angle = positions[:, None] * frequency
    want = np.concatenate([np.cos(angle), np.sin(angle)], -1)
    turn = jax.jit(functools.partial(rotary, frequency_K=frequencies(ModelConfig(head_dim=head_dim))))
    exact = np.asarray(turn(x, positions[None]))[0, :, 0]
    rounded = turn(jnp.asarray(x, jnp.bfloat16), positions[None])
    assert rounded.dtype == jnp.bfloat16
    error = np.abs(exact - want).max(-1)
    assert error[positions < 4096].max() < 5e-4
    assert error.max() < 4e-3
    assert np.abs(np.asarray(rounded, np.float32)[0, :, 0] - exact).max() <= 2**-8  # half a unit in the last place below 1


def test_rotary_scores_depend_on_the_difference_of_positions_only():
    x = np.random.default_rng(0).normal(size=(1, 1, 1, 32)).astype(np.float32)
    q, k = x, x[..., ::-1].copy()
    turn = jax.jit(functools.partial(rotary, frequency_K=frequencies(ModelConfig(head_dim=32))))

    def score(dtype, p, distance=1):
        at = lambda a, i: np.asarray(turn(jnp.asarray(a, dtype), jnp.full((1, 1), i, jnp.int32)), np.float32).ravel()
        return float(at(q, p) @ at(k, p - distance))

    for dtype, tolerance in ((jnp.float32, 2e-3), (jnp.bfloat16, 2**-8 * float(np.abs(q).ravel() @ np.abs(k).ravel()))):
        near = score(dtype, 1)
        assert all(abs(score(dtype, p) - near) < tolerance for p in (300, 5000, 30000))
    assert abs(score(jnp.float32, 300, 2) - score(jnp.float32, 300, 1)) > 0.1


# ----------------------------------------------------------------------------------------------- dropout
RATE = 0.5
DROPPED = ModelConfig(layers=4, width=32, heads=2, ffn=8, vocab=11, dropout=RATE, bias=True)


@functools.cache
def program_with_dropout():
    return build(
        Config(model=DROPPED, batch=BatchConfig(rows=4, length=8), pipeline=PipelineConfig(microbatches=2)), jax.devices()[:1]
    )


def masks(step: int, examples=(0, 1, 2, 3)) -> dict[tuple[int, int, int], np.ndarray]:
    """{(layer, place, row): mask} of the real layers: with zero weights a layer adds bias * mask / (1 - rate), twice."""
    program, model = program_with_dropout(), program_with_dropout().model()
    batch = reference.batch(4, 8, DROPPED.vocab) | dict(example=np.array(examples, np.int32))
    key = program.side(program.put(batch), step)["key"].reshape(4, -1)
    w = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), program.specs["layers"])
    w["out"]["bias"][:], w["down"]["bias"][:] = 1, 2
    side = {name: a for name, a in batch.items() if name != "example"} | dict(key=key)
    layer = jax.jit(lambda i: model.layer(w, (i, side), {}, jnp.zeros((4, 8, 32)))[0] * (1 - RATE))
    found = {}
    for i in range(DROPPED.layers):
        both = np.asarray(layer(i)).round().astype(int)
        for row in range(4):
            found |= {(i, 0, row): both[row] & 1, (i, 1, row): both[row] >> 1}
    return found


def test_dropout_masks_differ_between_layers_places_rows_and_steps():
    first, second = masks(0), masks(1)
    flat = np.array([mask.ravel() for mask in (*first.values(), *second.values())])
    assert flat.min() == 0
    assert flat.max() == 1
    assert 0.45 < flat.mean() < 0.55
    sign = 2 * flat - 1
    agreement = (1 + sign @ sign.T / flat.shape[1]) / 2
    np.fill_diagonal(agreement, 0.5)
    assert 0.3 < agreement.min() <= agreement.max() < 0.7, "two masks are much alike"


def test_a_dropout_mask_belongs_to_its_row_of_the_global_batch():
    first = masks(0)
    moved = masks(0, examples=(2, 0, 3, 1))  # the same rows in other places of other microbatches
    for place, example in enumerate((2, 0, 3, 1)):
        for i in range(DROPPED.layers):
            np.testing.assert_array_equal(moved[i, 0, place], first[i, 0, example])
            np.testing.assert_array_equal(moved[i, 1, place], first[i, 1, example])


def test_the_embedding_has_a_mask_of_its_own():
    ones, keys = jnp.ones((2, 8, 32)), side_of(np.zeros((2, 8)))["key"]
    salts = [EMBED_SALT, *range(8)]
    found = [np.asarray(dropout(ones, RATE, keys, salt)) for salt in salts]
    assert all(0.3 < (found[0] == other).mean() < 0.7 for other in found[1:])
    np.testing.assert_array_equal(np.unique(found[0]), [0, 2])
    assert dropout(ones, 0.0, keys, 0) is ones


# ----------------------------------------------------------------------------------------------- remat and the cut
def cut(config: ModelConfig, mode: str, fused: bool = False):
    """(programs of a layer, (w, ctx, x), matmuls of the plain vjp with the same remat)."""
    c = config.resolved()
    batch = reference.batch(4, 8, c.vocab)
    ctx = (jnp.int32(1), side_of(batch["tokens"], batch["segments"], batch["positions"]))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8, c.width)), jnp.float32)
    w, layer, keep = layer_of(random_params(c), 1), Transformer(c).layer, REMAT[mode]
    if keep is not None:
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*keep))

    def plain(w, x, dy):
        y, pull = jax.vjp(lambda w, x: layer(w, ctx, {}, x)[0], w, x)
        return y, pull(dy)

    return split(layer, w, ctx, {}, x, {}, fused), (w, ctx, x), count_matmuls(plain, w, x, x)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", REMAT)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_programs_of_a_layer_have_the_matmuls_of_its_vjp_and_stash_no_parameter(shape, mode, fused):
    programs, (w, _, x), matmuls = cut(dataclasses.replace(SHAPES[shape], dropout=0.1), mode, fused)
    assert sum(programs.matmuls) == matmuls
    f, b, ww = programs.matmuls
    weights = 7 if SHAPES[shape].mlp == "swiglu" else 6
    assert f == weights + 2  # scores and values
    if not fused:
        assert ww == weights
        again = b - weights - 4  # beside the gradients by inputs, by queries, keys, scores and values
        # none: the scores, which attention never keeps; selective: query, key, value and out beside them, but not the values:
        # the kernel does not run again; full: all but `down`, whose output is not needed, beside them
        assert again == dict(none=1, selective=5, full=f)[mode]
    stash = [*programs.a, *programs.aw, *programs.cut]
    assert not {a.shape for a in stash} & {np.shape(a) for a in jax.tree.leaves(w) if a.ndim > 1}
    assert all(a.shape[0] == len(x) for a in stash), "something that does not depend on the rows is stashed"
    assert not [a for a in stash if a.dtype == bool and a.shape == x.shape], "a dropout mask is stashed"
    if mode == "full" and fused:
        assert [a.shape for a in stash] == [x.shape]


def test_gradients_are_the_same_with_and_without_remat():
    """Dropout included: the backward draws the mask of its forward again."""
    results = []
    for mode in REMAT:
        programs, (w, ctx, x), _ = cut(dataclasses.replace(LLAMA, dropout=0.5), mode)

        def run(w, ctx, x, programs=programs):
            y, _, _, a, aw = programs.forward(w, ctx, {}, x)
            dx, handed = programs.backward(w, ctx, {}, a, aw, jnp.cos(x))
            return y, dx, programs.weights(w, ctx, {}, aw, handed)

        results.append(jax.jit(run)(w, ctx, x))
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), results[0], other)
    y = np.asarray(results[0][0] - x)
    assert np.std(y) > 0


# ----------------------------------------------------------------------------------------------- tensor parallelism
WIDE = ModelConfig(layers=1, width=16, heads=8, kv_heads=2, head_dim=4, ffn=16, vocab=101)


@functools.cache
def by_tensor(tensor: int, kv_heads: int = 2):
    """A function of canonical parameters: (loss, canonical gradients) on so many devices."""
    model = dataclasses.replace(WIDE, kv_heads=kv_heads, heads=8 if kv_heads == 2 else 6)
    config = Config(
        model=model,
        mesh=MeshConfig(tensor=tensor),
        pipeline=PipelineConfig(microbatches=1),
        batch=BatchConfig(rows=4, length=8),
    )
    program = build(config, jax.devices()[:tensor])
    step = jax.jit(program.gradients)

    def run(params):
        state = dict(reference.place(program, params), step=np.int32(0))
        with jax.set_mesh(program.mesh):
            sums, grads = step(state, program.put(reference.batch(4, 8, 101)), program.device_table)
        return float(sums["loss"]), reference.canonical(program, grads)

    return run, model, program


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_zero_embeddings_cost_the_logarithm_of_the_vocabulary(tensor):
    """101 does not divide: ln 101 = 4.61512, where counted padding would give ln 104 = 4.64439."""
    run, model, program = by_tensor(tensor)
    params = random_params(model)
    params["embed"]["tokens"][:] = 0
    loss, grads = run(params)
    assert loss == pytest.approx(math.log(101), rel=1e-6)
    rows = program._param_shapes["embed"]["tokens"].shape[0]
    assert rows == {1: 101, 2: 102, 4: 104}[tensor]
    assert grads["embed"]["tokens"].shape == (101, 16)


@pytest.mark.parametrize(("tensor", "kv_heads"), [(2, 2), (4, 2), (2, 3)])
def test_results_do_not_depend_on_tensor_nor_on_replicated_kv_heads(tensor, kv_heads):
    run, model, _ = by_tensor(tensor, kv_heads)
    params = random_params(model)
    want = by_tensor(1, kv_heads)[0](params)
    loss, grads = run(params)
    assert loss == pytest.approx(want[0], rel=1e-6)
    differences = reference.difference(want[1], grads)
    assert max(differences.values()) < 1e-5, differences
