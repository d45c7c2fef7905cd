"""Settings of a tokenizer that are refused, and what differs between two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from data_prep.base.errors import UserError
from data_prep.text.cleaning import Normalization
from data_prep.tokenizer.tokenizer_info import INFO_NAME, TokenizerInfo, TokenizerSettings
from tests.support.error_codes import coded

REFUSED = {
    "": "is empty",
    "[MASK]": "is already a special token",
    "<0x0A>": "name of a byte",
    "two words": "white space",
    "new\u2028line": "white space",
    "\u2581the": "U\\+2581",
    "e\u0301": "has '\u00e9' instead",
    "zero\u200bwidth": "has 'zero width' instead",
    "no\u061cwidth": "has 'nowidth' instead",
    "\ud800": "has '\ufffd' instead",
    "\u0301x": "begins with a combining mark",
}


@pytest.mark.parametrize("symbol", REFUSED, ids=ascii)
def test_a_user_symbol_that_no_text_can_hold_is_refused(symbol: str) -> None:
    with pytest.raises(ValidationError, match=REFUSED[symbol]):
        TokenizerSettings(user_symbols=("fine", symbol))


def test_user_symbols_are_refused_by_the_normalization_that_is_set() -> None:
    uncased = Normalization(form="NFKC", lowercase=True)
    assert TokenizerSettings(user_symbols=("<SEP>", "\ufb01")).user_symbols == ("<SEP>", "\ufb01")
    for symbol in ("<SEP>", "\ufb01"):
        with pytest.raises(ValidationError, match="instead"):
            TokenizerSettings(user_symbols=(symbol,), normalization=uncased)
    with pytest.raises(ValidationError, match="'a' is listed twice"):
        TokenizerSettings(user_symbols=("a", "b", "a"))


@pytest.mark.parametrize(
    "values", [{"character_coverage": 0.9}, {"sampling_alpha": 1.1}, {"sampling_alpha": -0.1}, {"sampling_by": "file"}]
)
def test_values_out_of_range_are_refused_before_anything_is_read(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TokenizerSettings.model_validate(values)


@pytest.mark.parametrize("name", ["../../../etc/hostname", "/dev/zero", "..", ".", "", "a/b", "a\n"])
def test_a_name_that_is_no_file_of_the_folder_is_refused(name: str) -> None:
    values = {"settings": {}, "inputs": {}, "libraries": {}, "vocab_size": 500}
    values |= {"format_version": 1, "fingerprint": "0" * 64}
    assert TokenizerInfo.model_validate(values | {"files": {"tokenizer.json": "0" * 64}}).files
    with pytest.raises(ValidationError, match="match pattern"):
        TokenizerInfo.model_validate(values | {"files": {name: "0" * 64}})


def test_a_damaged_file_is_reported_with_its_missing_fields(tmp_path: Path) -> None:
    (tmp_path / INFO_NAME).write_text('{"format_version": 1}')
    with pytest.raises(UserError, match="fingerprint", check=coded("damaged-tokenizer")):
        TokenizerInfo.read(tmp_path)


def test_differences_name_settings_and_inputs() -> None:
    files = [{"url": "a.txt", "bytes": 3, "source": "x"}, {"url": "b.txt", "bytes": 3, "source": "x"}]
    info = TokenizerInfo(
        format_version=1,
        fingerprint="0" * 64,
        vocab_size=500,
        settings=TokenizerSettings(),
        inputs={"files": files},
        libraries={},
    )
    assert list(info.differences(TokenizerSettings(), {"files": files[::-1]})) == []
    changed = [{**files[0], "bytes": 4}, {"url": "c.txt", "bytes": 3, "source": "x"}]
    settings = TokenizerSettings(sampling_alpha=0.5, normalization=Normalization(lowercase=True))
    assert list(info.differences(settings, {"files": changed})) == [
        "files.a.txt.bytes was 3 and is now 4",
        "input b.txt is gone",
        "input c.txt is new",
        "tokenizer.normalization.lowercase was false and is now true",
        "tokenizer.sampling_alpha was 1.0 and is now 0.5",
    ]


def test_a_tokenizer_of_format_1_has_version_1_of_the_normalization(tmp_path: Path) -> None:
    normalization = {"form": "NFC", "lowercase": True, "strip_accents": False}
    values = {"format_version": 1, "fingerprint": "0" * 64, "vocab_size": 500, "inputs": {}, "libraries": {}}
    values["settings"] = {"normalization": normalization}
    (tmp_path / INFO_NAME).write_text(json.dumps(values))
    info = TokenizerInfo.read(tmp_path)
    assert info is not None and info.settings is not None
    assert info.settings.normalization == Normalization(lowercase=True, version=1)
    info.model_copy(update={"format_version": 2}).write(tmp_path)
    assert TokenizerInfo.read(tmp_path) == info.model_copy(update={"format_version": 2})


def test_a_version_of_the_normalization_differs_only_if_it_was_asked_for() -> None:
    first = TokenizerSettings(normalization=Normalization(version=1))
    info = TokenizerInfo(
        format_version=2, fingerprint="0" * 64, vocab_size=500, settings=first, inputs={}, libraries={}
    )
    assert list(info.differences(TokenizerSettings(normalization=Normalization(form="NFC")), {})) == []
    asked = TokenizerSettings(normalization=Normalization(version=2))
    assert list(info.differences(asked, {})) == ["tokenizer.normalization.version was 1 and is now 2"]
