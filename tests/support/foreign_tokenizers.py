"""Tokenizers as they come with checkpoints of BERT and ModernBERT, learned from a few texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

NAMES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def write_wordpiece(folder: Path, texts: Sequence[str], vocab_size: int = 1_200) -> Path:
    """As bert-base-uncased: lower case, no accents, [PAD]=0 [UNK]=100 [CLS]=101 [SEP]=102 [MASK]=103."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    unused = [f"[unused{number}]" for number in range(99)]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size - 104, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    learned = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    pieces = ["[PAD]", *unused, "[UNK]", "[CLS]", "[SEP]", "[MASK]", *learned]
    tokenizer.model = models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]")
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES.values()])
    _write(tokenizer, folder, pair_type=1)
    return folder


def write_byte_level(folder: Path, texts: Sequence[str], vocab_size: int = 1_200) -> Path:
    """As ModernBERT: bytes, runs of spaces as tokens, and the special tokens behind all others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 8, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(" " * number, normalized=True) for number in (4, 3, 2)])
    tokenizer.add_special_tokens([AddedToken(NAMES[role], special=True) for role in ("unk", "cls", "sep", "pad")])
    tokenizer.add_special_tokens([AddedToken("[MASK]", special=True, lstrip=True)])
    _write(tokenizer, folder, pair_type=0)
    return folder


WRITERS = {"wordpiece": write_wordpiece, "byte level": write_byte_level}


def _write(tokenizer: Tokenizer, folder: Path, pair_type: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{pair_type} [SEP]:{pair_type}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {f"{role}_token": name for role, name in NAMES.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
