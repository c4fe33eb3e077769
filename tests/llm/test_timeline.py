"""Ticks measured by time stamps of the compiled step, drawn under the predicted ones."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from llm.run import open_run
from llm.timeline import table, timeline
from llm.train import train
from tests.llm.runs import small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    train(small(mesh__pipe=2, mesh__data=2, train__dtype="bfloat16", train__steps=1, evaluate__every=0), workdir)
    return workdir


def test_every_rank_stamps_every_tick_once_and_in_order(run):
    opened = open_run(run)
    stamps = []
    program = dataclasses.replace(opened.program, stamp=lambda rank, tick, _: stamps.append((int(rank), int(tick))))
    batch = opened.corpus.batch(0, 0, *program.batch_shape)
    with jax.set_mesh(program.mesh):
        state = dict(params=opened.params, step=np.int32(0))
        jax.block_until_ready(program.jit(program.gradients)(state, program.put(batch), program.device_table))
        jax.effects_barrier()
    ticks = program.tick_table.length
    assert sorted(stamps) == sorted((rank, tick) for rank in range(2) for tick in range(ticks) for _ in range(2))
    for rank in range(2):
        mine = [tick for r, tick in stamps if r == rank]
        assert all(b >= a - 1 for a, b in itertools.pairwise(mine))  # two data ranks, at most a tick apart


def test_the_picture_and_the_table_show_both(run):
    result = timeline(run)
    assert len(result["predicted_s"]) == len(result["measured_s"]) == result["ticks"]
    assert np.count_nonzero(result["measured_s"]) > result["ticks"] // 2
    assert (run / "timeline.png").stat().st_size > 10_000
    assert f"{result['error_pct']} %" in table(result)


def test_split_ranks_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"mesh.tensor=1"):
        timeline(tmp_path, small(mesh__pipe=2, mesh__tensor=2))
