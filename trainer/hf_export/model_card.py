"""The model card of an export: architecture, training, data, scores and intended use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from data_prep.dataset.data_card import escaped
from data_prep.dataset.manifest_records import SourceRecord
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.checkpoint.format import step_of
from trainer.config.families.family import PublishedFamily
from trainer.config.objective_settings import published, sentence_pairs_of
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.model.hugging_face import family_in_transformers
from trainer.objectives.pretraining import num_parameters

_TASKS = {
    "masked_lm": "masked language modeling",
    "causal": "causal language modeling",
    "sentence_pairs": "next-sentence prediction",
    "next_sentence": "next-sentence prediction",
    "sentence_order": "sentence-order prediction",
    "distillation": "distillation of a teacher's predictions",
    "hidden_states": "distillation of a teacher's hidden states",
}
_TOKENIZERS = {"sentencepiece": "SentencePiece BPE", "hugging_face": "that of another checkpoint (`tokenizer.json`)"}
_PLAIN_URL = re.compile(r"https?://[\w.~:/?#@!$&'()*+,;=%-]+", re.ASCII)  # nothing that ends <...> or a cell


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about the training of the weights; the card reports missing facts as not recorded."""

    checkpoint: str | None = None
    """Name of the checkpoint folder."""
    step: int | None = None
    tokens_seen: int | None = None
    mlflow_run_id: str | None = None
    git_revision: str | None = None
    """Revision of the code that trained the weights."""
    data_lineage: Sequence[str] = ()
    """Manifest digests of all data that the weights saw, also before a change of data and of the model in `init_from`,
    and of the earlier versions of this data, as far back as they are known."""
    data_digests: Mapping[str, str] = field(default_factory=dict)
    """Manifest digests by shard set (URL without credentials)."""
    sources: Sequence[SourceRecord] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    """Metrics on the valid shards by name."""
    evaluation: Mapping[str, str] = field(default_factory=dict)
    """How the scores were measured, as facts by name (`trainer/config/comparability.py`)."""
    adopted: Sequence[str] = ()
    """How the initial weights were made of those of `init_from`; empty where nothing was adopted."""
    teachers: Sequence[str] = ()
    """sha256 over config.json and weights of every teacher, in order; the last is that of the configuration."""
    averaged: Mapping[str, float] = field(default_factory=dict)
    """Coefficients of an averaged model by checkpoint name; empty for the weights of one checkpoint."""


def model_card(name: str, config: RunConfig, facts: TrainingFacts, tokenizer: Tokenizer) -> str:
    """Return the README.md of the exported folder; it begins with the metadata that model hubs read."""
    has_pairs = config.has_pair_head
    return "\n\n".join(
        [
            _metadata(config, facts),
            f"# {name}",
            _description(config, has_pairs),
            "## Use\n\n" + _use(name, config, has_pairs, tokenizer),
            "## Training\n\n" + _training(config, facts, tokenizer),
            "## Data\n\n" + _data(facts),
            "## Evaluation\n\n" + _evaluation(facts),
            "## Intended use and limits\n\n" + _limits(config, facts),
        ]
    )


def languages(facts: TrainingFacts) -> list[str]:
    """Return the languages of the sources, each once, from most to fewest tokens."""
    by_tokens = sorted(facts.sources, key=lambda source: -source.tokens)
    return list(dict.fromkeys(source.language for source in by_tokens if source.language))


def _metadata(config: RunConfig, facts: TrainingFacts) -> str:
    lines = ["---", "library_name: transformers", "pipeline_tag: fill-mask"]
    if languages(facts):
        lines += ["language:", *(f"- {json.dumps(language)}" for language in languages(facts))]
    return "\n".join([*lines, "tags:", f"- {_family(config).name}", "- clozeworks", "---"])


def _description(config: RunConfig, has_pairs: bool) -> str:
    model = config.model
    own = [f"`{each.name}`" for each in config.all_objectives if each.is_own]
    left_out = f" The heads of {', '.join(own)} are not part of this directory." if own else ""
    heads = f"{model.num_attention_heads} heads"
    if model.key_value_heads < model.num_attention_heads:
        heads += f" ({model.key_value_heads} of keys and values)"
    tasks = " and ".join(_TASKS.get(each.task or each.name, f"`{each.name}`") for each in config.all_objectives)
    return (
        f"A {_family(config).title} encoder pretrained with clozeworks by {tasks}: "
        f"{model.num_hidden_layers} layers, hidden size {model.hidden_size}, {heads}, "
        f"feed-forward size {model.intermediate_size}, trained on sequences of up to {config.longest_sequence} tokens, "
        f"{num_parameters(model, published(config.all_objectives)):,} parameters.{left_out}"
    )


def _use(name: str, config: RunConfig, has_pairs: bool, tokenizer: Tokenizer) -> str:
    pairs_class = _family(config).pairs_class
    heads = _pairs_head(config, has_pairs, pairs_class) if pairs_class is not None else ""
    rows = config.model.padded_vocab_size
    text = f"The capital of France is {tokenizer.vocabulary[tokenizer.info.special_tokens.mask].text}."
    padding = (
        f" `vocab_size` is {rows:,}: rows beyond the tokenizer's vocabulary are padding, "
        "which a trained model never predicts."
    )
    return (
        "```python\nfrom transformers import pipeline\n\n"
        f'pipeline("fill-mask", model={json.dumps(name)})({json.dumps(text)})\n```\n\n'
        f"`AutoModel`, `AutoModelForMaskedLM` and `SentenceTransformer` (mean pooling) load this directory too."
        f"{heads}{padding}"
    )


def _pairs_head(config: RunConfig, has_pairs: bool, pairs_class: str) -> str:
    return (
        f" The pooler and the head for {_TASKS[sentence_pairs_of(config.all_objectives)]} are trained; load them with "
        f"`{pairs_class}` (label 0: B follows A)."
        if has_pairs
        else " It was not trained on sentence pairs, so it has no trained pooler: transformers initializes a random "
        "one and warns. Use the hidden states."
    )


def _training(config: RunConfig, facts: TrainingFacts, tokenizer: Tokenizer) -> str:
    averaged = ", ".join(f"{name} ({share:.4f})" for name, share in facts.averaged.items())
    adopted = "; ".join([f"those of {escaped(storage.redact(str(config.init_from)))}", *facts.adopted])
    address = escaped(storage.redact(config.teacher or "of an earlier run"))
    *before, taught = [f"sha256 `{each}`" for each in facts.teachers] or [""]
    taught = ", then ".join([*before, f"{address}, {taught}"])
    rows = [
        ("optimizer steps", f"{facts.step:,} of {config.max_steps:,}" if facts.step is not None else None),
        ("tokens seen", f"{facts.tokens_seen:,}" if facts.tokens_seen is not None else None),
        ("sequence lengths", _each(str(stage.sequence_length) for stage in config.stages)),
        ("masking rate", _each(_masking_rate(stage) for stage in config.stages)),
        ("peak learning rate", _each(f"{s.peak_learning_rate:g} ({s.schedule.name})" for s in config.stages)),
        ("precision", config.training.precision),
        ("tokenizer", f"{_TOKENIZERS[tokenizer.info.kind]}, fingerprint `{tokenizer.fingerprint}`"),
        *([("mean of checkpoints", averaged)] if averaged else []),
        *([("initial weights", adopted)] if facts.adopted else []),
        *([("teachers" if before else "teacher", taught)] if facts.teachers else []),
        ("MLflow run", f"`{facts.mlflow_run_id}`" if facts.mlflow_run_id else None),
        ("source code", f"git `{facts.git_revision}`" if facts.git_revision else None),
    ]
    lines = [f"- {label}: {value if value is not None else 'not recorded'}" for label, value in rows]
    files = "`training_config.yaml` has the full configuration, `provenance.json` the results of the export checks."
    return "\n".join([*lines, "", files])


def _data(facts: TrainingFacts) -> str:
    lines = [f"- shard set `{_shown(url)}`, manifest sha256 `{digest}`" for url, digest in facts.data_digests.items()]
    known = ", ".join(languages(facts))
    lines.insert(0, f"- languages, by tokens: {known or 'not stated'}")
    if not facts.sources:
        return "\n".join([*lines, "- the sources and their licenses were not available at export"])
    table = ["", "| source | license | language | date | documents | tokens |", "|---|---|---|---|---|---|"]
    for source in facts.sources:
        linked = _linked(source.name, source.url)
        stated = (escaped(value or "not stated") for value in (source.license, source.language, source.date))
        table.append(f"| {linked} | {' | '.join(stated)} | {source.documents:,} | {source.tokens:,} |")
    return "\n".join([*lines, *table]).strip()


def _shown(url: str) -> str:
    """Return a URL, or the name of a local folder: its path means nothing to readers of the card."""
    return url if "://" in url else url.rstrip("/").rpartition("/")[2] or url


def _evaluation(facts: TrainingFacts) -> str:
    if not facts.scores:
        return "No scores were recorded with this checkpoint."
    lines = [f"- {name}: {value:.4f}" for name, value in sorted(facts.scores.items())]
    measured = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.evaluation.items())
    ending = f"\n\nMeasured with: {measured}." if measured else ""
    return "On held-out documents of the same data:\n\n" + "\n".join(lines) + ending


def _limits(config: RunConfig, facts: TrainingFacts) -> str:
    return _causal_limit(config, facts) + (
        "Intended for fill-mask, for fine-tuning on tasks over text, and for sentence embeddings after fine-tuning. "
        "The model does not generate text, and it was not evaluated for any use that affects people. It reflects its "
        "training text with its errors and biases, and does not know languages and subjects outside it. Truncate text "
        f"to {config.longest_sequence} tokens."
    )


def _causal_limit(config: RunConfig, facts: TrainingFacts) -> str:
    """Return what weights of a causal stage, or a mean with such weights, cannot do; empty for others."""
    averaged = [step for name in facts.averaged if (step := step_of(name)) is not None]
    steps = averaged or [step for step in (facts.step,) if step is not None]
    causal = [step for step in steps if config.stage_of(step).is_causal]
    if not causal:
        return ""
    listed = f"step{'s' if len(causal) > 1 else ''} {', '.join(f'{step:,}' for step in causal)}"
    if len(causal) < len(steps):
        return (
            f"These weights are a mean over checkpoints of a causal stage ({listed}), which predict the next token, "
            "and of a stage with masks. Such a mean may do neither well. "
        )
    return (
        f"These weights are of a causal stage ({listed}): they predict the next token, and fill masks only after "
        "training with masks. "
    )


def _family(config: RunConfig) -> PublishedFamily:
    return family_in_transformers(config.model, config.has_pair_head)


def _linked(name: str, url: str | None) -> str:
    """Return the name as a link if its URL is safe in Markdown; any other URL follows the name as text."""
    if not url:
        return escaped(name)
    return f"[{escaped(name)}](<{url}>)" if _PLAIN_URL.fullmatch(url) else f"{escaped(name)}: {escaped(url)}"


def _each(values: Iterable[str]) -> str:
    """List the values of the stages in order, each once."""
    return ", ".join(dict.fromkeys(values))


def _masking_rate(stage: Stage) -> str:
    if stage.is_causal:
        return "none (causal)"
    data = stage.data
    rate = data.law.describe() + (", loss weighted as a bound" if data.loss_weight == "elbo" else "")
    units = {"token": "", "word": ", whole words", "span": f", spans of {data.mean_span_words:g} words on average"}
    return rate + (units[data.mask_unit] if data.masking is None else f", masked by {data.masking}")
