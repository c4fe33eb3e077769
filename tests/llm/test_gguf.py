"""GGUF files that the package `gguf` wrote, with what llama.cpp's conversion changes, give the model they were made from."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from golden import FIXTURES, llama

from llm import checkpoint
from llm.data.tokenizer import Tokenizer
from llm.families import family_of
from llm.gguf import GPT2_KEYS, JOINED, KEYS, MODEL_TYPES, NAMES, ROPE_FACTORS
from llm.gguf_tokenizer import CONTROL, UNKNOWN, tokenizer_json
from llm.huggingface import HuggingFaceFolder, export_model, import_model
from llm.rotary import frequencies
from llm.run import TOKENIZER
from llm.workdir import CHECKPOINTS, load_config
from parallel.errors import UserError

gguf = pytest.importorskip("gguf")
NORMAL = 1


def convert(folder: Path, path: Path, kind: str, tokenizer: Tokenizer | None = None, pre: str = "smollm", **changes) -> Path:
    """A GGUF file of a Hugging Face folder as llama.cpp converts it, with other metadata."""
    source = HuggingFaceFolder(folder)
    family = family_of(source.config["model_type"])
    model = family.read(source.config)
    writer = gguf.GGUFWriter(path, kind)
    for theirs, key in (GPT2_KEYS if kind == "gpt2" else KEYS).items():
        value = changes.get(key, {**source.config, "rope_theta": model.rope_theta}.get(theirs))
        if value is not None:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{kind}.{key}", value)
    for key in ("rope.scaling.type", "rope.scaling.factor"):
        if key in changes:
            (writer.add_string if isinstance(changes[key], str) else writer.add_float32)(f"{kind}.{key}", changes[key])
    if tokenizer:
        described = json.loads(tokenizer.inner.to_str())["model"]
        tokens = sorted(described["vocab"], key=described["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([CONTROL if i == tokenizer.end else NORMAL for i in range(len(tokens))])
        writer.add_token_merges([" ".join(merge) for merge in described["merges"]])
        writer.add_eos_token_id(tokenizer.end)
        writer.add_add_bos_token(False)
        writer.add_chat_template("{{ messages }}")
    for tensor in family.tensors(model):
        part = tensor.parts[0]
        array = source.tensors[tensor.name].read()
        heads = dict(query=model.heads, key=model.kv_heads).get(part.split("/")[1]) if kind == "llama" else None
        if heads:
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if kind.startswith("gemma") and part.endswith("scale"):
            array = array + 1
        if kind == "gpt2" and part.endswith("kernel"):
            array = array.T
        names = JOINED if len(tensor.parts) > 1 else NAMES
        writer.add_tensor(names[part].format(tensor.layer), np.ascontiguousarray(array))
        if kind == "gpt2" and part == "embed/tokens":  # as earlier versions did
            writer.add_tensor(NAMES["head/tokens"], array)
    if "factors" in changes:
        writer.add_tensor(ROPE_FACTORS, changes["factors"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_parameters_are_those_of_the_folder(kind, tmp_path):
    case = dict(llama="mistral").get(kind, kind)
    import_model(FIXTURES / case, tmp_path / "folder")
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0} if kind == "gemma3" else {}
    document = import_model(convert(FIXTURES / case, tmp_path / "model.gguf", kind, **scaling), tmp_path / "run")
    assert document["tokenizer"] is None and document["family"] == kind
    folders = [tmp_path / name / CHECKPOINTS for name in ("folder", "run")]
    assert checkpoint.names(folders[0], 0) == checkpoint.names(folders[1], 0)
    for name in checkpoint.names(folders[0], 0):
        one, two = (checkpoint.read(folder, 0, name) for folder in folders)
        np.testing.assert_allclose(two, one, rtol=0, atol=3e-7 if kind.startswith("gemma") else 0, err_msg=name)
    one, two = (load_config(tmp_path / name).model for name in ("folder", "run"))
    unlike = dict(  # what GGUF does not say, or our small cases have unlike the published models
        llama=["window"],
        qwen2=["window", "window_pattern"],
        qwen3=["window", "window_pattern"],
        gemma2=["window_pattern", "query_scalar"],
        gemma3=["window_pattern", "query_scalar", "rope_theta_window"],
    )
    again = dataclasses.replace(two, **{name: getattr(one, name) for name in unlike.get(kind, [])})
    assert again == one


def test_the_tokenizer_is_rebuilt(tmp_path):
    trained = Tokenizer.train(["in 1984 the cats and the dogs"] * 9, 258)
    source = llama(tmp_path / "source", vocab_size=trained.size, tie_word_embeddings=True)
    document = import_model(convert(source, tmp_path / "model.gguf", "llama", trained), tmp_path / "run")
    assert document["tokenizer"] == trained.size and document["tied"]
    tokenizer = Tokenizer.load(tmp_path / "run" / TOKENIZER, trained.size)
    assert tokenizer.end == trained.end
    assert tokenizer.decode(tokenizer.encode("the dogs in 1984")) == "the dogs in 1984"
    assert tokenizer.encode("84") == tokenizer.encode("8") + tokenizer.encode("4")  # digits one by one
    export_model(tmp_path / "run", tmp_path / "out")
    about = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert about["eos_token"] == "<|endoftext|>" and about["chat_template"] == "{{ messages }}"
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == trained.end


def by_scores(text: str, pieces: dict[str, float]) -> list[str]:
    """SentencePiece's own way: join the neighbours whose joint piece has the best score, of equal ones the first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joint = [(pieces[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in pieces]
        if not joint:
            return parts
        i = -max(joint)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.smoke
def test_a_tokenizer_of_scores_is_rebuilt():
    rng, letters = np.random.default_rng(0), "▁abcd"
    pieces = {"".join(rng.choice(list(letters), n)): 0.0 for n in (2, 2, 2, 2, 3, 3, 3, 4, 4) for _ in range(6)}
    pieces = {piece: -float(i) for i, piece in enumerate(pieces)} | dict.fromkeys(letters, -1e6)
    special, bytes_ = ["<unk>", "<s>", "</s>"], [f"<0x{i:02X}>" for i in range(256)]
    tokens = [*special, *bytes_, *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * len(pieces)]
    about = dict(model="llama", tokens=tokens, token_type=kinds, scores=[0.0] * 259 + list(pieces.values()))
    get = lambda key, otherwise=None: about.get(key.removeprefix("tokenizer.ggml."), otherwise)
    built = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(get, 1, "x.gguf")))
    for _ in range(50):
        text = "".join(rng.choice(list(" abcd"), 12))
        ids = built.encode(text).ids
        assert ids[0] == 1 and [tokens[i] for i in ids[1:]] == by_scores(text, pieces)
        assert built.decode(ids) == text
    ids = built.encode("aé", add_special_tokens=False).ids
    assert [tokens[i] for i in ids[-2:]] == ["<0xC3>", "<0xA9>"] and built.decode(ids) == "aé"
    with pytest.raises(UserError, match="a tokenizer of kind 'bert': supported are gpt2"):
        tokenizer_json(lambda key, otherwise=None: "bert", None, "x.gguf")


def test_the_stretch_of_llama_3_is_found_in_its_factors(tmp_path):
    source = llama(tmp_path / "source", rope_theta=500000.0, head_dim=32)
    plain = family_of("llama").read(HuggingFaceFolder(source).config)
    scaled = dataclasses.replace(plain, rope_scaling="llama3", rope_factor=32.0)
    factors = frequencies(plain) / frequencies(scaled)
    import_model(convert(source, tmp_path / "model.gguf", "llama", factors=factors), tmp_path / "run")
    assert load_config(tmp_path / "run").model == dataclasses.replace(scaled, dropout=0.0)
    with pytest.raises(UserError, match=r"is not the stretch of Llama 3\.1"):
        import_model(convert(source, tmp_path / "other.gguf", "llama", factors=factors[::-1]), tmp_path / "other")


def test_what_is_not_supported_is_refused_by_name(tmp_path):
    trained = Tokenizer.train(["text"], 257)
    source = llama(tmp_path / "source", vocab_size=trained.size)
    for arguments, words in (
        (("mamba",), "of architecture 'mamba': supported are llama, qwen2"),
        (("llama", trained, "jina-v2"), "a tokenizer of kind 'jina-v2'"),
    ):
        with pytest.raises(UserError, match=words):
            import_model(convert(source, tmp_path / "model.gguf", *arguments), tmp_path / "run")
    path = convert(source, tmp_path / "model.gguf", "llama", **{"rope.scaling.type": "yarn"})
    with pytest.raises(UserError, match="rope type 'yarn'"):
        import_model(path, tmp_path / "run")
    path.write_bytes(b"GGUF")
    with pytest.raises(UserError, match="is not a GGUF file"):
        import_model(path, tmp_path / "run")
