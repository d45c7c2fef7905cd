"""ONNX: the model of a Hugging Face directory as a graph, in the layout of optimum, checked against transformers.

    model.onnx              float32, for any batch size and length (above 2 GB the weights are in model.onnx_data)
    model_quantized.onnx    the same with int8 matrices, if asked for; its products are computed in int8

Inputs are `input_ids`, `attention_mask` and, where the model has them, `token_type_ids`, each int64 (batch_size,
sequence_length). Outputs are `logits`, for question answering `start_logits` and `end_logits`, and for the encoder
alone `last_hidden_state`.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from safetensors import safe_open

from data_prep.base.errors import UserError
from data_prep.base.packages import installed_version
from data_prep.storage import storage
from trainer.hf_export.parity import LOGIT_TOLERANCE
from trainer.model.model_folder import CARD_FILE, FILES_SHA256, PROVENANCE_FILE, read_config, read_json
from trainer.model.pretrained import load_pretrained, refuse_random_weights
from trainer.model.quiet_transformers import quiet_transformers

ONNX_FILE = "model.onnx"
INT8_FILE = "model_quantized.onnx"
GRAPH_SUFFIXES = (".onnx", ".onnx_data")
LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "onnxscript")

Part = Literal["model", "encoder"]
"""What is exported: the model with its head, or the encoder alone."""

BATCH_SHAPES = ((2, 7), (3, 31))
"""Batch size and length of the batches that the gate compares, with padding in them; a third one is a single row that
is longer than a local layer attends."""
_MANY_POSITIONS = 1_000_000
"""Of models that have no limit."""
_LARGEST_FILE = 2_000_000_000
"""Bytes of weights within a file: protobuf ends at 2 GiB."""
_HEADS = {
    "ForMaskedLM": ("AutoModelForMaskedLM", ("logits",)),
    "ForPreTraining": ("AutoModelForMaskedLM", ("logits",)),  # without the head for sentence pairs
    "ForSequenceClassification": ("AutoModelForSequenceClassification", ("logits",)),
    "ForTokenClassification": ("AutoModelForTokenClassification", ("logits",)),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", ("start_logits", "end_logits")),
}
_ENCODER = ("AutoModel", ("last_hidden_state",))
_WITHOUT_HEAD = re.compile(r"(?!.*Head)\w+Model")
"""transformers' classes of an encoder alone, such as BertModel; BertLMHeadModel has a head."""
_OPTIMUM_CLASSES = {
    "AutoModel": "ORTModelForFeatureExtraction",
    "AutoModelForMaskedLM": "ORTModelForMaskedLM",
    "AutoModelForSequenceClassification": "ORTModelForSequenceClassification",
    "AutoModelForTokenClassification": "ORTModelForTokenClassification",
    "AutoModelForQuestionAnswering": "ORTModelForQuestionAnswering",
}
_TITLE = "## ONNX"


@dataclass(frozen=True)
class OnnxReport:
    """The exported graph, and the result of the comparison with transformers."""

    part: Part
    auto_class: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int
    num_bytes: int
    weights_were: tuple[str, ...]
    """Types of the weights in the directory where they are not float32, such as BF16."""
    num_batches: int
    num_values: int
    max_difference: float
    max_value: float

    def __str__(self) -> str:
        return (
            f"{self.num_values:,} values of {', '.join(self.outputs)} in {self.num_batches} batches with padding: "
            f"largest difference {self.max_difference:.2e} at values up to {self.max_value:.1f} "
            f"(allowed {LOGIT_TOLERANCE * self.max_value:.2e})"
        )


def add_onnx(folder: Path, part: Part = "model") -> OnnxReport:
    """Write model.onnx into a Hugging Face directory, with a section of its model card and of its provenance.

    Raises:
        UserError: the directory has no such model, torch cannot export it, or the gate finds that it computes something
            else; the directory must then be removed.
    """
    auto_class, outputs = _head_of(folder, part)
    part = "encoder" if auto_class == "AutoModel" else part
    model = _load(folder, auto_class)
    inputs = ["input_ids", "attention_mask"]
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs.append("token_type_ids")
    path = folder / ONNX_FILE
    opset = _write(model, inputs, outputs, path)
    batches = list(sample_batches(model, inputs))
    graph = OnnxModel(path)
    compared = [_difference(model, graph, outputs, auto_class, batch) for batch in batches]
    difference, largest = max(each[0] for each in compared), max(each[1] for each in compared)
    if not all(one <= LOGIT_TOLERANCE * largest for one, _, _ in compared):  # a NaN is not
        raise UserError(
            f"the outputs of {ONNX_FILE} differ from those of transformers by {difference:.3g} (largest value "
            f"{largest:.3g}, allowed {LOGIT_TOLERANCE} of it); nothing was exported",
            fix="report this as a bug of clozeworks, with the versions of torch "
            f"({torch.__version__}) and onnxruntime ({onnxruntime.__version__})",
            code="export-differs",
        )
    report = OnnxReport(
        part=part,
        auto_class=auto_class,
        inputs=tuple(inputs),
        outputs=outputs,
        opset=opset,
        num_bytes=size_of(path),
        weights_were=_other_types(folder),
        num_batches=len(batches),
        num_values=sum(each[2] for each in compared),
        max_difference=difference,
        max_value=largest,
    )
    describe(folder, {"onnx": {**asdict(report), "libraries": {name: installed_version(name) for name in LIBRARIES}}})
    _append_to_card(folder, _section(folder, report))
    return report


def _head_of(folder: Path, part: Part) -> tuple[str, tuple[str, ...]]:
    """Return transformers' Auto class of what is exported, and the names of its outputs."""
    architecture = str((read_config(folder).get("architectures") or ["no class"])[0])
    if part == "encoder" or _WITHOUT_HEAD.fullmatch(architecture):  # such as a model fine-tuned for vectors
        return _ENCODER
    head = next((head for suffix, head in _HEADS.items() if architecture.endswith(suffix)), None)
    if head is None:
        raise UserError(
            f"{folder} is of class {architecture}, which has no head that can be exported to ONNX",
            fix="export the encoder alone with --onnx encoder",
            code="onnx-without-head",
        )
    return head


def _load(folder: Path, auto_class: str) -> Any:
    purpose = "an encoder" if auto_class == "AutoModel" else f"{auto_class.removeprefix('AutoModelFor')} model"
    model, missing = load_pretrained(auto_class, folder, purpose)
    refuse_random_weights(missing, folder, purpose, but=("pooler.",) if auto_class == "AutoModel" else ())
    return model


class _Positional(torch.nn.Module):
    """A model that takes its inputs in order and returns some of its outputs, as the exporter names them."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, tuple(inputs), tuple(outputs)

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        computed = self.model(**dict(zip(self.inputs, values, strict=True)))
        return tuple(computed[name] for name in self.outputs)


def _write(model: Any, inputs: Sequence[str], outputs: Sequence[str], path: Path) -> int:
    """Write the graph and return the version of its operators."""
    example = _batch(model, inputs, 2, min(9, longest_sequence(model)))
    axes = {0: "batch_size", 1: "sequence_length"}
    try:
        with _quiet():
            program = torch.onnx.export(
                _Positional(model, inputs, outputs),
                tuple(example[name] for name in inputs),
                dynamo=True,
                verbose=False,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_shapes={"values": tuple(axes for _ in inputs)},
            )
    except Exception as error:  # whatever a model of another library makes the exporter raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"torch {torch.__version__} cannot export this {type(model).__name__} to ONNX ({reason}); nothing was "
            "exported",
            fix="install the versions of constraints.txt, or export without --onnx",
            code="onnx-not-exportable",
        ) from error
    assert program is not None, "dynamo=True returns a program"
    graph = program.model_proto
    _remove_notes(graph)
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    is_apart = num_bytes > _LARGEST_FILE
    apart: dict[str, Any] = {"save_as_external_data": True, "location": f"{path.name}_data"} if is_apart else {}
    onnx.save_model(graph, str(path), **apart)
    return int(next(each.version for each in graph.opset_import if each.domain == ""))


def _remove_notes(message: Any) -> None:
    """Remove what the exporter notes of its origin, such as the paths of source files on this machine."""
    for field, value in list(message.ListFields()):
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.name in ("graph", "node", "attribute", "g", "graphs", "functions", "input", "output", "value_info"):
            values = value if field.is_repeated else [value]
            for each in (each for each in values if not isinstance(each, str)):
                _remove_notes(each)


def longest_sequence(model: Any) -> int:
    """Return the number of tokens that a model takes: its positions, in RoBERTa without the unused rows."""
    positions = int(getattr(model.config, "max_position_embeddings", None) or _MANY_POSITIONS)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            positions -= 0 if module.padding_idx is None else module.padding_idx + 1
    return positions


def sample_batches(model: Any, inputs: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches that the gate compares, of random tokens."""
    most = longest_sequence(model)
    window = getattr(model.config, "local_attention", 0) or 0
    for num_rows, length in (*BATCH_SHAPES, (1, max(64, window + 32))):
        yield _batch(model, inputs, num_rows, min(length, most))


def _batch(model: Any, inputs: Sequence[str], num_rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return int64 tensors (num_rows, length) by name; the first row is full, the others end with padding."""
    generator = torch.Generator().manual_seed(1000 * num_rows + length)
    pad = model.config.pad_token_id or 0
    ids = torch.randint(model.get_input_embeddings().num_embeddings, (num_rows, length), generator=generator)
    ids[ids == pad] = 0 if pad else 1
    lengths = torch.tensor([max(1, length - row * (length // (num_rows + 1))) for row in range(num_rows)])
    mask = (torch.arange(length) < lengths[:, None]).long()
    types = torch.randint(2, (num_rows, length), generator=generator) * mask
    values = {"input_ids": torch.where(mask.bool(), ids, pad), "attention_mask": mask, "token_type_ids": types}
    return {name: values[name] for name in inputs}


@torch.no_grad()
def _difference(
    model: Any, graph: OnnxModel, outputs: Sequence[str], auto_class: str, batch: Mapping[str, torch.Tensor]
) -> tuple[float, float, int]:
    """Return the largest difference, the largest value, and the number of values that are not padding."""
    with quiet_transformers():
        theirs = model(**batch)
    ours = graph(**batch)
    is_real = batch["attention_mask"].bool()
    difference, largest, count = torch.tensor(0.0), 0.0, 0
    for name in outputs:
        mine, other = ours[name], theirs[name]
        if mine.shape != other.shape:
            return float("nan"), 0.0, 0
        if auto_class != "AutoModelForSequenceClassification":
            mine, other = mine[is_real], other[is_real]
        difference = torch.maximum(difference, (mine - other).abs().max())  # a NaN stays
        largest, count = max(largest, other.abs().max().item()), count + mine.numel()
    return difference.item(), largest, count


class OnnxModel(torch.nn.Module):
    """A graph on the CPU that is called as transformers' model is: tensors by name, and outputs by name."""

    def __init__(self, path: Path, num_threads: int | None = None) -> None:
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads or torch.get_num_threads()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = tuple(each.name for each in self.session.get_inputs())
        self.outputs = tuple(each.name for each in self.session.get_outputs())
        self.place = torch.nn.Parameter(torch.zeros(0))  # callers ask a model's parameters for its device

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return float32 outputs by name; tensors that the graph does not take, such as labels, are not used."""
        values = self.session.run(list(self.outputs), {name: batch[name].numpy() for name in self.inputs})
        return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(self.outputs, values, strict=True)}


def add_int8(folder: Path) -> Path:
    """Write model_quantized.onnx beside model.onnx: matrices of weights as int8, with a scale for each column.

    The rows of activations become uint8 when they are multiplied (dynamic quantization). Weights have 7 bits, so that
    the sums of processors without VNNI do not overflow, and the outputs are the same on all of them.
    """
    path = folder / INT8_FILE
    is_apart = (folder / f"{ONNX_FILE}_data").is_file()
    with _quiet():
        quantize_dynamic(
            str(folder / ONNX_FILE),
            str(path),
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=is_apart,
        )
    if is_apart:
        _rename_data(path)
    return path


def _rename_data(path: Path) -> None:
    """Name the weights beside a graph as optimum looks for them on the Hub: onnxruntime ends the name with ".data"."""
    graph = onnx.load_model(str(path), load_external_data=False)
    for entry in (entry for tensor in graph.graph.initializer for entry in tensor.external_data):
        if entry.key == "location":
            entry.value = f"{path.name}_data"
    onnx.save_model(graph, str(path))
    path.with_name(f"{path.name}.data").rename(path.with_name(f"{path.name}_data"))


def size_of(path: Path) -> int:
    """Return the bytes of a graph with those of its weights apart."""
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*") if each.is_file())


def _other_types(folder: Path) -> tuple[str, ...]:
    types = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            types |= {str(file.get_slice(name).get_dtype()) for name in file.keys()}
    return tuple(sorted(types - {"F32", "I64", "BOOL"}))


def describe(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to provenance.json, and the digests of the graphs to those of the files that passed the checks.

    What an earlier export wrote of graphs is replaced.
    """
    path = folder / PROVENANCE_FILE
    values = {name: value for name, value in read_json(path).items() if name != "int8"} | dict(facts)
    if FILES_SHA256 in values:
        others = {name: digest for name, digest in values[FILES_SHA256].items() if not name.endswith(GRAPH_SUFFIXES)}
        graphs = {each.name: storage.sha256_of(each) for each in folder.iterdir() if each.name.endswith(GRAPH_SUFFIXES)}
        values[FILES_SHA256] = dict(sorted((others | graphs).items()))
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _section(folder: Path, report: OnnxReport) -> str:
    given = ", ".join(f"`{name}`" for name in report.inputs)
    results = ", ".join(f"`{name}`" for name in report.outputs)
    were = " and ".join(report.weights_were)
    types = f" The weights were {were}; the graph has them as float32." if were else ""
    return (
        f"{_TITLE}\n\n`{ONNX_FILE}` computes {results} from {given} in float32, for any batch size and length (opset "
        f"{report.opset}, {report.num_bytes / 1e6:.1f} MB).{types} On batches with padding its outputs differ from "
        f"those of transformers by at most {report.max_difference:.1e}, at values up to {report.max_value:.1f}.\n\n"
        f"```python\nfrom optimum.onnxruntime import {_OPTIMUM_CLASSES[report.auto_class]}\n\n"
        f'model = {_OPTIMUM_CLASSES[report.auto_class]}.from_pretrained("DIRECTORY", file_name="{ONNX_FILE}")\n```\n'
    )


def _append_to_card(folder: Path, section: str) -> None:
    """Put the section at the end of the model card, in place of that of an earlier export."""
    path = folder / CARD_FILE
    card = path.read_text(encoding="utf-8") if path.is_file() else ""
    card = re.sub(rf"^{_TITLE}\n.*?(?=^## |\Z)", "", card, flags=re.MULTILINE | re.DOTALL)
    path.write_text(f"{card.rstrip()}\n\n{section}".lstrip(), encoding="utf-8")


def append_to_onnx_section(folder: Path, text: str) -> None:
    """Add a paragraph to the section, which ends the card."""
    path = folder / CARD_FILE
    path.write_text(f"{path.read_text(encoding='utf-8').rstrip()}\n\n{text}\n", encoding="utf-8")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the messages of the exporter and of the quantizer, which are for their developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
