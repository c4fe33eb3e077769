"""Every token once, every epoch another order, the same batch for every reader; rows checked against a plain loop."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.data import order as order_module
from llm.data.batches import held_out_batches, training_batch
from llm.data.order import count_rows, row_numbers
from parallel.errors import UserError
from tests.llm.data.small import CountingStream

LENGTHS = st.lists(st.integers(2, 23), min_size=1, max_size=12)


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key])
        assert left[key].dtype == right[key].dtype


def check_rows(stream, batch):
    """Segments, positions and weights of each row against a loop; returns the places of its inputs and targets."""
    document_of = np.repeat(np.arange(len(stream.starts_D) - 1), np.diff(stream.starts_D))
    inputs, scored = [], []
    for tokens, targets, segments, positions, weights in zip(
        *(batch[key].tolist() for key in ("tokens", "targets", "segments", "positions", "weights"))
    ):
        segment, position, last = -1, 0, None
        for token, target, s, p, w in zip(tokens, targets, segments, positions, weights):
            if s == -1:
                assert (token, p, w) == (stream.end, 0, 0)
                last = "padding"
                continue
            assert last != "padding", "padding only behind the tokens"
            if last is None or document_of[token] != document_of[last] or token != last + 1:
                segment, position = segment + 1, 0
            assert (s, p, target) == (segment, position, token + 1)
            assert w == (document_of[token] == document_of[target])
            inputs.append(token)
            scored += [target] * int(w)
            position, last = position + 1, token
    return inputs, scored


def predicted(stream):
    """Places of all tokens but each document's first."""
    return sorted(set(range(stream.starts_D[-1])) - set(stream.starts_D.tolist()))


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 7), st.integers(0, 3))
def test_an_epoch_holds_every_row_once(lengths, length, rows, epoch):
    stream = CountingStream(lengths)
    if stream.starts_D[-1] <= length:
        return
    count = count_rows(stream.starts_D[-1], length)
    # All batches that touch the epoch; its rows are found by their place in the endless order.
    first, stop = epoch * count, (epoch + 1) * count
    inputs, scored = [], []
    for step in range(first // rows, -(-stop // rows)):
        batch = training_batch(stream, 5, step, rows, length)
        for row in range(rows):
            if first <= step * rows + row < stop:
                one = check_rows(stream, {key: value[row : row + 1] for key, value in batch.items()})
                inputs += one[0]
                scored += one[1]
    assert sorted(inputs) == list(range(stream.starts_D[-1] - 1))
    assert sorted(scored) == predicted(stream)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 6), st.integers(0, 50), st.data())
def test_chosen_rows_are_those_of_the_whole_and_no_others_are_read(lengths, length, rows, step, data):
    stream = CountingStream(lengths)
    if stream.starts_D[-1] <= length:
        return
    which = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=rows)), int)
    whole = training_batch(stream, 1, step, rows, length)
    stream.reads.clear()
    part = training_batch(stream, 1, step, rows, length, which)
    assert len(stream.reads) == len(which)
    assert_same(part, {key: value[which] for key, value in whole.items()})
    assert whole["example"].tolist() == list(range(rows))


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.sampled_from([1, 2, 3, 8]))
def test_every_held_out_token_is_scored_once(lengths, length, rows):
    """Case E1: the counted tokens do not depend on the batch size; windows start where the design says."""
    stream = CountingStream(lengths)
    scored = []
    for batch in held_out_batches(stream, rows, length):
        assert batch["tokens"].shape == (rows, length)
        scored += check_rows(stream, batch)[1]
        fresh = np.diff(batch["segments"], axis=1, prepend=-9) != 0
        for token in batch["tokens"][fresh & (batch["segments"] >= 0)].tolist():
            start = stream.starts_D[np.searchsorted(stream.starts_D, token, side="right") - 1]
            assert (token - start) % length == 0
    assert scored == predicted(stream)  # in order, too


def test_two_documents_in_a_row():
    """Case D1: five and seven tokens, each with an end of text, in a row of 16."""
    (batch,) = held_out_batches(CountingStream([6, 8]), 1, 16)
    assert batch["positions"][0].tolist() == [*range(5), *range(7), 0, 0, 0, 0]
    assert batch["segments"][0].tolist() == [0] * 5 + [1] * 7 + [-1] * 4
    assert batch["weights"][0].tolist() == [1] * 12 + [0] * 4  # 4 + 6 inside the texts, and both ends
    assert 6 not in batch["targets"][0]  # the first token of the second document is never a target
    row = training_batch(CountingStream([6, 9]), 0, 0, 1, 14)
    assert row["segments"][0].tolist() == [0] * 6 + [1] * 8
    assert row["positions"][0].tolist() == [*range(6), *range(8)]
    assert row["weights"][0].tolist() == [1] * 5 + [0] + [1] * 8


def test_the_last_short_batch_is_padded():
    """Case E8: seven rows in batches of four."""
    first, second = held_out_batches(CountingStream([6] * 7), 4, 5)
    assert (first["weights"].sum(), second["weights"].sum()) == (20, 15)
    assert second["segments"][3].tolist() == [-1] * 5


def numbered(rows, length=4):
    """A stream of one document whose row i is filled with the id i."""
    stream = CountingStream([rows * length + 1])
    stream.read = lambda start, stop: (np.arange(start, stop) // length).astype(np.int32)
    return stream


def test_a_resumed_run_reads_the_same_rows():
    """Case D3: the step is all the state, so steps 8 to 19 are the same after a stop."""
    stream = numbered(50)
    whole = [training_batch(stream, 3, step, 6, 4)["tokens"][:, 0].tolist() for step in range(20)]
    again = [training_batch(numbered(50), 3, step, 6, 4)["tokens"][:, 0].tolist() for step in range(8, 20)]
    assert whole[8:] == again
    first_epoch = np.concatenate(whole)[:50].tolist()
    assert first_epoch != list(range(50)) and sorted(first_epoch) == list(range(50))


def test_every_epoch_has_its_own_order():
    """Case D5."""
    orders = {seed: [tuple(row_numbers(seed, 16 * e, 16 * e + 16, 16)) for e in range(3)] for seed in (0, 1)}
    assert len({*orders[0], *orders[1]}) == 6
    assert all(sorted(order) == list(range(16)) for order in orders[0])
    assert orders[0] == [tuple(row_numbers(0, 16 * e, 16 * e + 16, 16)) for e in range(3)]
    # Kept for ever: another order would make a resumed run repeat and skip rows.
    assert row_numbers(0, 0, 8, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5000), st.integers(0, 2**64), st.integers(0, 5))
def test_the_order_of_a_large_source_is_a_permutation(count, seed, epoch):
    order = order_module._permuted(seed, epoch, np.arange(count), count)
    assert sorted(order.tolist()) == list(range(count))
    places = np.array([count - 1, 0, count // 2])
    assert order_module._permuted(seed, epoch, places, count).tolist() == order[places].tolist()


def test_the_order_of_a_large_source(monkeypatch):
    count = 2_000_000_000
    assert len(row_numbers(0, 5 * count - 2, 5 * count + 2, count)) == 4  # over the end of an epoch, at once
    assert row_numbers(0, 0, 8, count).tolist()[:4] == [1820561473, 666291205, 1437882662, 295232192]  # kept for ever
    assert row_numbers(0, 0, 4, count).tolist() != row_numbers(1, 0, 4, count).tolist()
    assert row_numbers(0, 0, 4, count).tolist() != row_numbers(0, count, count + 4, count).tolist()
    monkeypatch.setattr(order_module, "TABLE", 10)
    orders = np.array([row_numbers(seed, 0, 40, 40) for seed in range(1000)])
    hits = np.stack([np.bincount(place, minlength=40) for place in orders.T])  # how often each row is at each place
    assert np.square(hits - 25).sum() / 25 < 1521 + 5 * np.sqrt(2 * 1521)  # chi-square of a uniform choice
    follows = np.bincount((orders[:, 1:] - orders[:, :-1]).ravel() % 40, minlength=40)[1:]
    assert np.square(follows - 1000).sum() / 1000 < 38 + 5 * np.sqrt(2 * 38)  # no distance between neighbours is preferred


def test_rows_that_do_not_fill_a_batch_continue_in_the_next_epoch():
    """Case D8: 34 rows in batches of 16, in any number of readers."""
    stream = numbered(34)
    for parts in ([(0, 16)], [(0, 8), (8, 16)], [(0, 5), (5, 6), (6, 16)]):
        seen = []
        for step in range(17):  # eight epochs
            for part in parts:
                seen += training_batch(stream, 0, step, 16, 4, np.arange(*part))["tokens"][:, 0].tolist()
        for epoch in range(8):
            assert sorted(seen[34 * epoch : 34 * epoch + 34]) == list(range(34))
    # A batch larger than the corpus holds several epochs.
    counts = collections.Counter(training_batch(numbered(3), 0, 0, 9, 4)["tokens"][:, 0].tolist())
    assert counts == {0: 3, 1: 3, 2: 3}


def test_no_number_is_cut_to_32_bits():
    """Case C10: row counters and places beyond 2**31 and 2**32, seeds beyond 2**63."""
    step, rows, count = 700_000, 3072, 1000
    assert step * rows > 2**31
    epoch, first = divmod(step * rows, count)
    np.testing.assert_array_equal(
        row_numbers(2, step * rows, step * rows + 5, count),
        row_numbers(2, epoch * count, epoch * count + count, count)[first : first + 5],
    )
    assert row_numbers(2**63 + 1, 2**70, 2**70 + 3, 10).tolist() != row_numbers(1, 2**70, 2**70 + 3, 10).tolist()
    stream = CountingStream([3_000_000_000, 3_000_000_001])
    length = 1 << 16
    stream.read = lambda start, stop: (np.arange(start, stop) % 60_000).astype(np.int32)
    for step in range(6):
        place = int(row_numbers(0, step, step + 1, count_rows(stream.starts_D[-1], length))[0]) * length
        batch = training_batch(stream, 0, step, 1, length)
        assert batch["tokens"][0, 0] == place % 60_000 and batch["weights"].sum() >= length - 1
        assert batch["positions"][0, -1] == length - 1


def test_a_corpus_shorter_than_a_row_is_refused():
    assert count_rows(9, 8) == 1
    with pytest.raises(UserError, match=r"has 8 tokens.*batch\.length=8"):
        count_rows(8, 8)
