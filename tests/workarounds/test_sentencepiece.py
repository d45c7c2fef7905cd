"""What SentencePiece does that `data_prep/tokenizer` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import io
from typing import Any

import sentencepiece

_LINES = [" the old cat crossed the river", " a quiet dog slept near the bridge", " it rained on the wooden ship"] * 20
_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 60,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "minloglevel": 2,
}


def sentencepiece_model(lines: list[str], **options: Any) -> tuple[bytes, list[str]]:

    model = io.BytesIO()
    trainer = sentencepiece.SentencePieceTrainer
    trainer.train(sentence_iterator=iter(lines), model_writer=model, **{**_OPTIONS, **options})
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return model.getvalue(), [processor.id_to_piece(number) for number in range(processor.get_piece_size())]


def test_sentencepiece_writes_the_number_of_its_threads_into_the_model() -> None:
    one, four = sentencepiece_model(_LINES, num_threads=1), sentencepiece_model(_LINES, num_threads=4)
    assert one[1] == four[1]
    assert one[0] != four[0], "_TRAINING_THREADS of tokenizer/sentencepiece_model.py need no longer be pinned"


def test_sentencepiece_drops_long_lines_in_silence() -> None:
    lines = [*_LINES, " " + "zzzzxxxx " * 60]
    pieces = sentencepiece_model(lines, max_sentence_length=200, vocab_size=40)[1]
    assert not any("z" in piece or "x" in piece for piece in pieces), (
        "max_line_bytes of tokenizer/sentencepiece_model.py and the cutting of lines before it may be taken out"
    )


def test_sentencepiece_leaves_out_required_characters_that_are_rare_or_absent() -> None:
    options = {"required_chars": "\u2581abcdefghijklmnopqrstuvwxyz~Z", "character_coverage": 0.99, "vocab_size": 40}
    pieces = sentencepiece_model([*_LINES * 9, " ~"], **options)[1]
    assert "~" not in pieces and "Z" not in pieces, "tokenizer_training/alphabet.py may be replaced by required_chars"


def test_sentencepiece_does_not_tell_which_pieces_are_user_defined() -> None:
    names = [name.lower() for name in dir(sentencepiece.SentencePieceProcessor)]
    assert not any("user" in name and "defined" in name for name in names), (
        "vocabulary_of of tokenizer/sentencepiece_model.py can ask the library instead of being given user_symbols"
    )
