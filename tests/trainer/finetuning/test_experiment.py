"""Default learning rates, and limits that are checked before any work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep.base.errors import UsageError, UserError
from tests.support.error_codes import coded
from trainer.finetuning import frozen
from trainer.finetuning.experiment import FROZEN_RATES, Experiment, prepare, usual_rates
from trainer.finetuning.finetune_settings import FinetuneSettings, Variant


@pytest.mark.parametrize(("hidden_size", "published"), [(768, (2e-5, 5e-5)), (1024, (2e-5, 5e-5))])
def test_the_rates_of_full_fine_tuning_cover_the_published_ones(
    hidden_size: int, published: tuple[float, float]
) -> None:
    rates = usual_rates("full", hidden_size)
    assert min(rates) <= published[0] * 1.25 and max(rates) >= published[1]


def test_narrower_encoders_are_given_larger_rates_up_to_a_bound() -> None:
    usual = [usual_rates("full", hidden_size)[1] for hidden_size in (1024, 768, 256, 128, 16)]
    assert usual == sorted(usual) and usual[-1] == 1e-3


def test_scratch_starts_at_the_usual_rate_and_frozen_has_its_own() -> None:
    assert usual_rates("scratch", 768) == (5e-5, 1e-4, 2e-4)
    assert usual_rates("frozen", 768) == FROZEN_RATES


def prepare_tagging(encoder: Path, path: Path, variants: tuple[Variant, ...] = ("full",), **more: Any) -> Experiment:
    columns = {"text_column": "words", "label_column": "tags"}
    task = {"task": "token_classification", "compare": variants, "seeds": 1, "batch_size": 8, **columns, **more}
    return prepare(FinetuneSettings(model=encoder, train=path, **task))


def test_rates_requested_are_taken_once_each_in_their_order(tiny_hugging_face: Path, tmp_path: Path) -> None:
    path = tmp_path / "tags.tsv"
    path.write_text("words\ttags\n" + "the cat\tO X\n" * 40)
    found = prepare_tagging(tiny_hugging_face, path, learning_rates=(3e-4, 1e-4, 3e-4))
    assert found.learning_rates == {"full": (3e-4, 1e-4)}


def test_a_separator_written_out_in_a_row_is_text(tiny_hugging_face: Path, tmp_path: Path) -> None:
    path = tmp_path / "tags.tsv"
    path.write_text("words\ttags\n" + "the [SEP] cat\tO X O\n" * 40)
    data = prepare_tagging(tiny_hugging_face, path).data
    assert data.parts["train"].encoded.rows[0]["input_ids"].count(data.preprocessor.tokenizer.sep_token_id) == 1


def test_more_tokens_than_the_model_takes_are_refused(tiny_hugging_face: Path, tmp_path: Path) -> None:
    path = tmp_path / "tags.tsv"
    path.write_text("words\ttags\n" + "the cat sat\tO X O\n" * 40)
    assert prepare_tagging(tiny_hugging_face, path, max_length=32).data.preprocessor.max_length == 32
    with pytest.raises(UsageError, match="--max-length 33 .* 32 tokens", check=coded("max-length-too-large")):
        prepare_tagging(tiny_hugging_face, path, max_length=33)


@pytest.mark.parametrize(("free", "refused"), [(2 * 4 * 16 * 7 * 40 - 1, True), (2 * 4 * 16 * 7 * 40, False)])
def test_hidden_states_that_would_fill_the_memory_are_refused_before_any_work(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, refused: bool
) -> None:
    path = tmp_path / "tags.tsv"
    path.write_text("words\ttags\n" + "the cat sat on mat\tO X O O O\n" * 40)  # 7 tokens each with [CLS] and [SEP]
    monkeypatch.setattr(frozen.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    prepare_tagging(tiny_hugging_face, path)
    both: tuple[Variant, ...] = ("frozen", "full")
    if refused:
        with pytest.raises(UserError, match="280 hidden states of 16 .* GiB", check=coded("features-exceed-memory")):
            prepare_tagging(tiny_hugging_face, path, both)
    else:
        prepare_tagging(tiny_hugging_face, path, both)
