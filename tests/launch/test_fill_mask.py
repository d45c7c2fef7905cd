"""The command that fills masks: what it prints, what it refuses."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError, UserError
from launch import fill_mask
from tests.support.error_codes import coded
from trainer.inference.fill_mask import FillMask
from trainer.inference.masking_rates import MaskingRates


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: str = "") -> None:
    monkeypatch.setattr(sys, "argv", ["fill_mask.py", *arguments])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
    fill_mask.main()


@pytest.fixture(autouse=True)
def loaded_once(tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The model is loaded once for all tests."""
    model = request.config.stash.setdefault(_MODEL, None) or FillMask.load(tiny_hugging_face)
    request.config.stash[_MODEL] = model
    monkeypatch.setattr(FillMask, "load", lambda folder: model)


_MODEL: pytest.StashKey[FillMask | None] = pytest.StashKey()


def test_each_mask_is_listed_and_the_text_filled(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--model", str(tiny_hugging_face), "--top-k", "2", "the [MASK] sat on a [MASK].")
    *lines, filled = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[3]] == ["mask 1:", "mask 2:"] and len(lines) == 6
    words = [line.split('"')[1] for line in (lines[1], lines[4])]
    assert filled == f"MODEL: the {words[0]} sat on a {words[1]}."


def test_a_fine_tuned_model_is_refused_before_it_is_loaded(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_hugging_face, tmp_path / "model")
    (folder / "finetune.json").write_text('{"task": "pair_classification"}')
    with pytest.raises(UsageError, match="pair classification.*predict", check=coded("fine-tuned-model")):
        run(monkeypatch, "--model", str(folder), "the [MASK] sat")


def test_lines_of_standard_input_become_json_lines(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--model", str(tiny_hugging_face), "--json", stdin="the [MASK] sat\n\na [MASK] été\n")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["text"], second["text"]) == ("the [MASK] sat", "a [MASK] été")
    assert len(first["masks"]) == 1 and len(first["masks"][0]) == 5
    assert first["filled"] == f"the {first['masks'][0][0]['token']} sat"


def test_a_line_without_a_mask_is_named_and_left_out(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--model", str(tiny_hugging_face), "--json", stdin="the [MASK] sat\n\nthe dog\na [MASK]\n")
    out, err = capsys.readouterr()
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["the [MASK] sat", "a [MASK]"]
    assert err.startswith("warning: skipped line 3: the text 'the dog' has no [MASK]\n") and err.count("\n") == 1


LONG = "the cat " * 300 + "[MASK] sat"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_text_longer_than_the_model_takes_is_named_with_what_was_read(
    options: tuple[str, ...],
    tiny_hugging_face: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(monkeypatch, "--model", str(tiny_hugging_face), *options, stdin=f"the [MASK] sat\n{LONG}\n")
    out, err = capsys.readouterr()
    assert err.startswith("warning: line 2: the text 'the cat the cat") and err.count("\n") == 1
    found = re.search(
        r"has ([\d,]+) tokens, more than the model takes; for each mask only the (\d+) tokens around", err
    )
    assert found is not None and int(found[1].replace(",", "")) == 602 and int(found[2]) < 602
    if options:
        short, long = map(json.loads, out.splitlines())
        assert (short["num_tokens"], short["window_tokens"]) == (3, None)
        assert (long["num_tokens"], long["window_tokens"]) == (602, int(found[2]))


def test_a_long_text_with_a_random_mask_is_named_too(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "the cat " * 300
    run(monkeypatch, "--model", str(tiny_hugging_face), "--mask-random", "--seed", "1", stdin=f"the cat sat\n{text}\n")
    assert capsys.readouterr().err.startswith("warning: line 2: the text 'the cat the cat")


def test_a_text_that_just_fits_is_not_named(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--model", str(tiny_hugging_face), "--json", LONG)
    out, err = capsys.readouterr()
    longest = json.loads(out)["window_tokens"]
    fitting = "the " * (longest - 1) + "[MASK]"
    run(monkeypatch, "--model", str(tiny_hugging_face), "--json", fitting)
    out, err = capsys.readouterr()
    assert err == "" and json.loads(out)["num_tokens"] == longest and json.loads(out)["window_tokens"] is None
    run(monkeypatch, "--model", str(tiny_hugging_face), "--json", "the " + fitting)
    out, err = capsys.readouterr()
    assert "warning: " in err and json.loads(out)["window_tokens"] == longest


def test_a_random_word_is_masked_and_shown_thrice_the_same_for_a_seed(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(tiny_hugging_face), "--mask-random", "--seed", "5")
    lines = "The unseen cat sat, quietly.\n*** !!!\nthe dog ran home\n"
    outputs = []
    for _ in range(2):
        run(monkeypatch, *arguments, stdin=lines)
        outputs.append(capsys.readouterr())
    out, err = outputs[0]
    assert out == outputs[1].out
    blocks = out.split("\n\n")
    shown = dict(line.split(": ", 1) for line in blocks[0].splitlines() if ": " in line)
    masked_word = shown["masked word"].strip('"')
    assert shown["ACTUAL"] == "The unseen cat sat, quietly."
    assert masked_word in ("cat", "sat")  # one piece each; the others are unknown to this tokenizer
    assert shown["MASKED"].replace("[MASK]", masked_word) == shown["ACTUAL"]
    predicted = blocks[0].partition("guesses:\n")[2].split('"')[1]
    assert shown["MODEL"] == shown["MASKED"].replace("[MASK]", predicted)
    assert blocks[2].startswith("first guess right: ") and "of 2" in blocks[2]
    assert "line 2: the text '*** !!!' has no word" in err


@pytest.mark.parametrize(
    ("arguments", "stdin", "code"),
    [
        (("the cat",), "", "text-without-mask"),
        (("",), "", "missing-text"),
        ((), "\n \n", "missing-text"),
        (("--mask-random", "..."), "", "text-without-word"),
        (("a \udcff [MASK]",), "", "input-not-utf8"),
    ],
)
def test_an_only_text_that_cannot_be_filled_is_wrong_usage_and_reported_once(
    tiny_hugging_face: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    stdin: str,
    code: str,
) -> None:
    with pytest.raises(UsageError, check=coded(code)):
        run(monkeypatch, "--model", str(tiny_hugging_face), *arguments, stdin=stdin)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("the cat",), "text-without-mask"), (("--mask-random", "... [MASK]"), "text-without-word")],
)
def test_a_text_without_what_is_needed_is_refused_before_the_model_is_loaded(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: str
) -> None:
    monkeypatch.setattr(FillMask, "load", lambda folder: pytest.fail("the model was loaded"))
    with pytest.raises(UsageError, check=coded(code)):
        run(monkeypatch, "--model", str(tiny_hugging_face), *arguments)


def test_a_missing_mask_is_reported_before_tokenizer_or_checkpoint_are_loaded(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer.model.pretrained.load_tokenizer", lambda folder: pytest.fail("the tokenizer was loaded")
    )
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    other = tmp_path / "other"
    shutil.copytree(tiny_hugging_face, other)
    values = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**values, "mask_token": "<mask>"}))
    for model, mask in ((tiny_hugging_face, r"\[MASK\]"), (tmp_path / "run", r"\[MASK\]"), (other, "<mask>")):
        with pytest.raises(UsageError, match=mask, check=coded("text-without-mask")):
            run(monkeypatch, "--model", str(model), "the cat")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--top-k", "0", "x"),
        ("--seed", "1", "x"),
        ("--nonsense",),
        ("--steps", "2", "x"),
        ("--temperature", "0", "x"),
        ("--any-rate", "x"),
        ("--generate", "0", "x"),
        ("--generate", "2", "--temperature", "-1", "x"),
        ("--generate", "2", "--temperature", "nan", "x"),
        ("--generate", "2", "--mask-random", "x"),
        ("--generate", "2", "--top-k", "3", "x"),
        ("--generate", "2", "--temperature", "0", "--seed", "1", "x"),
    ],
)
def test_wrong_options_end_with_status_two(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "--model", "m", *arguments)
    assert stopped.value.code == 2


def test_a_text_is_continued_and_printed_with_the_seed(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", str(tiny_hugging_face), "--generate", "4", "--any-rate")
    run(monkeypatch, *options, "the  cat")
    generated, filled, last = capsys.readouterr().out.splitlines()
    seed = re.fullmatch(r"\(--seed (\d+)\)", last)
    assert seed is not None and filled.startswith("MODEL: the  cat")
    # whatever the seed is; a piece that continues a word follows the text without a space
    written = filled.removeprefix("MODEL: the  cat").removeprefix(" ")
    assert written == generated.removeprefix("generated 1: ")
    run(monkeypatch, *options, "--seed", seed[1], "the  cat")
    assert capsys.readouterr().out.splitlines() == [generated, filled, last]
    run(monkeypatch, *options, "--temperature", "0", "the [MASK] sat [MASK]")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["generated 1", "generated 2", "MODEL"]


def test_each_text_is_generated_as_if_it_were_alone_and_a_long_one_is_left_out(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", str(tiny_hugging_face), "--generate", "3", "--any-rate", "--seed", "2", "--json")
    options += ("--top-k", "2", "--steps", "5", "--temperature", "0.7")
    run(monkeypatch, *options, stdin=f"the cat\n{LONG}\na [MASK] [MASK]\n")
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert (first["text"], second["text"]) == ("the cat", "a [MASK] [MASK]")
    assert (first["steps"], second["steps"], first["seed"], first["temperature"]) == (3, 5, 2, 0.7)
    assert "warning: line 1: the text 'the cat' has 3 tokens to generate" in err and "skipped line 2: " in err
    assert [len(each) for each in second["masks"]] == [2] * 6 and len(second["tokens"]) == 6
    run(monkeypatch, *options, "a [MASK] [MASK]")
    assert json.loads(capsys.readouterr().out) == second
    with pytest.raises(UsageError, check=coded("text-too-long")):
        run(monkeypatch, *options, LONG)


@pytest.mark.parametrize("loads", ["load", "__init__"])
def test_a_model_of_one_rate_or_of_unknown_ones_is_refused_before_it_is_loaded(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, loads: str
) -> None:
    monkeypatch.setattr(FillMask, loads, lambda *_: pytest.fail("the model was loaded"))
    golden = Path(__file__).resolve().parents[1] / "golden" / "v2"
    for model, code in (
        (tiny_hugging_face, "unknown-masking-rates"),
        (golden / "export", "one-masking-rate"),
        (golden / "run", "one-masking-rate"),
    ):
        with pytest.raises(UsageError, check=coded(code)):
            run(monkeypatch, "--model", str(model), "--generate", "4", "the cat")


def test_a_text_with_more_masks_than_the_training_had_is_noted(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.inference.masking_rates.check_rates", lambda rates: MaskingRates(0.1, 0.5))
    options = ("--model", str(tiny_hugging_face), "--generate", "2", "--seed", "1")
    run(monkeypatch, *options, "the cat sat")
    assert capsys.readouterr().err == ""
    run(monkeypatch, *options, "the cat sat", "the")
    assert "up to 67% of a text's tokens were masked at first, and the model was trained" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_generates_from_outside(tmp_path: Path) -> None:
    golden = Path(__file__).resolve().parents[1] / "golden" / "v2" / "run"
    command = [sys.executable, "-m", "launch", "fill-mask", "--model", str(golden), "--generate", "3", "The river"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "[one-masking-rate]" in refused.stderr and not refused.stdout
    forced = [*command, "--any-rate", "--seed", "4", "--json"]
    outputs = [subprocess.run(forced, capture_output=True, text=True, check=True) for _ in range(2)]
    assert outputs[0].stdout == outputs[1].stdout and not outputs[0].stderr
    values = json.loads(outputs[0].stdout)
    assert values["parts"][0].strip() == values["text"] == "The river" and len(values["tokens"]) == 3


def test_a_missing_model_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no/such/model"):
        run(monkeypatch, "--model", "no/such/model", "a [MASK]")
