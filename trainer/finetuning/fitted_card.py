"""The origin of a fitted model, and its model card: scores, code that loads it without this project, and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from trainer.finetuning.task_data import make_task
from trainer.finetuning.tasks import TaskName
from trainer.inference.preprocessor import SHORTEST

_SHOWN_NAMES = 30


@dataclass(frozen=True)
class FitFacts:
    """Origin of a fitted model; finetune.json."""

    task: TaskName
    base_model: str
    """As the user named it: models:/NAME@ALIAS or a folder's name."""
    variant: str
    text_column: str
    pair_column: str | None
    label_column: str
    max_length: Annotated[int, Field(ge=SHORTEST)]
    learning_rate: float
    seed: int
    best_epoch: int
    num_examples: dict[str, int]
    valid_scores: dict[str, float]
    scores: dict[str, float]
    scored_on: str
    train_sha256: str
    scored_sha256: str | None = None
    """Digest of the examples that `scores` were measured on, by `Files.examples_sha256`."""
    quoting: bool = True
    """Whether quotation marks in the tables enclose cells."""
    baseline: str = ""
    """What the yardstick of the scores predicts."""
    baseline_scores: dict[str, float] = field(default_factory=dict)
    pooling: str | None = None
    """For embedding: `mean` or `cls`."""
    matryoshka: list[int] = field(default_factory=list)
    """For embedding: sizes to which vectors may be cut."""


def fitted_card(facts: FitFacts, names: Sequence[str]) -> str:
    """Return the card as Markdown; `names` are the labels."""
    base = facts.base_model.removeprefix("models:/").removeprefix("runs:/")
    task = facts.task.replace("_", " ")
    tag = {name: name.replace("_", "-") for name in ("token_classification", "question_answering")}
    tag["embedding"] = "sentence-similarity"
    library = "sentence-transformers" if facts.task == "embedding" else "transformers"
    long = make_task(facts.task).of_long_texts
    beside = {metric: f" ({facts.baseline}: {value:.4g})" for metric, value in facts.baseline_scores.items()}
    scores = "\n".join(
        f"- {metric} on {facts.scored_on}: {value:.4g}{beside.get(metric, '')}"
        for metric, value in facts.scores.items()
    )
    counts = ", ".join(f"{count:,} {part}" for part, count in facts.num_examples.items())
    how = f"learning rate {facts.learning_rate:g}, seed {facts.seed}, epoch {facts.best_epoch}"
    title = f"{base}, fine-tuned for {task}"
    origin = f"`{facts.base_model}`, fine-tuned for {task} with clozeworks ({facts.variant}, {how})."
    if facts.variant == "scratch":
        title = f"{task}, trained from random weights"
        origin = (
            f"Trained for {task} from random weights with clozeworks (scratch, {how}). It has the architecture and the "
            f"tokenizer of `{facts.base_model}`, but nothing that this encoder learned in pretraining."
        )
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: {tag.get(facts.task, 'text-classification')}\n"
        f"tags:\n- clozeworks\n---\n\n# {title}\n\n{origin}\n\n"
        f"## Scores\n\n{scores}\n\nExamples: {counts}. Texts longer than {facts.max_length} tokens: {long}.\n\n"
        f"## Use\n\n{_use(facts)}\n\n"
        f"## Answers and limits\n\n{_limits(facts, names)}\n\n"
        "The model knows only the task and language of its training examples, and repeats their errors and biases. "
        "`provenance.json` has its origin, `finetune.json` how it was fine-tuned.\n"
    )


_ANSWERS = {
    "classification": "A text has exactly one class",
    "multilabel_classification": "A text has each class whose probability is at least 0.5, perhaps none",
    "pair_classification": "A pair of texts has exactly one class",
    "regression": "The answer is a number in the unit of the training labels; nothing keeps it within their range",
    "token_classification": (
        "Every word has one tag; words are what white space separates, so text of a language without spaces must be "
        'split into words first, as in the training data. `pipeline("token-classification", aggregation_strategy='
        '"first")` joins tags to entities if lines are joined by spaces first; words that are cut off have no tag'
    ),
    "question_answering": (
        "The answer is always a span of the context, also where the context has no answer to the question"
    ),
    "embedding": (
        "A text has one vector, which ranks other texts by cosine; its length is not 1. Cosines are not "
        "probabilities, and unrelated texts may have a cosine far above 0"
    ),
}

_LOADED = 'from transformers import pipeline\n\nfolder = "."  # this directory, or its name on the Hub\n'
_PIPELINES = {
    "classification": ('pipeline("text-classification", folder)', '"A text to classify."'),
    "multilabel_classification": ('pipeline("text-classification", folder, top_k=None)', '"A text to classify."'),
    "pair_classification": ('pipeline("text-classification", folder)', ""),
    "regression": ('pipeline("text-classification", folder, function_to_apply="none")', '"A text to rate."'),
    "token_classification": (
        'pipeline("token-classification", folder, aggregation_strategy="first")',
        '"Anna Smith lives in a town"',
    ),
}
_PAIR = '{"text": "The first text.", "text_pair": "The second text."}'
_ANSWERING = """import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

folder = "."  # this directory, or its name on the Hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForQuestionAnswering.from_pretrained(folder)
question, context = "Who came home?", "Anna came home in the evening."
inputs = tokenizer(question, context, return_tensors="pt")
with torch.no_grad():
    outputs = model(**inputs)
outside = torch.tensor([part != 1 for part in inputs.sequence_ids()])  # not of the context
starts, ends = (each[0].masked_fill(outside, -torch.inf) for each in (outputs.start_logits, outputs.end_logits))
first = int(starts.argmax())
last = first + int(ends[first:].argmax())
print(context[inputs.token_to_chars(first).start : inputs.token_to_chars(last).end].strip())
"""
_VECTORS = """from sentence_transformers import SentenceTransformer

folder = "."  # this directory, or its name on the Hub
model = SentenceTransformer(folder)
vectors = model.encode(["A text.", "Another text."])
print(model.similarity(vectors, vectors))
"""


def _use(facts: FitFacts) -> str:
    """Return code that runs in the folder, with transformers or sentence-transformers alone."""
    code = {"question_answering": _ANSWERING, "embedding": _VECTORS}.get(facts.task)
    if code is None:
        load, example = _PIPELINES[facts.task]
        example = _PAIR if facts.pair_column is not None else example
        code = f"{_LOADED}model = {load}\nprint(model({example}))\n"
    return f"```python\n{code}```"


def _limits(facts: FitFacts, names: Sequence[str]) -> str:
    """Return what the answers mean: their kind, their labels, their scores."""
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN_NAMES])
    more = f" and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else ""
    meaning = f" Labels: {shown}{more}, as in column `{facts.label_column}` of the training data."
    if facts.task == "embedding":
        sizes = ", ".join(f"{size:,}" for size in facts.matryoshka)
        cut = f" The first {sizes} numbers of a vector are a vector too." if sizes else ""
        return f"{_ANSWERS[facts.task]}.{cut} `SentenceTransformer(folder)` computes it ({facts.pooling} pooling)."
    scores = " Scores are the model's probabilities as they are; they are not calibrated."
    return f"{_ANSWERS[facts.task]}.{meaning if names else ''}{'' if facts.task == 'regression' else scores}"
