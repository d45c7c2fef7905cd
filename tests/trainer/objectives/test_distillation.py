"""The teacher's distribution and hidden states as targets: the formulas of torch, in one piece and in chunks."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.objectives import all_objectives, loss_sum
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import DISTILLATION, HIDDEN_STATES, MASKED_LM, ObjectiveSettings, objectives_of
from trainer.data.batch import Batch
from trainer.model import chunked_loss
from trainer.objectives import distillation, pretraining
from trainer.objectives.distillation import Target, Teacher, losses_of, teacher_layer
from trainer.objectives.objective import EncodedBatch
from trainer.objectives.pretraining import PretrainingModel, parameter_counts

LENGTH, LENGTHS, TOKENS = 32, [9, 6, 1, 16, 30, 2], 57
TEMPERATURE = 3.0
TAUGHT = ObjectiveSettings(name=DISTILLATION, settings={"temperature": TEMPERATURE})


def taught_by(width: int) -> ObjectiveSettings:
    return ObjectiveSettings(name=HIDDEN_STATES, settings={"teacher_hidden_size": width})


@pytest.fixture
def batch(make_documents, pack) -> Batch:
    packed: Batch = pack(make_documents(LENGTHS), LENGTH).batch
    return packed


def teacher_of(model: PretrainingModel) -> Teacher:
    model.requires_grad_(False).eval()
    return Teacher(model.config, model.encoder, model.masked_lm.mlm_head, TOKENS, "digest")


def student(
    config: ModelSettings, teacher: PretrainingModel, *more: ObjectiveSettings, pairs: bool = False
) -> PretrainingModel:
    model = PretrainingModel(config, (*objectives_of("next_sentence" if pairs else "none"), *more))
    model.initialize(1)
    teacher_of(teacher).attach_to(model.objectives.values())
    return model


def reference(model: PretrainingModel, teacher: PretrainingModel, batch: Batch) -> list[torch.Tensor]:
    """Loss of labels and divergence by plain torch: softmaxes over the tokens that both have, padding rows left out."""
    used = batch.labels != -100
    ours, theirs = (each.predict(batch).mlm_logits[used].double() for each in (model, teacher))
    of_labels = F.cross_entropy(ours, batch.labels[used], reduction="sum")
    p, q = ((each[:, :TOKENS] / TEMPERATURE).softmax(-1) for each in (theirs, ours))
    return [of_labels, TEMPERATURE**2 * (p * (p.log() - q.log())).sum()]


def gradients(model: PretrainingModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.fixture(params=["whole", "chunks"])
def in_chunks(request, monkeypatch) -> bool:
    """With logits of all predictions at once, and in chunks of five rows, the last of which has fewer."""
    if request.param == "chunks":
        for module in (chunked_loss, distillation):
            monkeypatch.setattr(module, "rows_per_chunk", lambda *_: 5, raising=False)
            monkeypatch.setattr(module, "is_chunked", lambda *_: True, raising=False)
    return bool(request.param == "chunks")


@pytest.mark.parametrize("family", ["tiny_config", "modern_config", "euro_config"])
def test_losses_and_every_gradient_are_those_of_the_formula(
    request, tiny_config, modern_config, make_model, batch, family, in_chunks
) -> None:
    """A teacher of another family, width, depth and number of padding rows; weights of 0.3 and 0.7."""
    config: ModelSettings = request.getfixturevalue(family)
    other = tiny_config if family == "modern_config" else modern_config
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "pad_vocab_size_to_multiple_of": 1}
    teacher = make_model(other.model_copy(update=sizes), next_sentence=False, seed=5).double()
    model = student(config, teacher, TAUGHT).double()
    output = model(batch)
    found = [output[name]["loss"] for name in (MASKED_LM, DISTILLATION)]
    wanted = reference(model, teacher, batch)
    for loss, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    mixed = [0.3 * losses[0] + 0.7 * losses[1] for losses in (found, wanted)]
    ours, theirs = (gradients(model, loss) for loss in mixed)
    assert ours.keys() == theirs.keys() == dict(model.named_parameters()).keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-6, atol=1e-6 * theirs[name].abs().max().item())


def test_weights_of_rows_are_of_the_labels_alone(tiny_config, modern_config, make_model, batch, in_chunks) -> None:
    teacher = make_model(modern_config, next_sentence=False, seed=5)
    model = student(tiny_config, teacher, TAUGHT)
    plain = PretrainingModel(tiny_config, objectives_of("none"))
    plain.load_state_dict(model.state_dict())
    rows = batch.num_rows
    weights = torch.arange(1, rows + 1, dtype=torch.float64) / 3
    weighted = replace(batch, row_weights=weights, row_tokens=torch.full((rows,), 30))
    output, expected, before = model(weighted), plain(weighted), model(batch)
    torch.testing.assert_close(output[MASKED_LM]["loss"], expected[MASKED_LM]["loss"], rtol=1e-6, atol=0)
    assert output[MASKED_LM]["loss"] != before[MASKED_LM]["loss"]
    torch.testing.assert_close(output[DISTILLATION]["loss"], before[DISTILLATION]["loss"], rtol=1e-6, atol=0)
    ours, theirs = (gradients(each, out[MASKED_LM]["loss"]) for each, out in ((model, output), (plain, expected)))
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())
    counts = all_objectives(model).num_predictions([weighted])
    assert (counts[MASKED_LM], counts[DISTILLATION]) == (30 * rows, batch.num_masked)


def test_in_float32_too(tiny_config, modern_config, make_model, batch, in_chunks) -> None:
    teacher = make_model(modern_config, next_sentence=False, seed=5)
    model = student(tiny_config, teacher, TAUGHT)
    output = model(batch)
    exact = reference(model.double(), teacher.double(), batch)
    # A divergence is a sum of differences of log-probabilities that are nearly equal here: their rounding remains.
    terms = batch.num_masked * TEMPERATURE**2 * math.log(tiny_config.vocab_size)
    allowed = {MASKED_LM: 0.0, DISTILLATION: terms * torch.finfo(torch.float32).eps / 2}
    for name, wanted in zip((MASKED_LM, DISTILLATION), exact, strict=True):
        assert output[name]["loss"].dtype == torch.float32
        torch.testing.assert_close(output[name]["loss"].double(), wanted, rtol=1e-6, atol=allowed[name])


def test_each_loss_has_its_own_gradient(tiny_config, modern_config, make_model, batch, in_chunks) -> None:
    """One of them alone gives what a model without the other has: no part of one leaks into the other."""
    teacher = make_model(modern_config, next_sentence=False, seed=5)
    model = student(tiny_config, teacher, TAUGHT)
    alone = gradients(model, model(batch, objectives=(MASKED_LM,))[MASKED_LM]["loss"])
    beside = gradients(model, model(batch)[MASKED_LM]["loss"])
    assert alone.keys() == beside.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(beside[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


def test_the_logits_of_the_model_are_computed_once(tiny_config, modern_config, make_model, batch, monkeypatch) -> None:
    teacher = make_model(modern_config, next_sentence=False, seed=5)
    model = student(tiny_config, teacher, TAUGHT, ObjectiveSettings(name=HIDDEN_STATES))
    calls = []
    for name, module in {"student": model, "teacher": teacher}.items():
        for part in (module.encoder, module.encoder.embeddings.word_embeddings, module.masked_lm.mlm_head):
            part.register_forward_hook(lambda module, *_, name=name: calls.append((name, type(module).__name__)))
    model(batch)
    assert calls.count(("student", "Encoder")) == calls.count(("teacher", "Encoder")) == 1
    assert calls.count(("student", "MaskedLanguageModelHead")) == 1
    assert calls.count(("student", "WordEmbeddings")) == 2, "the embedding, and the decoder"


def test_a_micro_batch_is_freed_with_its_loss(tiny_config, modern_config, make_model, batch, monkeypatch) -> None:
    """Without a search for garbage, which a run does not do between steps."""
    made = []

    class Watched(EncodedBatch):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr(pretraining, "EncodedBatch", Watched)
    teacher = make_model(modern_config, next_sentence=False, seed=5)
    model = student(tiny_config, teacher, TAUGHT, ObjectiveSettings(name=HIDDEN_STATES))
    gc.disable()
    try:
        loss_sum(model(batch)).backward()
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_give_what_all_logits_at_once_give(dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (0.4 * torch.randn(shape, generator=generator)).to(dtype)

    labels = torch.randint(700, (150,), generator=generator)
    labels[::7] = -100
    values = draw(150, 48), draw(704, 48), draw(704)
    target = Target(draw(150, 32), draw(650, 32), draw(650), 2.0)
    found = []
    for chunk_rows in (None, 150, 64, 1):
        leaves = [value.detach().requires_grad_() for value in values]
        losses = losses_of(*leaves, labels, target, chunk_rows)
        (losses * torch.tensor([0.0123, 0.321])).sum().backward()
        found.append([losses.detach(), *(leaf.grad for leaf in leaves)])
    error = 2e-6 if dtype == torch.float32 else 1e-2
    for each in found[1:]:
        for one, whole in zip(each, found[0], strict=True):
            assert one is not None and whole is not None and one.dtype == whole.dtype
            assert ((one - whole).double().norm() / whole.double().norm()).item() < error


def test_rows_that_pad_either_vocabulary_take_no_part(tiny_config, modern_config, make_model, batch) -> None:
    """Whatever stands in them: the divergence and its gradient are those of the tokens."""
    teacher = make_model(modern_config, next_sentence=False, seed=5)
    model = student(tiny_config, teacher, TAUGHT)
    assert len(model.mlm_head.bias) > TOKENS < len(teacher.mlm_head.bias)
    before = model(batch)[DISTILLATION]["loss"]
    assert not gradients(model, before)["mlm_head.bias"][TOKENS:].any()
    with torch.no_grad():
        model.mlm_head.bias[TOKENS:] += 20.0
        teacher.mlm_head.bias[TOKENS:] -= 20.0
    torch.testing.assert_close(model(batch)[DISTILLATION]["loss"], before, rtol=1e-6, atol=0)


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(tiny_config, make_model, batch, in_chunks) -> None:
    teacher = make_model(tiny_config, next_sentence=False)
    model = student(tiny_config, teacher, TAUGHT, ObjectiveSettings(name=HIDDEN_STATES))
    model.load_state_dict(teacher.state_dict())
    output = model(batch)
    for name in (DISTILLATION, HIDDEN_STATES):
        assert abs(output[name]["loss"].item()) < 1e-4
        assert all(gradient.abs().max() < 1e-4 for gradient in gradients(model, model(batch)[name]["loss"]).values())


def test_the_teacher_is_no_part_of_the_model_and_never_changes(tiny_config, modern_config, make_model, batch) -> None:
    teacher = make_model(modern_config, next_sentence=False, seed=5)
    before = {name: each.clone() for name, each in teacher.state_dict().items()}
    plain = PretrainingModel(tiny_config, objectives_of("none"))
    model = student(tiny_config, teacher, TAUGHT).train()
    assert [*model.state_dict()] == [*plain.state_dict()] and parameter_counts(model) == parameter_counts(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        loss_sum(model(batch)).backward()
        optimizer.step()
    assert not any(module.training for module in teacher.modules())
    assert all(each.grad is None and torch.equal(before[name], each) for name, each in teacher.named_parameters())


def test_the_teacher_sees_the_packing_and_has_no_dropout(tiny_config, make_model, make_documents, pack) -> None:
    """Its predictions for a document do not depend on the others of the row, and are the same in every pass."""
    teacher = make_model(tiny_config.model_copy(update={"hidden_dropout_prob": 0.5}), next_sentence=False, seed=5)
    documents = make_documents(LENGTHS)
    model = student(tiny_config, teacher, TAUGHT).train()
    together = [model(pack(documents, LENGTH).batch)[DISTILLATION]["loss"] for _ in range(2)]
    alone = sum(model(pack([each], LENGTH).batch)[DISTILLATION]["loss"] for each in documents)
    assert torch.equal(*together)
    torch.testing.assert_close(together[0], alone, rtol=1e-5, atol=1e-5)


def test_beside_sentence_pairs_a_teacher_without_segments_reads_both_as_one(tiny_config, make_model, batch) -> None:
    one_type = make_model(tiny_config.model_copy(update={"type_vocab_size": 1}), next_sentence=False, seed=5)
    model = student(tiny_config, one_type, TAUGHT, pairs=True)
    plain = PretrainingModel(tiny_config, objectives_of("next_sentence"))
    plain.load_state_dict(model.state_dict())
    output, expected = model(batch), plain(batch)
    assert torch.equal(output["sentence_pairs"]["loss"], expected["sentence_pairs"]["loss"])
    torch.testing.assert_close(output[MASKED_LM]["loss"], expected[MASKED_LM]["loss"])
    of_one_kind = replace(batch, has_segment_b=False)
    (used,) = (batch.labels != -100).nonzero(as_tuple=True)
    ours, theirs = (
        (each.predict(seen).mlm_logits[used, :TOKENS].double() / TEMPERATURE).log_softmax(-1)
        for each, seen in ((model, batch), (one_type, of_one_kind))
    )
    wanted = TEMPERATURE**2 * (theirs.exp() * (theirs - ours)).sum()
    torch.testing.assert_close(output[DISTILLATION]["loss"].double(), wanted, rtol=1e-5, atol=0)


def test_hidden_states_are_compared_by_layers_and_projected_where_widths_differ(
    tiny_config, modern_config, make_model, batch
) -> None:
    teacher = make_model(modern_config.model_copy(update={"hidden_size": 48}), next_sentence=False, seed=5)
    model = student(tiny_config, teacher, taught_by(48))
    assert [name for name in model.state_dict() if name.startswith("projections")] == [
        "projections.0.weight",
        "projections.1.weight",
    ]
    states: dict[str, list[torch.Tensor]] = {"student": [], "teacher": []}
    for name, each in {"student": model, "teacher": teacher}.items():
        each.encoder(batch, of_layers=states[name])
    used = batch.labels != -100
    at = batch.masked_positions[used]
    expected = torch.zeros(())
    for layer, of_teacher in ((0, 1), (1, 3)):  # of two layers, and of four
        projected = states["student"][layer][at] @ model.projections[layer].weight.T
        wanted = states["teacher"][of_teacher][at]
        cosines = (projected * wanted).sum(-1) / projected.norm(dim=-1) / wanted.norm(dim=-1)
        expected = expected + (1 - cosines).sum() / 2
    found = model(batch)[HIDDEN_STATES]["loss"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    ours, theirs = (gradients(model, loss) for loss in (found, expected))
    assert {"projections.0.weight", "encoder.layers.0.attention.qkv.weight"} <= ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layers", "of_teacher", "expected"),
    [
        (2, 4, [2, 4]),
        (2, 2, [1, 2]),
        (3, 4, [2, 3, 4]),
        (4, 2, [1, 1, 2, 2]),
        (1, 12, [12]),
        (6, 12, [2, 4, 6, 8, 10, 12]),
    ],
)
def test_layers_are_mapped_evenly_and_the_last_to_the_last(layers, of_teacher, expected) -> None:
    assert [teacher_layer(number + 1, layers, of_teacher) for number in range(layers)] == expected


def test_recomputed_blocks_give_the_same_gradients(tiny_config, modern_config, make_model, batch) -> None:
    teacher = make_model(modern_config, next_sentence=False, seed=5)
    found = []
    for checkpointing in (False, True):
        model = student(tiny_config, teacher, TAUGHT, ObjectiveSettings(name=HIDDEN_STATES))
        model.encoder.activation_checkpointing = checkpointing
        found.append(gradients(model, loss_sum(model(batch))))
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_evaluations_measure_no_teacher(tiny_config, modern_config, make_model, batch) -> None:
    """`valid/mlm_*` of a run with a teacher are those of a run without one."""
    teacher = make_model(modern_config, next_sentence=False, seed=5)
    model, plain = student(tiny_config, teacher, TAUGHT), PretrainingModel(tiny_config, objectives_of("none"))
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        scores = [each(batch, scored=(MASKED_LM,)) for each in (model, plain)]
    assert [*scores[0]] == [MASKED_LM]
    for name, values in scores[0][MASKED_LM].values.items():
        assert torch.equal(values, scores[1][MASKED_LM].values[name])


def test_a_loss_per_objective_is_reported_and_weighted(tiny_config, modern_config, make_model, batch) -> None:
    model = student(tiny_config, make_model(modern_config, next_sentence=False, seed=5), TAUGHT)
    objectives = all_objectives(model)
    assert objectives.columns == ((MASKED_LM, "loss"), (DISTILLATION, "loss"))
    counts = objectives.num_predictions([batch])
    assert counts[MASKED_LM] == counts[DISTILLATION] == int((batch.labels != -100).sum())


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_gives_the_same(tiny_config, modern_config, make_model, batch, backend, in_chunks) -> None:
    teacher = make_model(modern_config, next_sentence=False, seed=5)
    found = []
    for is_compiled in (False, True):
        model = student(tiny_config, teacher, TAUGHT)
        if is_compiled:
            model.compile_blocks(backend)
        output = model(batch)
        losses = torch.stack([sums["loss"] for sums in output.values()])
        found.append((losses.detach(), gradients(model, losses @ torch.tensor([0.3, 0.7]))))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())
