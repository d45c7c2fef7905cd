"""What ranks tell each other through the store."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed

from trainer.distributed.rendezvous import Board


@pytest.fixture
def store() -> torch.distributed.Store:
    return torch.distributed.HashStore()


def test_others_read_the_newest_text_of_a_name(store):
    mine, other = Board(store, "topic"), Board(store, "topic")
    assert other.read(1) is None and other.read_all([0, 1, "verdict"]) == {}
    mine.post(1, "here")
    mine.post("verdict", "ä")
    assert (other.read(1), other.read("verdict")) == ("here", "ä")
    mine.post(1, "there")
    assert other.read_all([0, 1, "verdict"]) == {1: "there", "verdict": "ä"}
    assert Board(store, "another topic").read(1) is None


def test_a_name_that_nobody_posts_is_waited_for_no_longer_than_that(store):
    board = Board(store, "topic")
    board.post(0, "here")
    assert board.has_all([0]) and not board.has_all([0, 1])
    started_at = time.monotonic()
    assert not board.wait([0, 1], seconds=0.3)
    assert 0.3 <= time.monotonic() - started_at < 20


def test_waiting_ends_once_all_names_are_there(store):
    board = Board(store, "topic")
    board.post(0, "here")
    later = threading.Timer(0.2, board.post, (1, "here"))
    later.start()
    assert board.wait([0, 1], seconds=60)
    later.join()


def test_a_name_that_was_seen_is_read_without_asking_for_it_again():
    class Asked(torch.distributed.HashStore):
        asked = 0

        def check(self, keys: list[str]) -> bool:
            Asked.asked += 1
            return super().check(keys)

    store = Asked()
    board = Board(store, "topic")
    board.post(0, "here")
    assert [board.read_all([0, 1]) for _ in range(3)] == [{0: "here"}] * 3
    assert Asked.asked == 1 + 1 + 3, "once for both, once for rank 0, each time for rank 1"
    for rank in range(512):
        board.post(rank, "here")
    Asked.asked = 0
    assert len(Board(store, "topic").read_all(range(512))) == 512 and Asked.asked == 1


def test_the_first_of_several_texts_stays(store):
    for text in ("the cause", "what followed"):
        Board(store, "topic").post_first("error", text)
    assert Board(store, "topic").read("error") == "the cause"
