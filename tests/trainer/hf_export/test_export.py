from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from data_prep.base.errors import UserError
from data_prep.dataset.manifest_records import SourceRecord
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import WRITERS
from tests.support.preparations import trained
from tests.support.toy_run import tiny_config
from trainer.checkpoint.initial_weights import load_initial_weights
from trainer.checkpoint.writer import ALONE
from trainer.config.families.eurobert import EuroBert
from trainer.config.families.modernbert import ModernBert
from trainer.config.run_config import RunConfig
from trainer.hf_export import export, parity
from trainer.hf_export.export import export_model
from trainer.hf_export.model_card import TrainingFacts, model_card
from trainer.model.quiet_transformers import quiet_transformers
from trainer.objectives.pretraining import PretrainingModel

FACTS = TrainingFacts(
    checkpoint="step-00000010",
    step=10,
    tokens_seen=640,
    data_digests={"s3://host/shards": "0" * 64},
    sources=(
        SourceRecord(
            name="tales",
            license="CC-BY-4.0",
            language="en",
            dropped={},
            documents=2,
            sentences=4,
            tokens=40,
            words=30,
            text_bytes=150,
        ),
    ),
    scores={"valid/mlm_loss": 5.25},
    adopted=("size: layers 0, 1, 1 of 2 become 0 to 2",),
    teachers=("1" * 64, "2" * 64),
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    draw = random.Random(0)
    words = "the quick brown fox jumps over lazy dog capital of France is Paris river city mountain quiet".split()
    documents = [" ".join(draw.choices(words, k=60)) + "." for _ in range(50)]
    trained(documents, folder, vocab_size=400)
    return folder


MODERN = {"family": "modernbert", "num_hidden_layers": 4, "local_attention": 8}
FAMILIES_OF = {
    "modernbert": MODERN,
    "byte level": MODERN,
    "roberta": {"family": "roberta"},
    "xlm-roberta": {"family": "xlm-roberta"},
}


def make_config(sentence_pairs: str = "next_sentence", model: dict[str, Any] | None = None, **data: str) -> RunConfig:
    sizes = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    return tiny_config(
        "runs/one",
        model={**sizes, "max_position_embeddings": 48, **(model or {})},
        data={"sequence_length": 40, "sentence_pairs": sentence_pairs, **data},
        training={"micro_batch_tokens": 40, "global_batch_tokens": 40},
    )


def make_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """Random weights far from the initial ones, biases and norms too, so that a wrong one shows."""
    model = PretrainingModel(config.model, config.all_objectives)
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.2 * torch.randn(parameter.shape, generator=generator) + float("norm.weight" in name)
        for name, parameter in model.named_parameters()
    }


@pytest.fixture(scope="module")
def exported(tokenizer_folder, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("exports") / "nested" / "tiny"
    config = make_config(shards="s3://user:secret@host/shards?token=secret")
    report = export_model(config, make_weights(config), tokenizer_folder, output, FACTS)
    assert report.output == output and report.num_parameters == sum(w.numel() for w in make_weights(config).values())
    return output


def left_behind(output: Path) -> list[Path]:
    return list(output.parent.iterdir()) if output.parent.exists() else []


@pytest.mark.long
def test_the_folder_loads_as_model_masked_model_pretraining_model_and_pipeline(exported, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with quiet_transformers():
        _, info = transformers.BertForPreTraining.from_pretrained(exported, output_loading_info=True)
        assert not any(info.values())
        assert transformers.AutoModel.from_pretrained(exported).config.model_type == "bert"
        assert transformers.AutoModelForMaskedLM.from_pretrained(exported).config.vocab_size == 448
        answers = transformers.pipeline("fill-mask", model=str(exported))("the capital of [MASK] is Paris.")
    assert len(answers) == 5 and all(0 <= answer["score"] <= 1 for answer in answers)


def test_the_tokenizer_that_loads_is_preparations(exported, tokenizer_folder):
    loaded = transformers.AutoTokenizer.from_pretrained(exported)
    text = "the  capital\tof\nFrance"
    expected = Tokenizer.load(tokenizer_folder).encode(" the capital of France").tolist()
    assert loaded(text)["input_ids"] == [2, *expected, 3]
    assert loaded.model_max_length == 40  # the longest rows of the training, not the 48 positions
    assert Tokenizer.load(exported).fingerprint == Tokenizer.load(tokenizer_folder).fingerprint


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        *("modernbert", "wordpiece", "xlm-roberta"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bert", "byte level", "roberta")),
    ],
)
def test_shards_made_with_an_exports_tokenizer_are_sound(kind, tokenizer_folder, small_corpus, tmp_path, command):
    folder, vocab_size = tokenizer_folder, {}
    if kind in WRITERS:
        folder = WRITERS[kind](tmp_path / "foreign", small_corpus.read_text().splitlines(), 600)
        vocab_size = {"vocab_size": 600}
    has_pairs = kind in ("bert", "wordpiece")
    config = make_config(model=vocab_size) if has_pairs else make_config("none", FAMILIES_OF[kind] | vocab_size)
    export_model(config, make_weights(config), folder, tmp_path / "out")
    assert Tokenizer.load(tmp_path / "out").fingerprint == Tokenizer.load(folder).fingerprint
    shards = tmp_path / "shards"
    assert command("shards", "--input", small_corpus, "--tokenizer", tmp_path / "out", "--output", shards) == 0
    assert command("verify", shards) == 0, command.errors
    assert command.output.startswith("ok: ")


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_a_roberta_is_exported_with_unused_positions_and_begins_another_run(
    small_corpus, tokenizer_folder, tmp_path, family
):
    """Also with a tokenizer made here, whose [PAD] is 0: one row is unused then."""
    sizes = {"family": family, "vocab_size": 600}
    config = make_config("none", sizes)
    texts = small_corpus.read_text().splitlines()
    for folder, unused in ((WRITERS[family](tmp_path / family, texts, 600), 2), (tokenizer_folder, 1)):
        output = tmp_path / f"out-{unused}"
        report = export_model(config, make_weights(config), folder, output)
        assert report.parity.num_texts > 40 and report.parity.num_logits > 100 * 600
        values = json.loads((output / "config.json").read_text())
        assert (values["max_position_embeddings"], values["pad_token_id"]) == (48 + unused, unused - 1)
        table = load_file(output / "model.safetensors")["roberta.embeddings.position_embeddings.weight"]
        assert len(table) == 48 + unused and not table[:unused].any()
        with quiet_transformers():
            assert transformers.AutoModel.from_pretrained(output).config.model_type == family
            mask = transformers.AutoTokenizer.from_pretrained(output).mask_token
            guesses = transformers.pipeline("fill-mask", model=str(output))(f"the capital of {mask} is Paris.")
        assert len(guesses) == 5
        begun = PretrainingModel(config.model, config.all_objectives)
        load_initial_weights(begun, "out", lambda output=output: output, ALONE)
        assert all(torch.equal(begun.state_dict()[name], weight) for name, weight in make_weights(config).items())


@pytest.mark.long
@pytest.mark.parametrize("kind", WRITERS)
def test_the_model_card_knows_a_foreign_tokenizer_and_its_mask(kind, small_corpus, tmp_path):
    folder = WRITERS[kind](tmp_path / "foreign", small_corpus.read_text().splitlines(), 600)
    config = make_config("none", FAMILIES_OF.get(kind, {}) | {"vocab_size": 600})
    export_model(config, make_weights(config), folder, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"France is {transformers.AutoTokenizer.from_pretrained(tmp_path / 'out').mask_token}." in card
    assert "SentencePiece" not in card and "tokenizer: that of another checkpoint" in card


def test_the_card_names_a_local_shard_set_without_its_path(tokenizer_folder):
    facts = TrainingFacts(data_digests={"/data/me/text/shards/": "1" * 64, "s3://host/shards": "2" * 64})
    card = model_card("x", make_config(), facts, Tokenizer.load(tokenizer_folder))
    assert f"- shard set `shards`, manifest sha256 `{'1' * 64}`" in card and "/data/me" not in card
    assert f"- shard set `s3://host/shards`, manifest sha256 `{'2' * 64}`" in card


def test_the_description_of_a_source_stays_in_its_cell(tokenizer_folder):
    counts = {"dropped": {}, "documents": 1, "sentences": 1, "tokens": 2, "words": 2, "text_bytes": 9}
    hostile = SourceRecord(
        name="news [2020](http://evil) <script>|", url="https://a.b/c_(d)|e>", license="a|b", **counts
    )
    plain = SourceRecord(name="tales", url="https://a.b/c_(d)", **counts)
    card = model_card("x", make_config(), TrainingFacts(sources=[hostile, plain]), Tokenizer.load(tokenizer_folder))
    assert "| [tales](<https://a.b/c_(d)>) |" in card
    (row,) = (line for line in card.splitlines() if "evil" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 7 and "<" not in row and "](" not in row


def test_a_model_without_pairs_is_exported_without_a_pooler(tokenizer_folder, tmp_path):
    config = make_config("none")
    export_model(config, make_weights(config), tokenizer_folder, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    assert not [name for name in load_file(tmp_path / "out/model.safetensors") if "pooler" in name]


def test_an_uncased_tokenizer_passes_the_gate(tmp_path):
    uncased = {"form": "NFKC", "lowercase": True, "strip_accents": True}
    trained(["A River, a City and a Caf\u00e9."] * 3, tmp_path / "tokenizer", vocab_size=360, normalization=uncased)
    config = make_config()
    export_model(config, make_weights(config), tmp_path / "tokenizer", tmp_path / "out")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("A CAF\u00c9")["input_ids"] == loaded("a cafe")["input_ids"]


@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"local_attention": None, "global_attn_every_n_layers": 1}, {"family": "custom"}]
)
def test_modernbert_is_exported_as_transformers_modernbert(tokenizer_folder, tmp_path, options):
    if options.get("family") == "custom":  # what a custom model computes counts, not what it is called
        options = {**ModernBert.defaults, **options}
    config = make_config("none", {**MODERN, **options})
    report = export_model(config, make_weights(config), tokenizer_folder, tmp_path / "out", FACTS)
    assert report.parity.num_logits > 100 * 448
    with quiet_transformers():
        _, info = transformers.ModernBertForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values())
        assert transformers.AutoModel.from_pretrained(tmp_path / "out").config.model_type == "modernbert"
        answers = transformers.pipeline("fill-mask", model=str(tmp_path / "out"))("the capital of [MASK] is Paris.")
    assert len(answers) == 5
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert set(loaded("the capital")) == {"input_ids", "attention_mask"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "A ModernBERT encoder" in card and "- modernbert\n" in card and "pooler" not in card


@pytest.mark.parametrize(
    "options",
    [
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {**EuroBert.defaults, "family": "custom", "pad_vocab_size_to_multiple_of": 1},
    ],
    ids=["grouped", "tied", "custom"],
)
def test_eurobert_is_exported_as_transformers_eurobert(tokenizer_folder, tmp_path, options):
    config = make_config("none", {"family": "eurobert", **options})
    report = export_model(config, make_weights(config), tokenizer_folder, tmp_path / "out", FACTS)
    assert report.parity.num_logits > 100 * 400
    with quiet_transformers():
        loaded, info = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert type(loaded) is transformers.EuroBertForMaskedLM and not any(info.values())
        words, decoder = loaded.get_input_embeddings().weight, loaded.lm_head.weight
        assert (words is decoder) == config.model.tie_word_embeddings
        assert type(transformers.AutoModel.from_pretrained(tmp_path / "out")) is transformers.EuroBertModel
        answers = transformers.pipeline("fill-mask", model=str(tmp_path / "out"))("the capital of [MASK] is Paris.")
        assert len(answers) == 5
        classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
        assert classifier.classifier_pooling == "late"
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("2 heads (1 of keys and values), " in card) == (config.model.num_key_value_heads == 1)
    assert "A EuroBERT encoder" in card and "- eurobert\n" in card and "pooler" not in card


def test_the_gate_refuses_a_window_of_another_width(tokenizer_folder, tmp_path, monkeypatch):
    config = make_config("none", MODERN)
    write = export.hugging_face_config
    wrongly = {"local_attention": 10}
    monkeypatch.setattr(export, "hugging_face_config", lambda *arguments: write(*arguments) | wrongly)
    with pytest.raises(UserError, check=coded("export-differs")):
        export_model(config, make_weights(config), tokenizer_folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("pairs", "options", "said"),
    [
        ("none", {"norm": "rmsnorm"}, "model.norm=rmsnorm"),
        ("none", {"num_key_value_heads": 1}, r"model.num_key_value_heads=1 \(it has as many"),
        ("none", {"tie_word_embeddings": False}, r"model.tie_word_embeddings=False \(its MLM decoder is the word"),
        ("next_sentence", {**EuroBert.defaults, "type_vocab_size": 2}, "model.type_vocab_size=2"),
        ("next_sentence", {"position_embedding": "sinusoidal"}, "model.position_embedding=sinusoidal"),
        ("none", {"position_embedding": "none"}, r"model.position_embedding=none \(BERT has learned position"),
        ("next_sentence", {**ModernBert.defaults, "type_vocab_size": 2}, "model.type_vocab_size=2"),
    ],
)
def test_a_model_that_transformers_cannot_compute_is_refused_with_the_reason(
    tokenizer_folder, tmp_path, pairs, options, said
):
    config = make_config(pairs, {"family": "custom", **options})
    with pytest.raises(UserError, match=said) as caught:
        export_model(config, make_weights(config), tokenizer_folder, tmp_path / "out")
    assert "fills masks from its own checkpoints" in str(caught.value)
    assert not left_behind(tmp_path / "out")


def test_sentence_transformer_files_ask_for_mean_pooling(exported):
    modules = json.loads((exported / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling"]
    pooling = json.loads((exported / modules[1]["path"] / "config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"] and pooling["word_embedding_dimension"] == 32


def test_the_model_card_reports_sources_tokens_and_scores(exported):
    card = (exported / "README.md").read_text()
    for told in ("| tales | CC-BY-4.0 | en | not stated | 2 | 40 |", "10 of 20", "640", "5.2500", '- "en"'):
        assert told in card
    begun = make_config().model_copy(update={"init_from": "s3://name:secret@host/base"})
    card = model_card("x", begun, FACTS, Tokenizer.load(exported))
    assert "- initial weights: those of s3://host/base; size: layers 0, 1, 1 of 2 become 0 to 2\n" in card
    assert f"- teachers: sha256 `{'1' * 64}`, then of an earlier run, sha256 `{'2' * 64}`\n" in card


@pytest.mark.parametrize(
    ("averaged", "said"),
    [
        ((), "of a causal stage (step 10)"),
        ((5, 10), "of a causal stage (steps 5, 10)"),
        ((10, 15), "a mean over checkpoints of a causal stage (step 10), which predict the next token, and of"),
        ((15, 20), None),
    ],
)
def test_the_model_card_tells_what_weights_of_causal_checkpoints_cannot_do(exported, averaged, said):
    stages = [{"steps": 10, "objectives": [{"name": "causal"}]}, {"steps": 10}]
    training = {"duration": None, "max_steps": None, "stages": stages}
    config = tiny_config(data={"sentence_pairs": "none"}, training=training)
    facts = TrainingFacts(step=max(averaged, default=10), averaged={f"step-{step:08d}": 0.5 for step in averaged})
    card = model_card("x", config, facts, Tokenizer.load(exported))
    assert said in card if said else "causal stage" not in card


def test_provenance_reports_what_was_checked(exported):
    provenance = json.loads((exported / "provenance.json").read_text())
    assert provenance["checkpoint"] == "step-00000010" and provenance["adopted"] == [*FACTS.adopted]
    assert provenance["teacher"] == {"address": None, "sha256": "2" * 64}
    assert provenance["teachers_sha256"] == ["1" * 64, "2" * 64]
    assert provenance["parity"]["num_texts"] > 40 and provenance["parity"]["num_sequences"] > 10
    assert provenance["parity"]["num_logits"] > 100 * 448
    assert provenance["parity"]["max_logit_difference"] < 1e-4 * provenance["parity"]["max_logit"]


def test_no_credentials_of_the_configuration_are_exported(exported):
    written = [path for path in exported.rglob("*") if path.is_file()]
    assert len(written) == 13
    assert not [path for path in written if b"secret" in path.read_bytes()]
    assert "shards: s3://host/shards?token=(hidden)\n" in (exported / "training_config.yaml").read_text()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tokenizer_folder, tmp_path, value):
    config = make_config()
    weights = make_weights(config)
    weights["pooler.dense.weight"][3, 4] = value
    with pytest.raises(UserError, match="pooler.dense.weight"):
        export_model(config, weights, tokenizer_folder, tmp_path / "out")
    assert not left_behind(tmp_path / "out")


def test_weights_of_another_configuration_are_refused(tokenizer_folder, tmp_path):
    weights = make_weights(make_config())
    with pytest.raises(UserError, match="pooler.dense"):
        export_model(make_config("none"), weights, tokenizer_folder, tmp_path / "out")
    del weights["mlm_head.bias"]
    with pytest.raises(UserError, match="mlm_head.bias", check=coded("weights-not-finite", "damaged-checkpoint")):
        export_model(make_config(), weights, tokenizer_folder, tmp_path / "out")


def test_a_tokenizer_with_more_pieces_than_the_model_is_refused(tokenizer_folder, tmp_path):
    config = make_config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 399})})
    with pytest.raises(UserError, match="400 .* 399", check=coded("other-tokenizer")):
        export_model(config, make_weights(config), tokenizer_folder, tmp_path / "out")


def test_the_gate_refuses_logits_that_differ(tokenizer_folder, tmp_path, monkeypatch):
    config = make_config("none")
    convert = export.to_hugging_face

    def convert_wrongly(*given):
        converted = convert(*given)
        prefix = "bert.encoder.layer.1.attention.self"
        converted[f"{prefix}.query.weight"], converted[f"{prefix}.value.weight"] = (
            converted[f"{prefix}.value.weight"],
            converted[f"{prefix}.query.weight"],
        )
        return converted

    monkeypatch.setattr(export, "to_hugging_face", convert_wrongly)
    with pytest.raises(UserError, check=coded("export-differs")):
        export_model(config, make_weights(config), tokenizer_folder, tmp_path / "out")
    assert not left_behind(tmp_path / "out")


def test_the_gate_refuses_weights_that_transformers_does_not_find(tokenizer_folder, tmp_path, monkeypatch):
    config = make_config()
    convert = export.to_hugging_face

    def convert_in_part(*given):
        return {name: weight for name, weight in convert(*given).items() if "pooler" not in name}

    monkeypatch.setattr(export, "to_hugging_face", convert_in_part)
    with pytest.raises(UserError, match="bert.pooler.dense.weight"):
        export_model(config, make_weights(config), tokenizer_folder, tmp_path / "out")
    assert not left_behind(tmp_path / "out")


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor"])
def test_the_gate_refuses_a_tokenizer_that_differs(exported, tokenizer_folder, tmp_path, part):
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    values = json.loads((exported / "tokenizer.json").read_text())
    values[part] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, check=coded("export-differs")):
        parity.check_token_ids(tmp_path, Tokenizer.load(tokenizer_folder))
