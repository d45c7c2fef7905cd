"""Export: a checkpoint becomes a folder that transformers and sentence-transformers load without our code.

    config.json model.safetensors                              weights in float32, as BertForPreTraining (or
                                                               BertForMaskedLM, where no pairs were trained on), or as
                                                               ModernBertForMaskedLM
    tokenizer.json tokenizer_config.json tokenizer.model ...   the tokenizer, in both formats
    modules.json sentence_bert_config.json 1_Pooling/          for SentenceTransformer: mean pooling
    README.md training_config.yaml provenance.json             model card, configuration, origin and checks

The folder is written under a temporary name beside its own and gets its name once the parity gate has passed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from data_prep.base.errors import UsageError, UserError
from data_prep.base.local_paths import home_in
from data_prep.base.packages import installed_version
from data_prep.base.settings import to_yaml
from data_prep.storage import storage
from data_prep.tokenizer.foreign_files import FILE_NAMES, TOKENIZER_CONFIG_NAME
from data_prep.tokenizer.hugging_face_tokenizer import write_hugging_face_tokenizer
from data_prep.tokenizer.tokenizer import MODEL_NAME, Tokenizer
from data_prep.tokenizer.tokenizer_report import REPORT_NAME
from trainer.checkpoint.format import CheckpointFolder, list_steps, step_folder
from trainer.config.objective_settings import MASKED_LM, SENTENCE_PAIRS, published
from trainer.config.run_config import RunConfig, without_secrets
from trainer.hf_export.export_source import read_source
from trainer.hf_export.model_card import TrainingFacts, model_card
from trainer.hf_export.parity import ParityReport, check_export
from trainer.hf_export.word_offsets import begin_at_words
from trainer.model.hugging_face import family_in_transformers, hugging_face_config, to_hugging_face
from trainer.model.model_folder import FILES_SHA256, PROVENANCE_FILE, file_digests
from trainer.objectives.pretraining import PretrainingModel

if TYPE_CHECKING:
    from trainer.checkpoint.average import Weighting

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "sentencepiece")


@dataclass(frozen=True)
class ExportReport:
    """The exported checkpoint, and the results of the checks."""

    checkpoint: str | None
    """Name of the checkpoint folder."""
    output: Path
    num_parameters: int
    parity: ParityReport


@home_in("checkpoint", "output")
def export_checkpoint(
    checkpoint: str | Path, output: str | Path, extend: Callable[[Path], None] | None = None
) -> ExportReport:
    """Export a checkpoint (`OUTPUT_DIR/checkpoints/step-...`), or a run's newest one, to the new directory `output`.

    `extend` adds files to the checked folder before it gets its name; if it fails, there is no export.

    Raises:
        UserError: `checkpoint` is not a checkpoint or is damaged, or `export_model` refuses.
        UsageError: `output` exists and is not empty.
    """
    check_output(Path(output))  # before anything large is read
    source = read_source(Path(checkpoint))
    return export_model(source.config, source.weights, source.tokenizer_folder, Path(output), source.facts, extend)


def last_checkpoints(run: Path, num_checkpoints: int) -> list[Path]:
    """Return the newest complete checkpoints of a run's output directory, oldest first."""
    if not run.is_dir():
        raise UsageError(f"{run} is not a directory", fix="give the output_dir of a run", code="missing-path")
    steps, _ = list_steps(run)
    if len(steps) < num_checkpoints:
        raise UsageError(
            f"{run} has {len(steps)} complete checkpoints, not --last {num_checkpoints}",
            fix="lower --last; for a new run, raise checkpoint.keep_last or set checkpoint.keep_every_steps"
            if steps
            else "give the output_dir of a run, which has the folder checkpoints",
            code="too-few-checkpoints",
        )
    return [step_folder(run, step).resolve() for step in reversed(steps[:num_checkpoints])]


def export_average(
    run: str | Path, num_checkpoints: int, weights: Weighting = "uniform", output: str | Path = ""
) -> ExportReport:
    """Export the weighted mean of a run's newest checkpoints to the new directory `output`.

    The configuration, tokenizer and facts are those of the newest checkpoint; the scores of that checkpoint are left
    out, because the mean has others. Up to the parity gate one copy of the weights and a fragment of one checkpoint are
    in memory; the gate maps the written file, whose pages the system may drop.

    Raises:
        UserError: there are too few checkpoints, one is damaged, they differ in tokenizer or parameters, or
            `export_model` refuses.
        UsageError: `output` exists and is not empty.
    """
    from trainer.checkpoint.average import average_checkpoints, average_coefficients  # which imports the engine

    check_output(Path(output))
    folders = last_checkpoints(Path(run), num_checkpoints)
    coefficients = average_coefficients(num_checkpoints, weights)
    fingerprints = {CheckpointFolder(folder).read_state().data.tokenizer_fingerprint for folder in folders}
    if len(fingerprints) > 1:
        raise UserError(
            f"the checkpoints of {run} have different tokenizers ({', '.join(sorted(fingerprints))})",
            fix="average checkpoints of one tokenizer",
            code="checkpoints-differ",
        )
    source = read_source(folders[-1], average_checkpoints(folders, coefficients))
    averaged = {folder.name: coefficient for folder, coefficient in zip(folders, coefficients, strict=True)}
    facts = replace(source.facts, averaged=averaged, scores={}, evaluation={})
    return export_model(source.config, source.weights, source.tokenizer_folder, Path(output), facts)


def export_model(
    config: RunConfig,
    weights: Mapping[str, torch.Tensor],
    tokenizer_folder: Path,
    output: Path,
    facts: TrainingFacts | None = None,
    extend: Callable[[Path], None] | None = None,
) -> ExportReport:
    """Write `weights` (names of `PretrainingModel`) and the tokenizer to `output` if they pass the parity gate.

    `extend` is as in `export_checkpoint`.

    Raises:
        UserError: transformers has no class for the configuration, weights are NaN or infinite or do not fit it, the
            tokenizer is not a tokenizer directory or is larger than the model's vocabulary, or the export does not
            behave like the model.
        UsageError: `output` exists and is not empty.
    """
    facts, output = facts or TrainingFacts(), Path(output).absolute()
    check_output(output)
    family_in_transformers(config.model, config.has_pair_head)
    model = build_model(config, weights)
    tokenizer = Tokenizer.load(tokenizer_folder)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"the tokenizer in {tokenizer_folder} has {tokenizer.vocab_size:,} tokens, and the model "
            f"has a vocabulary of {config.model.vocab_size:,}",
            fix="copy the tokenizer that the model was trained with there",
            code="other-tokenizer",
        )
    with new_folder(output) as folder:
        with _explained(output):
            write_model(folder, config, model, tokenizer)
            _write_tokenizer(folder, tokenizer, config)
            write_sentence_transformer(folder, config.longest_sequence, config.model.hidden_size)
        parity = check_export(folder, model, tokenizer)
        with _explained(output):
            _write_origin(folder, output.name, config, facts, tokenizer, parity)
            if extend is not None:
                extend(folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return ExportReport(facts.checkpoint, output, num_parameters, parity)


def check_output(output: Path) -> None:
    """Refuse an output that exists and is not an empty directory."""
    if output.is_dir() and any(output.iterdir()):
        raise UsageError(
            f"--output {output} is not empty",
            fix="give a new directory, or remove this one first",
            code="output-not-empty",
        )
    if output.exists() and not output.is_dir():
        raise UsageError(
            f"--output {output} is a file",
            fix="give the name of a new directory",
            code="output-is-a-file",
        )


def build_model(config: RunConfig, weights: Mapping[str, torch.Tensor]) -> PretrainingModel:
    """Return the trained model in evaluation mode, float32 on the CPU; it contains `weights`, not copies."""
    objectives = published(config.all_objectives)
    if MASKED_LM not in [each.name for each in objectives]:
        raise UserError(
            f"the run trained no {MASKED_LM} ({', '.join(each.name for each in config.all_objectives)}), and an "
            "exported model has its head",
            fix=f"train {MASKED_LM} too, or read the encoder's weights from the checkpoint (names `encoder.*`)",
            code="export-without-masked-lm",
        )
    with torch.device("meta"):
        model = PretrainingModel(config.model, objectives)
    if len(objectives) < len(config.all_objectives):  # the heads of the others are not exported
        parts = {name for name, _ in model.named_children()}
        weights = {name: weight for name, weight in weights.items() if name.partition(".")[0] in parts}
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    wrong = [name for name in expected if name not in weights or weights[name].shape != expected[name]]
    wrong += [name for name in weights if name not in expected]
    if wrong:
        raise UserError(
            f"the weights do not match the configuration: {', '.join(wrong[:5])} ({len(wrong)} in "
            "all) are missing, unexpected or of another shape",
            fix="export another checkpoint, whose files are all of one run",
            code="damaged-checkpoint",
        )
    prepared = {name: weights[name].detach().to("cpu", torch.float32) for name in expected}
    for name, tensor in prepared.items():
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"the weights of {name} are NaN or infinite, so training diverged before this checkpoint",
                fix="export an earlier checkpoint",
                code="weights-not-finite",
            )
    model.load_state_dict(prepared, assign=True)
    return model.eval()


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `output` that is renamed to it at the end, or removed after an error."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with _explained(output):
            temporary.mkdir(parents=True)
        yield temporary
        with _explained(output):
            os.replace(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _explained(output: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{output} cannot be written ({reason}); nothing was exported",
            fix="free the disk, or give another directory",
            code="unwritable-file",
        ) from None


def write_model(folder: Path, config: RunConfig, model: PretrainingModel, tokenizer: Tokenizer) -> None:
    """Write config.json, with the ids of the tokenizer's special tokens, and model.safetensors."""
    has_pairs = SENTENCE_PAIRS in model.objectives
    _write_json(folder / "config.json", hugging_face_config(config.model, has_pairs, tokenizer.special_tokens))
    family = family_in_transformers(config.model, has_pairs)
    weights = to_hugging_face(model.state_dict(), config.model, family, tokenizer.special_tokens.pad)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, config: RunConfig) -> None:
    """Write the SentencePiece model with the Hugging Face files made from it, or a foreign tokenizer's files.

    The export is also a tokenizer directory, so the tokenizer's description has the checksums of the written files.
    """
    for name in (MODEL_NAME, REPORT_NAME):
        if (tokenizer.folder / name).is_file():  # a foreign tokenizer has no model, one of earlier releases no report
            shutil.copyfile(tokenizer.folder / name, folder / name)
    write_hugging_face_tokenizer(tokenizer.folder, folder, model_max_length=config.longest_sequence)
    begin_at_words(folder, tokenizer)
    if config.model.type_vocab_size < 2:  # the model would refuse the token types that the tokenizer gives
        path = folder / TOKENIZER_CONFIG_NAME
        settings = json.loads(path.read_text(encoding="utf-8"))
        _write_json(path, settings | {"model_input_names": ["input_ids", "attention_mask"]})
    written = [name for name in (MODEL_NAME, REPORT_NAME, *FILE_NAMES) if (folder / name).is_file()]
    checksums = {name: storage.sha256_of(folder / name) for name in written}
    tokenizer.info.model_copy(update={"files": checksums}).write(folder)


def write_sentence_transformer(folder: Path, max_length: int, hidden_size: int, pooling: str = "mean") -> None:
    """Write the files that `SentenceTransformer(folder)` reads: pooling (`mean`, `cls`) over the hidden states."""
    types = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{types}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{types}.Pooling"},
    ]
    _write_json(folder / "modules.json", modules)
    lengths = {"max_seq_length": max_length, "do_lower_case": False}
    _write_json(folder / "sentence_bert_config.json", lengths)
    (folder / "1_Pooling").mkdir()
    modes = {
        "word_embedding_dimension": hidden_size,
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    _write_json(folder / "1_Pooling" / "config.json", modes)


def _write_origin(
    folder: Path,
    name: str,
    config: RunConfig,
    facts: TrainingFacts,
    tokenizer: Tokenizer,
    parity: ParityReport,
) -> None:
    """Write the model card, the resolved configuration, and the provenance."""
    (folder / "training_config.yaml").write_text(to_yaml(without_secrets(config)), encoding="utf-8")
    card = model_card(name, config, facts, tokenizer)
    (folder / "README.md").write_text(card + "\n", encoding="utf-8")
    provenance = {
        "clozeworks_version": installed_version("clozeworks"),
        "libraries": {library: installed_version(library) for library in LIBRARIES},
        "checkpoint": facts.checkpoint,
        "step": facts.step,
        **({"merged": dict(facts.averaged)} if facts.averaged else {}),
        "tokens_seen": facts.tokens_seen,
        "mlflow_run_id": facts.mlflow_run_id,
        "git_revision": facts.git_revision,
        "data_digests": dict(facts.data_digests),
        "data_lineage": list(facts.data_lineage),
        **({"adopted": list(facts.adopted)} if facts.adopted else {}),
        **_teachers(config, facts.teachers),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "scores": dict(facts.scores),
        "evaluation": dict(facts.evaluation),
        "parity": asdict(parity),
        "model_safetensors_sha256": storage.sha256_of(folder / "model.safetensors"),
        FILES_SHA256: file_digests(folder),
    }
    _write_json(folder / PROVENANCE_FILE, provenance)


def _teachers(config: RunConfig, teachers: Sequence[str]) -> dict[str, Any]:
    """Return the last teacher, which is that of the configuration, and where it is not the first, all in order."""
    if not teachers:
        return {}
    last = {"address": without_secrets(config).teacher, "sha256": teachers[-1]}
    return {"teacher": last, **({"teachers_sha256": list(teachers)} if len(teachers) > 1 else {})}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
