"""Judge whether a sentence follows another, with a model pretrained on pairs (Devlin et al. 2018, section 3.1).

Label 0 means that the text has the pair so: B is next, or (sentence-order prediction, Lan et al. 2019, section 3.1)
A and B are in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from data_prep.base.errors import UsageError
from data_prep.base.yaml_values import read_yaml
from trainer.inference.preprocessor import Preprocessor, load_text_tokenizer, max_length
from trainer.model.pretrained import load_config, load_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LABELS = {"next_sentence": ("IsNext", "NotNext"), "sentence_order": ("InOrder", "Swapped")}
CONFIG_FILE = "training_config.yaml"


class PairPrediction(NamedTuple):
    """The label that the model predicts for a pair, and its probability."""

    label: str
    probability: float


class NextSentence:
    """A model with a head for sentence pairs, and its tokenizer."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        labels: tuple[str, str] = LABELS["next_sentence"],
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._preprocessor = Preprocessor(tokenizer, max_length(model.config, tokenizer), has_token_types=True)
        self.labels = labels

    @classmethod
    def load(cls, folder: Path, name: str | None = None) -> NextSentence:
        """Load a Hugging Face folder; errors about a missing head call the folder `name`, by default its path."""
        remedy = (
            "give a model that was pretrained with data.sentence_pairs, or fine-tune this one on labeled pairs with "
            "`clozeworks finetune`"
        )
        config = load_config(folder)
        from transformers.models.auto.modeling_auto import MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING as WITH_HEAD

        if type(config) not in WITH_HEAD:
            raise UsageError(
                f"{name or folder} is a {config.model_type} model, a family without a head for sentence pairs",
                fix=remedy,
                code="no-pair-head",
            )
        model, missing = load_pretrained("AutoModelForNextSentencePrediction", folder, "a next-sentence model")
        untrained = sorted(name for name in missing if "seq_relationship" in name or "pooler" in name)
        if untrained:
            raise UsageError(
                f"{name or folder} has no head for sentence pairs ({', '.join(untrained)} missing)",
                fix=remedy,
                code="no-pair-head",
            )
        return cls(model, load_text_tokenizer(folder), LABELS[pair_task(folder)])

    def predict(self, first: str, second: str) -> PairPrediction:
        """Judge a pair; of a pair that exceeds the maximum length the longer text is truncated first."""
        if not first.strip() or not second.strip():
            raise UsageError("one text of the pair is empty", fix="give two sentences", code="empty-text")
        batch = self._preprocessor.collate(self._preprocessor.rows([first], [second])[0])
        with torch.inference_mode():
            probabilities = self.model(**batch).logits[0].softmax(dim=-1).tolist()  # (2,)
        best = int(probabilities[1] > probabilities[0])
        return PairPrediction(self.labels[best], probabilities[best])


def pair_task(folder: Path) -> str:
    """Return the kind of pairs that the model was pretrained on; `next_sentence` without a configuration of ours."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return "next_sentence"
    data = read_yaml(path).get("data", {})
    task = data.get("sentence_pairs", "next_sentence") if isinstance(data, dict) else "next_sentence"
    return task if task in LABELS else "next_sentence"
