"""The same tokenizer in Hugging Face's format: tokenizer.json, with all that preparation does to raw text.

Normalization, BPE merges, byte fallback and special tokens are written out for the `tokenizers` library, and a
comparison over real and tricky text refuses a file that gives other ids than preparation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from data_prep.base.errors import UserError
from data_prep.storage import storage
from data_prep.text.cleaning import (
    ACCENTS,
    METASPACE,
    Normalization,
    Ranges,
    character_class,
    normalize,
    replace_surrogates,
)
from data_prep.tokenizer.adversarial_lines import ADVERSARIAL_LINES, lines_with_symbols
from data_prep.tokenizer.foreign_files import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from data_prep.tokenizer.foreign_tokenizer import ForeignTokenizer
from data_prep.tokenizer.sentencepiece_model import Piece
from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from data_prep.tokenizer.special_tokens import CLS_TOKEN_ID, SEP_TOKEN_ID, SPECIAL_TOKENS, UNK_TOKEN_ID
from data_prep.tokenizer.tokenizer import Tokenizer

_PAIRED_TEXTS = 20


def write_hugging_face_tokenizer(
    folder: str | Path, output: str | Path | None = None, model_max_length: int | None = None
) -> None:
    """Write tokenizer.json and tokenizer_config.json for the tokenizer in `folder`, there or into `output`.

    `model_max_length` is the longest input of the model, in tokens. Nothing else of a foreign tokenizer changes, and
    transformers reads its tokenizer.json unchanged.
    """
    tokenizer = Tokenizer.load(folder)
    if isinstance(tokenizer, SentencePieceTokenizer):
        write_hugging_face_files(tokenizer, Path(output or folder), model_max_length)
    else:
        assert isinstance(tokenizer, ForeignTokenizer)
        _write_foreign_files(tokenizer, Path(output or folder), model_max_length)


def write_hugging_face_files(
    tokenizer: SentencePieceTokenizer, output: Path, model_max_length: int | None = None
) -> None:
    """Write tokenizer.json and tokenizer_config.json of an open tokenizer."""
    text = build(tokenizer).to_str(pretty=True)
    storage.write_bytes(output / TOKENIZER_NAME, (text + "\n").encode())
    config = json.dumps(_config(model_max_length), indent=2, ensure_ascii=False)
    storage.write_bytes(output / TOKENIZER_CONFIG_NAME, (config + "\n").encode())


def _write_foreign_files(tokenizer: ForeignTokenizer, output: Path, model_max_length: int | None) -> None:
    tokenizer.write_files(output)
    path = output / TOKENIZER_CONFIG_NAME
    settings = json.loads(storage.read_bytes(path)) if path.is_file() else {}
    ids, names = tokenizer.special_tokens, tokenizer.pieces
    roles = {"pad": ids.pad, "unk": ids.unk, "cls": ids.cls, "sep": ids.sep, "mask": ids.mask}
    tokens = {f"{role}_token": names[number] for role, number in roles.items() if number is not None}
    longest = {} if model_max_length is None else {"model_max_length": model_max_length}
    inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    settings = {**tokens, **inputs, **settings, "tokenizer_class": "PreTrainedTokenizerFast", **longest}
    storage.write_bytes(path, (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode())


def compare_with_hugging_face(
    tokenizer: SentencePieceTokenizer, hugging_face_folder: Path, texts: Sequence[str]
) -> None:
    """Compare the ids of raw texts, and of adversarial lines, by `tokenizer.json` with those of preparation.

    Each text is encoded alone. Each line, and the last of the texts, is also encoded as a pair with the next one.
    """
    path = hugging_face_folder / TOKENIZER_NAME
    try:
        other = tokenizers.Tokenizer.from_str(storage.read_bytes(path).decode())
    except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
        raise UserError(
            f"{path} cannot be read as a tokenizer ({error})", fix="write it again", code="damaged-tokenizer"
        ) from None
    # A literal "[MASK]" is the mask in tokenizer.json and text in preparation: read as text, all else can be compared.
    other.encode_special_tokens = True
    num_texts = len(texts)
    texts = [*texts, *ADVERSARIAL_LINES, *lines_with_symbols(tokenizer.settings.user_symbols)]
    raw = [replace_surrogates(text) for text in texts]
    if tokenizer.settings.user_symbols and not tokenizer.settings.byte_fallback:
        # Beside a symbol, a name of which no character is known is one [UNK] there and its token here (`isolation`).
        raw = [_without_special_tokens(text) for text in raw]
    normalized = [normalize(text, tokenizer.normalization) for text in raw]
    expected = [ids.tolist() for ids in tokenizer.encode_many(normalized)]
    for text, ids in zip(raw, expected, strict=True):
        _compare(path, text, ids, other.encode(text, add_special_tokens=False).ids)
    paired = max(0, num_texts - _PAIRED_TEXTS)
    for (first, ids), (second, second_ids) in pairwise(zip(raw[paired:], expected[paired:], strict=True)):
        pair = other.encode(first, second)
        _compare(path, f"{first} / {second}", [CLS_TOKEN_ID, *ids, SEP_TOKEN_ID, *second_ids, SEP_TOKEN_ID], pair.ids)
        types = [0] * (len(ids) + 2) + [1] * (len(second_ids) + 1)
        _compare(path, f"{first} / {second}", types, pair.type_ids)


def build(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """Build the same tokenizer for the `tokenizers` library: its pieces and the normalization before them."""
    vocabulary = tokenizer.vocabulary
    symbols = [piece.text for piece in vocabulary if piece.kind == "user"]
    has_bytes = any(piece.kind == "byte" for piece in vocabulary)
    result = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece.text: number for number, piece in enumerate(vocabulary)},
            merges=_merges(vocabulary),
            unk_token=SPECIAL_TOKENS[UNK_TOKEN_ID],
            byte_fallback=has_bytes,
            fuse_unk=True,
            ignore_merges=bool(symbols),
        )
    )
    result.normalizer = _normalizer(tokenizer.normalization)
    # Only a text's first word lacks its space: not what follows a [MASK], as in "[MASK].".
    words = pre_tokenizers.Metaspace(replacement=METASPACE, prepend_scheme="first", split=True)
    result.pre_tokenizer = pre_tokenizers.Sequence([words, *isolation(tokenizer, symbols)]) if symbols else words
    bytes_to_text = [decoders.ByteFallback()] if has_bytes else []
    result.decoder = decoders.Sequence(
        [decoders.Replace(METASPACE, " "), *bytes_to_text, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    result.add_special_tokens(
        [AddedToken(token, lstrip=token == "[MASK]", normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    result.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS_TOKEN_ID), ("[SEP]", SEP_TOKEN_ID)],
    )
    return result


def _merges(vocabulary: Sequence[Piece]) -> list[tuple[str, str]]:
    """All ways to join two pieces into a third, best score first; only normal pieces merge in SentencePiece."""
    ids = {piece.text: number for number, piece in enumerate(vocabulary) if piece.kind == "normal"}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for text in ids:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                merges.append((-vocabulary[ids[text]].score, ids[left], ids[right], (left, right)))
    return [merge for *_, merge in sorted(merges)]


def _normalizer(normalization: Normalization) -> normalizers.Normalizer:
    """The rules of `data_prep.text.cleaning`, in their order.

    The space in front is not put here but by the pre-tokenizer, which knows where a text begins.
    """
    forms: dict[str, list[normalizers.Normalizer]]
    forms = {"NFC": [normalizers.NFC()], "NFKC": [normalizers.NFKC()], "none": []}
    form = forms[normalization.form]
    steps = [*_remove(normalization.rules.removed), *form]
    if normalization.lowercase:
        steps += [normalizers.Lowercase(), *form]
    if normalization.strip_accents:
        steps += [normalizers.NFD(), *_remove(ACCENTS), *form]
    steps += [
        normalizers.Replace(Regex(character_class(normalization.rules.white_space) + "+"), " "),
        normalizers.Replace(Regex(r" \z"), ""),
    ]
    return normalizers.Sequence(steps)


def _remove(ranges: Ranges) -> list[normalizers.Normalizer]:
    """Remove characters; at the start of a text a space replaces them.

    Without this space the pre-tokenizer would not see the start of the text, and the first word would get no space.
    """
    characters = character_class(ranges)
    return [normalizers.Replace(Regex(rf"\A{characters}+"), " "), normalizers.Replace(Regex(characters), "")]


def _config(model_max_length: int | None) -> dict[str, Any]:
    pad, unk, cls, sep, mask = SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "unk_token": unk,
        "cls_token": cls,
        "sep_token": sep,
        "mask_token": {
            "__type": "AddedToken",
            "content": mask,
            "lstrip": True,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": True,
        },
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **({} if model_max_length is None else {"model_max_length": model_max_length}),
    }


def _without_special_tokens(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, " ")
    return text


def _compare(path: Path, text: str, expected: list[int], found: list[int]) -> None:
    if expected == found:
        return
    shorter = min(len(expected), len(found))
    index = next((i for i in range(shorter) if expected[i] != found[i]), shorter)
    raise UserError(
        f"{path} does not give the ids of preparation for the text beginning {text[:60]!r}: at token {index} it gives "
        f"{found[index : index + 8]} and preparation {expected[index : index + 8]}",
        fix="write it again with this release and the version of the tokenizers library in the constraints (here "
        f"{tokenizers.__version__})",
        code="tokenizer-json-mismatch",
    )


def isolation(tokenizer: SentencePieceTokenizer, symbols: Sequence[str]) -> Iterator[pre_tokenizers.PreTokenizer]:
    """Yield the pre-tokenizers after the one that parts words: each user symbol is a word, as SentencePiece cuts.

    Symbols are not added tokens of the `tokenizers` library, which would cut before the text's first space is known.
    Every symbol is split off after words have got their spaces, and the model takes a whole word that is in the
    vocabulary as it is (`ignore_merges`). That is right for symbols, and for other pieces too, except those that BPE
    does not make of their own text: names of bytes and special tokens. These are cut in two, where SentencePiece cuts
    them.
    """
    # Longest first, as SentencePiece matches them.
    alternatives = "|".join(_escaped(symbol) for symbol in sorted(symbols, key=lambda symbol: (-len(symbol), symbol)))
    yield pre_tokenizers.Split(Regex(alternatives), behavior="isolated")
    halves = [
        f"{_escaped(text[:cut])}(?={_escaped(text[cut:])}\\z)" for text, cut in cuts_of_unreachable_pieces(tokenizer)
    ]
    if halves:
        yield pre_tokenizers.Split(Regex(rf"\A(?:{'|'.join(halves)})"), behavior="isolated")


def cuts_of_unreachable_pieces(tokenizer: SentencePieceTokenizer) -> Iterator[tuple[str, int]]:
    """Yield the text of every piece that its own text does not become, and a place where SentencePiece cuts it."""
    for token_id, piece in enumerate(tokenizer.vocabulary):
        spans = tokenizer.spans(piece.text.replace(METASPACE, " "))
        if [span.token_id for span in spans] != [token_id] and len(spans) > 1:
            encoded = piece.text.replace(METASPACE, " ").encode()
            yield piece.text, len(encoded[: spans[0].stop_bytes].decode())
        else:
            # One [UNK] cannot be cut: then tokenizer.json takes the name for the token, as it does everywhere else.
            assert spans[0].token_id in (token_id, UNK_TOKEN_ID), piece


def _escaped(text: str) -> str:
    """The text as a pattern of Oniguruma."""
    return "".join(
        character if character.isalnum() or ord(character) > 127 else f"\\x{{{ord(character):02x}}}"
        for character in text
    )
