"""Fill the masks of a text, or generate text in their place.

    clozeworks fill-mask --model models:/NAME@ALIAS "Paris is the [MASK] of France."
    clozeworks fill-mask --model models:/NAME@ALIAS --generate 12 "The river"

Texts come from the command line, or line by line from standard input. A line without a mask is skipped with a warning.
With --mask-random the command masks one word of each text itself and compares the prediction with that word. If a text
is longer than the model's maximum sequence length, the model reads only the tokens around each mask and a warning says
so; with --json, `window_tokens` is their number, otherwise null.

With --generate N each [MASK] becomes N new tokens, and a text without a [MASK] is continued by N. Each of the --steps
steps predicts all masks that are left and fills an equal share of them. The masking rates of the model's training must
reach from at most 0.3 to at least 0.5; other models, such as those of a single rate, are refused without --any-rate.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from data_prep.base.arguments import at_least
from data_prep.base.errors import UsageError, run_command
from data_prep.base.logs import logger
from data_prep.base.terminal import json_line
from launch.options import add_model, add_tracking_uri, check_utf8, command_parser, lines_of_stdin

LOG = logger(__name__)

if TYPE_CHECKING:
    from trainer.inference.fill_mask import FillMask, MaskedText, Prediction


class Text(NamedTuple):
    """A text, and where it was given, for messages."""

    source: str
    text: str


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("fill_mask.py", __doc__)
    model = parser.add_argument_group("model")
    add_model(model)
    add_tracking_uri(model)
    texts = parser.add_argument_group("texts")
    texts.add_argument("texts", nargs="*", metavar="TEXT", help="text with [MASK] (default: lines of standard input)")
    texts.add_argument(
        "--mask-random",
        action="store_true",
        help="mask one word of each text, preferably a content word that is a single token of the vocabulary",
    )
    texts.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="with --mask-random and --generate: the same seed masks the same words, and generates the same text",
    )
    generation = parser.add_argument_group("generation")
    generation.add_argument(
        "--generate", type=at_least(1), metavar="N", help="new tokens for each [MASK], or at the end of a text without"
    )
    generation.add_argument(
        "--steps", type=at_least(1), metavar="S", help="number of predictions (default and at most: one per new token)"
    )
    generation.add_argument(
        "--temperature",
        type=temperature,
        metavar="X",
        help="divides the logits by which tokens are drawn, for masks in random order; 0 fills the masks that the "
        "model is surest of first, with their likeliest tokens (default 1)",
    )
    generation.add_argument(
        "--any-rate",
        action="store_true",
        help="generate also with a model that was trained at one masking rate, or at unknown ones",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--top-k",
        type=at_least(1),
        metavar="K",
        help="candidates for each mask (default 5); with --generate only --json has them",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object per text")
    arguments_read = parser.parse_intermixed_args(arguments)
    if arguments_read.generate is not None and arguments_read.mask_random:
        parser.error("--generate and --mask-random exclude each other")
    if arguments_read.seed is not None and not arguments_read.mask_random and arguments_read.generate is None:
        parser.error("--seed is only valid with --mask-random or --generate")
    for option in ("steps", "temperature", "any_rate"):
        value = getattr(arguments_read, option)
        if value is not None and value is not False and arguments_read.generate is None:
            parser.error(f"--{option.replace('_', '-')} is only valid with --generate")
    if arguments_read.seed is not None and arguments_read.temperature == 0:
        parser.error("--seed is only valid with a --temperature above 0, because 0 draws nothing")
    if arguments_read.top_k is not None and arguments_read.generate is not None and not arguments_read.json:
        parser.error("--top-k with --generate is only valid with --json")
    arguments_read.top_k = arguments_read.top_k or 5
    return arguments_read


def temperature(text: str) -> float:
    """Read a finite number of 0 or more, as a type of argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, got {text!r}")
    return value


def open_model(
    model: str, tracking_uri: str | None, texts: Sequence[Text] | None = None, generates: bool = False
) -> FillMask:
    """Open a registered model, an exported folder or a run's checkpoint.

    Raises:
        UsageError: the model fills no masks, none of `texts` has one, or the model `generates` and was not trained for
            it; checked before the model is loaded.
    """
    from trainer.inference.fill_mask import MASK_TOKEN, FillMask
    from trainer.inference.pulled_model import is_checkpoint, pull
    from trainer.model.model_folder import check_fills_masks, named_mask_token

    has_mask = texts is None or any(MASK_TOKEN in each.text for each in texts)
    if is_checkpoint(model):
        if not has_mask:
            raise no_mask(MASK_TOKEN)
        if generates:
            from trainer.hf_export.export_source import find_checkpoint
            from trainer.inference.masking_rates import check_rates, rates_of_checkpoint

            check_rates(rates_of_checkpoint(find_checkpoint(Path(model))))
        return FillMask(model)
    folder = pull(model, tracking_uri=tracking_uri)
    check_fills_masks(folder, model)
    if generates:
        from trainer.inference.masking_rates import check_rates, rates_of_export

        check_rates(rates_of_export(folder))
    if texts is not None and not has_mask:
        mask_token = named_mask_token(folder)
        if mask_token is None:
            from trainer.model.pretrained import load_tokenizer

            mask_token = load_tokenizer(folder).mask_token
        if mask_token is not None and not any(mask_token in each.text for each in texts):
            raise no_mask(mask_token)
    return FillMask.load(folder)


def no_mask(mask_token: str) -> UsageError:
    return UsageError(
        f"no text contains {mask_token}",
        fix=f"write {mask_token} instead of a word, or add --mask-random",
        code="text-without-mask",
    )


def no_word() -> UsageError:
    return UsageError("no text has a word to mask", fix="give sentences", code="text-without-word")


def main() -> None:
    arguments = parse_arguments()
    texts = read_texts(arguments.texts)
    from trainer.inference.fill_mask import has_word

    if arguments.mask_random and not any(has_word(each.text) for each in texts):
        raise no_word()
    generates = arguments.generate is not None
    needs_masks = not arguments.mask_random and not generates
    model = open_model(
        arguments.model,
        arguments.tracking_uri,
        texts if needs_masks else None,
        generates=generates and not arguments.any_rate,
    )
    if arguments.mask_random:
        show_random(model, texts, arguments)
    elif generates:
        show_generated(model, texts, arguments)
    else:
        show_filled(model, texts, arguments)


def read_texts(given: list[str]) -> list[Text]:
    """Return the texts of the command line, or the non-empty lines of standard input."""
    texts = [Text("", text) for text in given]
    if not texts:
        if sys.stdin.isatty():
            raise UsageError(
                "there is no text",
                fix='append one, as in: clozeworks fill-mask --model MODEL "a [MASK]"',
                code="missing-text",
            )
        texts = [Text(f"line {number:,}: ", line.strip()) for number, line in enumerate(lines_of_stdin(), start=1)]
    texts = [each for each in texts if each.text.strip()]
    if not texts:
        raise UsageError("the text is empty", fix="give a sentence", code="missing-text")
    check_utf8([each.text for each in texts])
    return texts


def show_filled(model: FillMask, texts: list[Text], arguments: argparse.Namespace) -> None:
    """Fill and print the masks of every text, one text after another."""
    from trainer.inference.fill_mask import as_json, report

    num_filled = 0
    for source, text in texts:
        try:
            prediction = model.predict(text, arguments.top_k)
        except UsageError as error:
            warn_of_skipped(source, error, len(texts))
            continue
        warn_of_window(source, prediction)
        print(json_line(as_json(prediction)) if arguments.json else "\n".join(report(prediction)))
        num_filled += 1
    if not num_filled:
        raise no_mask(model.mask_token)


def show_generated(model: FillMask, texts: list[Text], arguments: argparse.Namespace) -> None:
    """Generate and print tokens for every text, one text after another, and warn of what the training did not cover."""
    from trainer.inference.generation import generation_as_json, report, steps_note
    from trainer.inference.masking_rates import check_rates

    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    temperature = 1.0 if arguments.temperature is None else arguments.temperature
    first_rates, error = [], None
    for source, text in texts:
        try:
            generation = model.generate(
                text,
                arguments.generate,
                steps=arguments.steps,
                temperature=temperature,
                seed=seed,
                top_k=arguments.top_k,
                any_rate=True,  # which was checked before the model was loaded
            )
        except UsageError as refusal:
            error = refusal
            warn_of_skipped(source, error, len(texts))
            continue
        if (note := steps_note(generation, arguments.steps)) is not None:
            LOG.warning(f"{source}{note}")
        if arguments.json:
            print(json_line({**generation_as_json(generation), "temperature": temperature, "seed": seed}))
        else:
            print("\n".join(report(generation)))
        first_rates.append(generation.first_rate)
    if error is not None and not first_rates:
        raise error
    if not arguments.json and temperature:
        print(f"(--seed {seed})")
    if not arguments.any_rate and max(first_rates) > (highest := check_rates(model.trained_rates()).highest):
        LOG.warning(
            f"up to {max(first_rates):.0%} of a text's tokens were masked at first, and the model was trained at "
            f"masking rates up to {highest:.0%}"
        )


def show_random(model: FillMask, texts: list[Text], arguments: argparse.Namespace) -> None:
    """Mask a word of every text, fill it, and print how often the first prediction was right."""
    from trainer.inference.fill_mask import as_json, is_right, report

    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    masked_texts = [
        (each.source, masked) for each in texts if (masked := mask_or_skip(each, seed, model, len(texts))) is not None
    ]
    if not masked_texts:
        raise no_word()
    num_right = 0
    for source, masked in masked_texts:
        prediction = model.predict(masked.masked, arguments.top_k)
        warn_of_window(source, prediction)
        num_right += is_right(prediction, masked)
        if arguments.json:
            print(json_line({**as_json(prediction, masked), "seed": seed}))
        else:
            print("\n".join(report(prediction, masked)), end="\n\n")
    if len(masked_texts) > 1 and not arguments.json:
        print(f"first guess right: {num_right} of {len(masked_texts)} (--seed {seed})")


def mask_or_skip(given: Text, seed: int, model: FillMask, num_texts: int) -> MaskedText | None:
    """Mask a word of the text; return None with a warning if it has none."""
    from trainer.inference.fill_mask import mask_random_word

    text = given.text.replace(model.mask_token, " ")
    try:
        return mask_random_word(text, seed, model.mask_token, preferred=(model.is_one_piece, model.is_content_word))
    except UsageError as error:
        warn_of_skipped(given.source, error, num_texts)
        return None


def warn_of_window(source: str, prediction: Prediction) -> None:
    """Warn if the model read only a part of the text."""
    from trainer.inference.fill_mask import window_note

    note = window_note(prediction)
    if note is not None:
        LOG.warning(f"{source}{note}")


def warn_of_skipped(source: str, error: UsageError, num_texts: int) -> None:
    """Warn of one skipped text of several; the command's own error reports an only one."""
    if num_texts > 1:
        problem = str(error).partition(". Fix: ")[0]
        LOG.warning(f"skipped {source}{problem}")


if __name__ == "__main__":
    run_command(main)
