"""Loading a teacher: it predicts what transformers does, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    EuroBertConfig,
    EuroBertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from data_prep.base.errors import UserError
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from tests.support.preparations import trained
from tests.support.toy_run import preset_config
from trainer.checkpoint.teacher import digest_of, load_teacher, look_at_teacher
from trainer.checkpoint.writer import ALONE
from trainer.config.run_config import RunConfig
from trainer.data.batch import Batch
from trainer.inference.pulled_model import folder_without_weights, pull
from trainer.model.pretrained import load_tokenizer
from trainer.objectives.distillation import Teacher
from trainer.objectives.objective import EncodedBatch

ROWS, LENGTH = 379, 20
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "vocab_size": ROWS,
}
MODERN: dict[str, Any] = {"local_attention": 8, "pad_token_id": 0}
EURO: dict[str, Any] = {
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0},
}
XLM: dict[str, Any] = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1, "max_position_embeddings": 26}
MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "bert with pairs": lambda: BertForPreTraining(BertConfig(**SIZES)),
    "modernbert": lambda: ModernBertForMaskedLM(ModernBertConfig(**SIZES, **MODERN)),
    "modernbert, every 2nd global": lambda: ModernBertForMaskedLM(
        ModernBertConfig(**SIZES, **MODERN, global_attn_every_n_layers=2, local_rope_theta=5000.0)
    ),
    "eurobert": lambda: EuroBertForMaskedLM(EuroBertConfig(**SIZES, **EURO)),
    "eurobert, tied": lambda: EuroBertForMaskedLM(EuroBertConfig(**SIZES, **EURO, tie_word_embeddings=True)),
    "xlm-roberta": lambda: XLMRobertaForMaskedLM(XLMRobertaConfig(**SIZES | XLM)),
}


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = MAKERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, tokenizer_folder: Path) -> Path:
    model.save_pretrained(folder)
    for path in tokenizer_folder.iterdir():
        shutil.copyfile(path, folder / path.name)
    return folder


@pytest.fixture
def fingerprint(tokenizer_folder) -> str:
    return str(Tokenizer.load(tokenizer_folder).fingerprint)


@pytest.fixture
def folder(tmp_path, tokenizer_folder) -> Path:
    return save(make("modernbert"), tmp_path / "teacher", tokenizer_folder)


def config_with(folder: Path, *more: str) -> RunConfig:
    short = ("data.sequence_length=16", "training.micro_batch_tokens=64", "training.global_batch_tokens=64")
    objectives = "objectives=[{name: masked_lm},{name: distillation}]"
    settings = (*short, "training.precision=fp32", "data.sentence_pairs=none", objectives)
    return preset_config(*settings, f"teacher={folder}", *more)


def load(folder: Path, fingerprint: str, *more: str) -> Teacher:
    return load_teacher(config_with(folder, *more), lambda: pull(folder), fingerprint, ALONE)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(
        input_ids=torch.randint(5, 370, (2 * LENGTH,), generator=generator),
        position_ids=torch.arange(LENGTH).repeat(2),
        token_type_ids=torch.zeros(2 * LENGTH, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32),
        masked_positions=torch.arange(2 * LENGTH),
        labels=torch.arange(2 * LENGTH),
        sequence_length=LENGTH,
    )


@pytest.mark.parametrize("name", MAKERS)
def test_a_teacher_predicts_what_transformers_predicts(name, tmp_path, tokenizer_folder, fingerprint) -> None:
    folder = save(make(name), tmp_path / "teacher", tokenizer_folder)
    teacher, batch = load(folder, fingerprint), make_batch()
    assert teacher.num_tokens == 370 and not any(each.requires_grad for each in teacher.encoder.parameters())
    encoded = EncodedBatch(batch, teacher.encoder)
    encoded.of_layers = []
    states, (weight, bias) = teacher.read(encoded), teacher.decoder
    with torch.no_grad():
        output = make(name)(input_ids=batch.input_ids.view(2, LENGTH), output_hidden_states=True)
    logits = getattr(output, "logits", None)
    logits = output.prediction_logits if logits is None else logits
    ours = torch.nn.functional.linear(states.before_decoder, weight, bias)
    assert ours.shape == (2 * LENGTH, 370)
    torch.testing.assert_close(ours, logits.flatten(0, 1)[:, :370], rtol=1e-4, atol=1e-4)
    assert len(states.of_layers) == 4
    torch.testing.assert_close(states.of_layers[1], output.hidden_states[2].flatten(0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_has_the_precision_of_the_run(folder, fingerprint, precision) -> None:
    teacher = load(folder, fingerprint, f"training.precision={precision}")
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert {each.dtype for each in (*teacher.encoder.parameters(), *teacher.head.parameters())} == {wanted}
    assert not any(module.training for module in (*teacher.encoder.modules(), *teacher.head.modules()))


def test_the_digest_is_of_weights_and_config_alone(folder, tmp_path) -> None:
    before = digest_of(folder)
    (folder / "README.md").write_text("anything")
    moved = folder.rename(tmp_path / "moved")
    assert digest_of(moved) == before
    edit(moved, max_position_embeddings=32)
    changed = digest_of(moved)
    weights = load_file(moved / "model.safetensors")
    weights["head.dense.weight"][0, 0] += 1
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    assert len({before, changed, digest_of(moved)}) == 3


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def lose_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith(("head.", "decoder."))}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def lose_layer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layers.2." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def fine_tuned(folder: Path) -> None:
    BertForSequenceClassification(BertConfig(**SIZES)).save_pretrained(folder)


def lose_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_info.json"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lose_head, "missing-weights"),
        (lose_layer, "missing-weights"),
        (fine_tuned, "fine-tuned-model"),
        (lose_tokenizer, "no-tokenizer-of-teacher"),
        (lambda folder: (folder / "model.safetensors").unlink(), "weights-not-safetensors"),
        (lambda folder: edit(folder, model_type="gpt2"), "other-architecture"),
        (lambda folder: edit(folder, hidden_activation="silu"), "other-architecture"),
        (lambda folder: edit(folder, norm_bias=True), "other-architecture"),
        (lambda folder: edit(folder, layer_types=["sliding_attention"] * 4), "other-architecture"),
        (lambda folder: edit(folder, max_position_embeddings=15), "teacher-too-short"),
        (lambda folder: edit(folder, vocab_size=360), "other-tokenizer"),
        (shutil.rmtree, "unknown-model"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(folder, fingerprint, damage, code) -> None:
    damage(folder)
    with pytest.raises(UserError, check=coded(code)):
        load(folder, fingerprint)


def test_a_teacher_of_another_tokenizer_is_refused_before_its_weights_are_read(folder) -> None:
    config = config_with(folder)
    with pytest.raises(UserError, check=coded("other-tokenizer"), match="the same ids are other tokens"):
        look_at_teacher(config, lambda: folder_without_weights(folder), "another")
    assert look_at_teacher(config, lambda: folder_without_weights(folder), None) is not None
    assert look_at_teacher(config, lambda: None, "another") is None


def test_a_teacher_saved_again_by_transformers_is_of_the_tokenizer_of_the_shards(tmp_path) -> None:
    """An export without tokenizer_info.json, as `save_pretrained` leaves it; its weights are of the same ids."""
    texts = ["the old river crossed the wide bridge", "a bridge of stone and of water"] * 9
    own = trained(texts, tmp_path / "own", vocab_size=370)
    other = trained([*texts, "letters of another alphabet"], tmp_path / "other", vocab_size=370)
    again = tmp_path / "teacher"
    make("modernbert").save_pretrained(again)
    load_tokenizer(own.folder).save_pretrained(again)
    assert not (again / "tokenizer_info.json").exists()
    config = config_with(again)
    found = load_teacher(config, lambda: pull(again), own.fingerprint, ALONE, lambda: own)
    assert found.num_tokens == own.vocab_size
    assert look_at_teacher(config, lambda: again, own.fingerprint, lambda: own) is not None
    with pytest.raises(UserError, check=coded("other-tokenizer")):
        look_at_teacher(config, lambda: again, other.fingerprint, lambda: other)


def test_only_the_rows_that_it_reads_must_fit_its_positions(folder, fingerprint) -> None:
    taught = {"steps": 2, "objectives": [{"name": "masked_lm"}, {"name": "distillation"}]}
    longer = {"steps": 2, "sequence_length": 32, "objectives": [{"name": "masked_lm"}]}
    sizes = ("training.micro_batch_tokens=64", "training.max_steps=null", "objectives=null")

    def stages(*items: dict[str, Any]) -> tuple[str, ...]:
        return (*sizes, f"training.stages={json.dumps(items)}")

    assert load(folder, fingerprint, *stages(taught, longer)).num_tokens == 370
    with pytest.raises(UserError, check=coded("teacher-too-short"), match="stage 0 has rows of 32 tokens"):
        load(folder, fingerprint, *stages(taught | {"sequence_length": 32}, longer))


def test_hidden_states_of_another_width_need_the_setting(folder, fingerprint) -> None:
    objectives = "objectives=[{name: masked_lm},{name: hidden_states, settings: {teacher_hidden_size: 32}}]"
    assert load(folder, fingerprint, objectives).config.hidden_size == 32
    with pytest.raises(UserError, check=coded("other-width-of-teacher"), match="teacher_hidden_size: 32"):
        load(folder, fingerprint, objectives.replace("32", "48"))
