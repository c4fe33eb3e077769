"""The schedule command: its document, its text, its files, and the page in a real browser."""

import json
import math
import re
import shutil
import subprocess

import pytest

from parallel.errors import UserError
from parallel.schedule import make, pack, simulate
from parallel.schedule.boxes import of_simulation, of_ticks
from parallel.schedule.command import FLAGS, run, schedule
from parallel.schedule.html import page, save_html
from parallel.schedule.table_csv import load

KEYS = {
    "name",
    "stages",
    "microbatches",
    "chunks",
    "makespan",
    "rank_span",
    "bubble_makespan",
    "bubble_rank_span",
    "peak_activations",
    "residual_peak",
    "messages_per_rank",
    "tick_shape",
    "tick_makespan",
    "tick_makespan_compute",
    "tick_peak_activations",
    "tick_bubble",
}


def test_one_schedule():
    document, text = schedule("zb-h1", 4, 8, width=90)
    assert set(document) == KEYS
    assert (document["makespan"], document["rank_span"], document["tick_makespan"]) == (27, 27, 27)
    assert document["bubble_makespan"] == pytest.approx(3 / 27)
    assert document["tick_shape"] == "single"
    assert document["peak_activations"] == [4] * 4
    assert document["residual_peak"] == [1, 2, 3, 4]
    assert document["messages_per_rank"] == [8, 16, 16, 8]
    assert json.loads(json.dumps(document)) == document
    assert all(len(line) <= 90 for line in text.splitlines()[-4:])


@pytest.mark.parametrize("name", ["dualpipe", "chimera", "hanayo"])
def test_what_is_not_executed_has_no_ticks(name):
    document, text = schedule(name, 4, 8)
    assert set(document) == KEYS
    assert document["tick_makespan"] is None
    assert "not executed" in text


def test_costs_and_delay():
    document, _ = schedule("1f1b", 8, 24, costs="29.718,29.444,19.927", comm=0.527)
    assert round(document["bubble_rank_span"], 4) == 0.2347


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"costs": "1,2"}, "three times F,B,W"),
        ({"costs": "1,-1,1"}, "three times F,B,W"),
        ({"costs": "a,b,c"}, "three times F,B,W"),
        ({"costs": "0,0,0"}, "three times F,B,W"),
        ({"comm": -1}, "at least 0"),
        ({"name": "zbv"}, "did you mean 'zb-v'"),
        ({"name": "dualpipe", "stages": 3}, "even number of stages"),
        ({"name": "chimera", "microbatches": 7}, "even number of stages and of microbatches"),
        ({"name": "hanayo", "chunks": 3}, "two chunks for each wave"),
        ({"name": "gis-h", "stages": 4, "group": 5}, "between half"),
        ({"name": "zb-v", "chunks": 3}, "has 2 chunks a rank, not 3"),
        ({"draw": "a.gif"}, r"\.svg, \.png, \.html"),
        ({"name": "auto", "objective": "speed"}, "auto minimises one of"),
        ({"name": "auto", "group": 4}, "leave group at 0"),
        ({"objective": "skip"}, "is for --name=auto"),
        ({"comm": math.nan}, "comm is a time of at least 0"),
        ({"comm": math.inf}, "comm is a time of at least 0"),
        ({"costs": "1,nan,1"}, "three times F,B,W"),
        ({"costs": "1e300,1,1"}, "three times F,B,W"),
        ({"memory": math.nan}, "memory is in microbatches"),
        ({"memory": 0.5, "compare": True}, "memory is in microbatches"),
        ({"memory": 2}, "holds 2.5 microbatches, more than 2"),
        ({"stages": 0, "compare": True}, "stages and microbatches are at least 1"),
        ({"chunks": -1, "compare": True}, "chunks and group at least 0"),
        ({"stages": 10**5, "microbatches": 10**6}, "at most 1,000,000 forwards"),
        ({"chunks": 10**9}, "at most 1,000,000 forwards"),
        ({"name": "ZB-V"}, "did you mean 'zb-v'"),
        ({"compare": True, "draw": "a.svg", "csv": "a.csv"}, "--compare does not look at --draw, --csv"),
        ({"compare": True, "group": 4}, "--compare does not look at --group"),
        ({"list": True, "stages": 8}, "--list does not look at --stages"),
        ({"name": "dualpipe", "csv": "a.csv"}, "cannot be written as CSV"),
    ],
)
def test_what_cannot_be_done_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        schedule(**options)


def test_actions_that_take_no_time(tmp_path):
    document, text = schedule("zb-v", costs="0,0,1", width=60, ticks=True, draw=str(tmp_path / "a.png"))
    assert 8 <= document["makespan"] < 10
    assert "wrote" in text


def test_a_long_call_says_what_it_does(capsys):
    schedule("gpipe", 8, 1300, width=60)
    assert "making gpipe" in capsys.readouterr().err


def test_comparison_is_ranked_and_plain_about_ticks():
    rows, text = schedule(compare=True, stages=8, microbatches=24, width=10**6)
    names = {row["name"] for row in rows}
    assert {"gpipe", "1f1b", "zb-v", "dualpipe", "chimera", "hanayo", "interleaved", "adaptive-v"} <= names
    assert [row["makespan"] for row in rows] == sorted(row["makespan"] for row in rows)
    assert all(set(row) >= KEYS for row in rows)
    ticked = sorted((row for row in rows if row["rank_ticks"]), key=lambda row: row["rank_ticks"])
    assert [row["tick_makespan"] for row in ticked] == sorted(row["tick_makespan"] for row in ticked)
    slower = text.split("idle slots computed, interleaved (W deferred) takes 79; slower than that: ")[1].splitlines()[0]
    assert all(name in slower for name in ("zb-v", "dualpipe-v", "zb-h1", "1f1b", "gis"))
    few, text = schedule(compare=True, stages=8, microbatches=24, memory=5, width=100)
    assert all(len(line) <= 110 for line in text.splitlines())
    assert {row["name"] for row in few} <= {"v-half", "v-min", "adaptive-v"}


def test_the_list_names_all():
    rows, text = schedule(list=True)
    assert len(rows) == 20
    assert all(row["name"] in text and row["rule"] in text for row in rows)


def test_auto_within_a_memory():
    document, text = schedule("auto", 4, 8, memory=3)
    assert max(document["peak_activations"]) <= 3
    assert document["value"] == document["makespan"] <= document["best_named_value"]
    assert document["gap"] == pytest.approx(document["value"] / document["lower_bound"] - 1)
    assert "lower bound" in text
    ticks, _ = schedule("auto", 4, 8, objective="compute")
    assert ticks["value"] == pytest.approx(ticks["tick_makespan_compute"])


def test_files(tmp_path):
    options = {name: default for name, default, *_ in FLAGS} | {
        "name": "zb-v",
        "draw": str(tmp_path / "a.html"),
        "trace": str(tmp_path / "a.json"),
        "csv": str(tmp_path / "a.csv"),
    }
    _, text = run(options)
    assert text.count("wrote") == 3
    trace = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    boxes = [e for e in trace if e["ph"] == "X"]
    assert len(boxes) == 4 * 2 * 8 * 3
    assert max(e["ts"] + e["dur"] for e in boxes) == pytest.approx(25500)
    assert load(options["csv"]).ranks == make("zb-v", 4, 8).ranks
    run(options | {"draw": str(tmp_path / "a.svg"), "trace": "", "csv": "", "ticks": True})
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_a_large_page_stays_small():
    text = page(of_simulation(simulate(make("interleaved", 32, 256, 2))))
    assert len(text) < 3e6
    assert math.isclose(text.count("@"), 0)


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser: chromium is not on PATH")
def test_the_page_in_a_browser(tmp_path):
    """It runs, counts its boxes, and shows the details of the action that the address asks for."""
    save_html(of_ticks(pack(make("interleaved", 4, 8, 2, backward="split"))), tmp_path / "a.html", "a <title>")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    page = subprocess.run(
        [*command, "--dump-dom", f"file://{tmp_path}/a.html#1,0.7"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert 'data-boxes="192"' in page
    assert "a &lt;title&gt;" in page
    tip = re.search(r'<div id="tip" style="display: block;[^>]*>([^<]*)', page)
    assert tip
    assert tip[1].split("\n")[:3] == ["forward  F", "microbatch 0", "rank 1, chunk 0, stage 1"]
