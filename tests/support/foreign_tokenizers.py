"""Tokenizers as they come with checkpoints of BERT, ModernBERT, RoBERTa, XLM-R and Llama, learned from a few texts."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA_NAMES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}


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


def write_roberta(folder: Path, texts: Sequence[str], vocab_size: int = 1_200) -> Path:
    """As roberta-base: bytes, <s>=0 <pad>=1 </s>=2 <unk>=3, <mask> last, two separators between the texts of a pair."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    first = [ROBERTA_NAMES[role] for role in ("cls", "pad", "sep", "unk")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, show_progress=False, initial_alphabet=alphabet, special_tokens=first
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=True) for name in first])
    tokenizer.add_special_tokens([AddedToken("<mask>", special=True, lstrip=True)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return _save(tokenizer, folder, ROBERTA_NAMES)


def write_decoder(folder: Path, texts: Sequence[str], vocab_size: int = 1_200) -> Path:
    """As Llama 3: bytes, and of the special tokens only those around a text, with names that no encoder has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*names.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _save(tokenizer, folder, names)


def write_xlm_roberta(folder: Path, texts: Sequence[str], vocab_size: int = 1_200) -> Path:
    """As xlm-roberta-base: SentencePiece's Unigram model behind its own normalization (nmt_nfkc), and RoBERTa's special
    tokens at the same ids, which are pieces of the best score, as in the published file."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="unigram", vocab_size=vocab_size - 2,
        hard_vocab_limit=False, normalization_rule_name="nmt_nfkc", minloglevel=2, num_threads=1,
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    learned = [(piece.piece, piece.score) for piece in proto.pieces if piece.type == piece.NORMAL]
    names = [ROBERTA_NAMES[role] for role in ("cls", "pad", "sep", "unk")]
    vocabulary = [*((name, 0.0) for name in names), *learned, ("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3))
    tokenizer.normalizer = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    spaces = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    tokenizer.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.add_special_tokens([AddedToken("<mask>", special=True, lstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return _save(tokenizer, folder, ROBERTA_NAMES)


WRITERS = {
    "wordpiece": write_wordpiece,
    "byte level": write_byte_level,
    "roberta": write_roberta,
    "xlm-roberta": write_xlm_roberta,
}


def as_named(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text with the tokenizer's own names in place of BERT's."""
    for role, name in NAMES.items():
        text = text.replace(name, getattr(tokenizer, f"{role}_token"))
    return text


def _write(tokenizer: Tokenizer, folder: Path, pair_type: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{pair_type} [SEP]:{pair_type}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    _save(tokenizer, folder, NAMES)


def _save(tokenizer: Tokenizer, folder: Path, names: Mapping[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {f"{role}_token": name for role, name in names.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
