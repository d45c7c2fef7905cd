"""The generated parts of the pages: from `<!-- generated: NAME -->` to its end.

    python -m tests.generated_pages             write them

They show the presets as the schema reads them, every setting of the schema, every command, and the packages in import
order with the first sentence of their docstrings.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launch.command_table import DATA_PREP, GROUPS, Command
from tests.test_layout import MODULES, ORDER, TOWERS
from trainer import load_config
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.config.synonyms import synonyms
from trainer.config.training_settings import StageSettings
from trainer.objectives.pretraining import num_parameters

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = tuple(REPOSITORY / folder / "README.md" for folder in ("", "configs", "launch"))
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end of generated: \2 -->\n)", re.DOTALL)


def rewritten(page: str) -> str:
    """The page with every block regenerated."""
    return _BLOCK.sub(lambda found: found[1] + "\n".join(BLOCKS[found[2]]()) + "\n" + found[4], page)


def names_in(page: str) -> list[str]:
    """The names of the blocks of a page."""
    return [found[2] for found in _BLOCK.finditer(page)]


def preset_files() -> list[Path]:
    """The training presets, the smallest model first."""
    files = [path for path in (REPOSITORY / "configs").glob("*.yaml") if path.stem not in ("data", "glue")]
    return sorted(files, key=lambda path: (_size(load_config(path)), path.stem))


def _size(config: RunConfig) -> int:
    return num_parameters(config.model, config.all_objectives)


def presets() -> Iterator[str]:
    """Name, architecture, data, purpose (the first sentence of its file) and what was run of every preset."""
    yield "| preset | what it is | model | parameters | rows | precision | run so far |"
    yield "|---|---|---|---|---|---|---|"
    for path in preset_files():
        config = load_config(path)
        model = f"{config.model.family}, {config.model.num_hidden_layers} x {config.model.hidden_size}"
        lengths = dict.fromkeys(stage.sequence_length for stage in config.stages)
        pairs = {"none": "MLM", "next_sentence": "MLM, NSP", "sentence_order": "MLM, SOP"}
        rows = f"{pairs[config.data.sentence_pairs]}, {' then '.join(map(str, lengths))}"
        size = f"{_size(config) / 1e6:,.{0 if _size(config) >= 1e7 else 1}f}M"
        cells = (f"`{path.stem}`", purpose(path), model, size, rows, config.training.precision, verified(path))
        yield f"| {' | '.join(cells)} |"


def purpose(path: Path) -> str:
    """The first sentence of the comment that opens a preset, without its arXiv number and what follows a colon."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    first = re.split(r"[:;](?: |$)|\.(?: (?=[A-Z])|$)", comment)[0]
    first = re.sub(r", arXiv [\d.]+", "", first)
    return first + ")" * (first.count("(") - first.count(")"))


def verified(path: Path) -> str:
    """What was run of a preset, from the last line of the comment that opens its file."""
    (line,) = re.findall(r"^# Verified: (.+)\.$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return "no" if line.startswith("not run") else re.sub(r" \(.*\)$", "", line).removeprefix("on a CPU, ")


def recipes() -> Iterator[str]:
    """The batch and the optimizer of every preset."""
    columns = ("steps", "tokens per step", "peak rate", "schedule, warmup", "optimizer, betas", "weight decay")
    yield f"| preset | {' | '.join(columns)} | masks |"
    yield "|---|---|---|---|---|---|---|---|"
    for path in preset_files():
        config = load_config(path)
        batches = dict.fromkeys(f"{stage.global_batch_tokens:,}" for stage in config.stages)
        peaks = dict.fromkeys(f"{stage.peak_learning_rate:g}" for stage in config.stages)
        decays = dict.fromkeys(f"{stage.weight_decay:g}" for stage in config.stages)
        masks = dict.fromkeys(_masks(stage) for stage in config.stages)
        optimizer, schedule = config.optimizer, config.schedule
        warmup = config.stages[0].schedule.warmup.steps
        yield (
            f"| `{path.stem}` | {config.max_steps:,} | {' then '.join(batches)} | {' then '.join(peaks)} | "
            f"{_SHORT.get(schedule.name, schedule.name)}, {warmup:,} | "
            f"{optimizer.name}, {optimizer.beta1:g}, {optimizer.beta2:g} | "
            f"{' then '.join(decays)} | {' then '.join(masks)} |"
        )


_SHORT = {"warmup_stable_decay": "WSD"}
"""The name that papers use, for a narrow table."""


def _masks(stage: Stage) -> str:
    """The masking rate at the start and the end of a stage."""
    law = stage.data.law
    rates = dict.fromkeys(f"{rate:.0%}" for rate in (law.first, law.last))
    return law.describe() if law.is_drawn else " to ".join(rates)


def training_settings() -> Iterator[str]:
    """Every setting of a training run."""
    yield "```yaml"
    yield from yaml_of(RunConfig)
    yield "```"


def stage_settings() -> Iterator[str]:
    """The settings of an item of `training.stages`: its own ones, and those that the run has too."""
    in_run = {(name.rpartition(".")[2], meaning) for name, meaning in descriptions_of(RunConfig)}
    own, others = [], []
    for name, meaning in descriptions_of(StageSettings):
        is_own = not meaning.startswith("as ") and (name.rpartition(".")[2], meaning) not in in_run
        (own if is_own else others).append(f"`{name}`")
    yield f"Settings of a stage: {', '.join(own)}. As in the run: {', '.join(others)}."


def yaml_of(schema: type[BaseModel], indent: str = "") -> Iterator[str]:
    """Every setting at its default, as YAML; a comment has its other choices and what its description says first.

    A section that is null by default has its settings in comments. Settings come before sections.
    """
    fields = sorted(schema.model_fields.items(), key=lambda item: _section(item[1].annotation) is not None)
    for name, field in fields:
        section = _section(field.annotation)
        if section is None:
            yield indent + _setting(name, field)
        else:
            is_unset = not field.is_required() and field.default is None
            yield f"{indent}{name}:{' null # or:' if is_unset else ''}"
            yield from (f"{indent}{'  # ' if is_unset else '  '}{line}" for line in yaml_of(section))


def _setting(name: str, field: FieldInfo) -> str:
    default = "" if field.is_required() else f" {_plain(field.get_default(call_default_factory=True))}"
    choices = [choice for choice in map(_plain, _choices(field.annotation)) if choice != default.strip()]
    told = ("required: " * field.is_required()) + in_short(field.description or "")
    if choices:
        told += f" ({'one of' if field.is_required() else 'or'} {', '.join(choices)})"
    return f"{name}:{default} # {told}"


def _plain(value: Any) -> str:
    """A value as YAML in one line, without quotes where it needs none."""
    if isinstance(value, str) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def in_short(meaning: str) -> str:
    """What a description says first, without remarks in brackets; `--help` has the whole.

    It ends at the first colon, semicolon or full stop that stands outside of braces.
    """
    text = re.sub(r" \([^()]*\)", "", meaning)
    ends = (found.start() for found in re.finditer("[:;.] ", text))
    return text[: next((end for end in ends if text[:end].count("{") == text[:end].count("}")), None)]


def descriptions_of(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted name and description of every setting; a list is one setting."""
    for name, field in schema.model_fields.items():
        if section := _section(field.annotation):
            yield from descriptions_of(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or ""


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model of a section, which may be optional; None for a value or a list."""
    for item in (annotation, *(() if get_origin(annotation) in (list, tuple, dict) else get_args(annotation))):
        if isinstance(item, type) and issubclass(item, BaseModel):
            return item
    return None


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for item in get_args(annotation) for choice in _choices(item))


def commands() -> Iterator[str]:
    """Every subcommand of `clozeworks` in its group, with the script that it runs and the role that it needs."""
    yield "| group | `clozeworks` | the same as | role | task |"
    yield "|---|---|---|---|---|"
    for group, members in GROUPS.items():
        for command in members:
            role = command.extra or "core"
            yield f"| {group} | `{command.name}` | `{script_of(command)}` | {role} | {command.summary} |"


def script_of(command: Command) -> str:
    """The script or module that a command runs."""
    if command.module == DATA_PREP:
        return f"python -m data_prep {command.name}"
    return command.module.replace(".", "/") + ".py"


def data_prep_packages() -> Iterator[str]:
    """The packages of data_prep in import order."""
    return _packages("data_prep")


def trainer_packages() -> Iterator[str]:
    """The packages of trainer in import order."""
    return _packages("trainer")


def _packages(top: str) -> Iterator[str]:
    """The packages and what each is for; a blank line before and after each tower of `TOWERS`."""
    width = max(map(len, ORDER[top])) + 1
    yield "```text"
    groups = itertools.groupby(ORDER[top], lambda name: [name in tower for tower in TOWERS] * (top == "trainer"))
    for number, (_, names) in enumerate(groups):
        if number:
            yield ""
        for name in names:
            file, shown = (f"{name}.py",) * 2 if name in MODULES.get(top, ()) else (f"{name}/__init__.py", f"{name}/")
            docstring = ast.get_docstring(ast.parse((REPOSITORY / top / file).read_text(encoding="utf-8")))
            assert docstring is not None, f"{top}/{file} has no docstring"
            yield f"{shown:{width}}  {first_sentence(docstring)}"
    yield "```"


def first_sentence(docstring: str, limit: int = 53) -> str:
    """The first sentence of a docstring, without its full stop; the page has room for `limit` characters."""
    sentence = re.split(r"[.](?: |$)", " ".join(docstring.split()))[0]
    assert len(sentence) <= limit, f"{sentence!r} has more than {limit} characters"
    return sentence


COMMON_NAMES = {
    "length": ("max_steps", "num_train_epochs", "warmup_steps", "warmup_ratio"),
    "batch": ("per_device_train_batch_size", "global_batch_size", "gradient_accumulation_steps"),
    "optimizer": ("learning_rate", "lr_scheduler_type", "max_grad_norm", "bf16", "gradient_checkpointing"),
    "data": ("train_file", "max_seq_length", "whole_word_mask", "dataloader_num_workers", "tokenizer_name"),
    "model": ("model_name_or_path", "num_layers", "ffn_hidden_size"),
    "output": ("save_steps", "save_total_limit", "resume_from_checkpoint", "eval_steps", "report_to"),
}
"""Names that people look for, by topic; the errors know all of `trainer/config/synonyms.yaml`."""


def names_of_other_projects() -> Iterator[str]:
    """The settings that the most common names mean."""
    yield "| | Hugging Face, Megatron | here |"
    yield "|---|---|---|"
    by_name = {name: synonym for synonym in synonyms() for name in synonym.names}
    for topic, names in COMMON_NAMES.items():
        for number, name in enumerate(names):
            synonym = by_name[name]
            settings = ", ".join(f"`{each}`" for each in synonym.setting.split(", "))
            here = f"{settings} ({synonym.unit})"
            if synonym.setting == "none" or synonym.advice.startswith("remove"):
                here = re.split(r"[,;]| \(", synonym.advice)[0]
            yield f"| {f'{topic} ' if number == 0 else ''}| `{name}` | {here} |"


BLOCKS: dict[str, Callable[[], Iterator[str]]] = {
    "presets": presets,
    "recipes": recipes,
    "training_settings": training_settings,
    "stage_settings": stage_settings,
    "names": names_of_other_projects,
    "commands": commands,
    "data_prep_packages": data_prep_packages,
    "trainer_packages": trainer_packages,
}


def main() -> None:
    for path in PAGES:
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{path.relative_to(REPOSITORY)}: {', '.join(names_in(path.read_text(encoding='utf-8')))}")


if __name__ == "__main__":
    main()
