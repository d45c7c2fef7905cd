"""A tokenizer.json from elsewhere: what is refused before the library reads it, and what happens when it panics."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data_prep.base.errors import UserError
from data_prep.base.terminal import printable

if TYPE_CHECKING:
    import tokenizers

LARGEST_GROWTH = 256
"""Characters or tokens that one of the steps may make of one. Published tokenizers stay below 70 (ALBERT's 66)."""
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_PARTS = ("normalizers", "pretokenizers", "processors", "decoders")
_BYTES = 4  # of a character in UTF-8: `ByteLevel` makes a character of each
_LONGEST_REASON = 300  # characters
_RUN = 1_000  # characters: a regular expression that backtracks without end gives up long before


def check_steps(data: bytes, where: str) -> None:
    """Refuse steps with which a short text fills the memory, or with which a text has other ids each time.

    The library runs the normalizer while it loads the file (on the added tokens), so this comes first.

    Raises:
        UserError: a step could multiply the length of a text beyond `LARGEST_GROWTH`, or merges are dropped at random.
    """
    try:
        values = json.loads(data)
        growths = {name: _growth(values.get(name)) for name in _STEPS}
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return  # the library refuses what is not JSON, nested without end, of other types, or lacks a field
    for name, growth in growths.items():
        if growth > LARGEST_GROWTH:
            what = "tokens" if name == "post_processor" else "characters"
            raise UserError(
                f"the {name} of {where} can make {growth:,.0f} {what} of one, so a text could fill the memory",
                fix=f"use a tokenizer whose {name} stays below {LARGEST_GROWTH} {what} for one",
                code="growing-tokenizer",
            )
    model = values.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise UserError(
            f"{where} drops merges at random (model.dropout={model['dropout']!r:.40}), so a text has no fixed ids",
            fix="set model.dropout to null in that file",
            code="random-tokenizer",
        )


def try_out(encoder: tokenizers.Tokenizer) -> None:
    """Encode runs of every printable character: on these a regular expression that is too complex gives up.

    Call it within `panics_as_errors`. What the file says of padding and truncation goes: a padded length of 10**12
    would end the process, and every caller sets its own.
    """
    encoder.no_padding()
    encoder.no_truncation()
    for character in [chr(number) for number in range(32, 127)] + ["\n", "é", "字", "\u0301"]:
        # A vocabulary without an unknown token raises at a character that it lacks; only panics count here.
        with contextlib.suppress(Exception):
            encoder.encode(character * _RUN, add_special_tokens=False)


@contextlib.contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Turn the library's bare exceptions and panics into a `UserError`; `where` names the file in the message.

    Raises:
        UserError: the library failed.
    """
    try:
        with panics_as_errors(where):
            yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
        raise _unreadable(where, str(error)) from None


@contextlib.contextmanager
def panics_as_errors(where: str) -> Iterator[None]:
    """Turn a panic of the library's Rust code into a `UserError`, without the lines that it prints on stderr.

    Raises:
        UserError: the library panicked; `where` names the file in the message.
    """
    with _held_stderr() as held:
        try:
            yield
        except BaseException as error:  # a panic is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            held.drop = True
            raise _unreadable(where, str(error)) from None


def _unreadable(where: str, reason: str) -> UserError:
    return UserError(
        f"{where} cannot be read as a tokenizer ({printable(' '.join(reason.split()))[:_LONGEST_REASON]})",
        fix="copy it again, or use another tokenizer",
        code="damaged-tokenizer",
    )


def _growth(step: Any) -> float:
    """Return the most characters that a step may make of one, or the most tokens that a post-processor may."""
    if not isinstance(step, dict):
        return 1.0
    growth = float(_BYTES) if step.get("type") == "ByteLevel" else 1.0
    for part in next((step[name] for name in _PARTS if step.get(name)), ()):
        growth *= _growth(part)
    growth *= max([1.0, *(_tokens_added(step.get(name), step.get("special_tokens")) for name in ("single", "pair"))])
    pattern = step.get("pattern")
    content, prepended = step.get("content"), step.get("prepend")
    if isinstance(content, str) and pattern is not None:
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        # A regular expression may match between two characters, which both stay.
        growth *= max(1.0, len(content) / len(literal)) if literal else 1.0 + len(content)
    if isinstance(prepended, str):
        growth *= 1.0 + len(prepended)
    charsmap = step.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        growth *= _longest_replacement(charsmap)
    return growth


def _tokens_added(template: Any, special_tokens: Any) -> int:
    """Return the tokens of a template, in which a text may occur several times, for texts of one token."""
    if not isinstance(template, list) or not isinstance(special_tokens, dict):
        return 1
    lengths = {name: len(token["ids"]) for name, token in special_tokens.items()}
    return sum(lengths.get(part.get("SpecialToken", {}).get("id"), 1) for part in template)


def _longest_replacement(charsmap: str) -> int:
    """Bytes of the longest replacement in SentencePiece's compiled map: size of the trie, trie, then the
    replacements, each ended by a zero byte (sentencepiece, src/normalizer.cc)."""
    try:
        data = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1  # the library refuses it
    replacements = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *map(len, replacements.split(b"\0")))


class _Held:
    """Lines on stderr that were kept back while the library worked."""

    drop = False


_lock = threading.Lock()
_users = 0
_saved: int = -1
_kept: Any = None


@contextlib.contextmanager
def _held_stderr() -> Iterator[_Held]:
    """Keep back what is written to the process's stderr (descriptor 2) until the last of nested or parallel users is
    done, then write it out, unless `drop` was set: a panic prints its lines there before it can be caught."""
    global _users, _saved, _kept  # one descriptor, shared by all threads of the process
    held = _Held()
    with _lock:
        if _users == 0:
            _kept = os.fdopen(os.memfd_create("held-stderr"), "w+b")  # in memory: a reader writes no file
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            try:
                _saved = os.dup(2)
                os.dup2(_kept.fileno(), 2)
            except OSError:  # a process without stderr
                _saved = -1
        _users += 1
    try:
        yield held
    finally:
        with _lock:
            _users -= 1
            if held.drop:
                _kept.seek(0)
                _kept.truncate()
            if _users == 0:
                if _saved >= 0:
                    with contextlib.suppress(OSError, ValueError):
                        sys.stderr.flush()
                    os.dup2(_saved, 2)
                    os.close(_saved)
                    _kept.seek(0)
                    lines = _kept.read()
                    if lines:
                        os.write(2, lines)
                _kept.close()
