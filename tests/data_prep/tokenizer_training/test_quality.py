"""The report of a tokenizer counts what its held-out text holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep import Tokenizer
from data_prep.base.errors import UserError
from data_prep.tokenizer.tokenizer import TokenizerSettings
from data_prep.tokenizer.tokenizer_report import REPORT_NAME, GroupReport, read_report
from data_prep.tokenizer_training.quality import report_lines, size_warning
from data_prep.tokenizer_training.sampling import CorpusCounts
from data_prep.tokenizer_training.training import train_on_sample
from tests.support.error_codes import coded
from tests.support.made_up_documents import TrainingSample, lines_of
from tests.support.preparations import normalized

ENGLISH = [f"the house number {number} stands by the river, and the other house does not" for number in range(60)]
CHINESE = [f"\u4f60\u597d\u4e16\u754c\u3002\u6211\u5f88\u597d\u5c71{number}" for number in range(20)]


@pytest.fixture(scope="module", params=[True, False], ids=["bytes", "no bytes"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sample, counts = TrainingSample(1_500, 0), CorpusCounts()
    for source, language, texts in (("books", "en", ENGLISH), ("wiki", "zh", CHINESE)):
        for text in texts:
            sample.add([text], source, language)
            counts.documents[source, language] += 1
            counts.text_bytes[source, language] += len(text.encode())
    counts.dropped["books", "cleaning", "empty"] = 3
    settings = TokenizerSettings(vocab_size=400 if request.param else 140, byte_fallback=request.param)
    output = tmp_path_factory.mktemp("report")
    train_on_sample(sample, counts, output, settings)
    return output


def test_the_figures_are_those_of_the_held_out_text(folder: Path) -> None:
    tokenizer, report = Tokenizer.load(folder), read_report(folder)
    assert report is not None and report.fingerprint == tokenizer.fingerprint
    assert set(report.sources) == {"books", "wiki"} and set(report.languages) == {"en", "zh"}
    everything = report.everything
    for name in ("documents", "text_bytes", "characters", "words", "tokens", "byte_tokens", "unknown_tokens"):
        parts = [getattr(group, name) for group in report.sources.values()]
        assert getattr(everything, name) == sum(parts)
    chinese = report.languages["zh"]
    assert chinese.words == chinese.documents and chinese.tokens_per_word > 2
    assert 0.3 < chinese.tokens_per_character < 2
    if report.held_out_in_sample == 0 and everything.documents == 80 - report.sample_documents:
        texts = [*ENGLISH, *CHINESE]
        encoded = tokenizer.encode_many([normalized(text, tokenizer.normalization) for text in texts])
        assert everything.tokens < sum(map(len, encoded))
    has_bytes = tokenizer.info.settings.byte_fallback
    assert (everything.unknown_tokens == 0) is has_bytes or everything.byte_tokens == 0
    assert report.corpus_documents == 80 and report.dropped == {"books": {"empty": 3}}
    assert report.dropped_by_step == {"books": {"cleaning": {"empty": 3}}}
    assert sum(group.corpus_share or 0 for group in report.sources.values()) == pytest.approx(1, abs=1e-5)
    assert sum(group.sample_share or 0 for group in report.languages.values()) == pytest.approx(1, abs=1e-5)
    assert all(report.longest_pieces[i] >= "" for i in range(3))
    assert max(map(len, tokenizer.pieces[5 + 256 * has_bytes :])) == len(report.longest_pieces[0])


def test_held_out_documents_are_unseen_where_that_can_be(folder: Path) -> None:
    report = read_report(folder)
    assert report is not None
    assert 0 < report.sample_documents < 80
    assert report.held_out_in_sample == 0 and report.everything.documents == 80 - report.sample_documents


def test_characters_without_a_token_are_listed_with_their_counts(tmp_path: Path) -> None:
    sample, counts = TrainingSample(100_000, 0), CorpusCounts()
    for number in range(300):
        sample.add([f"the river and the village {number}"], "books", "en")
    sample.add(["x\u4e2d y\u4e2d z\u4e2d \u5c71\u5c71 q\u0327"], "books", "en")
    train_on_sample(sample, counts, tmp_path, TokenizerSettings(vocab_size=400, character_coverage=0.99))
    report = read_report(tmp_path)
    assert report is not None and report.left_out_characters is not None
    left_out = report.left_out_characters
    assert left_out.distinct == 3
    assert list(left_out.commonest.items()) == [("\u4e2d", 3), ("\u5c71", 2), ("\u0327", 1)]
    num_characters = sum(len(line) for line in lines_of(sample.texts()))
    assert left_out.share == pytest.approx(6 / num_characters, abs=1e-8)
    row = next(line for line in report_lines(report) if line.startswith("without a token"))
    assert row.endswith(f"3 characters, {6 / num_characters:.4%} of the training sample: \u4e2d 3, \u5c71 2, U+0327 1")
    assert report.held_out_in_sample == 0 and report.everything.documents == 15
    assert report.sample_documents == 286


def test_a_report_of_an_earlier_release_lists_none(folder: Path) -> None:
    report = read_report(folder)
    assert report is not None
    lines = list(report_lines(report.model_copy(update={"left_out_characters": None})))
    assert not any(line.startswith("without a token") for line in lines)


def test_a_corpus_too_small_to_hold_out_is_measured_on_its_training_text(tmp_path: Path) -> None:
    sample, counts = TrainingSample(100_000, 0), CorpusCounts()
    for text in ENGLISH:
        sample.add([text], "books", "en")
    train_on_sample(sample, counts, tmp_path, TokenizerSettings(vocab_size=400))
    report = read_report(tmp_path)
    assert report is not None and report.held_out_in_sample == report.sample_documents == 60
    row = next(line for line in report_lines(report) if line.startswith("measured on"))
    assert row.endswith("60 also in the training sample (too few documents to hold any out)")
    assert any("no character of the training sample" in line for line in report_lines(report))


def test_the_lines_name_sources_languages_and_shares(folder: Path) -> None:
    report = read_report(folder)
    assert report is not None
    text = "\n".join(report_lines(report))
    for expected in (
        "by source",
        "by language",
        "books",
        "zh",
        "held out of the training sample",
        "longest tokens",
        "left out of books: 3 empty",
    ):
        assert expected in text
    row = next(line for line in text.splitlines() if line.startswith("  wiki"))
    assert f"{report.sources['wiki'].tokens_per_character:.3f}" in row
    assert len(report.examples) == 6 and all(report.examples)


def test_a_language_of_which_nothing_was_held_out_has_no_figures(folder: Path) -> None:
    report = read_report(folder)
    assert report is not None
    nothing = dict.fromkeys(("documents", "text_bytes", "characters", "words", "tokens", "byte_tokens"), 0)
    group = GroupReport(**nothing, unknown_tokens=0, corpus_share=0.25, sample_share=0.5)
    lines = report_lines(report.model_copy(update={"languages": {**report.languages, "pt": group}}))
    row = next(line for line in lines if line.startswith("  pt"))
    assert row.split() == ["pt", "-", "-", "-", "-", "-", "25.00%", "50.00%"]


def test_a_missing_report_is_none_and_a_damaged_one_is_reported(folder: Path, tmp_path: Path) -> None:
    assert read_report(tmp_path) is None
    (tmp_path / REPORT_NAME).write_bytes((folder / REPORT_NAME).read_bytes()[:-30])
    with pytest.raises(UserError, match="tokenizer_report.json", check=coded("damaged-tokenizer")):
        read_report(tmp_path)
    (tmp_path / REPORT_NAME).write_text("{}")
    with pytest.raises(UserError, match="fingerprint", check=coded("damaged-tokenizer")):
        read_report(tmp_path)


def test_a_vocabulary_that_is_far_too_large_for_its_text_gets_a_warning(folder: Path) -> None:
    report = read_report(folder)
    assert report is not None
    sample_bytes = report.everything.bytes_per_token * 8_010
    report = report.model_copy(update={"sample_bytes": sample_bytes, "corpus_bytes": sample_bytes})
    assert size_warning(report.model_copy(update={"vocab_size": 400})) is None
    warning = size_warning(report.model_copy(update={"vocab_size": 2_000}))
    assert warning is not None and "4.0 times" in warning
    assert warning.endswith("Fix: give more text, or a vocabulary of at most 400 tokens")
    part = {"vocab_size": 2_000, "sample_bytes": sample_bytes / 2, "corpus_bytes": 100 * sample_bytes}
    warning = size_warning(report.model_copy(update=part))
    assert warning is not None and "for this sample" in warning
    assert warning.endswith("Fix: raise tokenizer.sample_bytes"), "200 tokens do not even hold all bytes"


def test_the_warning_is_printed_where_the_tokenizer_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample, counts = TrainingSample(100_000, 0), CorpusCounts()
    for text in ENGLISH:
        sample.add([text], "books", "en")
    train_on_sample(sample, counts, tmp_path, TokenizerSettings(vocab_size=400))
    assert "tokenizer: warning: a vocabulary of 400 tokens is far too large for this text" in capsys.readouterr().err
