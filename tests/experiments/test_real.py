"""The script for a published model, with a tiny one in its place."""

import gzip
import json

import pytest
from golden import llama

from experiments import real
from llm.data.tokenizer import Tokenizer
from llm.safetensor_files import entries
from parallel.errors import CheckError, UserError


def test_a_model_goes_all_the_way(tmp_path, monkeypatch, capsys):
    tokenizer = Tokenizer.train(["the cat and the dog and the bird and the capital of the union. "] * 9, 280)
    source = llama(tmp_path / "model", vocab_size=tokenizer.size)
    tokenizer.save(source / "tokenizer.json")
    requests = [
        dict(doc_id=d, idx=i, request=dict(context="the", continuation=f" {i}"), label=0) for d in range(3) for i in (0, 1)
    ]
    path = tmp_path / "tasks/quiz/rc_0shot/requests.jsonl.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in requests).encode()))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setattr("llm.tasks._package", lambda: tmp_path / "tasks")
    for name, value in dict(WORKDIR=tmp_path / "run", STAGES=2, STEPS=2, TASKS=("quiz",), find_model=lambda: source).items():
        monkeypatch.setattr(real, name, value)
    monkeypatch.setattr(real, "check", lambda tasks: None)
    monkeypatch.setattr(real, "PROMPTS", ("the cat",))
    assert real.main() == 0
    out = capsys.readouterr().out
    assert "finished: step 2" in out and "held-out loss on speeches" in out
    scores = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert scores["step"] == 0 and scores["layout"]["pipe"] == 2 and scores["tasks"]["quiz"]["n"] == 3
    assert entries(tmp_path / "run/export/model.safetensors").keys() == entries(source / "model.safetensors").keys()


@pytest.mark.smoke
def test_another_result_and_a_missing_package_are_told(monkeypatch):
    real.check({"lambada": {"acc": 0.275, "perplexity": 60.3914}})
    with pytest.raises(CheckError, match="perplexity is 61"):
        real.check({"lambada": {"acc": 0.275, "perplexity": 61.0}})
    monkeypatch.setattr(real, "PACKAGE", "no-such-package-installed")
    with pytest.raises(UserError, match="make real"):
        real.find_model()
