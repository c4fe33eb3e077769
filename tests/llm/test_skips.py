"""Updates that are skipped: the run goes back to a checkpoint and past their text, or skips a spike of the gradient."""

import json

import numpy as np
import pytest

from llm.checkpoint import Checkpoints
from llm.data.corpus import Corpus
from llm.metrics import METRICS, Metrics, read_jsonl
from llm.skips import FEWEST, WINDOW, Skips
from llm.train import train
from parallel.errors import CheckError, UserError
from tests.llm.faults import after, interrupt, tiny
from tests.llm.runs import records

pytestmark = pytest.mark.usefixtures("one_program")


def poison(monkeypatch, positions, weights=(3e38, -3e38)):
    """Batches whose first two tokens count so much, by default that the loss is not a number."""
    whole = Corpus.batch

    def batch(self, seed, step, *args, **options):
        found = whole(self, seed, step, *args, **options)
        if step in positions:
            found["weights"] = found["weights"].copy()
            found["weights"][0, :2] = weights
        return found

    monkeypatch.setattr(Corpus, "batch", batch)


def moved(monkeypatch, begin, by):
    """The batches of a run that has none of `begin` to `begin + by`."""
    whole = Corpus.batch
    shifted = lambda self, seed, step, *args, **options: whole(self, seed, step + by * (step >= begin), *args, **options)
    monkeypatch.setattr(Corpus, "batch", shifted)


def test_skipped_updates_lead_back_to_a_checkpoint_and_past_their_text(tmp_path, monkeypatch):
    """Updates 8 and 9 are skipped: the run is that of the text without the batches since checkpoint 6."""
    with monkeypatch.context() as context:
        moved(context, 6, 3)
        train(tiny(), tmp_path / "without")
    config = tiny(train__rollback=2)
    with monkeypatch.context() as context:
        poison(context, (7, 8))
        result = train(config, tmp_path / "through")
        assert (result["rollbacks"], result["skipped"], result["step"]) == (1, 2, 12)
        after(context, Metrics, "step", interrupt, 11)  # stopped after the roll-back
        assert 8 <= train(config, tmp_path / "twice")["step"] < 12
        train(config, tmp_path / "twice")
    assert clean(tmp_path / "through") == clean(tmp_path / "without") == clean(tmp_path / "twice")
    assert Checkpoints(tmp_path / "through/checkpoints", 9).meta(12)["position"] == 15


def clean(workdir):
    """Records without what says which text was read, which the shifted run says otherwise."""
    return [{name: value for name, value in record.items() if "epoch" not in name} for record in records(workdir)]


def test_a_run_that_stops_among_skipped_updates_still_goes_back(tmp_path, monkeypatch):
    config = tiny(train__rollback=4)
    poison(monkeypatch, (4, 5, 6, 7))
    train(config, tmp_path / "through")
    for line, step in ((6, 6), (7, 8), (8, 3)):  # among them; before the last is read; when it is, and another under way
        with monkeypatch.context() as context:
            after(context, Metrics, "step", interrupt, line)
            assert train(config, tmp_path / f"stopped{line}")["step"] == step
        train(config, tmp_path / f"stopped{line}")
        assert records(tmp_path / f"stopped{line}") == records(tmp_path / "through")


def test_no_way_back_is_said(tmp_path, monkeypatch):
    poison(monkeypatch, range(99))
    with pytest.raises(CheckError, match=r"the 4 updates until step 4 were skipped.*no checkpoint left to go back to"):
        train(tiny(train__rollback=4), tmp_path / "a")
    with pytest.raises(CheckError, match=r"all 12 updates were skipped.*lower optimizer\.lr"):
        train(tiny(train__rollback=0), tmp_path / "b")
    assert all(line["skipped"] == 1 and line["loss"] is None for line in read_jsonl(tmp_path / "b" / METRICS) if "lr" in line)


def test_each_time_further_back(tmp_path, monkeypatch):
    train(tiny(), tmp_path)
    Checkpoints(tmp_path / "checkpoints", 9).delete(12)
    poison(monkeypatch, range(9, 99))
    with pytest.raises(CheckError, match="no checkpoint left"):
        train(tiny(train__rollback=2), tmp_path)
    assert Checkpoints(tmp_path / "checkpoints", 9).steps() == [3]


def test_a_spike_of_the_gradient_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("llm.skips.FEWEST", 3)
    config = tiny(train__spike=4)
    poison(monkeypatch, (7,), (9000.0, -8999.0))
    result = train(config, tmp_path / "through")
    assert (result["skipped"], result["rollbacks"]) == (1, 0)
    line = next(line for line in read_jsonl(tmp_path / "through" / METRICS) if line["step"] == 8)
    assert line["skipped"] == 1 and line["grad_norm"] > 4 and line["loss"] is not None
    with monkeypatch.context() as context:
        after(context, Metrics, "step", interrupt, 6)
        train(config, tmp_path / "stopped")
    train(config, tmp_path / "stopped")
    assert records(tmp_path / "stopped") == records(tmp_path / "through")


@pytest.mark.smoke
def test_the_limit_of_the_gradient_norm():
    skips = Skips(3.0, 0)
    assert skips.limit(1) == float("inf")
    for step in range(1, 200):
        skips.note(step, float(step), skipped=step % 7 == 0)
        known = range(max(1, step - WINDOW), step)
        assert skips.limit(step + 1) == (3.0 * np.median(known) if len(known) >= FEWEST else float("inf"))
    last = range(199 - WINDOW, 199)
    assert skips.limit(200) == 3.0 * np.median(last)  # of updates until 198: 199 is read while 200 runs
    again = Skips(3.0, 0, json.loads(json.dumps(skips.meta())))
    assert again.limit(200) == skips.limit(200) and again.limit(201) == skips.limit(201)
    skips.note(200, float("nan"), True)
    assert skips.limit(202) == 3.0 * np.median(range(200 - WINDOW, 200))
    assert Skips(0.0, 3).limit(5) is None
    with pytest.raises(UserError, match=r"train\.spike=0\.9 would skip usual updates"):
        tiny(train__spike=0.9).validate()
