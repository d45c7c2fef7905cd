"""Trained weights that another model adopts: another tokenizer, other sizes, bases and positions."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from data_prep import Tokenizer
from data_prep.base.errors import UsageError, UserError
from data_prep.tokenizer.foreign_tokenizer import is_written_again
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import WRITERS, write_decoder
from tests.support.preparations import trained
from trainer import load_config
from trainer.checkpoint.adoption import FOLLOWS_COUNTS, WORDS, Adoption, layer_map, tile_map, token_map
from trainer.checkpoint.initial_weights import (
    SHUT,
    InitialWeights,
    Wanted,
    load_initial_weights,
    look_at_initial_weights,
    wanted_of,
)
from trainer.checkpoint.writer import ALONE
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.data.batch import Batch
from trainer.inference.pulled_model import pull
from trainer.model.hugging_face import family_in_transformers, hugging_face_config, to_hugging_face
from trainer.model.pretrained import load_tokenizer
from trainer.objectives.pretraining import PretrainingModel

LENGTH = 20
COMMON: dict[str, Any] = {"hidden_dropout_prob": 0.0, "pad_vocab_size_to_multiple_of": 1, "vocab_size": 70}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
SMALL = {
    "bert": ModelSettings(family="bert", max_position_embeddings=24, **SIZES, **COMMON),
    "modernbert": ModelSettings(family="modernbert", local_attention=8, **SIZES, **COMMON),
    "eurobert": ModelSettings(family="eurobert", **SIZES, **COMMON),
}
TEXTS = ["the old river crossed the wide bridge", "a bridge of stone and of water", "newer words are older"] * 9


@pytest.fixture(params=SMALL)
def small(request) -> ModelSettings:
    return SMALL[request.param]


def model_of(config: ModelSettings, seed: int = 3, pairs: bool = False) -> PretrainingModel:
    """A model whose norms and biases are no zeros and ones either."""
    model = PretrainingModel(config, objectives_of("next_sentence" if pairs else "none"))
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def weights_of(model: PretrainingModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def written(model: PretrainingModel, folder: Path) -> Path:
    """The model as a Hugging Face folder without a tokenizer."""
    family, pairs = family_in_transformers(model.config, False), len(model.objectives) > 1
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        to_hugging_face(weights_of(model), model.config, family),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(hugging_face_config(model.config, pairs)))
    return folder


def load(model: PretrainingModel, folder: Path, *adopt: Any, tokenizer: Tokenizer | None = None) -> InitialWeights:
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    return load_initial_weights(
        model, str(folder), lambda: pull(folder), ALONE, Wanted(fingerprint, lambda: tokenizer, adopt)
    )


def looked_at(model: PretrainingModel, folder: Path, *adopt: Any, tokenizer: Tokenizer | None = None) -> list[str]:
    """What `--dry-run` says before the model of these settings is made."""
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    wanted = Wanted(fingerprint, lambda: tokenizer, adopt)
    return look_at_initial_weights(model.config, str(folder), lambda: pull(folder), wanted)


def loss(model: PretrainingModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    masked = torch.tensor([2, 7, 11, 19, 23, 38])
    batch = Batch(
        input_ids=torch.randint(5, 70, (2 * LENGTH,), generator=generator),
        position_ids=torch.arange(LENGTH).repeat(2),
        token_type_ids=torch.zeros(2 * LENGTH, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32),
        masked_positions=masked,
        labels=torch.randint(5, 70, masked.shape, generator=generator),
        cls_positions=torch.tensor([0, LENGTH]),
        next_sentence_labels=torch.tensor([0, 1]),
        sequence_length=LENGTH,
    )
    return sum(sums["loss"] for sums in model(batch).values())


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (2, 3, [0, 1, 1]),
        (2, 4, [0, 1, 0, 1]),
        (3, 9, [0, 1, 2] * 3),
        (12, 6, [0, 2, 4, 7, 9, 11]),
        (5, 1, [0]),
        (1, 3, [0, 0, 0]),
    ],
)
def test_layers_repeat_as_published(old, new, expected):
    assert layer_map(old, new) == expected


@pytest.mark.parametrize("old", range(1, 30))
def test_a_layer_map_keeps_the_order_and_both_ends_and_the_same_number_is_the_identity(old):
    assert layer_map(old, old) == list(range(old))
    for new in range(1, 60):
        layers = layer_map(old, new)
        assert len(layers) == new and layers[0] == 0 and all(0 <= layer < old for layer in layers)
        if new > 1:
            assert layers[-1] == old - 1 and (new < old or {*layers} == {*range(old)})
        if new % old:
            assert layers == sorted(layers)


def tiled_by_loops(old: int, new: int) -> list[int]:
    """The old row in the middle; then one more at each end, as long as there is room."""
    start = (new - old) // 2
    row = {start + number: number for number in range(old)}
    for index in range(start - 1, -1, -1):
        row[index] = row[index + old]
    for index in range(start + old, new):
        row[index] = row[index - old]
    return [row[index] for index in range(new)]


def test_a_width_is_tiled_from_the_middle():
    assert tile_map(3, 8).tolist() == [1, 2, 0, 1, 2, 0, 1, 2]
    for old in range(1, 20):
        assert tile_map(old, old).tolist() == list(range(old))
        for new in range(old, 70):
            assert tile_map(old, new).tolist() == tiled_by_loops(old, new)


def test_the_same_model_is_adopted_bit_by_bit(small, tmp_path):
    theirs = model_of(small)
    ours = model_of(small, seed=5)
    found = load(ours, written(theirs, tmp_path), "size", "positions")
    assert found.adopted == (
        "size: nothing differs",
        f"positions: model.max_position_embeddings is {small.max_position_embeddings} there already",
    )
    for name, weight in weights_of(theirs).items():
        assert torch.equal(weights_of(ours)[name], weight), name


@pytest.mark.parametrize("heads", [4, 6])
def test_a_multiple_of_the_width_computes_the_same(small, heads, tmp_path):
    theirs = model_of(small, pairs=small.family == "bert")
    wide = small.model_copy(update={"hidden_size": 16 * heads, "num_attention_heads": heads, "intermediate_size": 96})
    ours = model_of(wide, seed=5, pairs=small.family == "bert")
    before = loss(ours)
    load(ours, written(theirs, tmp_path), "size")
    torch.testing.assert_close(loss(ours), loss(theirs), rtol=1e-4, atol=0)
    assert (before - loss(theirs)).abs() > 1
    loss(ours).backward()
    for name in ("attention.output", "feed_forward.output"):  # copies learn different things
        gradient = ours.get_parameter(f"encoder.layers.1.{name}.weight").grad
        first, copy = gradient[0], gradient[32]
        assert not torch.allclose(first, copy, rtol=1e-2)


def test_widths_that_are_no_multiple_are_made_as_the_loops_say(small, tmp_path):
    """Against a loop over single numbers: the part of every number and its column's share."""
    theirs = model_of(small)
    wide = small.model_copy(update={"hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 67})
    ours = model_of(wide, seed=5)
    fresh = {name: weight.clone() for name, weight in weights_of(ours).items()}
    load(ours, written(theirs, tmp_path), "size")
    hidden, middle = tiled_by_loops(32, 48), tiled_by_loops(48, 67)
    heads = [16 * head + number for head in tiled_by_loops(2, 3) for number in range(16)]
    gated = small.family != "bert"
    rows = {
        "attention.qkv": [32 * part + number for part in range(3) for number in heads],
        "attention.output": hidden,
        "feed_forward.intermediate": [48 * part + number for part in range(1 + gated) for number in middle],
        "feed_forward.output": hidden,
        "mlm_head.dense": hidden,
    }
    columns = {"attention.output": heads, "feed_forward.output": middle}
    for name, new in weights_of(ours).items():
        module = ".".join(name.split(".")[-3:-1])
        old = weights_of(theirs)[name]
        if module not in rows:
            continue
        if new.ndim == 1:
            assert new.tolist() == [old[row].item() for row in rows[module]], name
            continue
        source = columns.get(module, hidden)
        for i, j in np.random.default_rng(0).integers(0, new.shape, (200, 2)).tolist():
            copies = [column for column in range(new.shape[1]) if source[column] == source[j]]
            noise = fresh[name][i, j].item() - sum(fresh[name][i, copy].item() for copy in copies) / len(copies)
            expected = old[rows[module][i], source[j]].item() / len(copies) + noise
            assert math.isclose(new[i, j].item(), expected, abs_tol=1e-6), (name, i, j)
    assert torch.equal(weights_of(ours)[WORDS], weights_of(theirs)[WORDS][:, hidden])


def test_a_copied_first_layer_is_normalized_as_it_was(tmp_path):
    """ModernBERT's first layer has no norm of its own: that of the embeddings is in front of it."""
    theirs = model_of(SMALL["modernbert"])
    ours = model_of(SMALL["modernbert"].model_copy(update={"num_hidden_layers": 4}), seed=5)
    found = load(ours, written(theirs, tmp_path), "size")
    assert (
        found.adopted == ("size: layers 0, 1, 0, 1 of 2 become 0 to 3",)
        or "change between local and global" in found.adopted[0]
    )
    before, after = weights_of(theirs), weights_of(ours)
    assert torch.equal(after["encoder.layers.2.attention_norm.weight"], before["encoder.embeddings.norm.weight"])
    for number, source in enumerate([0, 1, 0, 1]):
        name = "encoder.layers.{}.feed_forward.output.weight"
        assert torch.equal(after[name.format(number)], before[name.format(source)])


def test_fewer_layers_are_spaced_evenly_and_the_rest_is_dropped(small, tmp_path):
    theirs = model_of(small.model_copy(update={"num_hidden_layers": 5}))
    ours = model_of(small.model_copy(update={"num_hidden_layers": 3}), seed=5)
    (line,) = load(ours, written(theirs, tmp_path), "size").adopted
    assert line.startswith("size: layers 0, 2, 4 of 5 become 0 to 2, 2 are dropped")
    name = "encoder.layers.{}.attention.qkv.weight"
    assert torch.equal(weights_of(ours)[name.format(1)], weights_of(theirs)[name.format(2)])


@pytest.mark.parametrize(("positions", "said"), [(60, "24 rows are copied, and rows 24 to 59 repeat"), (10, "14 are")])
def test_learned_positions_repeat_or_end(positions, said, tmp_path):
    theirs = model_of(SMALL["bert"])
    ours = model_of(SMALL["bert"].model_copy(update={"max_position_embeddings": positions}), seed=5)
    folder = written(theirs, tmp_path)
    with pytest.raises(UserError, match=r"or add positions to adopt \(adopt=\[positions\]\)"):
        load(ours, folder)
    (line,) = load(ours, folder, "positions").adopted
    assert said in line
    name = "encoder.embeddings.position_embeddings.weight"
    for number in range(positions):
        assert torch.equal(weights_of(ours)[name][number], weights_of(theirs)[name][number % 24])


def test_another_rope_base_is_taken_and_reported(tmp_path):
    folder = written(model_of(SMALL["modernbert"]), tmp_path)
    ours = model_of(SMALL["modernbert"].model_copy(update={"global_rope_theta": 10_000.0}))
    with pytest.raises(UserError, match=r"adopt=\[size,rope\]", check=coded("other-architecture")):
        load(ours, folder, "size")
    assert load(ours, folder, "rope").adopted == ("rope: model.global_rope_theta from 160,000 to 10,000",)


@pytest.mark.parametrize("kind", ["modernbert", "eurobert"])
def test_more_rotary_positions_are_reported_and_need_no_weights(kind, tmp_path):
    theirs = model_of(SMALL[kind])
    folder = written(theirs, tmp_path)
    longer = model_of(SMALL[kind].model_copy(update={"max_position_embeddings": 60}), seed=5)
    before = SMALL[kind].max_position_embeddings
    expected = f"positions: model.max_position_embeddings from {before} to 60; rotary ones have no weights"
    assert load(longer, folder, "positions").adopted == (expected,)
    assert all(torch.equal(weight, weights_of(theirs)[name]) for name, weight in weights_of(longer).items())
    there = f"positions: model.max_position_embeddings is {before} there already"
    assert load(model_of(SMALL[kind]), folder, "positions").adopted == (there,)
    bases = ["global_rope_theta is 160,000", "local_rope_theta is 10,000"] if kind == "modernbert" else []
    bases = [f"model.{base} there already" for base in bases or ["global_rope_theta is 250,000"]]
    assert load(longer, folder, "rope", "positions").adopted == (f"rope: {'; '.join(bases)}", expected)
    assert looked_at(longer, folder, "rope", "positions")[2:] == [
        f"adopts rope: {'; '.join(bases)}",
        f"adopts {expected}",
    ]


def test_the_base_of_the_first_stage_is_the_one_that_weights_are_compared_with(tmp_path):
    small = SMALL["modernbert"]
    folder = written(model_of(small), tmp_path)
    other = small.model_copy(update={"global_rope_theta": 10_000.0})

    def wanted(base: float, *adopt: str, model: ModelSettings) -> Wanted:
        settings = [f"training.stages=[{{steps: 1, global_rope_theta: {base}}}, {{steps: 1}}]", "init_from=x"]
        settings += ["model.output_bias=zeros", "model.family=modernbert", f"adopt=[{','.join(adopt)}]"]
        settings += [
            "training.max_steps=null",
            "data.sentence_pairs=none",
            f"model.global_rope_theta={model.global_rope_theta}",
        ]
        return wanted_of(load_config("tiny_cpu", settings), None, lambda: None, lambda: None)

    with pytest.raises(UserError, match=r"training.stages.0.global_rope_theta is 10000.0 and there 160000") as caught:
        look_at_initial_weights(
            SMALL["modernbert"], str(folder), lambda: folder, wanted(1e4, model=SMALL["modernbert"])
        )
    assert "adopt=[rope]" in str(caught.value)
    ours = model_of(SMALL["modernbert"])
    given = wanted(1e4, "rope", model=SMALL["modernbert"])
    found = load_initial_weights(ours, str(folder), lambda: pull(folder), ALONE, given)
    assert found.adopted == ("rope: training.stages.0.global_rope_theta from 160,000 to 10,000",)
    look_at_initial_weights(other, str(folder), lambda: folder, wanted(160_000, model=other))  # as it was trained


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 16, "num_attention_heads": 1}, "model.hidden_size is 16, less than 32"),
        ({"intermediate_size": 40}, "model.intermediate_size is 40, less than 48"),
        ({"hidden_size": 48, "num_attention_heads": 2}, "heads have 24 numbers and there 16"),
    ],
)
def test_a_width_that_cannot_be_tiled_is_refused_before_weights_are_read(small, changes, said, tmp_path):
    folder = written(model_of(small), tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    config = small.model_copy(update=changes)
    with pytest.raises(UserError, match=said, check=coded("size-not-tileable")):
        look_at_initial_weights(config, str(folder), lambda: folder, Wanted(adopt=("size",)))
    with pytest.raises(UserError, match=r"adopt=\[size\]", check=coded("other-architecture")):
        look_at_initial_weights(config, str(folder), lambda: folder)


@pytest.mark.parametrize(
    ("damage", "code"),
    [("missing", "missing-weights"), ("odd", "model-not-loadable"), ("pickle", "weights-not-safetensors")],
)
def test_a_damaged_folder_is_refused_and_the_model_stays_as_it_was(damage, code, tmp_path):
    folder = written(model_of(SMALL["bert"]), tmp_path)
    weights, name = load_file(folder / "model.safetensors"), "bert.encoder.layer.1.output.dense.weight"
    if damage == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    else:
        changed = weights.pop(name)[:7] if damage == "odd" else weights.pop(name)
        save_file(
            weights | ({name: changed} if damage == "odd" else {}), folder / "model.safetensors", {"format": "pt"}
        )
    ours = model_of(SMALL["bert"].model_copy(update={"num_hidden_layers": 4}))
    before = {name: weight.clone() for name, weight in weights_of(ours).items()}
    said = r"dense.weight is \(7, 48\), and \(32, 48\) by config.json" if damage == "odd" else None
    for find in (load, looked_at):
        with pytest.raises(UserError, match=said, check=coded(code)):
            find(ours, folder, "size")
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(ours).items())


@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("old", ["wordpiece", "byte level"])
def test_a_dry_run_says_of_the_tensors_what_the_run_says(small, tokenizers, shrinks, old, tmp_path):
    """Counts, new rows and new tensors follow from shapes alone, with every item of `adopt`."""
    before, after = tokenizers[old], tokenizers["wordpiece"]
    layers = {True: (4, 2), False: (2, 3)}[shrinks]
    sizes = {"vocab_size": before.vocab_size, "num_hidden_layers": layers[0], "max_position_embeddings": 24}
    folder = written(model_of(small.model_copy(update=sizes)), tmp_path)
    shutil.copytree(before.folder, folder, dirs_exist_ok=True)
    sizes = {"vocab_size": after.vocab_size + 8, "num_hidden_layers": layers[1], "max_position_embeddings": 40}
    wide = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 50}
    ours = model_of(small.model_copy(update=sizes | wide), seed=5)
    adopt = ("tokenizer", "size", "positions")
    _, *looked = looked_at(ours, folder, *adopt, tokenizer=after)
    first, *others = load(ours, folder, *adopt, tokenizer=after).notes
    assert looked[0].removeprefix("initializes ") == first.partition(": ")[2]
    assert [line.replace("adopts ", "adopting ") for line in looked[1:]] == others
    assert f"word_embeddings.weight from row {after.vocab_size} of {after.vocab_size + 8}" in looked[1]


def test_what_no_item_covers_is_refused_as_before(tmp_path):
    folder = written(model_of(SMALL["modernbert"]), tmp_path)
    config = SMALL["modernbert"].model_copy(update={"local_attention": 16, "num_hidden_layers": 4})
    with pytest.raises(UserError, match="model.local_attention is 16 and there 8") as caught:
        look_at_initial_weights(config, str(folder), lambda: folder, Wanted(adopt=("size", "rope")))
    assert "adopt" not in str(caught.value)
    config = SMALL["modernbert"].model_copy(update={"global_attn_every_n_layers": 2, "num_hidden_layers": 3})
    written(model_of(SMALL["modernbert"].model_copy(update={"num_hidden_layers": 3})), tmp_path)
    with pytest.raises(UserError, match="attention_kinds", check=coded("other-architecture")):
        look_at_initial_weights(config, str(folder), lambda: folder, Wanted(adopt=("size",)))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {
        name: Tokenizer.load(WRITERS[writer](folder / name, TEXTS, vocab_size=420))
        for name, writer in (("wordpiece", "wordpiece"), ("byte level", "byte level"))
    }
    other = [text.replace("river", "forest").replace("stone", "timber") for text in TEXTS]
    made["other words"] = Tokenizer.load(WRITERS["wordpiece"](folder / "other", other, vocab_size=420))
    return made | {"sentencepiece": trained(TEXTS, folder / "own", vocab_size=400)}


@pytest.mark.parametrize("kind", ["wordpiece", "byte level", "sentencepiece"])
def test_a_map_of_equal_tokenizers_is_the_identity(tokenizers, kind):
    found = token_map(tokenizers[kind], tokenizers[kind])
    assert found.copied.tolist() == list(range(tokenizers[kind].vocab_size))
    assert not found.averaged and not found.random and not found.dropped


@pytest.mark.parametrize("old", ["wordpiece", "byte level", "sentencepiece", "other words"])
@pytest.mark.parametrize("new", ["wordpiece", "byte level", "sentencepiece"])
def test_tokens_are_compared_by_their_text_and_special_tokens_by_their_role(tokenizers, old, new):
    before, after = tokenizers[old], tokenizers[new]
    found = token_map(before, after)
    for role in ("pad", "unk", "cls", "sep", "mask"):
        assert found.copied[getattr(after.special_tokens, role)] == getattr(before.special_tokens, role)
    ordinary = [number for number in after.special_tokens.ordinary(after.vocab_size).tolist() if after.pieces[number]]
    copied = [number for number in ordinary if found.copied[number] >= 0]
    assert b" the" in after.bytes_of(copied) and len(copied) > 20
    for number in copied:
        assert after.bytes_of([number]) == before.bytes_of([found.copied[number]])
    for number, ids in found.averaged.items():
        assert not {*ids} & {*before.special_tokens.ids}
        assert found.copied[number] < 0 and number not in found.random
    groups = [len(copied) + sum(found.copied[list(after.special_tokens.ids)] >= 0), len(found.averaged)]
    assert sum(groups) + len(found.random) <= after.vocab_size
    assert len(set(found.copied[found.copied >= 0].tolist())) + found.dropped == before.vocab_size


def test_a_part_of_a_character_has_the_rows_of_its_bytes(tokenizers, tmp_path):
    after = Tokenizer.load(WRITERS["byte level"](tmp_path, [*TEXTS, *["河流与桥梁 河流与桥梁"] * 99], vocab_size=330))
    before = tokenizers["sentencepiece"]
    found = token_map(before, after)
    parts = [number for number, text in enumerate(after.bytes_of(range(after.vocab_size))) if is_part(text)]
    assert parts and all(len(found.averaged[number]) == 2 for number in parts)
    for number in parts:
        assert b"".join(before.bytes_of(found.averaged[number])) == after.bytes_of([number])[0]


def is_part(text: bytes) -> bool:
    return len(text) == 2 and 0x80 <= text[0] < 0xC0


def test_a_part_of_a_word_does_not_begin_with_a_token_that_begins_one(tokenizers):
    before, after = tokenizers["wordpiece"], tokenizers["byte level"]
    found = token_map(before, after)
    opens = before.opens_word
    inner = {"".join(before.bytes_of([n])[0].decode()) for n in range(before.vocab_size) if not opens[n]}
    checked = 0
    for number, ids in found.averaged.items():
        text, first = after.bytes_of([number])[0].decode(), before.bytes_of(ids[:1])[0].decode()
        if not text.startswith(" ") and first.strip() in inner:
            assert not opens[ids[0]], (text, first)
            checked += 1
    assert checked


def test_rows_of_new_tokens_are_the_mean_of_the_old_tokens_of_their_text(tokenizers, tmp_path):
    before, after = tokenizers["other words"], tokenizers["wordpiece"]
    sizes = {"vocab_size": 420, "pad_vocab_size_to_multiple_of": 64}
    theirs = model_of(SMALL["bert"].model_copy(update=sizes))
    folder = written(theirs, tmp_path)
    shutil.copytree(before.folder, folder, dirs_exist_ok=True)
    ours = model_of(SMALL["bert"].model_copy(update=sizes), seed=5)
    fresh = weights_of(ours)[WORDS].clone()
    with pytest.raises(
        UserError, match=r"add tokenizer to adopt \(adopt=\[tokenizer\]\)", check=coded("other-tokenizer")
    ):
        load(ours, folder, tokenizer=after)
    found = load(ours, folder, "tokenizer", tokenizer=after)
    tokens = token_map(before, after)
    assert found.adopted == (f"tokenizer: {tokens.describe()}",)
    assert f"adopting {found.adopted[0]}" in found.notes
    looked = look_at_initial_weights(
        ours.config, str(folder), lambda: folder, Wanted(after.fingerprint, lambda: after, ("tokenizer",))
    )
    assert f"adopts {found.adopted[0]}" in looked
    stone = after.pieces.index("\u2581stone")
    expected = before.encode_text("stone").tolist()
    assert "\u2581stone" not in before.pieces and tokens.averaged[stone] == tuple(expected) and len(expected) > 1
    for name in (WORDS, "mlm_head.bias"):
        new, old = weights_of(ours)[name], weights_of(theirs)[name]
        for number in range(after.vocab_size):
            if (source := tokens.copied[number]) >= 0:
                assert torch.equal(new[number], old[source])
            elif number in tokens.averaged:
                ids = tokens.averaged[number]
                torch.testing.assert_close(new[number], sum(old[one] for one in ids) / len(ids))
            elif name == WORDS:
                assert torch.equal(new[number], fresh[number])


def test_the_bias_of_every_token_follows_how_often_it_occurs(tokenizers, tmp_path):
    """Against loops: what a new token takes from the old ones of its text, and the mean level of random rows."""
    before, after = tokenizers["wordpiece"], tokenizers["sentencepiece"]
    theirs = model_of(SMALL["bert"].model_copy(update={"vocab_size": before.vocab_size}))
    folder = written(theirs, tmp_path)
    shutil.copytree(before.folder, folder, dirs_exist_ok=True)
    tokens, counts = token_map(before, after), np.random.default_rng(0).integers(0, 90, after.vocab_size)
    counts[::7] = 0
    config = SMALL["bert"].model_copy(update={"vocab_size": after.vocab_size, "pad_vocab_size_to_multiple_of": 64})
    wanted = Wanted(after.fingerprint, lambda: after, ("tokenizer",), lambda: counts)
    ours, asked = model_of(config, seed=5), []
    looked = look_at_initial_weights(
        config, str(folder), lambda: folder, wanted._replace(token_counts=lambda: asked.append(1))
    )
    found = load_initial_weights(ours, str(folder), lambda: pull(folder), ALONE, wanted)
    assert found.adopted == (f"tokenizer: {tokens.describe()}; {FOLLOWS_COUNTS}",) and not asked
    assert f"adopts {found.adopted[0]}" in looked
    pieces = [
        (int(tokens.copied[number]),) if tokens.copied[number] >= 0 else tokens.averaged.get(number, ())
        for number in range(after.vocab_size)
    ]
    old_counts = [sum(int(counts[n]) * ids.count(old) for n, ids in enumerate(pieces)) for old in range(420)]
    old, new = weights_of(theirs)["mlm_head.bias"], weights_of(ours)["mlm_head.bias"]
    levels = [old[each].item() - math.log(old_counts[each] + 0.5) for each in sorted({*sum(pieces, ())})]
    moved = 0
    for number, ids in enumerate(pieces):
        level = [old[each].item() - math.log(old_counts[each] + 0.5) for each in ids] or levels
        expected = sum(level) / len(level) + math.log(counts[number] + 0.5)
        assert math.isclose(new[number].item(), expected, rel_tol=1e-5, abs_tol=1e-5), (number, ids)
        if len(ids) == 1 and tokens.copied[number] >= 0 and old_counts[ids[0]] == counts[number]:
            assert torch.equal(new[number], old[ids[0]]), "what occurs as often as before is copied bit by bit"
        moved += bool(ids) and old_counts[ids[0]] != counts[number]
    assert moved and (new[after.vocab_size :] == SHUT).all()
    spare = model_of(config.model_copy(update={"vocab_size": after.vocab_size + 20}), seed=5)
    load_initial_weights(spare, str(folder), lambda: pull(folder), ALONE, wanted)
    assert (weights_of(spare)["mlm_head.bias"][after.vocab_size :] == SHUT).all(), "rows of no token are shut too"
    twice = model_of(config, seed=5)
    load_initial_weights(twice, str(folder), lambda: pull(folder), ALONE, wanted)
    assert all(torch.equal(weight, weights_of(ours)[name]) for name, weight in weights_of(twice).items())


@pytest.mark.parametrize("same", [True, False])
def test_rows_of_no_token_are_named_where_no_bias_shuts_them(tokenizers, same, tmp_path):
    before, after = tokenizers["byte level"], tokenizers["byte level" if same else "wordpiece"]
    sizes: dict[str, Any] = SIZES | COMMON | {"vocab_size": before.vocab_size}
    folder = written(model_of(ModelSettings(family="eurobert", **sizes)), tmp_path)
    shutil.copytree(before.folder, folder, dirs_exist_ok=True)
    sizes |= {"vocab_size": after.vocab_size, "pad_vocab_size_to_multiple_of": 512}
    config = ModelSettings(family="eurobert", **sizes)
    wanted = Wanted(after.fingerprint, lambda: after, ("tokenizer",), lambda: np.zeros(after.vocab_size))
    said = f"rows {after.vocab_size} to 511 of the vocabulary are of no token and random, and stay in the softmax"
    *_, line = look_at_initial_weights(config, str(folder), lambda: folder, wanted)
    found = load_initial_weights(model_of(config), str(folder), lambda: pull(folder), ALONE, wanted)
    assert said in line and said in found.adopted[0] and FOLLOWS_COUNTS not in line
    small = config.model_copy(update={"pad_vocab_size_to_multiple_of": 1})
    assert "softmax" not in str(look_at_initial_weights(small, str(folder), lambda: folder, wanted))


def saved_again(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """As a user's `AutoTokenizer.from_pretrained(...).save_pretrained(...)` leaves it."""
    load_tokenizer(tokenizer.folder).save_pretrained(folder)
    assert not (folder / "tokenizer_info.json").exists() and not (folder / "tokenizer.model").exists()
    return Tokenizer.load(folder)


@pytest.mark.parametrize("old", ["wordpiece", "byte level", "sentencepiece", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("new", ["wordpiece", "byte level", "sentencepiece"])
def test_a_tokenizer_saved_again_by_transformers_gives_the_same_rows(tokenizers, old, new, tmp_path):
    """Without tokenizer_info.json; bytes of byte fallback are bytes there too."""
    before = tokenizers.get(old) or Tokenizer.load(WRITERS[old](tmp_path / "made", TEXTS, vocab_size=420))
    again = saved_again(before, tmp_path / "again")
    found, expected = token_map(again, tokenizers[new]), token_map(before, tokenizers[new])
    assert found.describe() == expected.describe()
    assert found.copied.tolist() == expected.copied.tolist() and found.averaged == expected.averaged
    same = token_map(again, before)
    assert same.copied.tolist() == list(range(before.vocab_size)) and not same.random


def test_an_export_saved_again_is_the_export(tokenizers, tmp_path):
    """Its ids are those of the shards, so nothing needs to be adopted; another tokenizer is still refused."""
    own = tokenizers["sentencepiece"]
    theirs = model_of(SMALL["bert"].model_copy(update={"vocab_size": own.vocab_size}))
    folder = written(theirs, tmp_path)
    again = saved_again(own, folder)
    assert again.fingerprint != own.fingerprint and is_written_again(again, own) and is_written_again(own, again)
    for adopt, said in (((), ()), (("tokenizer",), ("tokenizer: nothing differs",))):
        ours = model_of(theirs.config, seed=5)
        assert load(ours, folder, *adopt, tokenizer=own).adopted == said
        assert all(torch.equal(weight, weights_of(theirs)[name]) for name, weight in weights_of(ours).items())
    other = trained([*TEXTS, "letters of another alphabet"], tmp_path / "other", vocab_size=400)
    assert not is_written_again(again, other) and not is_written_again(again, again)
    with pytest.raises(UserError, check=coded("other-tokenizer")):
        load(ours, folder, tokenizer=other)


def test_rows_that_only_pad_there_are_dropped_with_the_same_tokenizer(tokenizers, tmp_path):
    tokenizer = tokenizers["wordpiece"]
    theirs = model_of(SMALL["bert"].model_copy(update={"vocab_size": 500}))
    folder = written(theirs, tmp_path)
    shutil.copytree(tokenizer.folder, folder, dirs_exist_ok=True)
    ours = model_of(SMALL["bert"].model_copy(update={"vocab_size": tokenizer.vocab_size}), seed=5)
    (line,) = load(ours, folder, "tokenizer", tokenizer=tokenizer).adopted
    assert line.startswith(f"tokenizer: {tokenizer.vocab_size} rows are copied, 0 are the mean") and "0 old tok" in line
    assert torch.equal(weights_of(ours)[WORDS], weights_of(theirs)[WORDS][: tokenizer.vocab_size])


def test_a_folder_without_a_tokenizer_has_none_to_adopt(small, tokenizers, tmp_path):
    folder = written(model_of(small), tmp_path)
    with pytest.raises(UserError, match="has no tokenizer.json", check=coded("no-tokenizer-to-adopt")):
        load(model_of(small), folder, "tokenizer", tokenizer=tokenizers["wordpiece"])


def test_a_tokenizer_without_a_mask_token_is_refused(small, tokenizers, tmp_path):
    folder = written(model_of(small), tmp_path)
    WRITERS["wordpiece"](folder, TEXTS, vocab_size=300)
    text = (folder / "tokenizer.json").read_text().replace("[MASK]", "[HIDE]")
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="mask_token", check=coded("missing-special-tokens")):
        load(model_of(small), folder, "tokenizer", tokenizer=tokenizers["wordpiece"])


def test_a_tokenizer_of_more_tokens_than_its_model_is_refused(small, tokenizers, tmp_path):
    folder = written(model_of(small), tmp_path)
    WRITERS["wordpiece"](folder, TEXTS, vocab_size=400)
    with pytest.raises(UserError, match="tokens and a model of 70", check=coded("other-tokenizer")):
        load(model_of(small), folder, "tokenizer", tokenizer=tokenizers["byte level"])


def test_weights_of_another_tokenizer_and_size_are_adopted_in_one(tokenizers):
    before, after = tokenizers["sentencepiece"], tokenizers["byte level"]
    old = SMALL["modernbert"].model_copy(update={"vocab_size": before.vocab_size})
    new = SMALL["modernbert"].model_copy(update={"vocab_size": after.vocab_size, "intermediate_size": 50})
    new = new.model_copy(update={"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3})
    tokens = token_map(before, after)
    weights, fresh = weights_of(model_of(old)), weights_of(model_of(new))
    shapes = new.model_copy(update={name: getattr(old, name) for name in SIZES})
    adopted = Adoption(shapes, new, tokens).apply(weights, fresh)
    assert {name: weight.shape for name, weight in adopted.items()} == {
        name: each.shape for name, each in fresh.items()
    }
    assert tokens.random and torch.equal(adopted[WORDS][list(tokens.random)], fresh[WORDS][list(tokens.random)])


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["adopt=[size]"], "setting-without-effect"),
        (["init_from=x", "adopt=[rope]"], "setting-without-effect"),
        (["init_from=x", "adopt=[size,size]"], "adopted-twice"),
        (["init_from=x", "adopt=[heads]"], "invalid-setting"),
    ],
)
def test_adopt_without_effect_is_an_error(overrides, code):
    with pytest.raises(UsageError, check=coded(code)):
        load_config("tiny_cpu", ["model.output_bias=zeros", *overrides])


def test_adopt_is_a_list_or_in_yaml_a_set_of_names():
    for written_as in ("[tokenizer,size]", "{tokenizer: null, size: null}", "{tokenizer: true, size: true}"):
        config = load_config("tiny_cpu", ["model.output_bias=zeros", "init_from=x", f"adopt={written_as}"])
        assert config.adopt == ("tokenizer", "size")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_multiple_of_a_grouped_width_computes_the_same(groups, tied, tmp_path):
    few = {"num_attention_heads": 4, "num_key_value_heads": groups, "tie_word_embeddings": tied}
    small = ModelSettings(family="eurobert", **(SIZES | few), **COMMON)
    theirs = model_of(small)
    wide = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2 * groups, "intermediate_size": 96}
    ours = model_of(small.model_copy(update=wide), seed=5)
    load(ours, written(theirs, tmp_path), "size")
    torch.testing.assert_close(loss(ours), loss(theirs), rtol=1e-4, atol=0)
    other = small.model_copy(update={**wide, "num_key_value_heads": 8, "num_attention_heads": 8})
    if groups < 4:
        with pytest.raises(UserError, match="query heads share", check=coded("size-not-tileable")):
            load(model_of(other), tmp_path, "size")


@pytest.mark.parametrize("pad", [None, "<|end_of_text|>"])
def test_the_tokenizer_of_a_decoder_needs_no_special_tokens_of_an_encoder(tokenizers, tmp_path, pad):
    after = tokenizers["byte level"]
    write_decoder(tmp_path, TEXTS, vocab_size=300)
    declared = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared | {"pad_token": pad}))
    files = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = files["model"]["vocab"]
    sizes: dict[str, Any] = SIZES | {"vocab_size": len(vocabulary)}
    theirs = LlamaForCausalLM(LlamaConfig(rms_norm_eps=1e-5, rope_theta=250_000.0, **sizes))
    theirs.save_pretrained(tmp_path)
    config = ModelSettings(family="eurobert", **SIZES | COMMON | {"vocab_size": after.vocab_size})
    ours = model_of(config)
    fresh = {name: each.clone() for name, each in weights_of(ours).items()}
    with pytest.raises(UserError, match="add tokenizer to adopt", check=coded("other-tokenizer")):
        load(ours, tmp_path, tokenizer=after)
    wanted = Wanted(after.fingerprint, lambda: after, ("tokenizer",))
    kind, tensors, _ = look_at_initial_weights(config, str(tmp_path), lambda: tmp_path, wanted)
    assert tensors == "initializes 15 of 15 tensors"
    assert kind.endswith("is a llama of an adoptable architecture, and its weights are converted to eurobert")
    (line,) = load(ours, tmp_path, "tokenizer", tokenizer=after).adopted
    assert "3 stay random, and 0 old tokens are dropped" in line
    the = after.bytes_of(range(after.vocab_size)).index(b" the")
    for name, old in ((WORDS, theirs.model.embed_tokens), ("mlm_head.decoder.weight", theirs.lm_head)):
        new = weights_of(ours)[name]
        assert torch.equal(new[the], old.weight[vocabulary["\u0120the"]])
        special = after.special_tokens
        assert torch.equal(new[[special.cls, special.sep]], old.weight[:2])  # what begins and ends a text
        absent = [special.pad, special.unk, special.mask]
        assert torch.equal(new[absent], fresh[name][absent])
