"""A random Hugging Face model of a few kilobytes, for tests of registry and fill-mask."""

from __future__ import annotations

from pathlib import Path

WORDS = "it was a day the cat sat on mat dog ran to house in garden and slept".split()
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_POSITIONS = 32


def build(folder: Path) -> Path:
    """Write a BertForPreTraining with a word-level tokenizer whose words begin with the metaspace."""
    import torch
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForPreTraining, PreTrainedTokenizerFast

    pieces = [*SPECIAL_TOKENS, *("▁" + word for word in WORDS), "ing", ".", "▁"]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split(".", "isolated")]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, lstrip=name == "[MASK]") for name in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_POSITIONS, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,  # more rows than pieces, as after padding to a multiple
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=MAX_POSITIONS,
    )
    BertForPreTraining(config).save_pretrained(folder)
    return folder
