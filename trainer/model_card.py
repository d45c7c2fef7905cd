"""The model card of an export: what the model is, what it saw, how well it did, what it is for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from data_prep.manifest import SourceRecord
from trainer.config import RunConfig
from trainer.model.sizes import num_parameters


@dataclass(frozen=True)
class TrainingFacts:
    """What is known of the training behind the weights; what is not stays empty and the card says so."""

    checkpoint: str | None = None
    """Name of the checkpoint folder."""
    step: int | None = None
    tokens_seen: int | None = None
    mlflow_run_id: str | None = None
    data_digests: Mapping[str, str] = field(default_factory=dict)
    """Shard set (URL without credentials) to manifest digest."""
    sources: Sequence[SourceRecord] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    """Metrics on the valid shards by name."""


def model_card(name: str, config: RunConfig, facts: TrainingFacts, tokenizer_fingerprint: str) -> str:
    """The README.md of the exported folder, with the metadata that model hubs read on top."""
    next_sentence = config.data.sentence_pairs == "next_sentence"
    return "\n\n".join(
        [
            _metadata(facts),
            f"# {name}",
            _description(config, next_sentence),
            "## Use\n\n" + _use(name, config, next_sentence),
            "## Training\n\n" + _training(config, facts, tokenizer_fingerprint),
            "## Data\n\n" + _data(facts),
            "## Evaluation\n\n" + _evaluation(facts),
            "## Intended use and limits\n\n" + _limits(config),
        ]
    )


def languages(facts: TrainingFacts) -> list[str]:
    """The languages of the sources, each once, in order of tokens."""
    by_tokens = sorted(facts.sources, key=lambda source: -source.tokens)
    return list(dict.fromkeys(source.language for source in by_tokens if source.language))


def _metadata(facts: TrainingFacts) -> str:
    lines = ["---", "library_name: transformers", "pipeline_tag: fill-mask"]
    if languages(facts):
        lines += ["language:", *(f"- {json.dumps(language)}" for language in languages(facts))]
    return "\n".join([*lines, "tags:", "- bert", "- clozeworks", "---"])


def _description(config: RunConfig, next_sentence: bool) -> str:
    model = config.model
    tasks = "masked language modelling" + (" and next-sentence prediction" if next_sentence else "")
    return (
        f"A BERT encoder pretrained with clozeworks by {tasks}: {model.num_hidden_layers} layers, hidden "
        f"size {model.hidden_size}, {model.num_attention_heads} heads, feed-forward size "
        f"{model.intermediate_size}, trained on rows of up to {config.longest_sequence} places, "
        f"{num_parameters(model, next_sentence):,} parameters."
    )


def _use(name: str, config: RunConfig, next_sentence: bool) -> str:
    pooler = (
        "The pooler and the next-sentence head are trained; load them with `BertForPreTraining`."
        if next_sentence
        else "There was no next-sentence task, so there is no trained pooler: transformers makes a random one "
        "and warns; use the hidden states."
    )
    rows = config.model.padded_vocab_size
    padding = (
        f" `vocab_size` is {rows:,}: rows beyond the tokenizer's pieces only fill up the matrix and are "
        "never predicted by a trained model."
    )
    return (
        "```python\nfrom transformers import pipeline\n\n"
        f'pipeline("fill-mask", model={json.dumps(name)})("The capital of France is [MASK].")\n```\n\n'
        f"`AutoModel`, `AutoModelForMaskedLM` and `SentenceTransformer` (mean pooling) load the folder too. "
        f"{pooler}{padding}"
    )


def _training(config: RunConfig, facts: TrainingFacts, tokenizer_fingerprint: str) -> str:
    rows = [
        ("optimizer steps", f"{facts.step:,} of {config.max_steps:,}" if facts.step is not None else None),
        ("tokens seen", f"{facts.tokens_seen:,}" if facts.tokens_seen is not None else None),
        (
            "sequence lengths",
            ", ".join(str(length) for length in dict.fromkeys(p.sequence_length for p in config.phases)),
        ),
        ("share of tokens predicted", f"{config.data.mlm_probability:g}"),
        ("peak learning rate", f"{config.optimizer.learning_rate:g} ({config.schedule.name})"),
        ("precision", config.training.precision),
        ("tokenizer", f"SentencePiece BPE, fingerprint `{tokenizer_fingerprint}`"),
        ("MLflow run", f"`{facts.mlflow_run_id}`" if facts.mlflow_run_id else None),
    ]
    lines = [f"- {label}: {value if value is not None else 'not recorded'}" for label, value in rows]
    return "\n".join([*lines, "", "The whole configuration is in `training_config.yaml`, checks in `provenance.json`."])


def _data(facts: TrainingFacts) -> str:
    lines = [f"- shard set `{url}`, manifest sha256 `{digest}`" for url, digest in facts.data_digests.items()]
    if not facts.sources:
        return "\n".join([*lines, "- the sources and their licences were not available when this was exported"])
    table = ["", "| source | licence | language | date | documents | tokens |", "|---|---|---|---|---|---|"]
    for source in facts.sources:
        linked = f"[{_cell(source.name)}]({source.url})" if source.url else _cell(source.name)
        stated = (_cell(value or "not stated") for value in (source.licence, source.language, source.date))
        table.append(f"| {linked} | {' | '.join(stated)} | {source.documents:,} | {source.tokens:,} |")
    return "\n".join([*lines, *table]).strip()


def _evaluation(facts: TrainingFacts) -> str:
    if not facts.scores:
        return "No scores were recorded with this checkpoint."
    lines = [f"- {name}: {value:.4f}" for name, value in sorted(facts.scores.items())]
    return "On held-out documents of the same data:\n\n" + "\n".join(lines)


def _limits(config: RunConfig) -> str:
    return (
        "For fill-mask, sentence embeddings after fine-tuning, and as the start of fine-tuning on tasks over text. "
        "It generates no text, and was not evaluated for any use that affects people. It reflects its training "
        f"text, with its errors and biases; languages and subjects not in it are out of reach. Text beyond "
        f"{config.longest_sequence} tokens has to be cut."
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
