"""The model of lm-evaluation-harness and our own evaluator give the same numbers on the same local tasks, bit for bit."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from llm.commandline import dispatch
from llm.data.tokenizer import Tokenizer
from llm.evaluate import evaluate_tasks, samples_path
from llm.generate import generate
from llm.harness import _groups, _sampling, register
from llm.metrics import read_jsonl
from llm.run import TOKENIZER
from llm.sampling import Sampling
from main import COMMANDS
from parallel.errors import UserError
from tests.llm.runs import untrained

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: make lm_eval")

LIMIT = 5
GREEDY = Sampling(temperature=0, max_tokens=2)
WORDS = "the state of the union is strong and the people of the states are free and the union of the people is strong. "
YAML = """
task: local_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {path}}}}}
validation_split: validation
output_type: {type}
target_delimiter: ""
{more}
metric_list: [{metrics}]
"""
MORE = dict(
    choice='doc_to_text: "{{context}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"',
    next='doc_to_text: "{{context}}"\ndoc_to_target: "{{continuation}}"',
    text='doc_to_text: ""\ndoc_to_target: "{{text}}"',
    written='doc_to_text: "{{context}}"\ndoc_to_target: "{{continuation}}"\n'
    "generation_kwargs: {until: [], max_gen_toks: 2, do_sample: false}",
)
TYPES = dict(
    choice=("multiple_choice", "acc", "acc_norm"),
    next=("loglikelihood", "acc", "perplexity"),
    text=("loglikelihood_rolling", "bits_per_byte", "byte_perplexity"),
    written=("generate_until", "exact_match"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = Tokenizer.train([WORDS * 30], 300)
    return untrained(tmp_path_factory.mktemp("run"), tokenizer, model__vocab=tokenizer.size)


@pytest.fixture(scope="module")
def files(folder, tmp_path_factory):
    """Kind -> the file of its documents, in a folder with a task of lm_eval for each."""
    path = tmp_path_factory.mktemp("tasks")
    tokenizer, words = Tokenizer.load(folder / TOKENIZER, 300), WORDS.split()
    contexts = [" ".join(words[:n]) for n in range(1, 16)]
    tried = zip(contexts, generate(folder, contexts, GREEDY))
    # texts whose ids are the ones that were drawn: not so of half characters
    same = [(c, one["text"]) for c, one in tried if tokenizer.encode(c + one["text"]) == tokenizer.encode(c) + one["token_ids"]]
    contexts, written = zip(*same[:6])
    lines = dict(
        choice=[dict(context=c, choices=[" union", " the people of the", " a"], label=i % 3) for i, c in enumerate(contexts)],
        next=[dict(context=c, continuation=text if i % 2 else " union") for i, (c, text) in enumerate(zip(contexts, written))],
        text=[dict(text=WORDS * n) for n in (1, 3, 5)] + [dict(text="the")],
    )
    lines["written"] = lines["next"]
    for kind, (output, *metrics) in TYPES.items():
        (path / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[kind]))
        where, listed = path / f"{kind}.jsonl", ", ".join(f"{{metric: {metric}}}" for metric in metrics)
        (path / f"{kind}.yaml").write_text(YAML.format(kind=kind, path=where, type=output, more=MORE[kind], metrics=listed))
    return path


@pytest.fixture(scope="module")
def both(folder, files):
    """What lm_eval found with the registered model, and what `evaluate --tasks` did."""
    register()
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(files), include_defaults=False)
    how = dict(model="convoy", model_args=f"workdir={folder},step=3", batch_size=4, task_manager=manager, limit=LIMIT)
    theirs = lm_eval.simple_evaluate(**how, tasks=[f"local_{kind}" for kind in TYPES], bootstrap_iters=0)
    names = {kind: f"file:{files / kind}.jsonl" for kind in TYPES if kind != "written"}
    ours = evaluate_tasks(folder, list(names.values()), LIMIT)
    return theirs, {kind: (ours["tasks"][name], read_jsonl(samples_path(folder, 3, name))) for kind, name in names.items()}


def test_log_probabilities_are_bitwise_the_same(both):
    theirs, ours = both
    for kind, (_, lines) in ours.items():
        samples = sorted(theirs["samples"][f"local_{kind}"], key=lambda sample: sample["doc_id"])
        assert len(samples) == len(lines) == min(LIMIT, 4 if kind == "text" else 6)
        for sample, line in zip(samples, lines):
            found = [response[0] for response in sample["resps"]]
            if kind == "text":
                assert found == [choice["logprob"] for choice in line["choices"]]
            else:
                assert [tuple(one) for one in found] == [(c["logprob"], c["greedy"]) for c in line["choices"]]
    assert ours["text"][1][2]["choices"][0]["tokens"] > 64  # scored in several windows


def test_metrics_are_the_same(both):
    theirs, ours = both
    value = lambda kind, metric: theirs["results"][f"local_{kind}"][f"{metric},none"]
    choice, next_, text = (ours[kind][0] for kind in ("choice", "next", "text"))
    assert (value("choice", "acc"), value("choice", "acc_norm")) == (choice["acc"], choice["acc_norm"])
    assert value("next", "acc") == next_["acc"] and 0 < next_["acc"] < 1
    assert math.isclose(value("next", "perplexity"), next_["perplexity"], rel_tol=1e-14)  # their sum is not exact
    assert math.isclose(value("text", "bits_per_byte"), text["bits_per_byte"], rel_tol=1e-14)
    assert math.isclose(value("text", "byte_perplexity"), 2 ** text["bits_per_byte"], rel_tol=1e-14)


def test_texts_are_those_of_generate(both, folder, files):
    theirs, ours = both
    samples = sorted(theirs["samples"]["local_written"], key=lambda sample: sample["doc_id"])
    contexts = [json.loads(line)["context"] for line in (files / "next.jsonl").read_text().splitlines()][:LIMIT]
    want = generate(folder, contexts, GREEDY)
    assert [sample["resps"][0][0] for sample in samples] == [one["text"] for one in want]
    # what decoding writes and what scoring calls greedy are the same
    matches = [one["text"] == sample["doc"]["continuation"] for one, sample in zip(want, samples)]
    assert matches == [line["choices"][0]["greedy"] for line in ours["next"][1]]
    assert theirs["results"]["local_written"]["exact_match,none"] == np.mean(matches)


def test_the_command(both, folder, files, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    flags = (f"--workdir={folder}", "--tasks=local_choice,local_next", f"--include_path={files}", f"--limit={LIMIT}")
    arguments = ["lm_eval", *flags]
    assert dispatch(COMMANDS, [*arguments, "--config.mesh.pipe=2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 3 and result["n-samples"]["local_next"]["effective"] == LIMIT
    for kind in ("choice", "next"):
        assert result["results"][f"local_{kind}"]["acc,none"] == both[1][kind][0]["acc"]
    for wrong, words in (("--tasks=none", "no such task: there are local_choice"), ("--include_path=/nowhere", "is no folder")):
        assert dispatch(COMMANDS, [*arguments, wrong]) == 2
        assert words in capsys.readouterr().err
    assert dispatch(COMMANDS, ["lm_eval", f"--workdir={folder}"]) == 2


@pytest.mark.smoke
def test_how_a_task_asks_for_texts():
    assert _sampling(dict(until="\n", max_gen_toks=3)) == Sampling(temperature=0.0, stop=("\n",), max_tokens=3)
    assert _sampling(dict(until=["a", ""], do_sample=True, top_p=0.5)) == Sampling(top_p=0.5, stop=("a",), max_tokens=256)
    with pytest.raises(UserError, match="generation_kwargs has num_beams"):
        _sampling(dict(num_beams=4))
    request = lambda text, **how: type("Request", (), dict(args=(text, how)))
    requests = [request("aaa"), request("a", max_gen_toks=2), request("bb"), request("a")]
    assert [numbers for _, numbers in _groups(requests, 2)] == [[1], [3, 2], [0]]


@pytest.mark.smoke
def test_torch_is_not_needed():
    code = "import sys; from llm.harness import register; register(); print({'torch', 'transformers'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"
