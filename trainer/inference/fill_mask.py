"""Fill masks in text with a trained model; mask a random word of a text, and compare the guess with it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import regex

from data_prep.base.errors import UsageError, UserError
from data_prep.base.local_paths import home_in
from data_prep.text.cleaning import replace_surrogates
from data_prep.tokenizer.foreign_tokenizer import cut_names
from data_prep.tokenizer.untrusted_file import library_errors
from trainer.inference.preprocessor import checked_texts, max_length
from trainer.model.pretrained import load_pretrained, load_tokenizer, refuse_random_weights
from trainer.model.quiet_transformers import quiet_transformers

if TYPE_CHECKING:
    import tokenizers
    import torch
    from transformers import PreTrainedTokenizerBase

    from trainer.inference.generation import Generation
    from trainer.inference.masking_rates import MaskingRates

MASK_TOKEN = "[MASK]"
METASPACE = "▁"
BYTE_LEVEL_SPACE = "Ġ"
WORDPIECE_CONTINUATION = "##"
NUM_FUNCTION_WORDS = 200
"""First words of a vocabulary that count as function words."""
# A word is one character of a script without spaces, or letters with marks, digits and apostrophes inside.
_WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}]|[\p{L}\p{M}\p{N}]*\p{L}[\p{L}\p{M}\p{N}]*(?:['’][\p{L}\p{M}]+)*"
)


class Candidate(NamedTuple):
    """A token for a mask; `begins_word` is false for the continuation of a word."""

    token: str
    token_id: int
    probability: float
    begins_word: bool


@dataclass(frozen=True)
class Prediction:
    """The candidates of each mask of a text, likeliest first, and the text filled with the likeliest."""

    text: str
    masks: tuple[tuple[Candidate, ...], ...]
    filled: str
    num_tokens: int = 0
    """Tokens of the text without special tokens."""
    window_tokens: int | None = None
    """Number of tokens around each mask that were read, if the text is longer than the model takes; else None."""


@dataclass(frozen=True)
class MaskedText:
    """A text in which one word was replaced by the mask."""

    actual: str
    masked: str
    word: str


class MaskedModel(Protocol):
    """The interface of transformers' masked language models, and of `CheckpointMaskedLM`."""

    config: Any

    def eval(self) -> Any: ...
    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any: ...


class FillMask:
    """Fill masks with a model, on the CPU.

        fill_mask = FillMask("models:/english@champion")
        fill_mask("Paris is the [MASK] of France.")[0]  # the candidates of the first mask, likeliest first
        fill_mask(["The [MASK] sat.", "A [MASK] ran."])[1][0]  # those of the second text

    Args:
        model: a run's output directory, a checkpoint, an exported or other Hugging Face directory,
            `models:/NAME@ALIAS`, `models:/NAME/VERSION`, `runs:/...`, or a name on the Hugging Face Hub; or a model in
            memory, with its `tokenizer`.
        tracking_uri: the MLflow server of an address; default MLFLOW_TRACKING_URI, else sqlite in ./mlflow.db.

    Raises:
        UserError: there is no such model, or it cannot fill masks.
    """

    @home_in("model")
    def __init__(
        self,
        model: str | Path | MaskedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        tracking_uri: str | None = None,
    ) -> None:
        self.trained_rates: Callable[[], MaskingRates | str] = lambda: "a model in memory has no record of its training"
        """Returns the masking rates that the model was trained at, or why they are unknown."""
        if isinstance(model, str | Path):
            model, tokenizer, self.trained_rates = _open(model, tracking_uri)
        assert tokenizer is not None, "a model in memory comes with its tokenizer"
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path} has no mask token",
                fix="give a masked language model",
                code="no-mask-token",
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._encode = TextEncoder(tokenizer)
        vocabulary = tokenizer.get_vocab()
        self.word_start = word_start_of(vocabulary)
        added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.word_ids = sorted(set(vocabulary.values()) - {*tokenizer.all_special_ids, *added})  # they may have holes
        self.max_length = max_length(model.config, tokenizer)

    @classmethod
    def load(cls, folder: Path) -> FillMask:
        """Load a Hugging Face directory: only safetensors, no code from the directory, no look-up elsewhere.

        Raises:
            UserError: transformers cannot load it as a masked language model, or it has no trained head.
        """
        loaded = cls(*_load_masked_model(folder))
        loaded.trained_rates = _rates_of_export(folder)
        return loaded

    @overload
    def __call__(self, text: str, top_k: int = 5) -> tuple[tuple[Candidate, ...], ...]: ...
    @overload
    def __call__(
        self, text: list[str] | tuple[str, ...], top_k: int = 5
    ) -> list[tuple[tuple[Candidate, ...], ...]]: ...
    def __call__(self, text: str | Sequence[str], top_k: int = 5) -> Any:
        """Return the `top_k` candidates of each mask of `text`, likeliest first; for a list of texts, a list of these.

        Raises:
            UsageError: a text has no mask, or `text` is neither a string nor a list of strings.
        """
        if isinstance(text, str):
            return self.predict(text, top_k).masks
        return [self.predict(each, top_k).masks for each in checked_texts(text)]

    @property
    def mask_token(self) -> str:
        token: str = self.tokenizer.mask_token
        return token

    def predict(self, text: str, top_k: int = 5) -> Prediction:
        """Fill every mask of `text`; if the text is longer than the model takes, read a window around each mask."""
        text, prefix, body, suffix = self.read(text)
        positions = self.masks_of(body)
        if not positions:
            raise UsageError(
                f"the text {shorten(text)!r} has no {self.mask_token}",
                fix=f"replace a word by {self.mask_token}",
                code="text-without-mask",
            )
        length = self.max_length - len(prefix) - len(suffix)
        masks: list[tuple[Candidate, ...]] = []
        for start, group in windows(positions, len(body), length):
            logits = self.logits(prefix, body[start : start + length], suffix)
            masks += [self.candidates(logits[position - start], top_k) for position in group]
        best = [candidates[0] for candidates in masks]
        window = length if len(body) > length else None
        return Prediction(text, tuple(masks), fill(text, self.mask_token, best), len(body), window)

    def generate(
        self,
        text: str,
        num_tokens: int,
        *,
        steps: int | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        top_k: int = 5,
        any_rate: bool = False,
    ) -> Generation:
        """Generate `num_tokens` tokens for each mask of a text; a text without a mask gets one at its end.

            fill_mask.generate("The river", 12).filled
            fill_mask.generate("The [MASK] of the river is cold.", 3).generated  # one text for each mask

        Each step predicts all masks that are left and fills an equal share of them, never with special tokens. The
        arguments determine the result. One step at temperature 0 takes the likeliest candidates of `predict`.

        Args:
            steps: number of steps; by default, and at most, one for each generated token.
            temperature: divides the logits that tokens are drawn by, for masks in random order. At 0 each step takes
                the likeliest tokens, of the masks that the model is surest of.
            top_k: number of candidates of each token in `Generation.masks`.
            any_rate: generate also with a model that was trained at one masking rate or at unknown ones.

        Raises:
            UsageError: the model was trained at one masking rate or at unknown ones, the text with its new tokens is
                longer than the model takes, or an argument is out of range.
        """
        from trainer.inference.generation import Sampling, generate
        from trainer.inference.masking_rates import check_rates

        sampling = Sampling(num_tokens, steps, temperature, seed, top_k)
        if not any_rate:
            check_rates(self.trained_rates())
        return generate(self, text, sampling)

    def read(self, text: str) -> tuple[str, list[int], list[int], list[int]]:
        """Return the text with the mask as the tokenizer has it, and its ids: special, those of the text, special.

        Raises:
            UsageError: the tokenizer reads a mask as text, as some do within a word.
        """
        (text,) = checked_texts([text])
        text = text if self.mask_token == MASK_TOKEN else text.replace(MASK_TOKEN, self.mask_token)
        with quiet_transformers():  # it warns of every text that is longer than the model takes
            (body, _), (full, _) = self._encode(text, add_special_tokens=False), self._encode(text)
        if (there := text.count(self.mask_token)) != (read := len(self.masks_of(body))):
            raise UsageError(
                f"the tokenizer reads {read} of the {there} {self.mask_token} in the text {shorten(text)!r} as a mask",
                fix=f"write a space before and after {self.mask_token}",
                code="mask-read-as-text",
            )
        before = next(start for start in range(len(full) + 1) if full[start : start + len(body)] == body)
        return text, full[:before], body, full[before + len(body) :]

    def masks_of(self, ids: list[int]) -> list[int]:
        return [position for position, token in enumerate(ids) if token == self.tokenizer.mask_token_id]

    def logits(self, prefix: list[int], ids: list[int], suffix: list[int]) -> torch.Tensor:
        """Return the logits (len(ids), vocab_size) of a text between the special tokens `prefix` and `suffix`."""
        import torch

        input_ids = torch.tensor([prefix + ids + suffix])
        with torch.inference_mode():
            logits = self.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).logits[0]
        rows: torch.Tensor = logits[len(prefix) : len(prefix) + len(ids)]
        return rows

    def is_one_piece(self, word: str) -> bool:
        """Return whether the word is one token of the vocabulary, so that one mask can be filled with it."""
        ids, _ = self._encode(word, add_special_tokens=False)
        return len(ids) == 1 and ids[0] not in self.tokenizer.all_special_ids

    def is_content_word(self, word: str) -> bool:
        """Return whether the word is neither short nor very frequent, as function words such as "the" or "with" are.

        Vocabularies of BPE and WordPiece are sorted by frequency, so their first words count as function words.
        """
        return word.casefold() not in self._function_words and (len(word) > 3 or not word.isascii())

    def candidates(self, logits: Any, top_k: int) -> tuple[Candidate, ...]:
        """Return the likeliest tokens by `logits` (vocab_size,), but no special tokens or padding of the vocabulary."""
        import torch

        probabilities = torch.softmax(logits.float(), dim=-1)
        allowed = [token_id for token_id in self.word_ids if token_id < len(probabilities)]
        values, indices = probabilities[allowed].topk(min(top_k, len(allowed)))
        likeliest = zip(indices.tolist(), values.tolist(), strict=True)
        return tuple(self.candidate(allowed[index], probability) for index, probability in likeliest)

    @cached_property
    def _function_words(self) -> set[str]:
        """Return the first tokens of the vocabulary that are words of several letters."""
        candidates = (self.candidate(token_id, 0.0) for token_id in self.word_ids)
        words = (each.token.casefold() for each in candidates if each.begins_word and len(each.token) > 1)
        return set(islice(words, NUM_FUNCTION_WORDS))

    def candidate(self, token_id: int, probability: float) -> Candidate:
        piece = str(self.tokenizer.convert_ids_to_tokens(token_id))
        if self.word_start == METASPACE:
            return Candidate(
                piece.replace(METASPACE, " ").strip() or piece, token_id, probability, piece.startswith(METASPACE)
            )
        if piece.startswith(WORDPIECE_CONTINUATION):
            return Candidate(piece.removeprefix(WORDPIECE_CONTINUATION), token_id, probability, False)
        begins_word = self.word_start is None or piece.startswith(self.word_start)
        return Candidate(str(self.tokenizer.decode([token_id])).strip() or piece, token_id, probability, begins_word)


def _open(
    model: str | Path, tracking_uri: str | None
) -> tuple[MaskedModel, PreTrainedTokenizerBase, Callable[[], MaskingRates | str]]:
    """Return model, tokenizer and masking rates by any name of a model; a checkpoint of a run needs no export."""
    from trainer.inference.pulled_model import is_checkpoint, pull

    if not is_checkpoint(model):
        folder = pull(model, tracking_uri=tracking_uri)
        return (*_load_masked_model(folder), _rates_of_export(folder))
    from trainer.inference.checkpoint_model import load_checkpoint

    loaded = load_checkpoint(Path(model))
    return loaded.model, loaded.tokenizer, loaded.trained_rates


def _rates_of_export(folder: Path) -> Callable[[], MaskingRates | str]:
    def read() -> MaskingRates | str:  # when text is generated: filling masks needs no configuration
        from trainer.inference.masking_rates import rates_of_export

        return rates_of_export(folder)

    return read


def _load_masked_model(folder: Path) -> tuple[MaskedModel, PreTrainedTokenizerBase]:
    tokenizer = load_tokenizer(folder)
    model, missing = load_pretrained("AutoModelForMaskedLM", folder, "a masked language model")
    refuse_random_weights(missing, folder, "a masked language model")
    return model, tokenizer


class TextEncoder:
    """Encodes texts as a tokenizer does, except that a fast one reads them with `mask_reader`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = mask_reader(tokenizer) if tokenizer.is_fast else None

    def __call__(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        """Return the ids, and for each id 1 if it is an added special token, else 0."""
        text = replace_surrogates(text)  # as in preparation
        with library_errors(self._tokenizer.name_or_path):
            if self._backend is not None:
                encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
                return encoded.ids, encoded.special_tokens_mask
            values = self._tokenizer(text, add_special_tokens=add_special_tokens, return_special_tokens_mask=True)
            return values["input_ids"], values["special_tokens_mask"]


def mask_reader(tokenizer: PreTrainedTokenizerBase) -> tokenizers.Tokenizer:
    """Return a copy of the tokenizer that reads "[SEP]" and the like in a text as text, but the mask as the mask.

    The library can read all special tokens in a text as text, or none; so the mask of the copy is not a special token.
    """
    import tokenizers

    values = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in values["added_tokens"]:
        token["special"] = token["special"] and token["content"] != tokenizer.mask_token
    backend = tokenizers.Tokenizer.from_str(json.dumps(values))
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    cut_names(backend, tokenizer.all_special_tokens)
    return backend


def word_start_of(pieces: Iterable[str]) -> str | None:
    """Return the character that marks tokens which begin a word; None if the vocabulary marks the other tokens.

    A vocabulary without such marks may still contain either character, as text.
    """
    firsts = Counter(piece[:1] for piece in pieces)
    mark = max((METASPACE, BYTE_LEVEL_SPACE), key=lambda character: firsts[character])
    return mark if firsts[mark] > firsts.total() // 20 else None


def windows(positions: list[int], num_tokens: int, length: int) -> list[tuple[int, list[int]]]:
    """Return windows of `length` tokens as (start, positions of masks): all masks of a short text, else one each."""
    if num_tokens <= length:
        return [(0, positions)]
    return [(min(max(position - length // 2, 0), num_tokens - length), [position]) for position in positions]


def fill(text: str, mask_token: str, candidates: list[Candidate]) -> str:
    """Fill each mask with one candidate; the continuation of a word is joined to the text before it."""
    filled, *rest = text.split(mask_token)
    for candidate, following in zip(candidates, rest, strict=True):
        if not candidate.begins_word:
            filled = filled.rstrip(" ")
        filled += candidate.token + following
    return filled


def mask_random_word(
    text: str, seed: int, mask_token: str = MASK_TOKEN, preferred: Sequence[Callable[[str], bool]] = ()
) -> MaskedText:
    """Mask one whole word of `text`, never punctuation; (seed, text) determine which one.

    Each function of `preferred` restricts the choice, for instance to words of one token, unless no word would be left.
    """
    words = list(_WORD.finditer(text.replace(mask_token, "\0" * len(mask_token))))
    if not words:
        raise UsageError(
            f"the text {shorten(text)!r} has no word to mask", fix="give a sentence", code="text-without-word"
        )
    for is_preferred in preferred:
        words = [word for word in words if is_preferred(word.group())] or words
    word = random.Random(f"{seed}:{replace_surrogates(text)}").choice(words)
    masked = text[: word.start()] + mask_token + text[word.end() :]
    return MaskedText(text, masked, word.group())


def has_word(text: str) -> bool:
    """Return whether `mask_random_word` would find a word in the text."""
    return _WORD.search(text.replace(MASK_TOKEN, "\0")) is not None


def report(prediction: Prediction, masked: MaskedText | None = None) -> list[str]:
    """Return lines for people: the candidates and the filled text, and for a word masked at random the actual text."""
    if masked is None:
        lines: list[str] = []
        for number, candidates in enumerate(prediction.masks, start=1):
            lines += [f"mask {number}:", *_listed(candidates)]
        return [*lines, f"MODEL: {one_line(prediction.filled)}"]
    return [
        f'masked word: "{masked.word}"',
        "guesses:",
        *_listed(prediction.masks[0]),
        f"ACTUAL: {one_line(masked.actual)}",
        f"MASKED: {one_line(masked.masked)}",
        f"MODEL: {one_line(prediction.filled)}",
    ]


def as_json(prediction: Prediction, masked: MaskedText | None = None) -> dict[str, Any]:
    """Return the content of `report` for programs."""
    masks = [[candidate_as_json(item) for item in candidates] for candidates in prediction.masks]
    value: dict[str, Any] = {"text": prediction.text, "masks": masks, "filled": prediction.filled}
    value |= {"num_tokens": prediction.num_tokens, "window_tokens": prediction.window_tokens}
    if masked is not None:
        best = prediction.masks[0][0]
        value |= {"actual": masked.actual, "word": masked.word, "predicted": best.token}
        value["correct"] = is_right(prediction, masked)
    return value


def candidate_as_json(item: Candidate) -> dict[str, Any]:
    return {"token": item.token, "token_id": item.token_id, "probability": item.probability}


def window_note(prediction: Prediction) -> str | None:
    """Return the warning about a text of which only windows were read; None for any other."""
    if prediction.window_tokens is None:
        return None
    return (
        f"the text {shorten(prediction.text)!r} has {prediction.num_tokens:,} tokens, more than the model takes; for "
        f"each mask only the {prediction.window_tokens:,} tokens around it were read"
    )


def is_right(prediction: Prediction, masked: MaskedText) -> bool:
    """Return whether the first guess is the word that was masked, regardless of case."""
    best = prediction.masks[0][0]
    return best.begins_word and best.token.casefold() == masked.word.casefold()


def one_line(text: str) -> str:
    return " ".join(text.split())


def shorten(text: str) -> str:
    """Return the beginning of a text, for messages."""
    text = one_line(text)
    return text if len(text) <= 80 else text[:77] + "..."


def _listed(candidates: tuple[Candidate, ...]) -> Iterator[str]:
    width = max(len(item.token) for item in candidates) + 2
    for item in candidates:
        quoted = f'"{item.token}"'
        note = "" if item.begins_word else f"  ({_joined(item.token)})"
        yield f"  {quoted:<{width}}  {item.probability:.3f}{note}"


def _joined(token: str) -> str:
    """Say how a token stands that no space precedes: a full stop continues no word."""
    return "continues the word before it" if any(map(str.isalnum, token)) else "no space before it"
