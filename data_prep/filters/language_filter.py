"""The built-in filter `language`: the language of a text, identified by py3langid, which brings its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.packages import install_command
from data_prep.documents.document import Document
from data_prep.text.cleaning import replace_surrogates
from data_prep.text.language_codes import TWO_LETTER_CODES


class LanguageFilter:
    """Keeps the documents of some languages, or assigns each document its language.

    Args:
        keep: codes such as en or eng (ISO 639); empty for all.
        min_probability: documents whose language is less certain are dropped as "uncertain".
        assign: the language found becomes the document's own, which selects the rules of sentence splitting.
        characters: number of characters at the beginning that are examined.
    """

    version = "1"

    def __init__(
        self, keep: Sequence[str] = (), min_probability: float = 0.0, assign: bool = False, characters: int = 2_000
    ) -> None:
        self._identifier = _identifier()
        given = [keep] if isinstance(keep, str) else list(keep)
        codes = [TWO_LETTER_CODES.get(str(code).lower(), str(code)) for code in given]
        known = {str(code) for code in self._identifier.nb_classes}
        unknown = sorted(set(codes) - known)
        if unknown or not (0 <= min_probability <= 1 and characters > 0) or not (codes or assign or min_probability):
            problem = (
                f"does not know the language {unknown[0]!r}" if unknown else "has nothing to do or a value out of range"
            )
            raise UsageError(
                f"filter 'language' {problem}",
                fix=f"give keep, min_probability (0 to 1) or assign; languages: {' '.join(sorted(known))}",
                code="filter-parameters",
            )
        self._keep, self._min_probability, self._assign = frozenset(codes), min_probability, assign
        self._characters = characters

    def identity(self) -> dict[str, Any]:
        """Return the version of the library, which contains the model."""
        from importlib.metadata import version

        return {"libraries": {"py3langid": version("py3langid")}}

    def __call__(self, document: Document) -> str | Document | None:
        language, probability = self._identifier.classify(replace_surrogates(document.text[: self._characters]))
        if probability < self._min_probability:
            return "uncertain"
        if self._keep and language not in self._keep:
            return str(language)
        return replace(document, language=str(language)) if self._assign else None


def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UsageError(
            "filter 'language' needs the library py3langid, which is not installed",
            fix=install_command("language"),
            code="missing-extra",
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
