"""Generated text: which tokens, in which order, how they are written, and by which models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.base.errors import UsageError, UserError
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import WRITERS
from tests.support.tiny_hugging_face import MAX_POSITIONS
from tests.support.toy_run import tiny_config
from trainer.inference.fill_mask import FillMask, mask_random_word
from trainer.inference.generation import generation_as_json, report, steps_note, unmask
from trainer.inference.masking_rates import MaskingRates, check_rates, rates_of_export, rates_until
from trainer.model.pretrained import load_tokenizer

EXPORT = Path(__file__).resolve().parents[2] / "golden" / "v2" / "export"
RUN = EXPORT.parent / "run"
TEXTS = ("the cat", "the [MASK] sat on a [MASK].", "[MASK]", "a dog [MASK] [MASK] to the house", "a day\n")


@pytest.fixture(scope="module")
def model(tiny_hugging_face: Path) -> FillMask:
    return FillMask.load(tiny_hugging_face)


@settings(max_examples=25, deadline=None)
@given(
    text=st.sampled_from(TEXTS),
    num_tokens=st.integers(1, 7),
    steps=st.one_of(st.none(), st.integers(1, 20)),
    temperature=st.sampled_from([0, 0.3, 1.0, 40.0]),
    seed=st.integers(0, 9),
)
def test_every_mask_becomes_tokens_and_the_given_text_stays(
    model: FillMask, text: str, num_tokens: int, steps: int | None, temperature: float, seed: int
) -> None:
    options = {"steps": steps, "temperature": temperature, "seed": seed, "any_rate": True}
    found = model.generate(text, num_tokens, **options)
    num_masks = max(text.count("[MASK]"), 1)
    assert len(found.tokens) == len(found.masks) == num_masks * num_tokens
    assert found.steps == min(steps or len(found.tokens), len(found.tokens))
    assert found.filled == "".join(found.parts) and "[" not in found.filled
    special = set(model.tokenizer.all_special_ids)
    assert all(token.token_id not in special and token.token_id < len(model.tokenizer) for token in found.tokens)
    given_texts = text.replace("[MASK] [MASK]", "[MASK]").split("[MASK]")  # adjacent masks are one text
    assert [part.rstrip(" ") for part in found.parts[::2]] == [
        part.rstrip(" ") for part in (given_texts if "[MASK]" in text else [text, ""])
    ]
    assert model.generate(text, num_tokens, **options) == found


def test_one_step_at_temperature_zero_is_fill_mask(model: FillMask) -> None:
    for text in ("the cat [MASK] on the mat", "the [MASK] sat on a [MASK].", "[MASK]"):
        filled, found = (
            model.predict(text, 4),
            model.generate(text, 1, steps=1, temperature=0, top_k=4, any_rate=True),
        )
        assert found.masks == filled.masks and found.filled == filled.filled
        assert list(found.tokens) == [candidates[0] for candidates in filled.masks]
    several = model.generate("the cat", 3, steps=1, temperature=0, any_rate=True)
    assert several.masks == model.predict("the cat [MASK] [MASK] [MASK]").masks
    drawn = model.generate("the cat", 3, steps=1, any_rate=True)
    assert drawn.masks == several.masks and drawn.tokens != several.tokens


def test_a_later_step_reads_what_the_one_before_filled(model: FillMask) -> None:
    found = model.generate("the cat", 2, temperature=0, any_rate=True)
    first, second = sorted(range(2), key=lambda number: -found.masks[number][0].probability)
    both = model.predict("the cat [MASK] [MASK]").masks
    surest = max(range(2), key=lambda number: both[number][0].probability)
    assert found.masks[surest] == both[surest]
    pieces = ["[MASK]", "[MASK]"]
    pieces[surest] = found.tokens[surest].token
    (rest,) = model.predict(f"the cat {' '.join(pieces)}").masks
    assert found.masks[1 - surest] == rest and {first, second} == {0, 1}


def test_seeds_differ_at_temperature_one_and_not_at_zero(model: FillMask) -> None:
    drawn = {model.generate("the cat", 5, seed=seed, any_rate=True).filled for seed in range(6)}
    assert len(drawn) == 6
    assert len({model.generate("the cat", 5, seed=seed, temperature=0, any_rate=True).filled for seed in range(6)}) == 1


def play(
    logits: Sequence[Sequence[float]], steps: int, temperature: float = 0.0, seed: str = "0"
) -> tuple[list[int], list[int]]:
    """Fill as many masks as there are rows of logits (vocab_size,); return the positions in order, and the ids."""
    ids, rows, seen = [0] * len(logits), torch.tensor(logits), []
    for position, found in unmask(
        lambda ids: rows, ids, range(len(ids)), [1, 2], steps=steps, temperature=temperature, seed=seed
    ):
        assert torch.equal(found, rows[position])
        seen.append(position)
    return seen, ids


def test_the_surest_masks_are_filled_first_by_equal_shares() -> None:
    logits = [[9.0, 1.0, 0.0], [9.0, 0.0, 8.0], [-9.0, 0.0, 1.0], [9.0, 1.0, 0.0]]
    assert play(logits, steps=4) == ([2, 1, 0, 3], [1, 2, 2, 1])  # the special id 0 counts, and is never taken
    calls: list[int] = []

    def predict(ids: list[int]) -> torch.Tensor:
        calls.append(ids.count(0))
        return torch.zeros(len(ids), 3)

    for steps, waiting in ((1, [7]), (3, [7, 5, 3]), (7, [7, 6, 5, 4, 3, 2, 1])):
        calls.clear()
        list(unmask(predict, [0] * 7, range(7), [1, 2], steps=steps, temperature=1.0, seed="x"))
        assert calls == waiting


def test_tokens_are_drawn_by_their_probabilities_at_the_temperature() -> None:
    logits = [[50.0, 0.0, 1.0]] * 4_000  # the special id has nearly all of the probability
    for temperature in (0.5, 1.0, 2.0):
        seen, ids = play(logits, steps=1, temperature=temperature)
        expected = torch.tensor([0.0, 1.0]).div(temperature).softmax(0)[1]
        assert ids.count(2) / 4_000 == pytest.approx(float(expected), abs=0.025)
        assert sorted(seen) == list(range(4_000)) != seen
    assert set(play(logits[:50], steps=1, temperature=5e-324)[1]) == {2}
    assert play(logits[:50], steps=1, temperature=1e300)[1].count(1) > 10


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FillMask]:
    """A random model with each kind of tokenizer."""
    from transformers import BertConfig, BertForMaskedLM

    texts = ["the river and a village where masks are sold, été 中文字"] * 9
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    models = {}
    for kind, write in WRITERS.items():
        tokenizer = load_tokenizer(write(tmp_path_factory.mktemp(kind.replace(" ", "")), texts))
        models[kind] = FillMask(BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)), tokenizer)
    return models


def write_with(
    model: FillMask, monkeypatch: pytest.MonkeyPatch, text: str, written: str, num_masks: int = 1
) -> tuple[str, ...]:
    """Return the parts if the model is sure of the tokens of `written` (equal shares of them for each mask)."""
    ids, first = model.tokenizer(written, add_special_tokens=False).input_ids, []

    def predict(input_ids: torch.Tensor, **_: Any) -> Any:
        masks = (input_ids[0] == model.tokenizer.mask_token_id).nonzero()[:, 0].tolist()
        first.append(masks[0])
        logits = torch.zeros(1, input_ids.shape[1], len(model.tokenizer))
        for position in masks:
            logits[0, position, ids[position - first[0]]] = 20.0
        return type("Output", (), {"logits": logits})

    monkeypatch.setattr(model.model, "forward", predict)
    return model.generate(text, len(ids) // num_masks, temperature=0, any_rate=True).parts


@pytest.mark.parametrize("kind", WRITERS)
def test_generated_tokens_are_written_as_text(
    foreign: dict[str, FillMask], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = foreign[kind]
    space = "" if kind in ("byte level", "roberta") else " "
    lead = "" if space else " "  # bytes: a word begins with its space
    write = lambda text, written, masks=1: write_with(model, monkeypatch, text, written, masks)  # noqa: E731
    assert write("the river", f"{lead}and a village") == ("the river ", "and a village", "")
    assert write("the  River", ", where masks are sold,")[0].startswith("the  River")
    assert "".join(write("the  River ", f"{lead}where masks are sold,")) == "the  River where masks are sold,"
    assert write("[MASK] sold", "the river") == ("", "the river", " sold")
    assert write("a ([MASK]), sold", f"{lead}village") == ("a (", "village", "), sold")
    accents = "ete" if kind == "wordpiece" else "été"
    assert write("the", f"{lead}{accents} village") == ("the ", f"{accents} village", "")
    if kind == "wordpiece":
        assert write("the 中文", "中文字") == ("the 中文", "中文字", "")
        assert write("中文", "river") == ("中文 ", "river", "")
    else:
        assert "".join(write("the 中", "文字" if lead else "中文字")).endswith("文字")


def test_the_continuation_of_a_word_joins_it(foreign: dict[str, FillMask], monkeypatch: pytest.MonkeyPatch) -> None:
    model = foreign["wordpiece"]
    pieces = [piece for piece in model.tokenizer.get_vocab() if piece.startswith("##")]
    monkeypatch.setattr(
        type(model.tokenizer),
        "__call__",
        lambda self, text, **_: type("E", (), {"input_ids": [self.convert_tokens_to_ids(pieces[0])]}),
    )
    assert write_with(model, monkeypatch, "a mask", "x") == ("a mask", pieces[0][2:], "")
    assert write_with(model, monkeypatch, "[MASK] mask", "x") == ("", pieces[0][2:], " mask")


def test_adjacent_masks_are_one_text_whose_characters_may_span_them(
    foreign: dict[str, FillMask], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = foreign["roberta"]
    num_tokens = len(model.tokenizer(" 文 文", add_special_tokens=False).input_ids)
    assert num_tokens % 2 == 0
    parts = write_with(model, monkeypatch, "a [MASK] [MASK] sold", " 文 文", num_masks=2)
    assert parts == ("a ", "文 文", " sold")


def test_the_report_names_the_generated_text_and_escapes_what_controls_a_terminal(model: FillMask) -> None:
    found = model.generate("the cat [MASK] on a [MASK].", 2, seed=3, any_rate=True)
    hostile = type(found)(**{**vars(found), "parts": ("a\tb ", "\x1b[2J", "")})
    assert report(hostile) == ["generated 1: \\x1b[2J", "MODEL: a\tb \\x1b[2J"]
    lines = report(found)
    assert lines == [*(f"generated {n}: {text}" for n, text in enumerate(found.generated, 1)), f"MODEL: {found.filled}"]
    values = json.loads(json.dumps(generation_as_json(found)))
    assert values["parts"][1::2] == values["generated"] == list(found.generated)
    assert [each["token_id"] for each in values["tokens"]] == [token.token_id for token in found.tokens]
    assert values["text"] == "the cat [MASK] on a [MASK]." and values["filled"] == found.filled
    assert len(values["masks"]) == 4 and values["window_tokens"] is None and values["steps"] == 4


def test_more_steps_than_tokens_are_noted(model: FillMask) -> None:
    found = model.generate("the cat", 3, steps=9, any_rate=True)
    assert found.steps == 3 and found == model.generate("the cat", 3, any_rate=True)
    assert "3 tokens to generate, so it took 3 steps, not 9" in str(steps_note(found, 9))
    assert steps_note(found, 3) is None and steps_note(found, None) is None


def test_the_positions_of_the_model_are_the_limit(model: FillMask) -> None:
    longest = MAX_POSITIONS - 2
    assert len(model.generate("the cat", longest - 2, any_rate=True).tokens) == longest - 2
    with pytest.raises(UsageError, match=f"{longest + 1} tokens.*takes {longest}", check=coded("text-too-long")):
        model.generate("the cat", longest - 1, any_rate=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tokens": 0},
        {"num_tokens": 2.0},
        {"steps": 0},
        {"top_k": 0},
        {"top_k": None},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "1"},
    ],
)
def test_arguments_out_of_range_are_refused(model: FillMask, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong)), check=coded("invalid-sampling")):
        model.generate("the cat", **{"num_tokens": 2, "any_rate": True, **wrong})


def test_other_values_than_a_text_are_refused(model: FillMask) -> None:
    with pytest.raises(UsageError, check=coded("not-a-text")):
        model.generate(["the cat"], 2, any_rate=True)  # type: ignore[arg-type]


def test_special_tokens_without_a_role_are_never_generated(tiny_hugging_face: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_hugging_face, tmp_path / "model")
    values = json.loads((folder / "tokenizer.json").read_text())
    number = values["model"]["vocab"]["▁dog"]
    values["added_tokens"].append({**values["added_tokens"][0], "id": number, "content": "▁dog"})
    (folder / "tokenizer.json").write_text(json.dumps(values))
    model = FillMask.load(folder)
    assert number not in model.tokenizer.all_special_ids
    (candidates,) = model.predict("the [MASK]", top_k=100).masks
    assert number not in [candidate.token_id for candidate in candidates]


def test_a_token_that_the_model_has_no_logit_for_is_never_generated(model: FillMask, tmp_path: Path) -> None:
    model.tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.add_tokens([f"new{number}" for number in range(99)])
    assert len(tokenizer) > model.model.config.vocab_size
    wider = FillMask(model.model, tokenizer)
    for temperature in (0, 1e9):
        found = wider.generate("the cat", 20, temperature=temperature, any_rate=True)
        assert all(token.token_id < model.model.config.vocab_size for token in found.tokens)


def test_hostile_arguments_are_no_crash(model: FillMask) -> None:
    found = model.generate("a \udcff cat", 2, any_rate=True)
    assert found.text == "a \udcff cat" and len(found.tokens) == 2
    assert mask_random_word("a \udcff cat", 1).masked.count("[MASK]") == 1
    with pytest.raises(UsageError, check=coded("text-too-long")):
        model.generate("the cat", 10**12, any_rate=True)


def test_a_mask_that_is_read_as_text_is_refused(tiny_hugging_face: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_hugging_face, tmp_path / "model")
    values = json.loads((folder / "tokenizer.json").read_text())
    for token in values["added_tokens"]:
        token["single_word"] = token["content"] == "[MASK]"
    (folder / "tokenizer.json").write_text(json.dumps(values))
    model = FillMask.load(folder)
    assert len(model.predict("the [MASK]").masks) == 1
    for use in (model.predict, lambda text: model.generate(text, 2, any_rate=True)):
        with pytest.raises(UsageError, match="1 of the 2", check=coded("mask-read-as-text")):
            use("the cat[MASK] [MASK]")


def export_with(folder: Path, **data: Any) -> Path:
    """Copy an export, whose run had these settings of `data`."""
    shutil.copytree(EXPORT, folder)
    path = folder / "training_config.yaml"
    values = yaml.safe_load(path.read_text())
    values["data"] |= data
    path.write_text(yaml.safe_dump(values))
    return folder


def test_an_export_generates_if_its_masking_rates_were_wide(tmp_path: Path) -> None:
    wide = export_with(tmp_path / "wide", mlm_probability=0.8, final_mlm_probability=0.1)
    assert check_rates(rates_of_export(wide)) == pytest.approx(MaskingRates(0.1, 0.8))
    assert len(FillMask(wide).generate("The river", 4).tokens) == 4
    assert FillMask.load(wide).generate("The river", 4) == FillMask(str(wide)).generate("The river", 4)
    narrow = export_with(tmp_path / "narrow", mlm_probability=0.4, final_mlm_probability=0.1)
    with pytest.raises(UsageError, match=r"from 0\.1 to 0\.4.*--any-rate", check=coded("narrow-masking-rates")):
        FillMask(narrow).generate("The river", 4)
    assert len(FillMask(narrow).generate("The river", 4, any_rate=True).tokens) == 4


@pytest.mark.parametrize("origin", [EXPORT, RUN, RUN / "checkpoints" / "step-00000003"])
def test_a_model_of_one_rate_is_refused_with_the_reason(origin: Path) -> None:
    model = FillMask(origin)
    with pytest.raises(UsageError, match=r"one masking rate, 0\.15", check=coded("one-masking-rate")):
        model.generate("The river", 4)
    assert len(model.generate("The river", 4, any_rate=True).tokens) == 4


def test_a_model_from_elsewhere_or_in_memory_is_refused(model: FillMask, tmp_path: Path) -> None:
    for each in (model, FillMask(model.model, model.tokenizer)):
        with pytest.raises(UsageError, check=coded("unknown-masking-rates")):
            each.generate("the cat", 2)
    custom = export_with(tmp_path / "custom", masking="own_masks:choose")
    with pytest.raises(UsageError, match="own_masks:choose", check=coded("unknown-masking-rates")):
        check_rates(rates_of_export(custom))
    (custom / "training_config.yaml").write_text("data: [\n")
    with pytest.raises(UserError, match="training_config"):
        check_rates(rates_of_export(custom))
    (custom / "training_config.yaml").write_text("[]\n")
    with pytest.raises(UserError, match="training_config"):
        check_rates(rates_of_export(custom))


def test_the_rates_are_those_of_the_stages_that_have_begun() -> None:
    stages = [
        {"duration": "4 steps", "mlm_probability": 0.15},
        {"duration": "4 steps", "mlm_probability": 0.7, "final_mlm_probability": 0.3},
        {"duration": "4 steps", "objectives": [{"name": "causal"}]},
        {"duration": "4 steps", "masking_law": {"name": "uniform", "from": 0, "to": 0.8}},
    ]
    config = tiny_config("run", training={"stages": stages, "max_steps": None})
    assert rates_until(config, 4) == MaskingRates(0.15, 0.15)
    assert rates_until(config, 5) == rates_until(config, 12) == MaskingRates(0.15, 0.7)
    assert rates_until(config, 13) == rates_until(config, None) == MaskingRates(0.0, 0.8)
