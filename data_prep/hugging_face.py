"""The same tokenizer in Hugging Face's format: tokenizer.json, which does to raw text all that preparation does.

Normalisation, BPE merges, byte fallback and special tokens are written out for the `tokenizers` library, and a
comparison over real and tricky text refuses a file that gives other ids than preparation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from data_prep import storage
from data_prep.cleaning import (
    ACCENTS,
    METASPACE,
    REMOVED,
    WHITE_SPACE,
    Normalisation,
    Ranges,
    character_class,
    normalise,
    replace_surrogates,
)
from data_prep.errors import UserError
from data_prep.tokenizer import CLS_TOKEN_ID, SEP_TOKEN_ID, SPECIAL_TOKENS, UNK_TOKEN_ID, Piece, Tokenizer

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"

ADVERSARIAL_LINES: tuple[str, ...] = (
    "",
    " ",
    "\u2581",
    " \t\r\n\u00a0\u3000 ",
    "one",
    "  two  spaces \t tabs\nand newlines\r\n\r\nand more  ",
    "e\u0301cole, \u00e9cole, E\u0301COLE, A\u030angstr\u00f6m \u212b, q\u0323\u0307 q\u0307\u0323, h\u0331 H\u0331",
    "zero\u200bwidth, soft\u00adhyphen, \ufeffbom, non\u200cjoiner, word\u2060joiner, e\u200b\u0301",
    "\u2581the\u2581metaspace \u2581\u2581 itself\u2581",
    "nul \x00 and \x07 control \x1b[0m \x7f \x85next \x1c \x1f characters\x00",
    "\x00\u200b starts with nothing",
    "lone surrogates \ud800 and \udc00 and \udfff\ud83d",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 "
    "\U0001f44d\U0001f3fd "
    "\U0001f1eb\U0001f1f7 \U0001faea 1\ufe0f\u20e3",
    "\u0645\u0631\u062d\u0628\u0627 \u202b\u05e9\u05dc\u05d5\u05dd\u202c "
    "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd\u200f! "
    "\u0627\u0653 \ufefb",
    "private \ue000\uf8ff\U00100000 unassigned \u0378\U000e0fff noncharacters \ufdd0\uffff\U0010ffff",
    "[MASK] [CLS][SEP] [PAD]s [UNK]. [MASK], [MASK]. a[MASK]b  [MASK]",
    "<0x41><0x0A> <s></s> <unk> <pad> ##ing \u0120the \u2585 \u2047",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u6211\u5f88\u597d\uff01 \uc548\ub155 \u1112\u1161\u11ab "
    "\u304b\u3099 \u0e19\u0e49\u0e33 \u0915\u094d\u0937\u093f",
    "\ufb01ne \uff26\uff35\uff2c\uff2c \u2460 \u00bd x\u00b2 \u00b4 \u00a8 \u2121 \ufe70 \u3382 "
    "\u1e9b\u0323 \u32ff \u0132",
    "\u0130STANBUL \u0131 \u039f\u0394\u03a5\u03a3\u03a3\u0395\u03a5\u03a3 \u03a3. STRASSE \u1e9e "
    "\u01c5 \ua7cb\ua7da\u1c89 \u13a0\uab70 \u2c2f",
    "\u0897\u0301 \u1acf\u0323 a\u0301\u089d\u0323 \U00011938 \U00011935\U00011930 \U000105d2\u0307 "
    "\U0001e030 \U0001d15e",
    "a" * 300
    + " "
    + "ab" * 150
    + " "
    + "aab" * 99
    + " "
    + "." * 77
    + " "
    + "-" * 78
    + " "
    + "0" * 51
    + " "
    + "\u00e9" * 33,
    'https://example.org/a?b=c&d=%20#e user@example.org C:\\path\\file.txt {"k": [1, 2.5e-10]} $\\frac{a}{b}$ <b>x</b>',
    "don't 'quote' \u201cquote\u201d it\u2019s \u2026 \u2014 100,000.00 3rd 50% A/B x=y; i++",
    " a",
    "a ",
    "\n\na\n\n",
    "\u0301 starts with a mark \u0301\u0301",
    "\u0301first",
    "\ufefffirst",
    "\u00ad\u200b\u0301\u00e9first",
    "\ufeff",
)
"""Lines on which tokenizers are known to disagree."""


def write_hugging_face_tokenizer(
    folder: str | Path, output: str | Path | None = None, model_max_length: int | None = None
) -> None:
    """Write tokenizer.json and tokenizer_config.json for the tokenizer in `folder`, there or into `output`.

    `model_max_length` is the longest input of the model it goes with, in tokens.
    """
    write_hugging_face_files(Tokenizer.load(folder), Path(output or folder), model_max_length)


def check_parity(folder: str | Path, texts: Iterable[str], hugging_face_folder: str | Path | None = None) -> None:
    """Compare the ids of raw texts by `tokenizer.json` (of another folder, if given) with those of preparation.

    Raises:
        UserError: they differ; it shows the first text that does.
    """
    compare_with_hugging_face(Tokenizer.load(folder), Path(hugging_face_folder or folder), list(texts))


def write_hugging_face_files(tokenizer: Tokenizer, output: Path, model_max_length: int | None = None) -> None:
    """Write tokenizer.json and tokenizer_config.json of an open tokenizer."""
    text = build(tokenizer.vocabulary, tokenizer.normalisation).to_str(pretty=True)
    storage.write_bytes(output / TOKENIZER_NAME, (text + "\n").encode())
    config = json.dumps(_config(model_max_length), indent=2, ensure_ascii=False)
    storage.write_bytes(output / TOKENIZER_CONFIG_NAME, (config + "\n").encode())


def compare_with_hugging_face(tokenizer: Tokenizer, hugging_face_folder: Path, texts: Sequence[str]) -> None:
    """The check of `check_parity` for an open tokenizer: every text alone, and with the next as a pair."""
    path = hugging_face_folder / TOKENIZER_NAME
    try:
        other = tokenizers.Tokenizer.from_str(storage.read_bytes(path).decode())
    except Exception as error:  # the library raises bare exceptions
        raise UserError(f"{path} cannot be read as a tokenizer ({error}); write it again") from None
    # A literal "[MASK]" is the mask in tokenizer.json and text in preparation: read as text, all else can be compared.
    other.encode_special_tokens = True
    raw = [replace_surrogates(text) for text in texts]
    normalised = [normalise(text, tokenizer.normalisation) for text in raw]
    expected = [ids.tolist() for ids in tokenizer.encode_many(normalised)]
    for text, ids in zip(raw, expected, strict=True):
        _compare(path, text, ids, other.encode(text, add_special_tokens=False).ids)
    for (first, ids), (second, second_ids) in pairwise(zip(raw, expected, strict=True)):
        pair = other.encode(first, second)
        _compare(path, f"{first} / {second}", [CLS_TOKEN_ID, *ids, SEP_TOKEN_ID, *second_ids, SEP_TOKEN_ID], pair.ids)
        types = [0] * (len(ids) + 2) + [1] * (len(second_ids) + 1)
        _compare(path, f"{first} / {second}", types, pair.type_ids)


def build(vocabulary: Sequence[Piece], normalisation: Normalisation) -> tokenizers.Tokenizer:
    """Build the tokenizer from the pieces of a SentencePiece BPE model and the normalisation before it."""
    ids = {piece.text: number for number, piece in enumerate(vocabulary)}
    result = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(vocabulary),
            unk_token=SPECIAL_TOKENS[UNK_TOKEN_ID],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    result.normalizer = _normalizer(normalisation)
    # Only a text's first word lacks its space: not what follows a [MASK], as in "[MASK].".
    result.pre_tokenizer = pre_tokenizers.Metaspace(replacement=METASPACE, prepend_scheme="first", split=True)
    result.decoder = decoders.Sequence(
        [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
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


def _normalizer(normalisation: Normalisation) -> normalizers.Normalizer:
    """The rules of `data_prep.cleaning`, in their order.

    The space in front is not put here but by the pre-tokenizer, which knows where a text begins.
    """
    form = {"NFC": [normalizers.NFC()], "NFKC": [normalizers.NFKC()], "none": []}[normalisation.form]
    steps: list[normalizers.Normalizer] = [*_remove(REMOVED), *form]
    if normalisation.lowercase:
        steps += [normalizers.Lowercase(), *form]
    if normalisation.strip_accents:
        steps += [normalizers.NFD(), *_remove(ACCENTS), *form]
    steps += [
        normalizers.Replace(Regex(character_class(WHITE_SPACE) + "+"), " "),
        normalizers.Replace(Regex(r" \z"), ""),
    ]
    return normalizers.Sequence(steps)


def _remove(ranges: Ranges) -> list[normalizers.Normalizer]:
    """Take characters away; at a text's start a space replaces them.

    Without it the text would seem to the pre-tokenizer to begin later, and its first word would get no space.
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


def _compare(path: Path, text: str, expected: list[int], found: list[int]) -> None:
    if expected == found:
        return
    shorter = min(len(expected), len(found))
    place = next((i for i in range(shorter) if expected[i] != found[i]), shorter)
    raise UserError(
        f"{path} does not give the ids of preparation for the text beginning {text[:60]!r}: at place {place} it gives "
        f"{found[place : place + 8]} and preparation {expected[place : place + 8]}; write it again with this release, "
        f"with the release of the tokenizers library named in the constraints (here {tokenizers.__version__})"
    )
