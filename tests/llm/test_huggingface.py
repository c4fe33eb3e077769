"""Import and export: nothing changes on the way, what is wrong is named, and memory holds a tensor at a time."""

import dataclasses
import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import reference
from golden import CASES, FIXTURES, LLAMA, llama, load, random_tensors, write_folder

from llm import arrays, checkpoint, huggingface, safetensor_files
from llm.checkpoint import Checkpoints
from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, OptimizerConfig
from llm.data.tokenizer import Tokenizer
from llm.families import family_of
from llm.families.family import canonical
from llm.fields import to_dict
from llm.huggingface import INDEX, WEIGHTS, export_model, import_model, open_source, table
from llm.run import open_run
from llm.step import build
from llm.workdir import CHECKPOINTS, load_config, save_config
from parallel.errors import UserError


def contents(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a folder in its own type, through the files' headers and numpy alone."""
    found = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, t in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = (8 + length + n for n in t["data_offsets"])
                found[name] = np.frombuffer(raw[start:stop], safetensor_files.DTYPES[t["dtype"]]).reshape(t["shape"])
    return found


def check_same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    assert one.keys() == two.keys()
    for name, a in one.items():
        assert a.dtype == two[name].dtype
        np.testing.assert_array_equal(a, two[name], err_msg=name)


# ------------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bitwise(case, tmp_path):
    source = FIXTURES / case
    document = import_model(source, tmp_path / "run")
    assert f"{document['parameters']:,} parameters" in table(document)
    export_model(tmp_path / "run", tmp_path / "out")
    check_same(contents(source), contents(tmp_path / "out"))
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    family = family_of(old["model_type"])
    assert canonical(family.read(old)) == canonical(family.read(new))
    assert {key: new[key] for key in ("eos_token_id", "bos_token_id", "pad_token_id", "dtype")} == {
        key: old[key] for key in ("eos_token_id", "bos_token_id", "pad_token_id", "dtype")
    }
    assert (tmp_path / "out/generation_config.json").read_text() == (source / "generation_config.json").read_text()


def test_the_square_projection_of_gpt2_is_not_transposed():
    _, _, params = load("gpt2")
    stored = open_source(FIXTURES / "gpt2").tensors["transformer.h.1.attn.c_proj.weight"].read()
    np.testing.assert_array_equal(params["layers"]["out"]["kernel"][1].reshape(16, 16), stored)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_shards_of_16_bits_with_an_index(tmp_path, dtype):
    source = llama(tmp_path / "source", dtype, torch_dtype=np.dtype(dtype).name)
    import_model(source, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out", shard_bytes=4000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (
        len(files) > 2
        and files == sorted(set(index["weight_map"].values()))
        and files[0].endswith(f"{len(files):05}.safetensors")
    )
    tensors = contents(source)
    check_same(tensors, contents(tmp_path / "out"))
    assert index["metadata"] == {
        "total_parameters": sum(a.size for a in tensors.values()),
        "total_size": sum(a.nbytes for a in tensors.values()),
    }
    import_model(tmp_path / "out", tmp_path / "again")
    name = "params/layers/up/kernel"
    one, two = (checkpoint.read(tmp_path / run / CHECKPOINTS, 0, name) for run in ("run", "again"))
    np.testing.assert_array_equal(one, two)


def test_a_file_saved_without_the_head_has_shorter_names(tmp_path):
    """As the published GPT-2: no prefix, and the masks are there."""
    tensors = {name.removeprefix("transformer."): a for name, a in contents(FIXTURES / "gpt2").items()}
    tensors |= {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32), "h.1.attn.masked_bias": np.zeros(1, np.float32)}
    config = json.loads((FIXTURES / "gpt2/config.json").read_text())
    document = import_model(write_folder(tmp_path / "source", tensors, config), tmp_path / "run")
    assert "left out: no parameter" in table(document)
    export_model(tmp_path / "run", tmp_path / "out")
    check_same(contents(FIXTURES / "gpt2"), contents(tmp_path / "out"))


# ------------------------------------------------------------------------------------------- tied heads
@pytest.mark.parametrize(
    ("tied", "head"), [(True, "none"), (True, "equal"), (True, "other"), (False, "none"), (False, "other")]
)
def test_tied_and_untied_heads(tmp_path, tied, head):
    tensors = random_tensors(LLAMA)
    if head != "other":
        del tensors["lm_head.weight"]
    if head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    source = write_folder(tmp_path / "source", tensors, LLAMA | dict(tie_word_embeddings=tied))
    if tied and head == "other":
        with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            import_model(source, tmp_path / "run")
    elif not tied and head == "none":
        with pytest.raises(UserError, match=r"missing: lm_head\.weight"):
            import_model(source, tmp_path / "run")
    else:
        document = import_model(source, tmp_path / "run")
        assert ("tied: equal to the embedding" in table(document)) == (head == "equal")
        export_model(tmp_path / "run", tmp_path / "out")
        out = contents(tmp_path / "out")
        assert ("lm_head.weight" in out) == (not tied)
        assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] == tied


# ------------------------------------------------------------------------------------------- layouts and training
def test_vocabulary_padding_never_reaches_the_disk(tmp_path):
    """101 rows over tensor=4: padded to 104 in memory. One step of training, saved, exported."""
    import_model(llama(tmp_path / "source"), tmp_path / "run")
    config = dataclasses.replace(
        load_config(tmp_path / "run"),
        mesh=MeshConfig(tensor=4),
        batch=BatchConfig(rows=2, length=8),
        optimizer=OptimizerConfig(name="sgd", warmup=0),
    )
    program = build(config, jax.devices()[:4])
    checkpoints = Checkpoints(tmp_path / "run" / CHECKPOINTS, 2)
    abstract, stored = program.abstract_state(), program.stored()
    params = checkpoints.restore(0, {"params": abstract["params"]}, {"params": stored["params"]})["params"]
    assert params["embed"]["tokens"].shape == (104, 16)
    check_same({"head": contents(tmp_path / "source")["lm_head.weight"]}, {"head": np.asarray(params["head"]["tokens"])[:101]})
    state, _ = program.train_step(program.init() | {"params": params}, program.put(reference.batch(2, 8, 101)))
    checkpoints.save(1, state, stored, {"config": to_dict(config)})
    checkpoints.close()
    export_model(tmp_path / "run", tmp_path / "out")
    out = contents(tmp_path / "out")
    assert out["model.embed_tokens.weight"].shape == out["lm_head.weight"].shape == (101, 16)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 101
    assert not np.array_equal(out["lm_head.weight"], contents(tmp_path / "source")["lm_head.weight"])
    export_model(tmp_path / "run", tmp_path / "first", step=0)
    check_same(contents(tmp_path / "source"), contents(tmp_path / "first"))


def test_a_model_of_our_own_is_exported_with_its_tokenizer(tmp_path):
    tokenizer = Tokenizer.train(["the cat and the dog and the bird"] * 9, 260)
    model = ModelConfig(layers=2, width=16, heads=2, vocab=tokenizer.size, max_length=32)
    save_config(tmp_path / "run", Config(model=model))
    tokenizer.save(tmp_path / "run/tokenizer.json")
    program = build(Config(model=model), jax.devices()[:1])
    checkpoints = Checkpoints(tmp_path / "run" / CHECKPOINTS, 1)
    checkpoints.save(3, program.init(), program.stored(), {})
    checkpoints.close()
    document = export_model(tmp_path / "run", tmp_path / "out")
    assert (document["family"], document["step"], document["tokenizer"]) == ("llama", 3, tokenizer.size)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eos_token_id"] == tokenizer.end and config["bos_token_id"] is None
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == tokenizer.end
    import_model(tmp_path / "out", tmp_path / "again")
    run = open_run(tmp_path / "again", config=dataclasses.replace(load_config(tmp_path / "again"), batch=BatchConfig(2, 8)),
                   with_corpus=False)  # fmt: skip
    assert run.step == 0 and run.tokenizer.encode("the cat") == tokenizer.encode("the cat")


# ------------------------------------------------------------------------------------------- what is refused
def test_every_wrong_tensor_is_named(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(17, np.float32)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(4, np.float32)
    with pytest.raises(UserError) as error:
        import_model(write_folder(tmp_path / "source", tensors, LLAMA), tmp_path / "run")
    for words in (
        "missing: model.layers.1.mlp.up_proj.weight",
        "unknown: model.layers.0.self_attn.q_norm.weight",
        "misshapen: model.norm.weight has shape (17,) and (16,) is wanted",
    ):
        assert words in str(error.value)
    assert not (tmp_path / "run").exists()


def test_damaged_and_strange_sources(tmp_path):
    source = llama(tmp_path / "source")
    whole = (source / WEIGHTS).read_bytes()
    for damaged, words in ((whole[:-3], "cut short"), (whole[:5], "not a safetensors file"), (b"x" * 99, "cut short")):
        (source / WEIGHTS).write_bytes(damaged)
        with pytest.raises(UserError, match=words):
            import_model(source, tmp_path / "run")
    (source / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        import_model(source, tmp_path / "run")
    (source / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors is missing"):
        import_model(source, tmp_path / "run")
    with pytest.raises(UserError, match="neither a folder"):
        import_model(tmp_path / "nowhere", tmp_path / "run")


def test_quantised_tensors_are_refused(tmp_path):
    source = llama(tmp_path / "source")
    (source / WEIGHTS).write_bytes((source / WEIGHTS).read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"'))
    with pytest.raises(UserError, match="is of type I32: supported are F64, F32, F16, BF16"):
        import_model(source, tmp_path / "run")
    assert not (tmp_path / "run/config.json").exists()


def test_nothing_is_overwritten(tmp_path):
    source = llama(tmp_path / "source")
    import_model(source, tmp_path / "run")
    with pytest.raises(UserError, match="there is a run in this folder"):
        import_model(source, tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").touch()
    with pytest.raises(UserError, match="not empty"):
        export_model(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UserError, match="--dtype=int8"):
        export_model(tmp_path / "run", tmp_path / "new", dtype="int8")
    with pytest.raises(UserError, match="--step=7"):
        export_model(tmp_path / "run", tmp_path / "new", step=7)
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    source = llama(tmp_path / "source")
    Tokenizer.train(["some text"], 257).save(source / "tokenizer.json")
    with pytest.raises(UserError, match=r"outside model\.vocab=101"):
        import_model(source, tmp_path / "run")
    with pytest.raises(UserError, match="there is no run"):
        load_config(tmp_path / "run")


# ------------------------------------------------------------------------------------------- memory
def test_memory_holds_one_tensor_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensor_files, "BLOCK", 1 << 15)
    monkeypatch.setattr(huggingface, "BLOCK", 1 << 18)
    monkeypatch.setattr(arrays, "BLOCK", 1 << 17)
    source = llama(tmp_path / "source", ml_dtypes.bfloat16, vocab_size=30000, hidden_size=64, intermediate_size=2000)
    embedding, total = 30000 * 64 * 4, sum(2 * a.nbytes for a in contents(source).values())

    def peak(run, *arguments, **options) -> int:
        tracemalloc.start()
        run(*arguments, **options)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    limit = 5_000_000  # a matrix of a layer has 0.5 MB, a block 1 MB; the rest is small objects
    assert limit < embedding < total
    assert peak(import_model, source, tmp_path / "run") < limit
    assert peak(export_model, tmp_path / "run", tmp_path / "out", shard_bytes=1_000_000) < limit
    shutil.rmtree(source)
