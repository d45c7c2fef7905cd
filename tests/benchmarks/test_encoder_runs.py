"""Rows and losses of the benchmarks that train encoders; what is measured here means nothing."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.base.errors import UserError
from trainer import load_config
from trainer.config.schedule import learning_rate
from trainer.config.stages import rates_of
from trainer.data.shard_set import open_shard_set
from trainer.inference.fill_mask import MaskedText

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parents[1]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a script of the benchmarks' folder, which finds its neighbors there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: runpy.run_path(str(BENCHMARKS / f"{name}.py"))


def test_the_peers_rows_are_every_document_in_its_special_tokens_one_after_another(
    scripts: Any, small_shards: Path
) -> None:
    shard_set = open_shard_set(str(small_shards))
    rows = scripts("pretraining_rows")["grouped_rows"](shard_set, "train", 32)
    special = shard_set.manifest.tokenizer.special_tokens
    expected: list[int] = []
    for shard in shard_set.shards("train"):
        for tokens, starts in _records(small_shards / shard.record.name):
            for document in np.split(tokens, starts[1:]):
                expected += [special.cls, *document.tolist(), special.sep]
    assert rows.shape == (len(expected) // 32, 32) and len(rows) > 10
    assert rows.reshape(-1).tolist() == expected[: rows.size]
    few = scripts("pretraining_rows")["grouped_rows"](shard_set, "train", 32, 5)
    assert np.array_equal(few, rows[:5])


def _records(shard: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and the documents' starts of every record, as anybody reads a tar."""
    with tarfile.open(shard) as tar:
        members = {name: np.load(io.BytesIO(tar.extractfile(name).read())) for name in tar.getnames()}  # type: ignore[union-attr]
    for name, tokens in members.items():
        if name.endswith(".tokens.npy"):
            yield tokens, members[name.replace(".tokens.", ".documents.")]


def test_the_judge_counts_predicted_places_alone(scripts: Any, tiny_model: Path) -> None:
    judge = scripts("pretraining_rows")["judge"]
    ids = torch.tensor([[2, 6, 4, 3], [2, 4, 3, 0]])
    row = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.full_like(ids, -100)}
    row["labels"][0, 2], row["labels"][1, 1] = 7, 8
    found = judge(tiny_model, [row], torch.device("cpu"))
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(tiny_model).eval()
    with torch.no_grad():
        first = model(input_ids=ids[:1]).logits[0, 2].log_softmax(-1)[7]
        second = model(input_ids=ids[1:, :3]).logits[0, 1].log_softmax(-1)[8]
    assert found["predictions"] == 2
    assert found["mlm_loss"] == pytest.approx(-(first + second).item() / 2, abs=1e-5)


def test_the_peers_learning_rates_are_ours(scripts: Any) -> None:
    trainer = object.__new__(scripts("pretraining_peer")["ScheduledTrainer"])
    settings = ["data.shards=s", "output_dir=o", "training.max_steps=8", "schedule.warmup_ratio=0.25"]
    trainer.run_config = config = load_config("small_cpu", settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = trainer.create_scheduler(8, optimizer)
    rates = []
    for _ in range(8):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([learning_rate(step, 8, 0.5, config.schedule) for step in range(8)])


def test_a_part_of_a_corpus_depends_on_texts_and_seed_alone(scripts: Any, tmp_path: Path) -> None:
    select, texts = (
        scripts("corpus_part")["select_documents"],
        [f"document {number} of some words" for number in range(40)],
    )
    for name, given in (("a", texts), ("b", texts[::-1])):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as lines:
            lines.writelines(json.dumps({"text": text}) + "\n" for text in given)
    first, again, other = (
        select([str(tmp_path / f"{name}.jsonl.gz")], 52, seed, tmp_path / f"part-{name}-{seed}.jsonl.gz")
        for name, seed in (("a", 1), ("b", 1), ("a", 2))
    )
    assert first == again and first["documents"] == 11 and first["words"] == 55, "whole documents, until 52 are reached"
    assert first["digest"] != other["digest"]
    with gzip.open(tmp_path / "part-a-1.jsonl.gz", "rt") as lines:
        written = [json.loads(line)["text"] for line in lines]
    assert len(set(written)) == 11 and set(written) < set(texts)


def test_results_grow_run_by_run_also_from_the_shape_of_earlier_versions(scripts: Any, tmp_path: Path) -> None:
    reports, path = scripts("reports"), tmp_path / "found.json"
    described = {"date": "2026-01-02", "cpu": "one", "load_average": 1.26, "python": "3.11.7", "versions": {}}
    described["command"] = "python /x/tests/benchmarks/a.py --work w"
    earlier = {"loss": 3.0, "command": "python tests/benchmarks/a.py"}
    reports["write"](path, {**described, "planned": 5, "runs": [earlier]})
    assert reports["read_report"](path)["details"] == {"planned": 5, "runs": [earlier]}
    reports["add_run"](path, described, {"loss": 2.0}, planned=4)
    reports["add_run"](path, described, {"loss": 1.0}, planned=3)
    where = {"date": "2026-01-02", "cpu": "one", "load_average": 1.3, "command": "python tests/benchmarks/a.py"}
    assert reports["runs_in"](path) == [earlier, {"loss": 2.0} | where, {"loss": 1.0} | where]
    report = reports["read_report"](path)
    assert report["details"]["planned"] == 3 and report["date"] == "2026-01-02"


def test_the_plan_of_the_proof_table_waits_for_the_shape_and_then_uses_the_best_of_equals(scripts: Any) -> None:
    script = scripts("proof")
    plan, shapes = script["plan"], list(script["SHAPES"])
    found = ((0.52, 4.0), (0.575, 4.2), (0.58, 4.5))
    rows = [
        run.key | {"overall": accuracy, "interval": [accuracy - 0.01, accuracy + 0.01], "loss": loss}
        for run, (accuracy, loss) in zip(plan([]), found, strict=True)
    ]
    assert [row["shape"] for row in rows] == shapes and plan(rows[:2]) == plan([])
    runs = plan(rows)
    assert len(set(runs)) == len(runs)
    assert {run.shape for run in runs[len(shapes) :]} == {shapes[1]}
    first = [(run.side, run.epochs, run.seed) for run in runs[len(shapes) : len(shapes) + 4]]
    assert first == [("ours", 1, 1), ("run_mlm", 1, 1), ("ltg_bert", 1, 1), ("ours", 0.1, 1)]
    drawn = script["draw"]([row | {"tokens": 1000} for row in rows], script["best_shape"](rows))
    assert drawn.startswith(b"\x89PNG"), "a single point can be drawn"


def test_two_processes_measure_different_rows_of_the_proof_table(scripts: Any, tmp_path: Path) -> None:
    script, reports, results = scripts("proof"), scripts("reports"), tmp_path / "proof.json"
    first, second, third = script["plan"]([])
    described = {"date": "2026-01-02", "cpu": "one", "load_average": 1.0, "python": "3.11.7", "versions": {}}
    reports["add_run"](results, {**described, "command": "python tests/benchmarks/a.py"}, first.key)
    with script["next_run"](results, tmp_path, ["ours"]) as one, script["next_run"](results, tmp_path, ["ours"]) as two:
        assert (one, two) == (second, third)
        with script["next_run"](results, tmp_path, ["ours"]) as nothing:
            assert nothing is None
    with script["next_run"](results, tmp_path, ["ours"]) as again:
        assert again == second
    with script["next_run"](results, tmp_path, ["run_mlm"]) as other:
        assert other is None, "the search for a shape comes first"


def test_ablations_choose_the_rate_by_seed_1_and_repeat_the_best(scripts: Any) -> None:
    script = scripts("ablations")
    plan, steps_of, rates = script["plan"], script["steps_of"], script["RATES"]
    corpus, other = script["CORPORA"]
    *first, _, _, _, _, _, _ = plan([])
    epoch = [(run.variant, run.seed) for run in plan([]) if run.corpus == script["EPOCH"]]
    assert epoch == [(name, seed) for seed in (1, 2, 3) for name in ("default", script["COMBINATION"])]
    assert {run.seed for run in first} == {1} and {run.variant for run in first} == {
        name for name, variant in script["VARIANTS"].items() if variant.has_rates
    }
    rows = [
        asdict(run)
        | {"loss": 3.0 - (run.learning_rate == rates[1]), "cpu_seconds": 50.0 * (2 - (run.variant != "Muon"))}
        for run in first
        if run.corpus == corpus
    ]
    runs = [run for run in plan(rows) if run not in first and run.corpus != script["EPOCH"]]
    assert {(run.corpus, run.learning_rate) for run in runs} == {(corpus, rates[1])}
    assert {run.variant for run in runs if run.equal == "time"} == {"Muon", "StableAdamW"}
    (muon,) = [run for run in runs if (run.variant, run.equal, run.seed) == ("Muon", "time", 1)]
    assert steps_of(muon, rows, 600) == 300, "its steps take twice the time"
    assert steps_of(first[0], rows, 600) == 600 and other not in {run.corpus for run in runs}


def test_variants_of_the_masking_rate_change_nothing_else(scripts: Any) -> None:
    script = scripts("masking")
    default, taught = script["DEFAULT"], script["TAUGHT"]
    settings = {name: script["settings_of"](name, None) for name in script["VARIANTS"] if name != taught}
    configs = {name: load_config("small_cpu", each) for name, each in settings.items()}
    first, *rates = (rates_of(config) for config in configs.values())
    assert first == (0.3, 0.5) and rates[:2] == [(0.15, 0.15), (0.3, 0.3)]
    assert rates[2] == pytest.approx((0.0, 0.8), abs=0.003)
    assert rates[3] == pytest.approx((0.7 * 0.12, 1.3 * 0.57))
    for config in configs.values():
        assert config.model_copy(update={"data": configs[default].data}) == configs[default]
    with_teacher = load_config("small_cpu", script["settings_of"](taught, Path("large")))
    assert with_teacher.teacher == "large" and with_teacher.data == configs[default].data


def test_the_longest_runs_of_masking_are_the_default_and_the_two_with_the_lowest_loss(scripts: Any) -> None:
    script = scripts("masking")
    plan, names, quarter = script["plan"], list(script["VARIANTS"]), script["QUARTER"]
    short = plan([])
    assert len(short) == len(set(short)) == 2 * 3 * len(names)
    rows = [
        {"length": run.length, "variant": run.variant, "seed": run.seed, "loss": 5.0 - names.index(run.variant)}
        for run in short
        if run.length == quarter
    ]
    assert plan(rows[:-1]) == short
    longest = plan(rows)[len(short) :]
    assert [(run.variant, run.seed) for run in longest[:3]] == [(names[0], 1), (names[-1], 1), (names[-2], 1)]
    assert len(longest) == 9 and {run.length for run in longest} == {script["EPOCH"]}


def test_the_two_ways_differ_in_what_half_of_the_steps_predict_alone(scripts: Any) -> None:
    script = scripts("causal")
    causal, masked = (
        load_config(recipe.preset, [*recipe.settings, f"training.max_steps={recipe.steps}"])
        for recipe in (script["recipe_of"](way, 1000) for way in script["WAYS"])
    )
    assert [(stage.steps, stage.is_causal) for stage in causal.stages] == [(500, True), (500, False)]
    assert [(stage.steps, stage.is_causal) for stage in masked.stages] == [(1000, False)]
    assert causal.max_steps == masked.max_steps == 1000 and causal.model == masked.model
    for step in (0, 400, 700, 999):
        stages = (each.stage_of(step + 1) for each in (causal, masked))
        assert len({stage.learning_rate(step) for stage in stages}) == 1
    assert [(run.seed, run.way) for run in script["PLAN"]] == [(n, way) for n in (1, 2, 3) for way in script["WAYS"]]


def test_labels_of_law_come_from_the_path_and_are_not_in_the_text(scripts: Any, tmp_path: Path) -> None:
    script, lines = scripts("domain"), []
    for number in range(400):
        title, words = number % 5 + 30, f"word{number} " * 90
        text = (
            f"{title}-{number} Heading of {number}.\n\n(a) See §§ {title}-1 and {title}-9.02(b), Title {title}; {words}"
        )
        lines.append({"text": text, "source": f"code/titles/{title}/sections/{title}-{number}.xml"})
    lines.append({"text": "Title\n\n" + "index " * 100, "source": "code/titles/30/index.xml"})
    with gzip.open(tmp_path / "law.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    script["prepare_law"]([str(tmp_path / "law.jsonl.gz")], tmp_path / "made")
    with gzip.open(tmp_path / "made" / "continued.jsonl.gz", "rt") as file:
        continued = [json.loads(line)["text"] for line in file]
    assert 200 < len(continued) < 280
    used = [set(re.findall(r"word\d+", " ".join(continued)))]
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (tmp_path / "made" / f"{name}.jsonl").read_text().splitlines()]
        assert {row["label"] for row in rows} == {f"title {title}" for title in range(30, 35)}
        assert not [row for row in rows if re.search(r"\b3[0-4]\b|Heading|index|§", row["text"])]
        used.append(set(re.findall(r"word\d+(?= )", " ".join(row["text"] for row in rows))))
    assert not used[0] & used[1] and not used[0] & used[2] and not used[1] & used[2]
    plan = script["plan"](3)
    assert [(run.seed, run.rate, run.replay) for run in plan[:4]] == [
        (1, 0, 0),
        (1, 1e-3, 0),
        (1, 1e-3, 0.05),
        (2, 0, 0),
    ]
    assert [(run.seed, run.rate) for run in plan[9:]] == [(1, 3e-4), (1, 3e-3)] and len({*plan}) == len(plan)


def test_few_labels_are_drawn_alike_for_every_encoder(scripts: Any) -> None:
    script = scripts("domain")
    labels = [f"title {number % 3}" for number in range(60)] + ["title 3"] * 2
    drawn = script["draw"](labels, 4, 1)
    assert Counter(labels[number] for number in drawn) == {"title 0": 4, "title 1": 4, "title 2": 4, "title 3": 2}
    assert drawn == script["draw"](labels, 4, 1) != script["draw"](labels, 4, 2)
    generator = np.random.default_rng(3)
    centers = generator.normal(size=(4, 8))
    vectors = np.stack([centers[int(label[-1])] for label in labels]) + generator.normal(size=(62, 8)) / 50
    assert script["probe"](vectors[drawn], [labels[n] for n in drawn], vectors, labels) == 100.0
    assert script["probe"](vectors[drawn], [labels[n] for n in drawn], vectors[:1], ["title 1"]) == 0.0


def test_an_encoder_is_extended_by_the_preset_and_compared_at_equal_tokens(scripts: Any) -> None:
    script = scripts("extension")
    before, extended, start = (
        load_config(recipe.preset, [*recipe.settings, f"training.max_steps={recipe.steps}", "data.shards=shards"])
        for recipe in (script["recipe_of"](way, 8192, 1000, 200, "model") for way in script["WAYS"])
    )
    assert [(stage.steps, stage.sequence_length) for stage in before.stages] == [(1000, 128)]
    assert [(stage.steps, stage.sequence_length) for stage in extended.stages] == [(160, 512), (40, 512)]
    assert [(stage.steps, stage.sequence_length) for stage in start.stages] == [(1200, 512)]
    assert extended.init_from == "model" and extended.adopt == ("rope", "positions")
    bases = [each.model.global_rope_theta for each in (before, extended, start)]
    assert bases == [10_000, 160_000, 160_000] and extended.model == start.model.model_copy(
        update={"output_bias": "zeros"}
    )
    assert {stage.global_batch_tokens for each in (before, extended, start) for stage in each.stages} == {2048}
    plan = script["plan"](3)
    assert len({*plan}) == len(plan) == 9 and [run.way for run in plan[:3]] == [*script["WAYS"]]


def test_missing_rows_are_measured_and_rows_of_other_settings_are_not_mixed(scripts: Any, tmp_path: Path) -> None:
    script, reports, causal = scripts("encoder_runs"), scripts("reports"), scripts("causal")
    described = {"date": "2026-01-02", "cpu": "one", "load_average": 1.0, "python": "3.11.7", "versions": {}}
    described["command"] = "python tests/benchmarks/a.py"
    path, (first, second, *_) = tmp_path / "found.json", causal["PLAN"]

    def measure_missing(number: int, steps: int) -> None:
        script["measure_missing"](
            SimpleNamespace(results=path, runs=number),
            lambda rows: causal["PLAN"],
            lambda run: {"steps": steps},
            lambda run, rows: ({"loss": float(len(rows))}, described),
        )

    def found() -> list[tuple[Any, ...]]:
        rows = reports["runs_in"](path)
        return [(row["way"], row["seed"], row.get("steps"), row["loss"]) for row in rows]

    reports["add_run"](path, described, {**asdict(first), "loss": 9.0})  # an earlier version named no steps
    measure_missing(1, 100)
    assert found() == [(first.way, first.seed, None, 9.0), (second.way, second.seed, 100, 1.0)]
    with pytest.raises(UserError, match="steps=100, and this command has steps=200"):
        measure_missing(1, 200)
    assert len(found()) == 2
    measure_missing(10**6, 100)
    assert [row[:2] for row in found()] == [(run.way, run.seed) for run in causal["PLAN"]]
    assert len(reports["read_report"](path)["details"]["planned"]) == len(causal["PLAN"])


def test_the_ways_of_distillation_differ_in_the_teacher_alone(scripts: Any) -> None:
    script = scripts("distillation")
    alone, *taught = (
        load_config(recipe.preset, [*recipe.settings, f"training.max_steps={recipe.steps}"])
        for recipe in (script["recipe_of"](way, 1000, "teacher") for way in script["WAYS"])
    )
    assert alone.teacher is None and all(each.teacher == "teacher" for each in taught)
    for each in taught:
        assert each.model_copy(update={"teacher": None, "objectives": None}) == alone
        assert sum(one.weight for one in each.run_objectives if one.name != "hidden_states") == 1
    plan = script["PLAN"]
    assert len({*plan}) == len(plan) == 3 * len(script["WAYS"])
    assert [(run.seed, run.way) for run in plan[:3]] == [(1, "labels"), (1, "labels and teacher"), (2, "labels")]


def test_adoptions_are_measured_at_their_start_first(scripts: Any) -> None:
    script = scripts("adoption")
    plan, adoptions = script["plan"](3), script["ADOPTIONS"]
    assert [run.kind for run in plan] == ["start"] * 3 * len(adoptions) + ["reach"] * 6
    assert {run.name for run in plan if run.kind == "reach"} == {"other tokenizer", "4 x 256"}
    assert len({*plan}) == len(plan) and {run.seed for run in plan} == {1, 2, 3}


def test_ltg_bert_attends_by_content_and_by_distance(scripts: Any) -> None:
    script = scripts("ltg_bert")
    buckets = script["position_buckets"](40, 8, 64)
    assert buckets[0, 0] == 7 and buckets[4, 0] == 11 and buckets[0, 4] == 3, "one row for each distance up to half"
    assert buckets.min() == 0 and buckets.max() == 14 and (buckets + buckets.T == 14).all()
    assert (buckets[:, 0].diff() >= 0).all()
    torch.manual_seed(0)
    config = script["LtgBertConfig"](vocab_size=32, hidden_size=8, intermediate_size=12, position_bucket_size=4)
    model = script["LtgBertForMaskedLM"](config).eval()
    model.initialize()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    attention, hidden = model.model.layers[0].attention, torch.randn(2, 6, 8)
    positions, buckets = torch.randn(7, 8), script["position_buckets"](6, 4, 512)
    found = attention(hidden, torch.ones(2, 1, 1, 6, dtype=torch.bool), positions, buckets)
    normed = attention.norm(hidden)
    (query, key), (at_query, at_key) = (attention.query_key(each).chunk(2, dim=-1) for each in (normed, positions))
    value = attention.value(normed)
    expected = torch.zeros(2, 6, 8)
    for head in (slice(0, 4), slice(4, 8)):
        for i in range(6):
            scores = torch.stack(
                [
                    (query[:, i, head] * key[:, j, head]).sum(-1)
                    + (query[:, i, head] * at_key[buckets[i, j], head]).sum(-1)
                    + (key[:, j, head] * at_query[buckets[i, j], head]).sum(-1)
                    for j in range(6)
                ],
                dim=-1,
            )
            weights = (scores / (3 * 4) ** 0.5).softmax(-1)
            expected[:, i, head] = torch.einsum("bj,bjd->bd", weights, value[:, :, head])
    torch.testing.assert_close(found, attention.output_norm(attention.output(expected)), rtol=1e-4, atol=1e-5)
    short = model(torch.arange(5)[None], torch.ones(1, 5, dtype=torch.int64)).logits
    padded = model(torch.tensor([[0, 1, 2, 3, 4, 0, 0]]), torch.tensor([[1] * 5 + [0, 0]])).logits
    torch.testing.assert_close(padded[:, :5], short)


def test_hits_ignore_case_and_count_whole_words(scripts: Any) -> None:
    texts = [MaskedText("", "", word) for word in ("The", "cat", "sat")]
    rates = scripts("fills")["hit_rates"](texts, [["the", "a"], ["dog", "cat"], ["-sat", "ran"]])
    assert rates == {"top_1": pytest.approx(1 / 3), "top_5": pytest.approx(2 / 3)}


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    BertForMaskedLM(BertConfig(vocab_size=20, max_position_embeddings=16, **sizes)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_labeled_file_that_is_missing_is_told_before_anything_is_trained(scripts: Any, tmp_path: Path) -> None:
    script = scripts("downstream")
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.tsv").touch()
    with pytest.raises(UserError, match="has no sst2/dev.tsv"):
        script["check_labeled"](tmp_path, script["TASKS"])
    (tmp_path / "sst2" / "dev.tsv").touch()
    script["check_labeled"](tmp_path, script["TASKS"][:1])


@pytest.mark.slow
def test_the_downstream_command_compares_on_every_task_and_does_none_twice(tiny_model: Path, tmp_path: Path) -> None:
    labeled = tmp_path / "labeled"
    heads = {"sst2": "sentence\tlabel", "mrpc": "Quality\t#1 String\t#2 String", "fr_allocine_films": "text,label"}
    lines = {"sst2": "w{0} w1\t{1}", "mrpc": "{1}\tw{0} w1\tw2", "fr_allocine_films": "w{0} w1,{1}"}
    for name, head in heads.items():
        for file in ("train.csv", "test.csv") if name == "fr_allocine_films" else ("train.tsv", "dev.tsv"):
            rows = [lines[name].format(number % 9, number % 2) for number in range(40)]
            (labeled / name).mkdir(parents=True, exist_ok=True)
            (labeled / name / file).write_text("\n".join([head, *rows]) + "\n")
    _with_tokenizer(tiny_model)
    command = [sys.executable, str(BENCHMARKS / "downstream.py"), "--labeled", str(labeled), "--rows", "30"]
    command += ["--english", str(tiny_model), "--french", str(tiny_model), "--seeds", "2", "--epochs", "1"]
    command += ["--learning-rates", "1e-3", "--max-length", "16", "--work", str(tmp_path / "work")]
    command += ["--results", str(tmp_path / "found.json")]
    _run(command)
    text = (tmp_path / "found.json").read_text()
    report = json.loads(text)["details"]
    assert set(report["tasks"]) == {f"{name}, 30 rows" for name in heads}
    assert report["tasks"]["sst2, 30 rows"]["num_examples"] == {"train": 27, "valid": 3, "test": 40}
    for task in report["tasks"].values():
        assert set(task["variants"]) == {"scratch", "frozen", "full"} and task["scored_on"] == "test"
        for entry in task["variants"].values():
            values = [fit["scores"]["accuracy"] for fit in entry["fits"]]
            assert len(values) == 2 and entry["mean"]["accuracy"] == pytest.approx(np.mean(values))
    assert str(tmp_path) not in text
    assert "..." not in _run(command), "tasks that are done are read, not fitted again"


def _with_tokenizer(folder: Path) -> None:
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(15))]
    BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)


def _run(command: list[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return done.stdout
