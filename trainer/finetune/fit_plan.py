"""What a fine-tuning is asked to do, and everything settled before the first fit: data, model, rates, seeds, time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted, duration
from trainer.finetune.batches import Collator
from trainer.finetune.examples import Columns
from trainer.finetune.experiment import Setting, make_model
from trainer.finetune.frozen import check_room
from trainer.finetune.parameters import letters_line, parameter_lines, trainable_parameters
from trainer.finetune.task_data import Files, count_swallowing, data_lines, encode_task, read_task
from trainer.finetune.tasks import Preprocessor, TaskName, choosing_metric
from trainer.finetune.text_fit import fit_lines, measure_text, pretraining_fit
from trainer.inference.pretrained import load_config, load_text_tokenizer, max_length

FROZEN_RATES = (1e-3, 3e-3, 1e-2)


@dataclass(frozen=True)
class FitRequest:
    """What was asked for, in the words of the command line; None where the model or the task decides."""

    model: str
    task: TaskName
    train: Path
    valid: Path | None
    test: Path | None
    text_column: str
    pair_column: str | None
    label_column: str
    no_quoting: bool
    max_length: int | None
    variants: tuple[str, ...]
    seeds: int
    learning_rates: tuple[float, ...]
    epochs: int
    batch_size: int
    early_stopping: int | None
    metric: str | None
    split_seed: int
    output: Path
    tracking_uri: str | None
    experiment: str
    no_tracking: bool


def prepare(request: FitRequest, folder: Path) -> Setting:
    """Read and encode the data, and settle everything that the fits share.

    Raises:
        UserError: the files, the columns, the metric, the model or the memory do not fit the task.
    """
    files = Files(request.train, request.valid, request.test, not request.no_quoting)
    columns = Columns(request.text_column, request.pair_column, request.label_column)
    task, examples = read_task(request.task, files, columns, request.split_seed)
    metric = choosing_metric(task, request.metric)
    config, tokenizer = load_config(folder), load_text_tokenizer(folder)
    longest = max_length(config, tokenizer)
    if request.max_length is not None and request.max_length > longest:
        raise UsageError(
            f"--max-length {request.max_length} is more than the {longest} tokens that the model takes; give at most "
            "those, or leave it out"
        )
    preprocessor = Preprocessor(tokenizer, request.max_length or longest, getattr(config, "type_vocab_size", 0) > 1)
    rates = {variant: learning_rates(request, variant, config.hidden_size) for variant in request.variants}
    setting = Setting(
        folder,
        replace(encode_task(task, examples, preprocessor), num_swallowing=count_swallowing(files, examples)),
        preprocessor,
        Collator(tokenizer.pad_token_id or 0),
        metric,
        rates,
        tuple(range(request.seeds)),
        request.epochs,
        request.batch_size,
        request.early_stopping,
    )
    if "frozen" in request.variants:
        rows = [row for part in setting.data.parts.values() for row in part.encoded.rows]
        check_room(make_model(setting, "frozen", 0), rows)
    return setting


def learning_rates(request: FitRequest, variant: str, hidden_size: int) -> tuple[float, ...]:
    """The rates to try: those asked for, else around a usual one.

    It goes with hidden_size ** -1.5, at most 1e-3: 5e-5 at 768 and 3e-5 at 1,024, which are among the rates of Devlin
    et al. 2018, and 7e-4 at 128, the best of three for `small_cpu` on SST-2 (tests/benchmarks/results).
    """
    if request.learning_rates:
        return tuple(dict.fromkeys(request.learning_rates))
    if variant == "frozen":
        return FROZEN_RATES
    usual = min(5e-5 * (768 / hidden_size) ** 1.5, 1e-3)
    return tuple(float(f"{usual * factor:.1e}") for factor in ((1, 2, 4) if variant == "scratch" else (0.5, 1, 2)))


def describe(setting: Setting, variants: tuple[str, ...]) -> Iterator[str]:
    """What is about to be done: the data, how its text fits the tokenizer, what is trained."""
    data = setting.data
    yield from data_lines(data, setting.preprocessor.max_length)
    texts = [text if isinstance(text, str) else " ".join(text) for text in data.train.examples.texts]
    yield ""
    yield from fit_lines(measure_text(texts, setting.preprocessor.tokenizer), pretraining_fit(setting.model_folder))
    model = make_model(setting, "full", 0)
    for variant in variants:
        yield f"\n{variant}"
        yield from parameter_lines(trainable_parameters(model, frozen=variant == "frozen"))
    yield f"\n{letters_line(model.config)}"


def estimate_lines(setting: Setting, estimates: dict[str, float]) -> Iterator[str]:
    seeds, epochs = len(setting.seeds), setting.epochs
    yield ""
    for variant, seconds in estimates.items():
        rates = setting.learning_rates[variant]
        shown = ", ".join(f"{rate:g}" for rate in rates)
        fits, of_seeds = counted(len(rates) + seeds - 1, "fit"), counted(seeds, "seed")
        what = f"{fits} of {counted(epochs, 'epoch')} (rates {shown}; {of_seeds})"
        yield f"{variant}: {what}, about {duration(seconds)}"
    yield f"about {duration(sum(estimates.values()))} in all, by a few timed steps"


def run_params(request: FitRequest, setting: Setting) -> dict[str, Any]:
    """What the parent run says of the experiment."""
    names = (
        *("model", "task", "text_column", "pair_column", "label_column", "no_quoting"),
        *("split_seed", "seeds", "epochs", "batch_size", "early_stopping"),
    )
    sizes = {name: len(part.examples) for name, part in setting.data.parts.items()}
    files = {name: str(getattr(request, name)) for name in ("train", "valid", "test") if getattr(request, name)}
    return {
        **{name: getattr(request, name) for name in names},
        "variants": ",".join(request.variants),
        "num_examples": sizes,
        "files": files,
        "metric": setting.metric,
        "max_length": setting.preprocessor.max_length,
        "learning_rates": setting.learning_rates,
    }
