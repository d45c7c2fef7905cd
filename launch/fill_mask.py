"""Fill masks with a model: `fill_mask.py --model models:/NAME@ALIAS "Paris is the [MASK] of France."`.

The model is a registered one, a run's, an exported folder, or a run's own checkpoint (its output_dir). Texts come from
the command line, or line by line from standard input; one without a mask is reported and left out. `--mask-random`
masks a word of each text itself and shows what the model makes of it. Of a text longer than the model's positions only
the tokens around each mask are read, and a warning says so; with --json `window_tokens` is their number, else null.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

from data_prep.base.arguments import at_least
from data_prep.base.errors import UsageError, run_command
from launch.options import add_model, add_tracking_uri, check_utf8, command_parser, lines_of_stdin
from trainer.inference.fill_mask import (
    MASK_TOKEN,
    FillMask,
    MaskedText,
    Prediction,
    as_json,
    has_word,
    is_right,
    mask_random_word,
    report,
    window_note,
)
from trainer.inference.pulled_model import is_checkpoint, pull

_NO_WORD = "no text has a word to mask; give sentences"


class Text(NamedTuple):
    """A text, and where it stands, for messages."""

    place: str
    text: str


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("fill_mask.py", __doc__)
    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help="text with [MASK]; without any, lines of standard input"
    )
    add_model(parser, or_run=True)
    parser.add_argument(
        "--top-k", type=at_least(1), default=5, metavar="K", help="candidates for each mask (default 5)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a text instead of lines for people")
    parser.add_argument(
        "--mask-random",
        action="store_true",
        help="mask a word of each text: one that a single piece of the vocabulary stands for, where there is one",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="with --mask-random: the same seed masks the same words")
    add_tracking_uri(parser)
    arguments_read = parser.parse_intermixed_args(arguments)
    if arguments_read.seed is not None and not arguments_read.mask_random:
        parser.error("--seed chooses the words of --mask-random; give both or neither")
    return arguments_read


def open_model(model: str, tracking_uri: str | None, texts: Sequence[Text] | None = None) -> FillMask:
    """A registered model, an exported folder, or a run's checkpoint, to fill the masks of `texts` if they are given.

    Raises:
        UsageError: none of the texts has a mask, of which a folder's tokenizer tells before its model is loaded.
    """
    if is_checkpoint(model):
        return FillMask(model)
    folder = pull(model, tracking_uri=tracking_uri)
    if texts is not None and not any(MASK_TOKEN in each.text for each in texts):
        from trainer.inference.pretrained import load_tokenizer

        mask_token = load_tokenizer(folder).mask_token
        if mask_token is not None and not any(mask_token in each.text for each in texts):
            raise no_mask(mask_token)
    return FillMask.load(folder)


def no_mask(mask_token: str) -> UsageError:
    return UsageError(f"there is no {mask_token} in any text; put it for a word, or add --mask-random")


def main() -> None:
    arguments = parse_arguments()
    texts = read_texts(arguments.texts)
    if arguments.mask_random and not any(has_word(each.text) for each in texts):
        raise UsageError(_NO_WORD)
    model = open_model(arguments.model, arguments.tracking_uri, None if arguments.mask_random else texts)
    if arguments.mask_random:
        show_random(model, texts, arguments)
    else:
        show_filled(model, texts, arguments)


def read_texts(given: list[str]) -> list[Text]:
    """The texts of the command line, or the lines of standard input that hold anything."""
    texts = [Text("", text) for text in given]
    if not texts:
        if sys.stdin.isatty():
            raise UsageError('no text is given; put one behind the options, as in fill_mask.py --model M "a [MASK]"')
        texts = [Text(f"line {number:,}: ", line.strip()) for number, line in enumerate(lines_of_stdin(), start=1)]
    texts = [each for each in texts if each.text.strip()]
    if not texts:
        raise UsageError("the text is empty; give a sentence")
    check_utf8([each.text for each in texts])
    return texts


def show_filled(model: FillMask, texts: list[Text], arguments: argparse.Namespace) -> None:
    """Fill the masks of every text, each as soon as it is filled."""
    num_filled = 0
    for place, text in texts:
        try:
            prediction = model.predict(text, arguments.top_k)
        except UsageError as error:
            tell_left_out(place, error, len(texts))
            continue
        warn_of_window(place, prediction)
        print(json.dumps(as_json(prediction), ensure_ascii=False) if arguments.json else "\n".join(report(prediction)))
        num_filled += 1
    if not num_filled:
        raise no_mask(model.mask_token)


def show_random(model: FillMask, texts: list[Text], arguments: argparse.Namespace) -> None:
    """Mask a word of every text, fill it, and say how often the first guess was right."""
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    masked_texts = [
        (each.place, masked) for each in texts if (masked := mask_or_skip(each, seed, model, len(texts))) is not None
    ]
    if not masked_texts:
        raise UsageError(_NO_WORD)
    num_right = 0
    for place, masked in masked_texts:
        prediction = model.predict(masked.masked, arguments.top_k)
        warn_of_window(place, prediction)
        num_right += is_right(prediction, masked)
        if arguments.json:
            print(json.dumps({**as_json(prediction, masked), "seed": seed}, ensure_ascii=False))
        else:
            print("\n".join(report(prediction, masked)), end="\n\n")
    if len(masked_texts) > 1 and not arguments.json:
        print(f"first guess right: {num_right} of {len(masked_texts)} (--seed {seed})")


def mask_or_skip(given: Text, seed: int, model: FillMask, num_texts: int) -> MaskedText | None:
    """Mask a word; a line without any is reported and left out, so that a file of held-out lines goes through."""
    text = given.text.replace(model.mask_token, " ")
    try:
        return mask_random_word(text, seed, model.mask_token, preferred=model.is_one_piece)
    except UsageError as error:
        tell_left_out(given.place, error, num_texts)
        return None


def warn_of_window(place: str, prediction: Prediction) -> None:
    """Warn of a text of which the model read only a part."""
    note = window_note(prediction)
    if note is not None:
        print(f"warning: {place}{note}", file=sys.stderr)


def tell_left_out(place: str, error: UsageError, num_texts: int) -> None:
    """Warn of one text among others; where it is the only one, the command's error says enough."""
    if num_texts > 1:
        problem = str(error).partition(". Fix: ")[0]
        print(f"warning: {place}{problem}; it is left out", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
