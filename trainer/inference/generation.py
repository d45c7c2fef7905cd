"""Text from a masked language model: masks are filled in several steps, each of which reads what was filled before.

Each step predicts all masks and fills an equal share of them. At a temperature above 0 the order of the masks is random
and their tokens are drawn, so that the text is a sample of the model's distribution (Sahoo et al. 2024, "Simple and
Effective Masked Diffusion Language Models"; Nie et al. 2025, "Large Language Diffusion Models"). Drawing the surest
tokens first would repeat frequent ones. At temperature 0 each step fills the masks that the model is surest of with
their likeliest tokens (Ghazvininejad et al. 2019, "Mask-Predict"; Chang et al. 2022, "MaskGIT").

The first steps read mostly masks and the last ones hardly any, so the model must know such rates (`masking_rates.py`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import regex

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted, printable
from data_prep.text.cleaning import replace_surrogates
from trainer.inference.fill_mask import (
    BYTE_LEVEL_SPACE,
    METASPACE,
    WORDPIECE_CONTINUATION,
    Candidate,
    FillMask,
    Prediction,
    as_json,
    candidate_as_json,
    shorten,
)

if TYPE_CHECKING:
    import torch

_SPACE_BETWEEN_IDEOGRAPHS = regex.compile(
    r"(?<=[\p{Han}\p{Hiragana}\p{Katakana}]) (?=[\p{Han}\p{Hiragana}\p{Katakana}])"
)
_BYTE_PIECES = regex.compile(r"(?:<0x[0-9A-F]{2}>)+")


@dataclass(frozen=True)
class Sampling:
    """How tokens are generated; the arguments of `FillMask.generate`.

    Raises:
        UsageError: one of them is out of range.
    """

    num_tokens: int
    steps: int | None
    temperature: float
    seed: int
    top_k: int

    def __post_init__(self) -> None:
        for name in ("num_tokens", "steps", "top_k"):
            value = getattr(self, name)
            if not (value is None and name == "steps") and (not isinstance(value, int) or value < 1):
                raise _out_of_range(name, value, "a whole number of 1 or more")
        if not isinstance(self.temperature, int | float) or not 0 <= self.temperature < math.inf:
            raise _out_of_range("temperature", self.temperature, "a number of 0 or more")


def _out_of_range(name: str, value: object, rule: str) -> UsageError:
    return UsageError(f"{name} is {value!r:.40}", fix=f"make it {rule}", code="invalid-sampling")


@dataclass(frozen=True, kw_only=True)
class Generation(Prediction):
    """A text with generated tokens; `masks` has the candidates of each token at the step that filled it."""

    tokens: tuple[Candidate, ...]
    """Generated tokens in the order of the text, with their probabilities at the step that filled them."""
    parts: tuple[str, ...]
    """`filled` in parts: those at odd indices are generated, the others are given."""
    steps: int
    """Number of predictions; at most that of the tokens."""
    first_rate: float
    """Share of the tokens that were masked at the first step, without special tokens."""

    @property
    def generated(self) -> tuple[str, ...]:
        """The generated texts; adjacent masks have one."""
        return self.parts[1::2]


def generate(model: FillMask, given: str, sampling: Sampling) -> Generation:
    """Generate tokens for each mask of a text, or at its end (`FillMask.generate`), whatever the model was trained at.

    Raises:
        UsageError: the text with its new tokens is longer than the model takes.
    """
    text, prefix, body, suffix = model.read(given)
    if not model.masks_of(body):
        space = " " if text and not text[-1].isspace() else ""
        text, prefix, body, suffix = model.read(f"{text}{space}{model.mask_token}")
    mask = model.tokenizer.mask_token_id
    new, longest = sampling.num_tokens * body.count(mask), model.max_length - len(prefix) - len(suffix)
    if (length := len(body) - body.count(mask) + new) > longest:
        raise UsageError(
            f"the text {shorten(given)!r} has {length:,} tokens, {new:,} of them to generate, but the model takes "
            f"{longest:,}",
            fix="generate fewer tokens, or give a shorter text",
            code="text-too-long",
        )
    ids = [each for token in body for each in [token] * (sampling.num_tokens if token == mask else 1)]
    positions, steps = model.masks_of(ids), min(sampling.steps or new, new)
    found: dict[int, tuple[Candidate, tuple[Candidate, ...]]] = {}
    for position, logits in unmask(
        lambda ids: model.logits(prefix, ids, suffix),
        ids,
        positions,
        model.word_ids,
        steps=steps,
        temperature=sampling.temperature,
        seed=f"{sampling.seed}:{replace_surrogates(given)}",
    ):
        probability = float(logits.float().softmax(dim=-1)[ids[position]])
        found[position] = (model.candidate(ids[position], probability), model.candidates(logits, sampling.top_k))
    parts = _parts(model, text, ids, positions[:: sampling.num_tokens], sampling.num_tokens)
    return Generation(
        given,
        tuple(found[position][1] for position in positions),
        "".join(parts),
        len(ids),
        tokens=tuple(found[position][0] for position in positions),
        parts=parts,
        steps=steps,
        first_rate=len(positions) / len(ids),
    )


def unmask(
    predict: Callable[[list[int]], torch.Tensor],
    ids: list[int],
    positions: Sequence[int],
    allowed: Sequence[int],
    *,
    steps: int,
    temperature: float,
    seed: str,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Fill `positions` of `ids` in place; yield each position with its logits (vocab_size,) when it is filled.

    Args:
        predict: returns the logits (length, vocab_size) of all positions.
        allowed: ids that may be generated, as far as the model has logits for them.
        steps: number of predictions, at most one for each position.
        seed: determines the order of the positions and their tokens at a temperature above 0.
    """
    generator = random.Random(seed)
    waiting = list(positions)
    if temperature:
        generator.shuffle(waiting)
    for step in range(steps):
        count = len(positions) * (step + 1) // steps - len(positions) * step // steps
        logits = predict(ids)[waiting]  # (waiting, vocab_size)
        allowed = [token for token in allowed if token < logits.shape[-1]]
        values = logits[:, allowed]
        if temperature:
            chosen = list(range(count))
            tokens = [_drawn(values[row], temperature, generator) for row in chosen]
        else:
            probabilities = logits.float().softmax(dim=-1)[:, allowed]
            surest, likeliest = (each.tolist() for each in probabilities.max(dim=-1))
            chosen = sorted(range(len(waiting)), key=lambda row: (-surest[row], waiting[row]))[:count]
            tokens = [likeliest[row] for row in chosen]
        for row, token in zip(chosen, tokens, strict=True):
            ids[waiting[row]] = allowed[token]
            yield waiting[row], logits[row]
        waiting = [position for row, position in enumerate(waiting) if row not in set(chosen)]


def _drawn(logits: torch.Tensor, temperature: float, generator: random.Random) -> int:
    """Return the index of one of the logits (tokens,), drawn by their softmax at the temperature."""
    logits = logits.double()
    sums = ((logits - logits.max()) / temperature).exp().cumsum(dim=0)
    return min(int((sums <= generator.random() * float(sums[-1])).sum()), len(sums) - 1)


def _parts(model: FillMask, text: str, ids: list[int], starts: list[int], num_tokens: int) -> tuple[str, ...]:
    """Return given and generated parts in turn; each mask of `text` stands for `num_tokens` of `ids` from a start on.

    As in `fill`, a word has the spaces that `text` has before its mask, and the continuation of a word has none.
    """
    first, *rest = text.split(model.mask_token)
    parts, begin, end = [first], -1, -1
    for start, following in zip(starts, rest, strict=True):
        if start == end and not parts[-1].strip(" "):  # adjacent masks may be bytes of one character
            del parts[-2:]
        else:
            begin = start
        end = start + num_tokens
        before, given = ids[:begin], parts[-1]
        written = _written(model, before, ids[begin:end])
        if not (before and _is_space(model, before[-1])):  # else the space before the mask is a token
            given = given if written.startswith(" ") else given.rstrip(" ")
            written = written.removeprefix(" ")
        if model.word_start is None and _SPACE_BETWEEN_IDEOGRAPHS.search(given[-2:] + written[:1]):
            given = given.rstrip(" ")
        parts[-1:] = [given, written, following]
    return tuple(parts)


def _written(model: FillMask, before: list[int], ids: list[int]) -> str:
    """Return the text of `ids` after the ids `before`; a space at its beginning means that a word begins there."""
    if model.word_start == METASPACE:
        text = "".join(model.tokenizer.convert_ids_to_tokens(ids)).replace(METASPACE, " ")
        return _BYTE_PIECES.sub(_decode_bytes, text)
    start, whole = _decode(model, before[-1:]), _decode(model, [*before[-1:], *ids])
    text = whole[len(start) :] if whole.startswith(start) else _decode(model, ids)
    if model.word_start is not None:
        return text
    return _SPACE_BETWEEN_IDEOGRAPHS.sub("", text if before else text.removeprefix(WORDPIECE_CONTINUATION))


def _decode_bytes(pieces: regex.Match[str]) -> str:
    return bytes(int(each, 16) for each in regex.findall("0x(..)", pieces[0])).decode(errors="replace")


def _decode(model: FillMask, ids: list[int]) -> str:
    return str(model.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _is_space(model: FillMask, token_id: int) -> bool:
    return not str(model.tokenizer.convert_ids_to_tokens(token_id)).strip(f" {METASPACE}{BYTE_LEVEL_SPACE}")


def report(generation: Generation) -> list[str]:
    """Return lines for people: the generated texts, then the whole text."""
    lines = [f"generated {number}: {printable(text)}" for number, text in enumerate(generation.generated, start=1)]
    shown = (printable(part) if number % 2 else part for number, part in enumerate(generation.parts))
    return [*lines, f"MODEL: {''.join(shown)}"]


def generation_as_json(generation: Generation) -> dict[str, Any]:
    """Return the content of `report` for programs, with the keys of filled masks too."""
    tokens = [candidate_as_json(item) for item in generation.tokens]
    value = {"generated": generation.generated, "parts": generation.parts, "tokens": tokens}
    return {**as_json(generation), **value, "steps": generation.steps}


def steps_note(generation: Generation, steps: int | None) -> str | None:
    """Return the warning about a text that has fewer tokens to generate than `steps`; None for any other."""
    if steps is None or steps == generation.steps:
        return None
    return (
        f"the text {shorten(generation.text)!r} has {counted(generation.steps, 'token')} to generate, so it took "
        f"{counted(generation.steps, 'step')}, not {steps:,}"
    )
