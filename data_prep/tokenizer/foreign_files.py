"""Files of a foreign tokenizer: special tokens, vocabulary, fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from data_prep.text.cleaning import METASPACE
from data_prep.tokenizer.sentencepiece_model import Piece
from data_prep.tokenizer.special_tokens import SPECIAL_TOKENS, SpecialTokens

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS_MAP_NAME = "special_tokens_map.json"
FILE_NAMES = (TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, SPECIAL_TOKENS_MAP_NAME)

_ROLES = ("pad", "unk", "cls", "sep", "mask")
_ROBERTA_NAMES = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
_IDS_DO_NOT_DEPEND_ON = ("version", "truncation", "padding", "decoder", "post_processor")
_UNKNOWN = "\ufffd".encode()
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


def read_files(url: str) -> dict[str, bytes]:
    """Return the existing files of the tokenizer by name.

    Raises:
        UserError: there is no tokenizer.json.
    """
    paths = {name: storage.join(url, name) for name in FILE_NAMES}
    files = {name: storage.read_bytes(path) for name, path in paths.items() if storage.exists(path)}
    if TOKENIZER_NAME not in files:
        raise UsageError(
            f"{storage.redact(url)} contains no {TOKENIZER_NAME}",
            fix="copy the tokenizer's whole folder again",
            code="incomplete-tokenizer",
        )
    return files


def read_special_tokens(
    encoder: tokenizers.Tokenizer, files: Mapping[str, bytes], where: str, is_of_decoder: bool = False
) -> SpecialTokens:
    """Return the special tokens that the files name, or else the tokens with BERT's names, or else RoBERTa's.

    With `is_of_decoder` the tokens that begin and end a text are [CLS] and [SEP], roles that are not there or share a
    token get ids beyond the vocabulary, and no template is needed.

    Raises:
        UserError: one that an encoder needs is not there, or a text is not put between [CLS] and [SEP].
    """
    declared = {**_read_json(files, SPECIAL_TOKENS_MAP_NAME, where), **_read_json(files, TOKENIZER_CONFIG_NAME, where)}
    names = {
        role: _content(declared.get(f"{role}_token"))
        or (roberta if encoder.token_to_id(bert) is None and encoder.token_to_id(roberta) is not None else bert)
        for role, bert, roberta in zip(_ROLES, SPECIAL_TOKENS, _ROBERTA_NAMES, strict=True)
    }
    found = {role: encoder.token_to_id(name) for role, name in names.items()}
    ids = {role: number for role, number in found.items() if number is not None}
    missing = [f"{role}_token {names[role]!r}" for role in _ROLES if role not in ids and role != "unk"]
    if is_of_decoder:
        around = {"cls": _content(declared.get("bos_token")), "sep": _content(declared.get("eos_token"))}
        for role, name in around.items():
            if name and (number := encoder.token_to_id(name)) is not None:
                ids.setdefault(role, number)
        first = {ids[role]: role for role in ("pad", "mask", "unk", "sep", "cls") if role in ids}
        ids = {role: number for number, role in first.items()}  # often [PAD] is the token that ends a text
        absent = (role for role in _ROLES if role not in ids and role != "unk")
        beyond = max(encoder.get_vocab(with_added_tokens=True).values(), default=0) + 1
        ids |= {role: number for number, role in enumerate(absent, beyond)}
    elif missing:
        raise UserError(
            f"{where} has no {', '.join(missing)} in its vocabulary, which masked-language modeling needs",
            fix=f"name the special tokens in {TOKENIZER_CONFIG_NAME}, or use the tokenizer of a BERT, ModernBERT or "
            "RoBERTa",
            code="missing-special-tokens",
        )
    named = list(ids.values())
    if len(set(named)) < len(named):
        raise UserError(
            f"{where} has one id for two of its special tokens ({names})",
            fix="give each special token its own id",
            code="shared-special-token-id",
        )
    if not is_of_decoder:
        _check_template(encoder, ids["cls"], ids["sep"], where)
    others = [
        number
        for number, token in sorted(encoder.get_added_tokens_decoder().items())
        if token.special and number not in named and not _becomes_itself(encoder, token.content, number)
    ]
    return SpecialTokens(
        pad=ids["pad"], unk=ids.get("unk"), cls=ids["cls"], sep=ids["sep"], mask=ids["mask"], others=tuple(others)
    )


def fingerprint_of(files: Mapping[str, bytes], special_tokens: SpecialTokens, exact_scores: bool = False) -> str:
    """Return the sha256 of what decides the ids; not of how a file is written, nor of what is done to ids afterwards.

    The scores of a Unigram model are float32, written with more digits, of which the library changes the last one where
    it writes the file again. `exact_scores` takes all digits, as releases before this rule did (`is_named`).
    """
    values = json.loads(files[TOKENIZER_NAME])
    what = {key: value for key, value in values.items() if key not in _IDS_DO_NOT_DEPEND_ON}
    if "merges" in what.get("model", {}):  # pairs, or both with a space between in older files
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in what["model"]["merges"]]
        what["model"] = {**what["model"], "merges": merges}
    if what.get("model", {}).get("type") == "Unigram" and not exact_scores:
        vocabulary = [[piece, float(np.float32(score))] for piece, score in what["model"]["vocab"]]
        what["model"] = {**what["model"], "vocab": vocabulary}
    what["special_tokens"] = special_tokens.model_dump(mode="json")
    return hashlib.sha256(json.dumps(what, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_named(fingerprint: str, files: Mapping[str, bytes], special_tokens: SpecialTokens) -> bool:
    """Return whether a fingerprint is that of these files, by this rule or by that of earlier releases."""
    return any(fingerprint_of(files, special_tokens, exact_scores=exact) == fingerprint for exact in (False, True))


def vocabulary_of(
    encoder: tokenizers.Tokenizer, special_tokens: SpecialTokens, vocab_size: int
) -> tuple[tuple[Piece, ...], list[bytes]]:
    """Return the piece of every id, with U+2581 for a space before a word, and the bytes that it decodes to.

    In WordPiece a piece without the prefix of continuations begins a word. An id without a piece is empty. Bytes that
    are not text alone are written as "<0xE4><0xB8>". With byte fallback, as in Llama 2 and in tokenizers made here, the
    pieces "<0x00>" to "<0xFF>" are bytes.
    """
    values = json.loads(encoder.to_str())
    names = {number: name for name, number in encoder.get_vocab(with_added_tokens=True).items()}
    added = encoder.get_added_tokens_decoder()
    prefix = values["model"].get("continuing_subword_prefix") or ""
    steps = json.dumps([values[step] for step in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    is_byte_level, has_metaspace = "ByteLevel" in steps, METASPACE in steps
    has_bytes = values["model"].get("byte_fallback") is True
    pieces, id_bytes = [], []
    for number in range(vocab_size):
        name = names.get(number, "")
        if number in special_tokens.ids:
            is_unknown = number == special_tokens.unk
            pieces.append(Piece(name, 0.0, "unknown" if is_unknown else "control"))
            id_bytes.append(_UNKNOWN if is_unknown else b"")
            continue
        if has_bytes and number not in added and _BYTE_PIECE.fullmatch(name):
            pieces.append(Piece(name, 0.0, "byte"))
            id_bytes.append(bytes.fromhex(name[3:5]))
            continue
        if number in added:
            text = name.encode()
        elif is_byte_level:
            text = bytes(_BYTE_OF.get(character, ord("?")) for character in name)
        elif prefix and name.startswith(prefix):
            text = name.removeprefix(prefix).encode()
        elif has_metaspace:
            text = name.replace(METASPACE, " ").encode()
        else:
            text = f" {name}".encode() if name else b""
        pieces.append(Piece(_as_piece(text), 0.0, "user" if number in added else "normal"))
        id_bytes.append(text)
    return tuple(pieces), id_bytes


def _as_piece(text: bytes) -> str:
    space, rest = (METASPACE, text[1:]) if text.startswith(b" ") else ("", text)
    try:
        return space + rest.decode().replace(" ", METASPACE)
    except UnicodeDecodeError:
        return space + "".join(f"<0x{byte:02X}>" for byte in rest)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (Radford et al. 2019): itself where it can
    be seen, the others in their order from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = sorted({*range(256)}.difference(seen))
    return {chr(byte): byte for byte in seen} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _check_template(encoder: tokenizers.Tokenizer, cls_id: int, sep_id: int, where: str) -> None:
    first, second = (encoder.encode(text, add_special_tokens=False).ids for text in ("a", "b"))
    pairs = [[cls_id, *first, *between, *second, sep_id] for between in ([sep_id], [sep_id, sep_id])]
    expected = {
        "a text": (encoder.encode("a").ids, [[cls_id, *first, sep_id]]),
        "a pair": (encoder.encode("a", "b").ids, pairs),
    }
    for what, (found, wanted) in expected.items():
        if found not in wanted:
            raise UserError(
                f"{where} encodes {what} as {found}; training needs [CLS] A [SEP] and [CLS] A [SEP] B [SEP] or, as in "
                f"RoBERTa, [CLS] A [SEP] [SEP] B [SEP], {' or '.join(map(str, wanted))}",
                fix=f"set the post-processor in {TOKENIZER_NAME} to write these, as those of BERT and RoBERTa do",
                code="unsupported-template",
            )


def separators_of_pairs(encoder: tokenizers.Tokenizer, sep_id: int) -> int:
    """Return how many [SEP] the tokenizer writes between the texts of a pair: 1, or 2 as in RoBERTa."""
    return encoder.encode("a", "b").ids.count(sep_id) - 1


def _becomes_itself(encoder: tokenizers.Tokenizer, content: str, number: int) -> bool:
    """Return whether the text of a special token is encoded to this token; then the token is also ordinary text."""
    encoder.encode_special_tokens = True
    try:
        return number in encoder.encode(content, add_special_tokens=False).ids
    finally:
        encoder.encode_special_tokens = False


def _content(token: Any) -> str | None:
    """Return the text of a token, which a file gives alone or with properties."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _read_json(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{storage.join(where, name)} is not valid JSON ({error})", fix="copy it again", code="damaged-tokenizer"
        ) from None
    return values if isinstance(values, dict) else {}
