"""Pictures: every action at its place, colours apart in grey and for the colour-blind, text that fits."""

from itertools import pairwise

import numpy as np
import pytest

from parallel.errors import UserError
from parallel.schedule import make, make_forward, pack
from parallel.schedule.boxes import colour, of_simulation, of_ticks
from parallel.schedule.draw import ascii_timeline, draw, draw_ticks
from parallel.schedule.simulate import simulate


def rgb(text: str) -> np.ndarray:
    return np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def light(text: str) -> float:
    return float(rgb(text) @ [0.299, 0.587, 0.114])


@pytest.mark.parametrize("v", [1, 2, 4])
def test_kinds_are_apart_in_grey(v):
    bands = [[light(colour(kind, c, v)) for c in range(v)] for kind in "FBW"]
    assert all(max(a) + 0.09 < min(b) for a, b in pairwise(bands))
    assert max(bands[-1]) < 0.97  # idle is white


def test_kinds_are_apart_for_the_colour_blind():
    # Machado, Oliveira, Fernandes 2009: severity 1 of protanopia, deuteranopia, tritanopia
    for matrix in (
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
        [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    ):
        seen = [np.array(matrix) @ rgb(colour(k, 0, 1)) for k in "FBW"]
        assert min(np.linalg.norm(a - b) for a, b in ((seen[0], seen[1]), (seen[1], seen[2]), (seen[0], seen[2]))) > 0.25


@pytest.mark.parametrize("idle", ["skip", "compute"])
@pytest.mark.parametrize("backward", ["whole", "split"])
def test_a_picture_of_ticks_holds_every_slot_to_scale(idle, backward):
    ticks, costs = pack(make("interleaved", 4, 6, 2, backward=backward)), (1.0, 2.0, 0.5)
    picture = of_ticks(ticks, costs, idle)
    assert len(picture.boxes) == len(ticks.at)
    assert picture.end == pytest.approx(ticks.cost(*costs, idle=idle))
    for r in range(4):
        row = sorted((b.start, b.end) for b in picture.boxes if b.rank == r)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(row))
    measured = of_ticks(ticks, costs, idle, durations=np.full(ticks.length, 0.01))
    assert measured.end == pytest.approx(0.01 * ticks.length)


def test_a_picture_of_a_simulation_shows_a_whole_backward_as_b_and_w():
    picture = of_simulation(simulate(make("1f1b", 2, 2), (1, 2, 1)))
    assert len(picture.boxes) == 2 * 2 * 3
    assert {round(b.end - b.start, 9) for b in picture.boxes if b.kind == "B"} == {2}


def test_svg_and_png(tmp_path):
    ticks = pack(make("interleaved", 4, 8, 2, backward="split"))
    draw_ticks(ticks, tmp_path / "a.svg", step_time_s=0.25)
    text = (tmp_path / "a.svg").read_text()
    assert "time (ms)" in text
    assert "darker: later chunk" in text
    assert draw_ticks(ticks, str(tmp_path / "a.png"), title="mine").endswith("a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    draw(simulate(make("1f1b", 2, 3)), tmp_path / "b.png")
    draw_ticks(pack(make_forward("loop", 2, 3, 2)), tmp_path / "c.png")
    with pytest.raises(UserError, match=r"\.svg, \.png"):
        draw_ticks(ticks, tmp_path / "a.gif")


def test_numbers_fit_their_boxes(tmp_path, monkeypatch):
    """No microbatch number is wider than its box, at p=4, m=8 and at 8 x 24; and there are numbers."""
    from matplotlib.axes import Axes

    placed = []
    keep = Axes.text
    monkeypatch.setattr(Axes, "text", lambda self, *a, **k: placed.append(keep(self, *a, **k)) or placed[-1])
    for p, m in ((4, 8), (8, 24)):
        placed.clear()
        picture = of_ticks(pack(make("interleaved", p, m, 2, backward="split")))
        draw(picture, tmp_path / "x.png")
        assert len(placed) == len(picture.boxes)
        renderer = placed[0].figure.canvas.get_renderer()
        for text, box in zip(placed, picture.boxes):
            left, right = (placed[0].axes.transData.transform((x, 0))[0] for x in (box.start, box.end))
            extent = text.get_window_extent(renderer)
            assert left <= extent.x0
            assert extent.x1 <= right


@pytest.mark.parametrize("width", [40, 80, 200])
def test_ascii_fits_the_width(width):
    for table, ranks in ((make("interleaved", 8, 24, 2), 8), (pack(make("1f1b", 8, 24)), 8), (make("gpipe", 1, 1), 1)):
        lines = ascii_timeline(table, width).splitlines()
        assert len(lines) == ranks
        assert all(len(line) <= width for line in lines)


def test_ascii_of_a_small_table():
    assert ascii_timeline(make("1f1b", 2, 2), 80).splitlines() == [
        "0 F0--F1--········B0--W0--····B1--W1--",
        "1 ····F0--B0--W0--F1--B1--W1--········",
    ]
