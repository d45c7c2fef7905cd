from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.config.preparation_config import DeduplicationSettings
from data_prep.deduplication import signature_files as signature_module
from data_prep.deduplication.signature_files import ngram_hashes, signatures

SETTINGS = DeduplicationSettings(near=True, ngram_tokens=5, num_hashes=128)


def ngram_set(tokens: np.ndarray, length: int) -> set[tuple[int, ...]]:
    """Independently of the product: the n-grams as tuples."""
    values = tokens.tolist()
    return {tuple(values[place : place + length]) for place in range(max(1, len(values) - length + 1))}


def random_documents(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 1000, length).astype(np.uint16) for length in lengths]


def hashes_of(documents: list[np.ndarray], ngram_tokens: int) -> list[np.ndarray]:
    lengths = np.array([len(document) for document in documents])
    hashes, counts = ngram_hashes(np.concatenate(documents), lengths, ngram_tokens)
    assert counts.sum() == len(hashes)
    return np.split(hashes, np.cumsum(counts)[:-1])


def test_a_document_has_one_ngram_for_each_place_that_it_can_begin_at() -> None:
    documents = random_documents([7, 3, 2, 1, 4])
    assert [len(hashes) for hashes in hashes_of(documents, 3)] == [5, 1, 1, 1, 2]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8),
    ngram_tokens=st.integers(1, 6),
    chunk_tokens=st.integers(1, 9),
)
def test_hashes_are_equal_where_ngrams_are_and_only_there(
    documents: list[list[int]], ngram_tokens: int, chunk_tokens: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signature_module, "_CHUNK_TOKENS", chunk_tokens)
        found = hashes_of([np.array(tokens, np.uint16) for tokens in documents], ngram_tokens)
    by_ngram: dict[tuple[int, ...], int] = {}
    for tokens, hashes in zip(documents, found, strict=True):
        places = range(max(1, len(tokens) - ngram_tokens + 1))
        for place, value in zip(places, hashes.tolist(), strict=True):
            assert by_ngram.setdefault(tuple(tokens[place : place + ngram_tokens]), value) == value
    assert len(set(by_ngram.values())) == len(by_ngram)


def test_a_batch_is_signed_as_its_documents_one_by_one() -> None:
    documents = random_documents([1, 4, 5, 6, 300, 70_000, 2, 900])
    together = signatures(documents, SETTINGS)
    assert together.shape == (8, 128) and together.dtype == np.uint32
    np.testing.assert_array_equal(together, np.concatenate([signatures([one], SETTINGS) for one in documents]))


def test_a_signature_does_not_depend_on_the_dtype_of_the_tokens() -> None:
    documents = random_documents([50, 3])
    wide = [document.astype(np.uint32) for document in documents]
    np.testing.assert_array_equal(signatures(documents, SETTINGS), signatures(wide, SETTINGS))


def test_no_documents_give_no_signatures() -> None:
    assert signatures([], SETTINGS).shape == (0, 128)


def test_signatures_are_the_same_on_every_machine() -> None:
    """Where this fails a new rensa signs otherwise: signatures of old and new versions must not be compared."""
    documents = [(np.arange(length) * 7919 % 1009).astype(np.uint16) for length in (1, 4, 60, 1000)]
    signed = signatures(documents, SETTINGS)
    assert hashlib.sha256(signed.astype("<u4").tobytes()).hexdigest()[:16] == "fc5f415c3b0b3aac"
    assert signature_module.ALGORITHM_VERSION == 2


@pytest.mark.parametrize("length", [20, 200, 3000])
@pytest.mark.parametrize("share_changed", [0.01, 0.05, 0.2])
def test_equal_places_estimate_the_jaccard_similarity_of_the_ngram_sets(length: int, share_changed: float) -> None:
    generator = np.random.default_rng(length)
    pairs, truth = [], []
    for original in random_documents([length] * 100, seed=length):
        edited = original.copy()
        places = generator.choice(length, max(1, round(share_changed * length)), replace=False)
        edited[places] = generator.integers(0, 1000, len(places))
        pairs += [original, edited]
        left, right = ngram_set(original, 5), ngram_set(edited, 5)
        truth.append(len(left & right) / len(left | right))
    signed = signatures(pairs, SETTINGS)
    errors = (signed[::2] == signed[1::2]).mean(axis=1) - truth
    # Standard deviation of one estimate: sqrt(J (1 - J) / 128) <= 0.0442; of the mean of 100: a tenth of it.
    assert abs(errors.mean()) < 4 * 0.0442 / 10
    assert errors.std() < 1.3 * 0.0442
    assert np.abs(errors).max() < 5 * 0.0442


def test_the_order_of_ngrams_and_their_number_do_not_matter_only_the_set_does() -> None:
    unit = random_documents([40])[0]
    once, twice = np.tile(unit, 2), np.tile(unit, 7)  # the same 40 n-grams, around the seam too
    assert ngram_set(once, 5) == ngram_set(twice, 5)
    np.testing.assert_array_equal(*signatures([once, twice], SETTINGS))


def test_text_without_spaces_is_compared_by_its_tokens() -> None:
    """A Chinese page is one word to a splitter at spaces: changed in one place it would share nothing."""
    page = np.arange(5, 505, dtype=np.uint16)
    edited = page.copy()
    edited[250] = 4
    signed = signatures([page, edited], SETTINGS)
    assert (signed[0] == signed[1]).mean() > 0.9
