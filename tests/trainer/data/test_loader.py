from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.support.toy_run import stage_of
from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.config.training_settings import BatchWarmup
from trainer.data.batch import IGNORED, longest_sequence
from trainer.data.evaluation_batches import evaluation_batches
from trainer.data.loader import GlobalBatch, Loader, Position
from trainer.data.sentence_pairs import IN_ORDER, IS_SWAPPED
from trainer.data.shard_set import open_shard_set

LENGTH = 32
GLOBAL_ROWS = 15
START = Position(stage=0, epoch=0, next_sample=0)
MODES = ["none", "next_sentence", "sentence_order"]


def shape_of(micro_rows: int = 4, global_rows: int = GLOBAL_ROWS, length: int = LENGTH) -> StageShape:
    return StageShape(
        steps=1,
        sequence_length=length,
        micro_batch_tokens=micro_rows * length,
        global_batch_tokens=global_rows * length,
    )


def data_of(corpus, mode: str = "none", num_workers: int = 0) -> DataSettings:
    return DataSettings(shards=corpus.shard_set.url, sentence_pairs=mode, num_workers=num_workers)


def loader_of(
    corpus, mode: str = "none", num_workers: int = 0, position: Position = START, seed: int = 0, rank: int = 0,
    world_size: int = 1, **stage: int,
) -> Loader:  # fmt: skip
    data = data_of(corpus, mode, num_workers)
    return Loader([corpus.shard_set], stage_of(shape_of(**stage), data), position, seed, (rank, world_size))


def rows_of_batches(batches: list[GlobalBatch], rows_of: Callable) -> list[list]:
    """The rows of each global batch of one rank."""
    return [[row for batch in global_batch.micro_batches for row in rows_of(batch)] for global_batch in batches]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_micro_batch_knows_a_bound_of_its_longest_sequence(corpus, num_workers: int) -> None:
    """Flash attention leaves out what lies beyond it."""
    for batch in itertools.islice(loader_of(corpus, num_workers=num_workers), 8):
        for micro in batch.micro_batches:
            longest = int(micro.cu_seqlens.diff().max())
            assert micro.longest_sequence == longest_sequence(longest, micro.sequence_length) >= longest


@pytest.fixture(scope="module", params=MODES)
def reference(request: pytest.FixtureRequest, corpus, rows_of: Callable) -> tuple[str, list[GlobalBatch], list[list]]:
    """Mode, global batches and their rows on one rank over more than an epoch."""
    loader = loader_of(corpus, request.param)
    steps = loader.num_samples(0) // GLOBAL_ROWS + 6
    batches = list(itertools.islice(loader, steps))
    return request.param, batches, rows_of_batches(batches, rows_of)


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(world_size=st.sampled_from([1, 2, 3, 4, 8]), micro_rows=st.sampled_from([1, 2, 3, 5, 15]), data=st.data())
def test_global_batches_are_the_same_on_any_ranks_and_micro_batches_from_any_step(
    corpus, rows_of: Callable, reference, world_size: int, micro_rows: int, data: st.DataObject
) -> None:
    mode, batches, expected = reference
    start = data.draw(st.integers(0, len(batches) - 4), label="start")
    # What a checkpoint holds is the `next_position` of the step before it.
    position = batches[start - 1].next_position if start else START
    found: list[list] = [[] for _ in range(4)]
    for rank in range(world_size):
        loader = loader_of(corpus, mode, position=position, rank=rank, world_size=world_size, micro_rows=micro_rows)
        own = list(itertools.islice(loader, 4))
        rows_a_rank = math.ceil(GLOBAL_ROWS / world_size)
        slices = math.ceil(rows_a_rank / micro_rows)
        assert {len(batch.micro_batches) for batch in own} == {slices}
        num_rows = {batch.num_rows for global_batch in own for batch in global_batch.micro_batches}
        assert num_rows == {math.ceil(GLOBAL_ROWS / (world_size * slices))}
        for global_batch, before in zip(own, batches[start:], strict=False):
            assert global_batch.first_slice == rank * loader.accumulation_steps
            assert global_batch.position == before.position
            assert global_batch.next_position == before.next_position
            assert global_batch.skipped_samples == before.skipped_samples
        for step, rows in enumerate(rows_of_batches(own, rows_of)):
            found[step] += rows
    assert found == expected[start : start + 4]


@pytest.mark.parametrize("stratified", [True, False])
def test_rows_have_rates_of_their_own_that_neither_ranks_nor_micro_batches_change(corpus, stratified: bool) -> None:
    law = {"name": "uniform", "from": 0.0, "to": 1.0, "stratified": stratified}
    bound = {"masking_law": law, "loss_weight": "elbo", "mask_share": 1.0, "random_share": 0.0}
    data = DataSettings.model_validate({"shards": corpus.shard_set.url, "num_workers": 0, **bound})

    def rows(world_size: int, micro_rows: int, seed: int = 0) -> list[tuple[list[int], list[int], float, int]]:
        found = []
        for step in range(12):
            for rank in range(world_size):
                stage, shape = stage_of(shape_of(micro_rows), data), (rank, world_size)
                position = replace(START, next_sample=0, epoch=step)
                (planned,) = itertools.islice(Loader([corpus.shard_set], stage, position, seed, shape), 1)
                for batch in planned.micro_batches:
                    assert len(batch.labels) == stage.room_in(batch.num_rows * LENGTH), "the shape is fixed"
                    used = batch.labels != IGNORED
                    owners = batch.masked_positions[used] // LENGTH
                    for row in range(batch.num_rows):
                        ids = batch.input_ids[row * LENGTH : (row + 1) * LENGTH].tolist()
                        labels = batch.labels[used][owners == row].tolist()
                        if any(ids):
                            found.append((ids, labels, float(batch.row_weights[row]), int(batch.row_tokens[row])))
        return found

    expected = rows(1, 15)
    assert expected == rows(1, 4) == rows(3, 2) and expected != rows(1, 15, seed=1)
    shares = np.array([len(labels) / tokens for _, labels, _, tokens in expected])
    assert np.histogram(shares, bins=4, range=(0, 1))[0].min() > len(shares) / 5, "rates from 0 to 1"
    for _, labels, weight, tokens in expected:
        whole = 2 if len(labels) == tokens else 1
        assert weight == pytest.approx(whole * tokens / len(labels) if labels else 0)


@pytest.mark.spawn
@pytest.mark.parametrize(("num_workers", "start"), [(1, 0), (2, 14), (4, 3)])
def test_global_batches_are_the_same_with_workers(
    corpus, rows_of: Callable, reference, num_workers: int, start: int
) -> None:
    mode, batches, expected = reference
    # Workers are forked from a process whose thread pools run.
    torch.randn(300, 300) @ torch.randn(300, 300)
    position = batches[start - 1].next_position if start else START
    loader = loader_of(corpus, mode, num_workers, position, rank=1, world_size=2, micro_rows=3)
    own = rows_of_batches(list(itertools.islice(loader, 5)), rows_of)
    assert own == [rows[GLOBAL_ROWS // 2 :] for rows in expected[start : start + 5]]


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 1)])
def test_a_causal_stage_reads_the_rows_of_a_masked_one_in_their_order(
    corpus, world_size: int, num_workers: int
) -> None:
    data = data_of(corpus, num_workers=num_workers)
    for rank in range(world_size):
        stages = (stage_of(replace(shape_of(), is_causal=is_causal), data) for is_causal in (False, True))
        loaders = (Loader([corpus.shard_set], stage, START, 0, (rank, world_size)) for stage in stages)
        for masked, causal in itertools.islice(zip(*loaders, strict=True), 6):
            assert (masked.position, masked.next_position) == (causal.position, causal.next_position)
            for one, other in zip(masked.micro_batches, causal.micro_batches, strict=True):
                used, originals = one.labels != IGNORED, one.input_ids.clone()
                originals[one.masked_positions[used]] = one.labels[used]
                assert torch.equal(originals, other.input_ids) and torch.equal(one.cu_seqlens, other.cu_seqlens)
                assert (one.is_causal, other.is_causal) == (False, True)
                follows = other.labels != IGNORED
                assert torch.equal(other.input_ids[other.masked_positions[follows] + 1], other.labels[follows])
                num_sequences = len({*other.cu_seqlens.tolist()}) - 1
                assert 0 <= other.num_tokens + other.num_rows - int(follows.sum()) - num_sequences <= other.num_rows


@pytest.mark.long
def test_every_token_comes_once_an_epoch(corpus, rows_of: Callable) -> None:
    loader = loader_of(corpus, micro_rows=1, global_rows=1)
    num_samples = loader.num_samples(0)
    batches = list(itertools.islice(loader, 2 * num_samples))
    rows = [rows[0] for rows in rows_of_batches(batches, rows_of)]
    for epoch in (0, 1):
        own = rows[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(token for row in own for token in row.tokens) == corpus.train_ids.tolist()
        assert {batch.position.epoch for batch in batches[epoch * num_samples : (epoch + 1) * num_samples]} == {epoch}
    assert not any(batch.skipped_samples for batch in batches)


@pytest.mark.long
def test_a_new_epoch_has_another_order_and_other_masks(corpus, rows_of: Callable) -> None:
    loader = loader_of(corpus, micro_rows=1, global_rows=1)
    num_samples = loader.num_samples(0)
    rows = [rows[0] for rows in rows_of_batches(list(itertools.islice(loader, 2 * num_samples)), rows_of)]
    masks = [{row.original_ids: row.masked for row in part} for part in (rows[:num_samples], rows[num_samples:])]
    assert masks[0].keys() == masks[1].keys()
    assert list(masks[0]) != list(masks[1])
    assert sum(masks[0][row] == masks[1][row] for row in masks[0]) < 0.1 * num_samples


def test_another_seed_is_another_order(corpus, rows_of: Callable, reference) -> None:
    mode, _, expected = reference
    own = rows_of_batches(list(itertools.islice(loader_of(corpus, mode, seed=1), 2)), rows_of)
    assert not any(row in expected[0] + expected[1] for row in own[0])


def test_the_remainder_of_an_epoch_is_skipped_and_reported(corpus, reference) -> None:
    mode, batches, _ = reference
    loader = loader_of(corpus, mode)
    skips = [batch for batch in batches if batch.skipped_samples]
    (skip,) = skips
    assert skip is not batches[0]
    assert skip.position == Position(0, 1, 0)
    assert skip.skipped_samples == loader.num_samples(0) % GLOBAL_ROWS
    assert [batch.position.next_sample for batch in batches[:3]] == [0, 15, 30]
    assert batches[1].first_sample == 15 and batches[1].last_sample == 29


def test_a_sequence_is_a_piece_of_one_document_in_its_order(corpus, rows_of: Callable) -> None:
    for global_batch in itertools.islice(loader_of(corpus), 10):
        for row in (row for batch in global_batch.micro_batches for row in rows_of(batch)):
            for start, stop in itertools.pairwise((*row.sequence_starts, LENGTH)):
                tokens = np.array([token for token in row.original_ids[start:stop] if token >= corpus.first_id])
                if len(tokens):
                    assert (np.diff(tokens) == 1).all()
                    assert len(set(corpus.document_of[tokens - corpus.first_id])) == 1
                    assert len(tokens) + 2 == stop - start


@pytest.mark.long
def test_pairs_are_adjacent_or_from_different_documents_of_one_shard(corpus, rows_of: Callable) -> None:
    labels: Counter = Counter()
    for global_batch in itertools.islice(loader_of(corpus, "next_sentence"), 60):
        for row in (row for batch in global_batch.micro_batches for row in rows_of(batch)):
            pairs = [start for start in row.sequence_starts if row.original_ids[start]]
            for start, stop, label in zip(
                pairs, (*row.sequence_starts, LENGTH)[1:], row.next_sentence_labels, strict=False
            ):
                if label == IGNORED:
                    continue
                positions = range(start, stop)
                halves = [
                    np.array(
                        [row.original_ids[position] for position in positions if row.token_type_ids[position] == kind]
                    )
                    for kind in (0, 1)
                ]
                a, b = (half[half >= corpus.first_id] - corpus.first_id for half in halves)
                assert len(halves[0]) == len(a) + 2 and len(halves[1]) == len(b) + 1
                documents = [set(corpus.document_of[half]) for half in (a, b)]
                assert len(documents[0]) == len(documents[1]) == 1
                assert (documents[0] == documents[1]) == (label == 0)
                assert set(corpus.shard_of[a]) == set(corpus.shard_of[b])
                if label == 0:
                    assert corpus.sentence_of[a[-1]] < corpus.sentence_of[b[0]]
                labels[label] += 1
    assert labels[0] > 50 and labels[1] > 50


@pytest.mark.long
def test_pairs_in_order_or_swapped_follow_each_other_in_one_document(corpus, rows_of: Callable) -> None:
    labels: Counter = Counter()
    for global_batch in itertools.islice(loader_of(corpus, "sentence_order"), 60):
        for row in (row for batch in global_batch.micro_batches for row in rows_of(batch)):
            sequences = itertools.pairwise((*row.sequence_starts, LENGTH))
            for (start, stop), label in zip(sequences, row.next_sentence_labels, strict=False):
                ids = np.array(row.original_ids[start:stop])
                types = np.array(row.token_type_ids[start:stop])[ids >= corpus.first_id]
                tokens = ids[ids >= corpus.first_id] - corpus.first_id
                a, b = tokens[types == 0], tokens[types == 1]
                if not len(b):
                    assert label == IGNORED
                    continue
                labels[label] += 1
                first, second = (b, a) if label == IS_SWAPPED else (a, b)
                assert len(set(corpus.document_of[tokens])) == 1
                assert corpus.sentence_of[first[-1]] < corpus.sentence_of[second[0]]
    judged = labels[IN_ORDER] + labels[IS_SWAPPED]
    assert abs(labels[IN_ORDER] / judged - 0.5) < 5 * 0.5 / np.sqrt(judged) and judged > 100


def test_pair_counts_are_reported(corpus) -> None:
    counts = loader_of(corpus, "next_sentence").pair_counts(0)
    assert counts is not None and counts.pairs > 50 and counts.single_sentence_chunks > 50
    assert loader_of(corpus).pair_counts(0) is None


def test_shapes_never_change_but_for_the_room_for_sequences(corpus, reference) -> None:
    mode, batches, _ = reference
    micro_batches = [batch for global_batch in batches for batch in global_batch.micro_batches]
    names = ("input_ids", "masked_positions", "labels", "cls_positions", "next_sentence_labels")
    assert len({tuple(getattr(batch, name).shape for name in names) for batch in micro_batches}) == 1
    assert len(micro_batches[0].labels) == 4 * np.ceil(0.15 * LENGTH)
    assert {batch.has_segment_b for batch in micro_batches} == {mode != "none"}


@pytest.mark.parametrize("mode", MODES)
def test_room_for_sequences_is_near_their_number_with_documents_of_one_token(
    tmp_path: Path, corpus_at: Callable, documents_of: Callable, mode: str
) -> None:
    """One document of one token in the corpus made room for 171 sequences in every row of 512, sentence pairs 103."""
    documents = [[1], *documents_of(np.random.default_rng(3), 400, 600.0), *([[1]] * 30)]
    corpus = corpus_at(tmp_path, [documents], [documents_of(np.random.default_rng(4), 3, 90.0)])
    loader = loader_of(corpus, mode, micro_rows=32, global_rows=64, length=512)
    batches = list(itertools.islice(loader, 5))
    for batch in (micro_batch for global_batch in batches for micro_batch in global_batch.micro_batches):
        real, capacity = len(batch.cu_seqlens.unique()) - 1, len(batch.cu_seqlens) - 1
        assert real <= capacity <= 2 * real + 64
        assert capacity < 32 * 20


@pytest.mark.long
def test_slices_of_many_ranks_are_disjoint_complete_and_equal(corpus) -> None:
    ranks, global_rows = 1024, 250
    slices = []
    for rank in range(ranks):
        loader = loader_of(corpus, rank=rank, world_size=ranks, micro_rows=1, global_rows=global_rows)
        slices += next(loader.planned()).slices()
        assert loader.accumulation_steps == 1
    assert [piece.first for piece in slices[1:]] == [piece.stop for piece in slices[:-1]]
    assert (slices[0].first, slices[-1].stop) == (0, global_rows)
    assert {piece.stop - piece.first for piece in slices} == {0, 1}


def test_the_runs_own_random_state_is_left_alone(corpus) -> None:
    torch.manual_seed(3)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 - what users have
    next(iter(loader_of(corpus)))
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_a_data_set_smaller_than_a_global_batch_is_refused(corpus) -> None:
    rows = loader_of(corpus).num_samples(0)
    loader_of(corpus, global_rows=rows)
    with pytest.raises(
        UserError,
        check=coded("less-than-one-batch"),
        match=f"contains {rows} rows of 32 tokens, fewer than the {rows + 1} .*{rows * 32} or less",
    ):
        loader_of(corpus, global_rows=rows + 1)


def test_an_empty_split_is_refused(tmp_path, corpus_at: Callable) -> None:
    corpus = corpus_at(tmp_path, [[[9], [9]]])
    with pytest.raises(UserError, match="no document in the split 'valid'"):
        next(evaluation_batches([corpus.shard_set], data_of(corpus), shape_of(), 0, 0, 1, None))


@pytest.mark.parametrize("mode", ["next_sentence", "sentence_order"])
@pytest.mark.parametrize(
    "documents", [[[9]], [[9]] * 20, [[9, 4]]], ids=["one sentence", "single sentences", "one pair"]
)
def test_a_corpus_without_any_labeled_pair_is_refused(
    tmp_path, corpus_at: Callable, documents: list[list[int]], mode: str
) -> None:
    corpus = corpus_at(tmp_path, [documents])
    with pytest.raises(UserError, check=coded("no-sentence-pairs"), match=r"^[^\n]* Fix: [^\n]*$"):
        loader_of(corpus, mode, global_rows=1, micro_rows=1)


@pytest.mark.spawn
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_shard_is_the_users_error(tmp_path, corpus_at: Callable, num_workers: int) -> None:
    corpus = corpus_at(tmp_path, [[[90]], [[90]]])
    path = tmp_path / "train-000001.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    loader = loader_of(corpus, num_workers=num_workers, global_rows=6, micro_rows=6)
    with pytest.raises(UserError, match=r"^shard .*train-000001.tar is damaged: sha256 \w+, and[^\n]*$"):
        next(iter(loader))


@pytest.mark.spawn
def test_workers_obey_their_rank_alone_and_end_with_it(corpus) -> None:
    before = set(active_children())
    state = torch.get_rng_state()
    batches = iter(loader_of(corpus, num_workers=1))
    next(batches)
    assert torch.equal(state, torch.get_rng_state())
    (worker,) = set(active_children()) - before
    # As a scheduler does that ends a job: from another process.
    for name in ("TERM", "INT", "USR1"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    for _ in range(10):
        next(batches)
    assert worker.is_alive()
    del batches
    worker.join(timeout=10)
    assert worker.exitcode == 0


@pytest.mark.spawn
def test_a_worker_ends_at_its_ranks_word(corpus) -> None:
    before = set(active_children())
    batches = iter(loader_of(corpus, num_workers=1))
    next(batches)
    (worker,) = set(active_children()) - before
    time.sleep(0.1)
    os.kill(worker.pid, 15)
    worker.join(timeout=10)
    assert worker.exitcode == 0


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluation_is_the_same_on_any_ranks_and_every_time(corpus, rows_of: Callable, mode: str) -> None:
    def evaluate(world_size: int, max_tokens: int | None = None, micro_rows: int = 4) -> list:
        by_rank = [
            list(evaluation_batches(
                [corpus.shard_set], data_of(corpus, mode), shape_of(micro_rows), 0, rank, world_size, max_tokens
            ))
            for rank in range(world_size)
        ]  # fmt: skip
        assert len({len(batches) for batches in by_rank}) == 1
        assert {batch.batch.num_rows for batches in by_rank for batch in batches} == {micro_rows}
        return [row for batches in zip(*by_rank, strict=True) for batch in batches for row in rows_of(batch.batch)]

    whole = evaluate(1)
    assert evaluate(1) == evaluate(2) == evaluate(3, micro_rows=3) == evaluate(8) == whole
    if mode == "none":
        assert sorted(token for row in whole for token in row.tokens) == corpus.valid_ids.tolist()
    assert evaluate(2, max_tokens=5 * LENGTH) == whole[:5]
    assert sum(len(row.masked) for row in whole) == pytest.approx(0.15 * sum(len(row.tokens) for row in whole), rel=0.1)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, corpus_at: Callable) -> tuple:
    """Two corpora without a common id: 20 documents of 100 tokens, and 3."""
    documents = [[[25] * 4] * 5] * 4
    large = corpus_at(tmp_path_factory.mktemp("large"), documents, [[[50]]], dtype="uint16", vocab_size=11_000)
    small = corpus_at(tmp_path_factory.mktemp("small"), [[[20] * 5] * 3], [[[50]]], dtype="uint16", first_id=10_000)
    return large, small


@pytest.mark.long
@pytest.mark.parametrize("mode", [*MODES[:2], pytest.param(MODES[2], marks=pytest.mark.slow)])
def test_a_mixture_takes_its_shares_and_every_component_runs_through_its_own_epochs(
    mixed: tuple, rows_of: Callable, mode: str
) -> None:
    data = DataSettings(
        shards=[{"url": mixed[0].shard_set.url, "weight": 3}, {"url": mixed[1].shard_set.url, "weight": 1}],
        num_workers=0, sentence_pairs=mode,
    )  # fmt: skip
    shard_sets = [corpus.shard_set for corpus in mixed]

    def batches(position: Position, rank: int, world_size: int, count: int) -> list[GlobalBatch]:
        loader = Loader(shard_sets, stage_of(shape_of(8, 128), data), position, 0, (rank, world_size))
        assert loader.num_samples(0) is None
        return list(itertools.islice(loader, count))

    alone = batches(START, 0, 1, 32)
    expected = rows_of_batches(alone, rows_of)
    rows = [row for part in expected for row in part]
    of_small = [row.tokens[0] >= 10_000 for row in rows]
    assert len(rows) == 4096 and sum(of_small) == 1024
    if mode == "none":
        for corpus, is_small in zip(mixed, (False, True), strict=True):
            tokens = [
                token for row, small in zip(rows, of_small, strict=True) if small == is_small for token in row.tokens
            ]
            one_epoch = len(corpus.train_ids)
            for first in range(0, len(tokens) - one_epoch, one_epoch):
                assert sorted(tokens[first : first + one_epoch]) == corpus.train_ids.tolist()
    position = alone[20].next_position
    later = [rows_of_batches(batches(position, rank, 3, 2), rows_of) for rank in range(3)]
    assert [sum((part[step] for part in later), []) for step in range(2)] == expected[21:23]


def test_a_mixture_is_evaluated_on_all_its_valid_text(mixed: tuple, rows_of: Callable) -> None:
    shard_sets = [corpus.shard_set for corpus in mixed]
    data = DataSettings(shards=[{"url": shard_set.url} for shard_set in shard_sets])
    batches = evaluation_batches(shard_sets, data, shape_of(), 0, 0, 1, None)
    tokens = sorted(token for batch in batches for row in rows_of(batch.batch) for token in row.tokens)
    assert tokens == [*mixed[0].valid_ids.tolist(), *mixed[1].valid_ids.tolist()]


def test_fewer_shards_than_ranks_give_every_rank_as_much(tmp_path, corpus_at: Callable, rows_of: Callable) -> None:
    corpus = corpus_at(tmp_path, [[[300], [200]]])
    open_shard_set(str(tmp_path))
    found = []
    for rank in range(8):
        (batch,) = itertools.islice(loader_of(corpus, rank=rank, world_size=8, global_rows=4, micro_rows=1), 1)
        assert len(batch.micro_batches) == 1
        found += rows_of(batch.micro_batches[0])
        assert (batch.micro_batches[0].labels != IGNORED).any() == bool(rows_of(batch.micro_batches[0]))
    assert len(found) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("alpha", "share"), [(1.0, 2000 / 2300), (0.5, 2000**0.5 / (2000**0.5 + 300**0.5)), (0.0, 0.5)]
)
def test_a_mixture_without_weights_is_drawn_by_tempered_tokens(mixed: tuple, alpha: float, share: float) -> None:
    shard_sets = [corpus.shard_set for corpus in mixed]
    assert [shard_set.manifest.train.tokens for shard_set in shard_sets] == [2000, 300]
    shards, no_random_ids = (
        [{"url": corpus.shard_set.url} for corpus in mixed],
        {"mask_share": 1.0, "random_share": 0.0},
    )
    data = DataSettings(shards=shards, sampling_alpha=alpha, num_workers=0, **no_random_ids)
    loader = Loader(shard_sets, stage_of(shape_of(8, 128), data), START, 0)
    rows = [
        bool((batch.input_ids.reshape(-1, batch.sequence_length)[row] >= 10_000).any())
        for step in itertools.islice(loader, 32)
        for batch in step.micro_batches
        for row in range(batch.num_rows)
    ]
    assert len(rows) == 4096 and 1 - sum(rows) / 4096 == pytest.approx(share, abs=1 / 4096)


def damaged_copy(corpus, folder: Path, name: str) -> DataSettings:
    """The corpus with a flipped bit in a shard, to be read with the policy to skip."""
    shutil.copytree(corpus.shard_set.url, folder)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    return DataSettings(shards=str(folder), num_workers=0, on_corrupt_shard="skip")


@pytest.mark.long
def test_rows_of_a_damaged_shard_keep_their_places_without_predictions(
    corpus, rows_of: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = damaged_copy(corpus, tmp_path / "damaged", "train-000003.tar")
    shard_set = open_shard_set(data.shards, tmp_path / "cache")
    broken = shard_set.manifest.train.shards[3]
    sound = list(itertools.islice(loader_of(corpus), 30))

    def batches(position: Position, rank: int, world_size: int, count: int) -> list[GlobalBatch]:
        loader = Loader([shard_set], stage_of(shape_of(), data), position, 0, (rank, world_size))
        return list(itertools.islice(loader, count))

    alone = batches(START, 0, 1, 30)
    assert capsys.readouterr().err.count("train-000003.tar is damaged") == 1
    lost = 0
    for found, expected in zip(alone, sound, strict=True):
        assert (found.position, found.next_position) == (expected.position, expected.next_position)
        for batch, whole in zip(found.micro_batches, expected.micro_batches, strict=True):
            lost += batch.num_unreadable_rows
            rows, whole_rows = rows_of(batch), rows_of(whole)
            assert len(rows) == len(whole_rows) - batch.num_unreadable_rows
            assert [row for row in whole_rows if row in rows] == rows, "all other rows are as they were"
    own = set(corpus.train_ids[corpus.shard_of[: len(corpus.train_ids)] == 3].tolist())
    gone = sum(bool(own & set(row.tokens)) for step in sound for batch in step.micro_batches for row in rows_of(batch))
    assert lost == gone > 0 and broken.documents
    later = [batches(alone[10].next_position, rank, 4, 2) for rank in range(4)]
    split = [sum((rows_of_batches(part, rows_of)[step] for part in later), []) for step in range(2)]
    assert split == rows_of_batches(alone[11:13], rows_of)


def test_a_damaged_shard_is_an_error_by_default(corpus, tmp_path: Path) -> None:
    data = damaged_copy(corpus, tmp_path / "damaged", "train-000003.tar").model_copy(
        update={"on_corrupt_shard": "error"}
    )
    shard_set = open_shard_set(data.shards, tmp_path / "cache")
    loader = Loader([shard_set], stage_of(shape_of(), data), START, 0)
    with pytest.raises(UserError, match=r"train-000003\.tar is damaged"):
        list(itertools.islice(loader, 30))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_remote_shards_give_the_same_batches_through_a_cache_that_holds_few(
    corpus, rows_of: Callable, tmp_path: Path, mode: str
) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in Path(corpus.shard_set.url).iterdir():
        memory.pipe_file(f"/loader-{mode}/{path.name}", path.read_bytes())
    size = max(shard.bytes for shard in corpus.shard_set.manifest.train.shards)
    remote = open_shard_set(f"memory://loader-{mode}", tmp_path / "cache", cache_bytes=3 * size)
    data = DataSettings(shards=remote.url, num_workers=0, sentence_pairs=mode)
    loader = Loader([remote], stage_of(shape_of(), data), START, 0)
    expected = rows_of_batches(list(itertools.islice(loader_of(corpus, mode), 20)), rows_of)
    assert rows_of_batches(list(itertools.islice(loader, 20)), rows_of) == expected
    deadline = time.monotonic() + 30  # the thread that fetches ahead may be at it still
    while (held := bytes_in(tmp_path / "cache")) > 3 * size and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 0 < held <= 3 * size


def bytes_in(cache: Path) -> int:
    """Bytes of the files in a cache that others may be emptying."""
    total = 0
    for path in cache.glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


WARMUP = BatchWarmup(initial_tokens=4 * LENGTH, steps=7)
SIZES = [4, 4, 4, 8, 8, 12, 12, 15, 15, 15]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "micro_rows", "num_workers"),
    [(1, 4, 0), (2, 3, 0), (3, 2, 0), (8, 1, 0), pytest.param(2, 3, 1, marks=pytest.mark.spawn)],
)
def test_a_growing_batch_is_the_same_samples_on_any_ranks_from_any_step(
    corpus, rows_of: Callable, world_size: int, micro_rows: int, num_workers: int
) -> None:
    stage_start = 100  # the warm-up counts from the stage's first step

    def batches(rank: int, ranks: int, rows: int, start: int, position: Position) -> list[GlobalBatch]:
        shape, data = replace(shape_of(rows), batch_warmup=WARMUP), data_of(corpus, num_workers=num_workers)
        stage = stage_of(shape, data, first_step=stage_start)
        loader = Loader([corpus.shard_set], stage, position, 0, (rank, ranks), stage_start + start)
        return list(itertools.islice(loader, len(SIZES) - start))

    whole = batches(0, 1, 4, 0, START)
    assert [batch.last_sample - batch.first_sample + 1 for batch in whole] == SIZES
    assert [len(rows) for rows in rows_of_batches(whole, rows_of)] == SIZES
    assert all(before.next_position == after.position for before, after in itertools.pairwise(whole))
    for start in (0, 2, 4, 8):
        by_rank = [batches(rank, world_size, micro_rows, start, whole[start].position) for rank in range(world_size)]
        assert len({tuple(len(batch.micro_batches) for batch in own) for own in by_rank}) == 1
        for rank, own in enumerate(by_rank):
            assert [batch.first_slice for batch in own] == [rank * len(batch.micro_batches) for batch in own]
        found = [
            [row for rows in step for row in rows]
            for step in zip(*(rows_of_batches(own, rows_of) for own in by_rank), strict=True)
        ]
        assert found == rows_of_batches(whole[start:], rows_of)
