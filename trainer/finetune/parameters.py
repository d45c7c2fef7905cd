"""How many parameters a fit trains: counted, beside the closed form for the layouts of BERT and ModernBERT."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedModel


class ParameterRow(NamedTuple):
    """A part of the model; `closed_form` and `formula` are None where the family's layout has none here."""

    part: str
    counted: int
    closed_form: int | None
    formula: str | None


def trainable_parameters(model: PreTrainedModel, frozen: bool) -> list[ParameterRow]:
    """The parts that are trained, and their sum last."""
    encoder = model.base_model
    counts = {"encoder": 0, "pooler": 0, "head": 0}
    for name, parameter in model.named_parameters():
        inside = name.removeprefix(f"{model.base_model_prefix}.")
        part = "head" if inside == name else "pooler" if inside.startswith("pooler.") else "encoder"
        counts[part] += parameter.numel()
    if frozen:
        counts.pop("encoder")
    if getattr(encoder, "pooler", None) is None:
        counts.pop("pooler")
    forms = _FORMS.get(model.config.model_type, _no_forms)(model.config)
    rows = [ParameterRow(part, count, *forms.get(part, (None, None))) for part, count in counts.items()]
    closed = [row.closed_form for row in rows]
    total = sum(number for number in closed if number is not None) if None not in closed else None
    return [
        *rows,
        ParameterRow("total", sum(counts.values()), total, "sum of the above" if total is not None else None),
    ]


def parameter_lines(rows: list[ParameterRow]) -> list[str]:
    """The table for people."""
    lines = [f"{'trained':<10}{'closed form':>14}{'counted':>14}  formula"]
    for row in rows:
        closed = f"{row.closed_form:,}" if row.closed_form is not None else "-"
        formula = row.formula or "(none for this family)"
        lines.append(f"{row.part:<10}{closed:>14}{row.counted:>14,}  {formula}")
    return lines


def letters_line(config: Any) -> str:
    """What the letters of the formulas stand for, with their values."""
    named = {
        "V": ("vocabulary rows", "vocab_size"),
        "P": ("positions", "max_position_embeddings"),
        "T": ("segments", "type_vocab_size"),
        "H": ("hidden size", "hidden_size"),
        "L": ("layers", "num_hidden_layers"),
        "I": ("feed-forward size", "intermediate_size"),
        "C": ("outputs of the head", "num_labels"),
    }
    if config.model_type == "modernbert":  # its positions are rotary, and it tells no segments apart
        named = {letter: each for letter, each in named.items() if letter not in "PT"}
    found = ((letter, name, getattr(config, field, None)) for letter, (name, field) in named.items())
    return "; ".join(f"{letter} = {value:,} {name}" for letter, name, value in found if value is not None)


def _no_forms(config: Any) -> dict[str, tuple[int, str]]:
    return {}


def _bert_forms(config: Any) -> dict[str, tuple[int, str]]:
    hidden, inner, labels = config.hidden_size, config.intermediate_size, config.num_labels
    rows = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    layer = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
    return {
        "encoder": (
            rows * hidden + 2 * hidden + config.num_hidden_layers * layer,
            "(V + P + T + 2) * H + L * (4 * H**2 + 2 * H * I + 9 * H + I)",
        ),
        "pooler": (hidden * hidden + hidden, "H**2 + H"),
        "head": (hidden * labels + labels, "H * C + C"),
    }


def _modernbert_forms(config: Any) -> dict[str, tuple[int, str]]:
    """Without biases, as ModernBERT was published; its first layer has no norm before its attention."""
    if config.attention_bias or config.mlp_bias or config.norm_bias or config.classifier_bias:
        return {}
    hidden, inner, labels = config.hidden_size, config.intermediate_size, config.num_labels
    layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    return {
        "encoder": (
            config.vocab_size * hidden + hidden + config.num_hidden_layers * layer,
            "V * H + H + L * (4 * H**2 + 3 * H * I + 2 * H)",
        ),
        "head": (hidden * hidden + hidden + hidden * labels + labels, "H**2 + H + H * C + C"),
    }


_FORMS = {"bert": _bert_forms, "modernbert": _modernbert_forms}
