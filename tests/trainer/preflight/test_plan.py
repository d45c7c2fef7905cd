from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from tests.support.doctor import findings_of, planned
from tests.support.error_codes import coded
from trainer import load_config
from trainer.api import EXTENSIONS
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.model.sizes import DTYPES, loss_bytes
from trainer.preflight.dry_run import batch_lines, memory_lines
from trainer.preflight.plan import GPUS, measured_speed, micro_batch_without_padding, plan_run


@pytest.mark.parametrize(
    ("preset", "pairs"),
    [
        *(("bert_base", "next_sentence"), ("bert_large", "none"), ("bert_large", "next_sentence")),
        *(("bert_large_64gpu", "none"), ("modern_large", "none"), ("bert_large_phased", "next_sentence")),
    ],
)
def test_the_micro_batches_of_presets_fill_a_card_of_80_gb(preset: str, pairs: str) -> None:
    """On one rank, where nothing is divided, with room for buffers and the allocator."""
    config = load_config(preset, [f"data.sentence_pairs={pairs}"])
    for stage in config.stages:
        parts = planned(config, 1).memory_in_stage(stage)
        assert {"optimizer", "logits", "activations"} <= {name for name, size in parts.items() if size > 0}
        sequences = 2 * SEQUENCES_PER_ROW * stage.micro_batch_tokens // stage.sequence_length
        scratch = 4 * (stage.micro_batch_tokens + 128 * sequences) * config.model.hidden_size
        assert sum(parts.values()) + scratch <= 0.85 * 80e9
        # Twice as many rows do not fit, or the global batch is one micro-batch.
        doubled = sum(parts.values()) + parts["activations"] + parts["logits"]
        assert doubled > 0.85 * 80e9 or batch_arithmetic(stage, 1).accumulation_steps == 1


def test_the_memory_of_a_causal_stage_has_the_loss_of_all_positions() -> None:
    stages = "training.stages=[{steps: 1, objectives: [{name: causal}]}, {steps: 1, micro_batch_tokens: 16384}]"
    config = load_config("bert_base", [stages, "training.max_steps=null", "data.sentence_pairs=none"])
    run = planned(config, 1)
    parts = [run.memory_in_stage(stage, micro_batch_tokens=16384) for stage in config.stages]
    dtype = DTYPES[config.training.precision]
    assert [each["logits"] for each in parts] == [
        loss_bytes(config.model, predictions, dtype) for predictions in (16384, 32 * 77)
    ]
    rest = [{name: size for name, size in each.items() if name != "logits"} for each in parts]
    assert rest[0] == rest[1] and run.heaviest_stage().is_causal


SEQUENCES_PER_ROW = 7
"""More than rows hold on average (2 to 3). Flash attention's backward has fp32 scratch for the tokens of a micro-batch
and 128 for each sequence that there is room for, up to twice as many as there are."""


def memory_of(*overrides: str, gpu: str = "h100-80", num_ranks: int = 8) -> tuple[str, str]:
    """The level and the text of what the doctor says of the memory of bert_large on a GPU that is not here."""
    (finding,) = findings_of(load_config("bert_large", list(overrides)), "memory", num_ranks=num_ranks, gpu=gpu)
    return finding.level, finding.text


def test_a_run_fits_a_gpu_that_this_machine_lacks() -> None:
    assert memory_of()[0] == "ok" and memory_of()[1].startswith("fits: 55 of 80 GB per rank")
    assert memory_of(gpu="h200-141")[1].startswith("fits: 55 of 141 GB per rank")
    run = planned(load_config("bert_large"), 8, gpu="h100-80")
    assert memory_lines(run)[-1] == memory_of()[1], "the dry run says the same"


@pytest.mark.parametrize(
    ("overrides", "num_ranks"),
    [
        (["training.micro_batch_tokens=131072"], 8),
        (["training.micro_batch_tokens=131072", "training.precision=fp32"], 8),
        # 24 layers of this width need 90 GiB of states at ZeRO 1 on 4 ranks, and less at ZeRO 3.
        (["model.hidden_size=4096", "model.num_attention_heads=64", "model.intermediate_size=16384"], 4),
        (["model.hidden_size=3072", "model.num_attention_heads=48", "training.micro_batch_tokens=65536"], 8),
    ],
)
def test_what_is_advised_to_a_run_that_does_not_fit_makes_it_fit(overrides: list[str], num_ranks: int) -> None:
    level, text = memory_of(*overrides, num_ranks=num_ranks)
    advised = re.search(r"; set (.*), with which it fits", text)
    assert level == "fail" and text.startswith("does not fit: ") and advised is not None, text
    assert memory_of(*overrides, *advised[1].split(), num_ranks=num_ranks)[0] == "ok"


def test_the_largest_micro_batch_that_fits_is_advised() -> None:
    _, text = memory_of("training.micro_batch_tokens=131072")
    (tokens,) = (int(number) for number in re.findall(r"set training.micro_batch_tokens=(\d+),", text))
    assert tokens % 512 == 0
    larger = planned(load_config("bert_large", [f"training.micro_batch_tokens={tokens + 512}"]), 8)
    needed = sum(larger.memory_in_stage(larger.config.stages[0], micro_batch_tokens=tokens + 512).values())
    assert needed > 0.9 * GPUS["h100-80"].memory_bytes


def test_every_stage_of_a_recipe_gets_a_micro_batch_that_fits() -> None:
    config = load_config("modernbert_large", ["training.precision=fp32"])
    (finding,) = findings_of(config, "memory", num_ranks=8, gpu="h100-80")
    advised = re.findall(r"training\.stages\.\d\.micro_batch_tokens=\d+", finding.text)
    assert finding.level == "fail" and len(advised) == len(config.stages)
    changed = load_config("modernbert_large", ["training.precision=fp32", *advised])
    (finding,) = findings_of(changed, "memory", num_ranks=8, gpu="h100-80")
    assert finding.level == "ok"


def test_a_model_that_no_micro_batch_fits_is_said_to_need_another_device() -> None:
    sizes = ["model.hidden_size=16384", "model.num_attention_heads=256", "model.intermediate_size=65536"]
    level, text = memory_of(*sizes, num_ranks=1)
    assert level == "fail" and "a larger device" in text and "with which it fits" not in text


def test_a_host_without_a_gpu_does_not_refuse_a_run_for_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.preflight.machine_checks.device_memory_bytes", lambda device, world_size: 1 << 30)
    (finding,) = findings_of(load_config("bert_large"), "memory", num_ranks=8)
    assert finding.level == "warn" and "give --gpu NAME" in finding.text
    (finding,) = findings_of(load_config("bert_large"), "compiler", num_ranks=8, gpu="h100-80")
    assert finding.level == "ok" and "not checked" in finding.text


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="--gpu h100.*h100-80, h200-141, a100-80", check=coded("unknown-gpu")):
        plan_run(load_config("bert_large"), EXTENSIONS, gpu="h100")


def test_precision_is_that_of_the_gpu() -> None:
    config = load_config("bert_large", ["training.precision=auto"])
    assert plan_run(config, EXTENSIONS, gpu="a100-80").config.training.precision == "bf16"


@pytest.mark.parametrize(
    ("initial_tokens", "world_size", "expected"),
    [
        (1024, 2, 512),  # every size is a multiple of 2 x 512 already
        (1024, 8, 128),  # 16 rows of 64 tokens over 8 ranks: 2 rows each
        (1024, 16, 64),
        (1024, 3, None),
        (1536, 4, 128),  # 24, 48 and 64 rows: 8 are common, so 2 for each rank
    ],
)
def test_the_micro_batch_without_padding_is_the_largest_that_divides_all_batches(
    initial_tokens: int, world_size: int, expected: int | None
) -> None:
    sizes = ["training.global_batch_tokens=4096", "training.micro_batch_tokens=512", "training.max_steps=100"]
    ramp = f"training.batch_warmup={{initial_tokens: {initial_tokens}, steps: 30}}"
    config = load_config("tiny_cpu", [*sizes, ramp])
    (stage,) = config.stages
    assert micro_batch_without_padding(stage, world_size) == expected
    if expected is not None:
        changed = load_config("tiny_cpu", [*sizes, ramp, f"training.micro_batch_tokens={expected}"])
        assert "% padding" not in "".join(batch_lines(planned(changed, world_size)))


def test_the_dry_run_names_the_micro_batch_that_removes_the_padding_of_a_ramp_up() -> None:
    sizes = ["training.global_batch_tokens=4096", "training.micro_batch_tokens=512", "training.max_steps=100"]
    config = load_config("tiny_cpu", [*sizes, "training.batch_warmup={initial_tokens: 1024, steps: 30}"])
    assert "removes this padding" not in "".join(batch_lines(planned(config, 2)))
    assert "training.micro_batch_tokens=128 removes this padding" in batch_lines(planned(config, 8))[-1]
    assert "no micro-batch removes this padding" in batch_lines(planned(config, 3))[-1]


def test_a_throughput_must_be_positive() -> None:
    for number in (0.0, -5.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, check=coded("invalid-throughput")):
            measured_speed(load_config("tiny_cpu"), number, None, None)


def test_a_benchmark_gives_the_hours_of_its_model_on_its_gpu(tmp_path: Path) -> None:
    """Two H100 compute 1,000 tokens of 1e9 operations per second: 5e11 each, the same on eight."""
    config = load_config("bert_large", ["logging.gpu_hour_price=3", "training.max_steps=100"])
    path = tmp_path / "speed.json"
    report = {
        "machine": {"device": "NVIDIA H100 80GB HBM3", "ranks": 2},
        "flops_per_position": 1e9,
        "measurements": [{"tokens_per_second": 700.0}, {"tokens_per_second": 1000.0}],
        "config": {"model": config.model.model_dump(mode="json"), "training": {"precision": "bf16"}},
    }
    path.write_text(json.dumps(report))
    run = plan_run(config, EXTENSIONS, world_size=8, gpu="h100-80", benchmark=path)
    (seconds,) = (run.seconds(stage) for stage in config.stages)
    assert seconds == pytest.approx(1.9920e9 * 100 * 1_048_576 / (8 * 5e11), rel=1e-4)
    assert "from 1,000 tokens/s in" in (run.describe_time() or "") and "at 3 per device-hour" in run.describe_time()
    wrong = ({"gpu": "a100-80"}, {"config": load_config("bert_base")})
    for change in wrong:
        arguments = {"config": config, "gpu": "h100-80"} | change
        with pytest.raises(UsageError, check=coded("benchmark-of-another-run")):
            plan_run(arguments["config"], EXTENSIONS, gpu=arguments["gpu"], benchmark=path)
    for content in ("", "[]", json.dumps(report | {"measurements": []})):
        path.write_text(content)
        with pytest.raises(UsageError, check=coded("unreadable-benchmark")):
            plan_run(config, EXTENSIONS, benchmark=path)
