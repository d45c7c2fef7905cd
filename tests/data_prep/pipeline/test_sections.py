"""Work files: every destination gets its own documents, in the order in which they came."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from data_prep.base.errors import UserError
from data_prep.pipeline import sections
from data_prep.pipeline.sections import (
    Section,
    SectionWriter,
    join_sections,
    read_sections,
    read_summary,
    select_documents,
    take_runs,
)
from tests.support.error_codes import coded
from tests.support.living_data_sets import starts_of


def section_of(documents: dict[int, list[int]], first_token: int = 5) -> Section:
    """Documents by id, each given by its sentences' lengths; tokens count on."""
    lengths = [sum(sentences) for sentences in documents.values()]
    sentences = [length for sentences in documents.values() for length in sentences]
    return Section(
        np.array(list(documents), np.uint64),
        np.array(lengths, np.uint32),
        np.array([len(item) for item in documents.values()], np.uint32),
        np.array(sentences, np.uint32),
        np.arange(first_token, first_token + sum(lengths)).astype(np.uint16),
    )


def random_batches(seed: int, num_documents: int) -> list[tuple[Section, np.ndarray]]:
    draw = np.random.default_rng(seed)
    batches, first = [], 0
    while first < num_documents:
        size = int(draw.integers(1, 9))
        documents = {number: draw.integers(1, 6, draw.integers(1, 4)).tolist() for number in range(first, first + size)}
        batches.append((section_of(documents, 5 + first), draw.integers(0, 4, size)))
        first += size
    return batches


def write(path: Path, batches: list[tuple[Section, np.ndarray]], num_destinations: int = 5) -> str:
    with open(path, "wb") as file:
        writer = SectionWriter(file, num_destinations, np.uint16)
        for section, destinations in batches:
            writer.add(section, destinations)
        writer.close({"note": 1})
    return str(path)


def documents_of(section: Section) -> list[tuple[int, list[int], list[int]]]:
    """(id, tokens, sentence lengths) of each document."""
    return [
        (
            int(section.document_ids[number]),
            section.tokens[start : start + section.document_lengths[number]].tolist(),
            section.sentence_lengths[first : first + section.sentence_counts[number]].tolist(),
        )
        for number, (start, first) in enumerate(
            zip(starts_of(section.document_lengths), starts_of(section.sentence_counts), strict=True)
        )
    ]


@pytest.mark.parametrize("flush_bytes", [1, 500, 1 << 20])
@pytest.mark.parametrize("values_at_once", [1, 7, 1 << 20])
def test_each_destination_gets_its_documents_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush_bytes: int, values_at_once: int
) -> None:
    monkeypatch.setattr(sections, "FLUSH_BYTES", flush_bytes)
    monkeypatch.setattr(sections, "_VALUES_AT_ONCE", values_at_once)
    batches = random_batches(3, 100)
    url = write(tmp_path / "work", batches)
    everything = documents_of(join_sections([section for section, _ in batches]))
    destinations = np.concatenate([destinations for _, destinations in batches]).tolist()
    for destination in range(5):
        expected = [item for item, place in zip(everything, destinations, strict=True) if place == destination]
        found = [item for section in read_sections(url, destination, np.uint16) for item in documents_of(section)]
        assert found == expected
    summary, counts = read_summary(url)
    assert summary == {"note": 1} and counts.tolist() == np.bincount(destinations, minlength=5).tolist()
    assert counts[4] == 0 < counts[:4].min()


def test_a_unit_without_documents_has_a_file_without_sections(tmp_path: Path) -> None:
    url = write(tmp_path / "work", [])
    assert list(read_sections(url, 2, np.uint16)) == []
    assert read_summary(url)[1].tolist() == [0] * 5


def test_a_mask_selects_whole_documents() -> None:
    section = join_sections([section for section, _ in random_batches(1, 20)])
    for seed in range(3):
        is_kept = np.random.default_rng(seed).random(len(section.document_ids)) < 0.4
        expected = [item for item, kept in zip(documents_of(section), is_kept, strict=True) if kept]
        assert documents_of(select_documents(section, is_kept)) == expected
    nothing = select_documents(section, np.zeros(len(section.document_ids), bool))
    assert documents_of(nothing) == [] and not nothing.nbytes


def test_a_file_cut_short_is_damaged(tmp_path: Path) -> None:
    url = write(tmp_path / "work", random_batches(1, 10))
    Path(url).write_bytes(Path(url).read_bytes()[:-9])
    with pytest.raises(UserError, check=coded("damaged-work-file")):
        read_summary(url)


def test_every_flipped_bit_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "FLUSH_BYTES", 300)
    path = tmp_path / "work"
    url = write(path, random_batches(1, 6), 4)
    whole = path.read_bytes()

    def read() -> None:
        read_summary(url)
        for destination in range(4):
            list(read_sections(url, destination, np.uint16))

    read()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(UserError, check=coded("damaged-work-file")):
            read()


def test_a_file_of_an_earlier_release_is_not_misread(tmp_path: Path) -> None:
    counts, summary = np.zeros(5, np.int64).tobytes(), b"{}"
    trailer = struct.pack("<8sQQQQ", b"clozesec", 0, 5, 0, len(summary))
    (tmp_path / "work").write_bytes(counts + summary + trailer)
    with pytest.raises(UserError, check=coded("damaged-work-file")):
        read_summary(str(tmp_path / "work"))


def test_runs_of_equal_values_equal_those_made_by_hand() -> None:
    values = np.arange(10)
    assert take_runs(values, np.array([7, 0, 3]), np.array([2, 1, 3])).tolist() == [7, 8, 0, 3, 4, 5]
    assert take_runs(values, np.array([4]), np.array([2])).tolist() == [4, 5]
    assert starts_of(np.array([2, 1, 3])).tolist() == [0, 2, 3]
    values, starts, lengths = np.arange(1000), np.array([700, 0, 300]), np.array([250, 1, 90], np.uint32)
    expected = [*range(700, 950), 0, *range(300, 390)]
    assert take_runs(values, starts, lengths).tolist() == expected, "long runs are copied, short ones gathered"
