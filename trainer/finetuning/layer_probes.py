"""Linear probes: how much of a label each layer of a frozen encoder holds (Alain and Bengio 2017).

One pass of the encoder stores the features of every layer: for a text the mean of its hidden states, for a pair the
means u and v of both texts with |u - v| and u * v (Conneau et al. 2017), for a tag the hidden state of the word's first
token. On standardized features of a layer a logistic regression is fitted (a ridge regression for numbers), for each
seed on nine tenths of the training examples; the valid score selects its regularization.

The control of Hewitt and Liang 2019 is the same probe for labels without meaning: each text, pair or word (the same one
always) has the label of a random training example. What a probe learns of the control, it memorized.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted, duration
from data_prep.storage import storage
from data_prep.text.cleaning import replace_surrogates
from trainer.data.minimal_pairs import read_minimal_pairs, subject_number
from trainer.finetuning.examples import Columns, Examples, read_examples, text_of
from trainer.finetuning.finetune_settings import ALL_LAYERS, FinetuneSettings
from trainer.finetuning.fit import sign_of
from trainer.finetuning.frozen import check_memory, layer_states, store_layers
from trainer.finetuning.regression_task import RegressionTask
from trainer.finetuning.scores import figure, figure_of_seeds
from trainer.finetuning.task_data import Part, TaskData, data_lines, divide, encode_task, read_task
from trainer.finetuning.tasks import ClassificationTask, ExamplePrediction, Task, TokenTask, choosing_metric
from trainer.inference.preprocessor import Preprocessor, row_length
from trainer.inference.pulled_model import hugging_face_folder
from trainer.model.pretrained import load_pretrained, refuse_random_weights
from trainer.model.quiet_transformers import quiet_transformers
from trainer.tracking.figures import Curve, draw_layers

PENALTIES = (1.0, 0.1, 0.01, 0.001, 0.0001)
"""Regularization: the factor of half the squared weights beside the mean loss of an example; strongest first."""
TRAIN_SHARE = 0.9
"""Share of the training examples that the probes of a seed are fitted on."""
NUM_LENGTH_CLASSES = 6
MOST_ITERATIONS = 500
LARGEST_HESSIAN = 1024
"""Features up to which a probe of two classes is fitted by Newton's method: a few steps where L-BFGS takes hundreds."""
EMBEDDINGS = "0"


@dataclass(frozen=True)
class Units:
    """What the probes label in a part: its texts, its pairs, or its words that were not truncated."""

    spans: list[list[list[int]]]
    """For each row the positions of its vectors."""
    places: list[tuple[int, int]]
    """For each unit the example, and the word in it (0 for a text or a pair)."""


@dataclass(frozen=True)
class ProbePlan:
    """Model, data and settings of all probes."""

    settings: FinetuneSettings
    model: Any
    data: TaskData
    metric: str
    """The metric whose value on valid selects the regularization."""
    layers: tuple[str, ...]
    """Names of the layers: "0" for the embeddings, "1" for the first layer, perhaps `norm`."""
    units: dict[str, Units]


class Probe(NamedTuple):
    """The probe of one layer and seed, with the regularization that the valid score selected."""

    seed: int
    penalty: float
    valid_score: float
    scores: dict[str, float]
    control: float
    """Score of the same probe for the control's labels."""
    converged: bool


@dataclass(frozen=True)
class ProbeResult:
    """Probes of every layer by its name, one per seed, and the score of the yardstick, which reads no text."""

    metric: str
    probes: dict[str, tuple[Probe, ...]]
    baseline: dict[str, float]


def prepare_probes(settings: FinetuneSettings, log: Callable[[str], None]) -> ProbePlan:
    """Read the data, load the encoder, find its layers, and log a description of the data and the features.

    Raises:
        UserError: files, columns or model do not fit, the model lacks the layer, or the features exceed the memory.
    """
    encoder = hugging_face_folder(settings.model, settings.tracking_uri)
    preprocessor = Preprocessor.load(encoder).limited(settings.max_length)
    task, examples = read_probe_task(settings, preprocessor)
    usual = "accuracy" if "accuracy" in task.metrics else None
    metric = choosing_metric(task, settings.metric or usual)
    data = encode_task(task, examples, preprocessor)
    log("\n".join(data_lines(data)))
    model = _load_encoder(encoder)
    layers = _chosen(settings.layer or ALL_LAYERS, _layer_names(model, data))
    units = {name: _units(data, part) for name, part in data.parts.items()}
    plan = ProbePlan(settings, model, data, metric, layers, units)
    num_vectors = {name: sum(map(len, some.spans)) for name, some in units.items()}
    # A probe works on copies of one layer: standardized, as the seed draws it, and in the order of a pair's features.
    copies = 8 if task.needs_pair or examples["train"].pairs is not None else 3
    check_memory(sum(num_vectors.values()) * (len(layers) + copies), model.config.hidden_size, "give fewer examples")
    log(
        f"{counted(sum(num_vectors.values()), 'vector')} of {model.config.hidden_size:,} numbers in each of "
        f"{counted(len(layers), 'layer')}"
    )
    return plan


def read_probe_task(settings: FinetuneSettings, preprocessor: Preprocessor) -> tuple[Task, dict[str, Examples]]:
    """Return the task and its parts; `length` and `subject_number` make their labels.

    `length` has classes of about equally many training texts by their number of tokens, special tokens included and as
    truncated. The labels of `subject_number` are those of `trainer.data.minimal_pairs.subject_number`.
    """
    files, columns = settings.files, settings.columns
    if settings.task == "length":
        read = {
            part: read_examples(
                path, Columns(columns.text, None, ""), text_of, None, files.quoting, skip_bad=files.skip_bad
            )
            for part, path in files.given.items()
        }
        lengths = {part: [row_length(row) for row in preprocessor.rows(some.texts)[0]] for part, some in read.items()}
        classes = length_classes(lengths["train"])
        examples = {part: replace(some, labels=[*map(classes, lengths[part])]) for part, some in read.items()}
        return divide(ClassificationTask(), examples, files, "length", settings.split_seed)
    if settings.task == "subject_number":
        examples = {part: _numbered(path) for part, path in files.given.items()}
        return divide(ClassificationTask(), examples, files, "number", settings.split_seed)
    return read_task(settings.task, files, columns, settings.split_seed)


def length_classes(lengths: Sequence[int]) -> Callable[[int], str]:
    """Return a function of a length that returns its class, such as "8 to 10"; each has about as many of `lengths`."""
    ordered = sorted(lengths)
    cuts = {ordered[number * len(ordered) // NUM_LENGTH_CLASSES] for number in range(1, NUM_LENGTH_CLASSES)}
    firsts = sorted(cuts - {ordered[0]})  # the first length of every class but the lowest
    bounds = [min(lengths), *firsts, max(lengths) + 1]
    spans = [(first, stop - 1) for first, stop in zip(bounds, bounds[1:], strict=False)]
    names = [f"{first} to {last}" if last > first else str(first) for first, last in spans]
    return lambda length: names[int(np.searchsorted(firsts, length, side="right"))]


def run_probes(plan: ProbePlan, log: Callable[[str], None]) -> ProbeResult:
    """Store the features, fit the probes, log a table, and write `probes.json` and `probes.png` into the output.

    Raises:
        UserError: the output cannot be written.
    """
    settings, data, output = plan.settings, plan.data, Path(plan.settings.output)
    started_at = time.perf_counter()
    features = _store(plan)
    log(f"features stored in {duration(time.perf_counter() - started_at)}\n")
    baseline = data.reported_baseline
    fewest = f"; mean ± standard deviation over {settings.seeds} seeds" if settings.seeds > 1 else ""
    fewest += f"; each fitted on {TRAIN_SHARE:.0%} of the training examples"
    log(f"{plan.metric} of linear probes on {data.scored_on}{fewest}")
    log(_row("layer", (plan.metric, "control", "selectivity", "regularization")))
    probes: dict[str, tuple[Probe, ...]] = {}
    for name in plan.layers:
        vectors = {part: features[part].pop(name) for part in features}  # freed after its probes
        probes[name] = tuple(_probe(plan, vectors, seed) for seed in range(settings.seeds))
        log(_row(_shown(name), _cells(probes[name], plan.metric)))
    log(_row(data.task.baseline_name, (figure(baseline[plan.metric]),)))
    log(f"{data.task.baseline_name}: {data.task.yardstick(data.train_labels)[1]}")
    log(
        "control: the same probe for random labels, where a repeated text, pair or word keeps its label; "
        "selectivity: the difference, which says most if test repeats texts of train, as words do"
    )
    result = ProbeResult(plan.metric, probes, baseline)
    if odd := [_shown(name) for name, some in probes.items() if not all(probe.converged for probe in some)]:
        log(f"warning: fits of layers {', '.join(odd)} ended after {MOST_ITERATIONS} iterations, before convergence")
    storage.write_bytes(output / "probes.json", (json.dumps(_content(plan, result), indent=1) + "\n").encode())
    storage.write_bytes(output / "probes.png", _picture(plan, result))
    log(f"\ntable: {output / 'probes.json'}\nplot: {output / 'probes.png'}")
    return result


def _numbered(path: Path) -> Examples:
    sentences = subject_number(read_minimal_pairs(path))
    if not sentences:
        raise UsageError(
            f"{path} has no minimal pair of subject and verb",
            fix="give BLiMP's directory, or files of its paradigms of subject-verb agreement",
            code="no-minimal-pairs",
        )
    return Examples([each.text for each in sentences], None, [each.number for each in sentences])


def _load_encoder(folder: Path) -> Any:
    import torch

    model, missing = load_pretrained("AutoModel", folder, "an encoder")
    refuse_random_weights(missing, folder, "an encoder", but=("pooler.",))
    return model.to("cuda") if torch.cuda.is_available() else model  # type: ignore[arg-type]  # as in `make_model`


def _layer_names(model: Any, data: TaskData) -> tuple[str, ...]:
    """Return the names of all layers, by a pass over one text."""
    row = {name: value for name, value in data.parts["train"].encoded.rows[0].items() if name != "labels"}
    batch = {name: value.to(model.device) for name, value in data.preprocessor.collate([row]).items()}
    return tuple(layer_states(model, batch))


def _chosen(layer: str, names: tuple[str, ...]) -> tuple[str, ...]:
    if layer == ALL_LAYERS:
        return names
    name = str(int(layer)) if layer.isdecimal() else layer
    if name not in names:
        raise UsageError(
            f"--layer {layer} does not exist: the model has {', '.join(names)}",
            fix="give one of them, or all",
            code="unknown-layer",
        )
    return (name,)


def _units(data: TaskData, part: Part) -> Units:
    examples, rows = part.examples, part.encoded.rows
    if isinstance(data.task, TokenTask):
        words = [sorted(first.items()) for first in part.encoded.offsets]
        spans = [[[position] for _, position in some] for some in words]
        return Units(spans, [(number, word) for number, some in enumerate(words) for word, _ in some])
    places = [(number, 0) for number in range(len(examples))]
    if examples.pairs is None:
        return Units([[list(range(row_length(row)))] for row in rows], places)
    return Units(_segments(data.preprocessor, examples), places)


def _segments(preprocessor: Preprocessor, examples: Examples) -> list[list[list[int]]]:
    """Return for each pair the positions of both texts in its row, without special tokens."""
    cut = {"truncation": "longest_first", "max_length": preprocessor.max_length}
    texts, others = ([*map(replace_surrogates, each)] for each in (examples.texts, examples.pairs or ()))
    with quiet_transformers():
        encoded = preprocessor.tokenizer(texts, others, **cut)
    found = []
    for number in range(len(examples)):
        of_text = encoded.sequence_ids(number)  # None for special tokens
        found.append([[place for place, text in enumerate(of_text) if text == each] for each in (0, 1)])
    return found


def _store(plan: ProbePlan) -> dict[str, dict[str, np.ndarray]]:
    """Return the stored vectors by part and layer."""
    data, size = plan.data, plan.settings.batch_size
    return {
        name: store_layers(
            plan.model, part.encoded.rows, plan.units[name].spans, plan.layers, data.preprocessor.collate, size
        )
        for name, part in data.parts.items()
    }


def _probe(plan: ProbePlan, vectors: Mapping[str, np.ndarray], seed: int) -> Probe:
    """Fit and score the probe of a layer for its labels and for the control's; `vectors` are by part."""
    data, draw = plan.data, np.random.default_rng(seed)
    labels = {name: part.labels for name, part in data.parts.items()}
    control = _control_labels(data, draw)
    num_examples = len(data.parts["train"].examples)
    drawn = draw.permutation(num_examples)[: max(1, round(TRAIN_SHARE * num_examples))]
    is_kept = np.isin([example for example, _ in plan.units["train"].places], drawn)
    is_pair = data.parts["train"].examples.pairs is not None
    features = {part: _paired(each) if is_pair else each for part, each in vectors.items()}
    scaler = StandardScaler().fit(features["train"][is_kept])
    given = {part: scaler.transform(each) for part, each in features.items()}
    train = given["train"][is_kept]

    def fits(of: Mapping[str, list[Any]], penalties: Sequence[float]) -> Iterator[_Fit]:
        of_units = _of_units(of["train"], plan.units["train"])
        kept = [label for label, keep in zip(of_units, is_kept, strict=True) if keep]
        return _fits(data.task, train, kept, penalties)

    def score(one: _Fit, part: str, of: Mapping[str, list[Any]]) -> dict[str, float]:
        guesses = _predictions(data.task, data.parts[part], plan.units[part], one.predict(given[part]))
        return data.task.score(of[part], guesses)

    sign, best = sign_of(plan.metric), None
    for one in fits(labels, PENALTIES):
        valid_score = score(one, "valid", labels)[plan.metric]
        if best is None or sign * valid_score > sign * best.valid_score:
            best = Probe(
                seed, one.penalty, valid_score, score(one, data.scored_on, labels), 0.0, converged=one.converged
            )
    assert best is not None, "there are penalties"
    (guess,) = fits(control, (best.penalty,))
    return best._replace(control=score(guess, data.scored_on, control)[plan.metric])


def _paired(vectors: np.ndarray) -> np.ndarray:
    """Return the features (num_pairs, 4 * hidden_size) of pairs from the vectors of both texts in turn."""
    first, second = vectors[::2], vectors[1::2]
    return np.concatenate([first, second, np.abs(first - second), first * second], axis=1)


def _of_units(labels: Sequence[Any], units: Units) -> list[Any]:
    """Return the label of each unit; tags are lists by example."""
    return [
        labels[example][word] if isinstance(labels[example], list) else labels[example]
        for example, word in units.places
    ]


def _control_labels(data: TaskData, draw: np.random.Generator) -> dict[str, list[Any]]:
    """Return labels by part in which equal texts (pairs, words) have the same one, drawn from the training labels."""
    train = data.train_labels
    pool = [tag for tags in train for tag in tags] if isinstance(train[0], list) else train
    of_key: dict[Any, Any] = {}

    def drawn(key: Any) -> Any:
        if key not in of_key:
            of_key[key] = pool[int(draw.integers(len(pool)))]
        return of_key[key]

    def labels(examples: Examples) -> list[Any]:
        if isinstance(data.task, TokenTask):
            return [[drawn(word) for word in words] for words in examples.texts]
        keys = examples.texts if examples.pairs is None else [*zip(examples.texts, examples.pairs, strict=True)]
        return [drawn(key) for key in keys]

    return {name: labels(part.examples) for name, part in data.parts.items()}


class _Fit(NamedTuple):
    penalty: float
    predict: Callable[[np.ndarray], list[Any]]
    converged: bool


def _fits(task: Task, train: np.ndarray, labels: Sequence[Any], penalties: Sequence[float]) -> Iterator[_Fit]:
    """Yield a fitted probe for each penalty; its predictions are labels of the task."""
    if isinstance(task, RegressionTask):
        targets = np.array([task.model_label(label) for label in labels])
        for penalty in penalties:
            ridge = Ridge(penalty * len(train)).fit(train.astype(np.float64), targets)
            yield _Fit(penalty, ridge.predict, converged=True)
        return
    if len(set(labels)) < 2:  # nothing to fit
        yield from (_Fit(penalty, lambda given: [labels[0]] * len(given), converged=True) for penalty in penalties)
        return
    logistic = LogisticRegression(max_iter=MOST_ITERATIONS, warm_start=True)  # a weaker penalty goes on from there
    if len(set(labels)) == 2 and train.shape[1] <= LARGEST_HESSIAN:
        logistic.set_params(solver="newton-cholesky")
        train = train.astype(np.float64)  # in float32 its linear systems are singular at weak penalties
    for penalty in penalties:
        logistic.set_params(C=1.0 / (penalty * len(train)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logistic.fit(train, list(labels))
        is_short = any(issubclass(each.category, ConvergenceWarning) for each in caught)
        yield _Fit(penalty, lambda given: logistic.predict(given).tolist(), converged=not is_short)


def _predictions(task: Task, part: Part, units: Units, guesses: Sequence[Any]) -> list[ExamplePrediction]:
    """Return the predictions of the examples from those of the units; a truncated word has the task's default tag."""
    if isinstance(task, RegressionTask):
        return task.decode([{"logits": np.array([guess])} for guess in guesses], part.encoded, part.examples)
    if not isinstance(task, TokenTask):
        return [ExamplePrediction(guess) for guess in guesses]
    tags = [[task.default] * len(words) for words in part.examples.texts]
    for (example, word), guess in zip(units.places, guesses, strict=True):
        tags[example][word] = guess
    return [ExamplePrediction(some) for some in tags]


def _shown(name: str) -> str:
    return "embeddings" if name == EMBEDDINGS else name


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<12}" + "".join(f"{cell:>18}" for cell in cells)


def _cells(probes: Sequence[Probe], metric: str) -> list[str]:
    scores, controls = _scores(probes, metric), [probe.control for probe in probes]
    penalties = ", ".join(f"{penalty:g}" for penalty in sorted({probe.penalty for probe in probes}, reverse=True))
    return [*map(figure_of_seeds, (scores, controls, _selectivity(probes, metric))), penalties]


def _scores(probes: Sequence[Probe], metric: str) -> list[float]:
    return [probe.scores[metric] for probe in probes]


def _selectivity(probes: Sequence[Probe], metric: str) -> list[float]:
    return [sign_of(metric) * (probe.scores[metric] - probe.control) for probe in probes]


def _picture(plan: ProbePlan, result: ProbeResult) -> bytes:
    data, metric = plan.data, plan.metric

    def curve(values: Sequence[Sequence[float]]) -> Curve:
        return Curve(range(len(values)), [*map(fmean, values)], ([*map(min, values)], [*map(max, values)]))

    curves = {
        "probe": curve([_scores(probes, metric) for probes in result.probes.values()]),
        "control (random labels)": curve([[probe.control for probe in probes] for probes in result.probes.values()]),
    }
    title = f"{plan.settings.task}, {data.scored_on}" + (f", {plan.settings.seeds} seeds" * (plan.settings.seeds > 1))
    baseline = data.task.baseline_name, result.baseline[metric]
    return draw_layers([*map(_short, result.probes)], curves, baseline, metric, title)


def _short(name: str) -> str:
    return "emb." if name == EMBEDDINGS else name


def _content(plan: ProbePlan, result: ProbeResult) -> dict[str, Any]:
    """Return the content of probes.json."""
    data, metric = plan.data, plan.metric
    layers = []
    for name, probes in result.probes.items():
        columns = {
            "score": _scores(probes, metric),
            "control": [probe.control for probe in probes],
            "selectivity": _selectivity(probes, metric),
        }
        figures = {key: {"mean": fmean(some), "spread": _spread(some)} for key, some in columns.items()}
        layers.append({"layer": _shown(name), **figures, "probes": [probe._asdict() for probe in probes]})
    baseline = {
        "name": data.task.baseline_name,
        "predicts": data.task.yardstick(data.train_labels)[1],
        "scores": result.baseline,
    }
    facts = {"task": plan.settings.task, "model": str(plan.settings.model), "metric": metric}
    return {
        **facts,
        "scored_on": data.scored_on,
        "num_examples": data.num_examples,
        "max_length": data.preprocessor.max_length,
        "baseline": baseline,
        "layers": layers,
    }


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
