"""Known numbers: unit-cost values, published bubble rates, peaks, orders and tick costs of the schedules."""

import pytest

from parallel.schedule import make, pack, simulate
from parallel.schedule.dual_pipe import dual_pipe, dual_pipe_v
from parallel.schedule.table_csv import dumps

# (p, m, name, chunks, rank span, makespan, peaks of the ranks (one number: the largest))
UNIT = [
    (4, 8, "gpipe", 1, 33, 33, [8, 8, 8, 8]),
    (4, 8, "1f1b", 1, 33, 33, [4, 3, 2, 1]),
    (4, 8, "eager-1f1b", 1, 33, 33, [7, 5, 3, 1]),
    (4, 8, "interleaved", 2, 28.5, 28.5, [5.5, 4.5, 3.5, 2.5]),
    (4, 8, "interleaved", 4, 26.25, 26.25, [4.75, 4.25, 3.75, 3.25]),
    (4, 8, "looped-bfs", 2, 28.5, 28.5, [8] * 4),
    (4, 8, "looped-bfs", 4, 26.25, 26.25, [8] * 4),
    (4, 8, "zb-h1", 1, 27, 27, [4] * 4),
    (4, 8, "zb-h2", 1, 24, 27, [7] * 4),
    (4, 8, "zb-v", 2, 24, 25.5, [4] * 4),
    (4, 8, "v-half", 2, 26.5, 26.5, [3] * 4),
    (4, 8, "v-min", 2, 29.5, 29.5, [2] * 4),
    (4, 8, "dualpipe-v", 2, 25.5, 25.5, [4.5] * 4),
    (8, 24, "1f1b", 1, 93, 93, 8),
    (8, 24, "zb-h1", 1, 79, 79, 8),
    (8, 24, "zb-h2", 1, 72, 79, 15),
    (8, 24, "interleaved", 2, 82.5, 82.5, 11.5),
    (8, 24, "interleaved", 4, 77.25, 77.25, 9.75),
    (8, 24, "zb-v", 2, 72, 75.5, 8),
    (8, 24, "v-half", 2, 80.5, 80.5, 5),
    (8, 24, "v-min", 2, 85.5, 85.5, 4),
    (8, 24, "dualpipe-v", 2, 75.5, 75.5, 8.5),
    (16, 64, "zb-v", 2, 192, 199.5, 16),
    (16, 64, "v-half", 2, 212.5, 212.5, 9),
    (16, 64, "v-min", 2, 221.5, 221.5, 6),
]


@pytest.mark.parametrize(("p", "m", "name", "chunks", "span", "makespan", "peaks"), UNIT)
def test_unit_costs(p, m, name, chunks, span, makespan, peaks):
    run = simulate(make(name, p, m, chunks).validate())
    assert (run.rank_span, run.makespan) == pytest.approx((span, makespan))
    if isinstance(peaks, list):
        assert run.peak_activations == peaks
    else:
        assert max(run.peak_activations) == peaks


@pytest.mark.parametrize(("p", "v", "chunks"), [(4, 2, 11), (4, 4, 19), (8, 3, 31)])
def test_interleaved_peak_in_chunks(p, v, chunks):
    assert simulate(make("interleaved", p, 3 * p, v)).peak_activations[0] * v == pytest.approx(chunks)


# Zero Bubble, arXiv 2401.10241: measured times (Table 9) and the bubble rates that its authors calculated (Table 5)
# model, p, m, F, B, W, comm, chunks of 1F1B-I: 1F1B, 1F1B-I, ZB-H1, ZB-H2, ZB-1p, ZB-2p
ZERO_BUBBLE = """
1.5B  8  24 18.522 18.086  9.337 0.601 3: .2431 .1055 .1585 .1083 .1585 .0433
1.5B  8  32 18.513 18.086  9.331 0.626 3: .1985 .0818 .1242 .0837 .1242 .0039
1.5B  8  64 18.546 18.097  9.321 0.762 3: .1240 .0443 .0674 .0444 .0674 .0026
6.2B  8  24 29.718 29.444 19.927 0.527 4: .2347 .0808 .1323 .0698 .1323 .0029
6.2B  8  32 29.802 29.428 19.530 0.577 4: .1898 .0628 .1045 .0559 .1045 .0022
6.2B  8  64 29.935 29.621 19.388 0.535 4: .1091 .0320 .0554 .0294 .0554 .0010
14.6B 16 48 11.347 11.248  8.132 0.377 3: .2552 .1104 .1397 .0672 .1397 .0066
14.6B 16 64 11.307 11.254  8.101 0.379 3: .2082 .0852 .1088 .0516 .1088 .0054
14.6B 16 128 11.325 11.308 8.109 0.378 3: .1251 .0445 .0576 .0266 .0576 .0028
28.3B 32 96 10.419 10.207  7.715 0.408 2: .2646 .1493 .1421 .0641 .1421 .0038
28.3B 32 128 10.408 10.204 7.703 0.408 2: .2168 .1164 .1106 .0490 .1106 .0029
28.3B 32 256 10.402 10.248 7.698 0.460 2: .1352 .0624 .0594 .0257 .0594 .0018
"""
ROWS = [line.split(":") for line in ZERO_BUBBLE.strip().splitlines()]


@pytest.mark.parametrize(("left", "right"), ROWS, ids=[left.split(None, 3)[0] + "-" + left.split()[2] for left, _ in ROWS])
def test_published_bubble_rates_to_four_decimals(left, right):
    _, p, m, *numbers = left.split()
    p, m = int(p), int(m)
    F, B, W, comm, v = map(float, numbers)
    published = dict(zip(("1f1b", "1f1b-i", "zb-h1", "zb-h2", "zb-1p", "zb-2p"), map(float, right.split())))
    closed = m * (F + B + W) + (p - 1) * (F + B + W) / v + (2 * p * v - p - 2) * comm
    assert round(1 - m * (F + B + W) / closed, 4) == published.pop("1f1b-i")
    for name, bubble in published.items():
        table = make(name, p, m, costs=(F, B, W), comm=comm)
        assert round(simulate(table, (F, B, W), comm).bubble_rank_span, 4) == bubble, name


@pytest.mark.parametrize(
    ("p", "m", "costs", "comm", "v_half", "v_min"),
    [
        (8, 24, (18.522, 18.086, 9.337), 0.601, 0.1702, 0.3353),
        (8, 24, (29.718, 29.444, 19.927), 0.527, 0.1447, 0.2721),
        (16, 48, (11.347, 11.248, 8.132), 0.377, 0.1682, 0.2927),
        (32, 96, (10.419, 10.207, 7.715), 0.408, 0.1780, 0.3027),
    ],
)
def test_v_schedules_on_measured_times(p, m, costs, comm, v_half, v_min):
    for name, bubble in (("v-half", v_half), ("v-min", v_min)):
        assert round(simulate(make(name, p, m), costs, comm).bubble_rank_span, 4) == bubble


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 9, 12, 16])
def test_peaks_of_v_schedules(p):
    for name, peak in (("zb-v", p), ("v-half", (p + 2) // 2), ("v-min", (p + 4) // 3)):
        assert max(simulate(make(name, p, 4 * p)).peak_activations) == peak, name


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24), (8, 64)])
@pytest.mark.parametrize("v", [2, 4])
def test_gis_needs_the_memory_of_its_paper(p, m, v):
    assert max(simulate(make("gis", p, m, v)).peak_activations) == p
    assert max(simulate(make("gis-h", p, m, v)).peak_activations) == (v + 1) / (2 * v) * p
    assert simulate(make("gis", p, m, v)).makespan == pytest.approx(3 * m + (p - 1) / v)


def test_dualpipe_v_row():
    """Rank 1 of p=4, m=10, as quoted in PyTorch's pull request 158978."""
    row = (
        "1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 (1F6;6B2) (6F4;1B0) (1F7;6B3) (6F5;1B1) (1F8;6B4) "
        "(6F6;1B2) (1F9;6B5) (6F7;1B3) 6B6 (6F8;1B4) 6B7 (6F9;1B5) 6B8 1B6 6I9 1I7 6W9 1I8 1W7 1I9 1W8 1W9"
    )
    assert dumps(dual_pipe_v(4, 10, split=False)).splitlines()[1].replace("OVERLAP_F_B", "").split(",") == row.split()


def bubbles(table, costs, pair):
    """Per rank, the time to the end of the step in which it does nothing."""
    run = simulate(table, costs, pair=pair)
    return [run.makespan - sum(end - start for start, end in set(times)) for times in run.times]


@pytest.mark.parametrize("p", [4, 8])
def test_dualpipe_formulas(p):
    """(p-1)(F&B + B_full - 3W) a chunk for the V, (P/2-1)(...) for the whole; an upper bound when B is not F."""
    for F, B, W, pair in ((1, 1, 1, 3), (1, 1, 1, 2.2)):
        table = dual_pipe_v(p, 2 * p + 2, split=False).validate()
        assert max(bubbles(table, (2 * F, 2 * B, 2 * W), pair)) == pytest.approx((p - 1) * (pair + B + W - 3 * W))
    assert bubbles(table, (2, 2, 2), 3) == pytest.approx([2 * (p - 1)] * p)
    worst = max(bubbles(table, (20, 22, 14), 28))
    assert worst == pytest.approx({4: 72, 8: 168}[p])
    assert worst <= (p - 1) * (28 + 18 - 21)
    both = dual_pipe(p, 4 * p, split=False).validate()
    assert bubbles(both, (1, 1, 1), 3) == pytest.approx([(p // 2 - 1) * 2] * p)
    assert simulate(both).peak_activations == [p + 1] * p


def test_waves():
    """Hanayo by list scheduling beats the published ratio (2P-2)/(3PW+P-1) at one wave; Chimera has p-2 idle slots."""
    for p, found, published in ((4, 0.3333, 0.4), (8, 0.3684, 0.4516)):
        run = simulate(make("hanayo", p, p), (2, 2, 2))
        assert round(run.bubble_makespan, 4) == found < published == round((2 * p - 2) / (3 * p + p - 1), 4)
        for n in (1, 2, 3):
            assert simulate(make("chimera", p, n * p), (1, 0.5, 0.5)).makespan == pytest.approx(2 * n * p + p - 2)


@pytest.mark.parametrize(
    ("name", "chunks", "backward", "shape", "cost"),
    [
        ("eager-1f1b", 1, "", "pairs", 93),
        ("1f1b", 1, "", "pairs", 153),
        ("zb-h1", 1, "", "pairs", 146),
        ("interleaved", 2, "", "pairs", 82.5),
        ("interleaved", 4, "", "pairs", 77.25),
        ("interleaved", 2, "split", "pairs", 79),
        ("interleaved", 4, "split", "pairs", 75.5),
        ("zb-v", 2, "", "pairs", 96.5),
        ("dualpipe-v", 2, "", "pairs", 94),
        ("zb-h1", 1, "", "single", 79),
        ("interleaved", 2, "split", "single", 75.5),
        ("interleaved", 4, "split", "single", 73.75),
        ("gis", 2, "", "single", 75.5),
        ("gis", 4, "", "single", 73.75),
        ("zb-v", 2, "", "single", 75.5),
        ("dualpipe-v", 2, "", "single", 75.5),
    ],
)
def test_tick_costs(name, chunks, backward, shape, cost):
    """p=8, m=24, F=B=W=1, each rank's order kept."""
    assert pack(make(name, 8, 24, chunks, backward=backward), shape).cost() == pytest.approx(cost)
