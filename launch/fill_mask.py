"""Fill the masks of a text.

    clozeworks fill-mask --model models:/NAME@ALIAS "Paris is the [MASK] of France."

Texts come from the command line, or line by line from standard input. A line without a mask is skipped with a warning.
With --mask-random the command masks one word of each text itself and compares the prediction with that word. If a text
is longer than the model's maximum sequence length, the model reads only the tokens around each mask and a warning says
so; with --json, `window_tokens` is their number, otherwise null.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
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
    texts.add_argument("--seed", type=int, metavar="N", help="with --mask-random: the same seed masks the same words")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--top-k", type=at_least(1), default=5, metavar="K", help="candidates for each mask (default 5)"
    )
    output.add_argument("--json", action="store_true", help="print one JSON object per text")
    arguments_read = parser.parse_intermixed_args(arguments)
    if arguments_read.seed is not None and not arguments_read.mask_random:
        parser.error("--seed is only valid with --mask-random")
    return arguments_read


def open_model(model: str, tracking_uri: str | None, texts: Sequence[Text] | None = None) -> FillMask:
    """Open a registered model, an exported folder or a run's checkpoint.

    Raises:
        UsageError: the model is fine-tuned, or none of `texts` has a mask; checked before the model is loaded.
    """
    from trainer.inference.fill_mask import MASK_TOKEN, FillMask
    from trainer.inference.pulled_model import is_checkpoint, pull
    from trainer.model.model_folder import check_not_fine_tuned, named_mask_token

    has_mask = texts is None or any(MASK_TOKEN in each.text for each in texts)
    if is_checkpoint(model):
        if not has_mask:
            raise no_mask(MASK_TOKEN)
        return FillMask(model)
    folder = pull(model, tracking_uri=tracking_uri)
    check_not_fine_tuned(folder, model)
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
    model = open_model(arguments.model, arguments.tracking_uri, None if arguments.mask_random else texts)
    if arguments.mask_random:
        show_random(model, texts, arguments)
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
