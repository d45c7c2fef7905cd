"""The presets of published recipes: sizes, tokens and rates as published, in files that a person can read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.doctor import planned
from tests.trainer.checkpoint.test_compatibility import IDENTITY, NUMERICS, saved_with
from trainer import load_config
from trainer.checkpoint.compatibility import check_compatible
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.objective_settings import MASKED_LM_ALONE
from trainer.config.run_config import RunConfig
from trainer.config.schedule import global_batch_tokens
from trainer.model.numerics import with_own_precision
from trainer.objectives.pretraining import num_parameters
from trainer.preflight.machine_checks import check_batches, check_memory

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


class Published(NamedTuple):
    """Literals of the sources that a preset's comments name."""

    million_parameters: int
    billion_tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    masks: tuple[float, ...]
    peak_rates: tuple[float, ...]
    last_shares: tuple[float, ...]
    """Learning rate at the end of each stage, as a share of its peak."""
    decoupled_decay: tuple[float, ...]
    """The sources' weight decay, which a step multiplies by lr / lr_max."""
    rope_bases: tuple[tuple[float, float], ...]
    """Global, local."""


LONG = (160_000.0, 160_000.0)
MODERN_BASES = ((1e4, 1e4), (160_000.0, 1e4), (160_000.0, 1e4))
ETTIN = ((1700, 250, 50), (1024, 7999, 7999), (0.3, 0.3, 0.15))
ETTIN_ENDS = (1.0, 0.5, 0.04)
PUBLISHED = {
    "modernbert_base": Published(
        149,
        (1719, 250, 50),
        (1024, 8192, 8192),
        (0.3,) * 3,
        (8e-4, 3e-4, 3e-4),
        (1, 1, 0.001),
        (1e-5,) * 3,
        MODERN_BASES,
    ),
    "modernbert_large": Published(
        395,
        (900, 800, 250, 50),
        (1024, 1024, 8192, 8192),
        (0.3,) * 4,
        (5e-4, 5e-5, 5e-5, 5e-5),
        (1, 1, 1, 0.001),
        (1e-5, 1e-6, 1e-6, 1e-6),
        ((1e4, 1e4), *MODERN_BASES),
    ),
    "ettin_17m": Published(
        17, *ETTIN, (3e-3, 3e-3, 1.5e-3), ETTIN_ENDS, (3e-4,) * 3, ((1e4, 1e4), (160_000.0, 1e4), LONG)
    ),
    "ettin_68m": Published(68, *ETTIN, (3e-3, 3e-3, 1.5e-3), ETTIN_ENDS, (3e-4,) * 3, ((1e4, 1e4), LONG, LONG)),
    "ettin_150m": Published(150, *ETTIN, (8e-4, 8e-4, 4e-4), ETTIN_ENDS, (1e-5,) * 3, ((1e4, 1e4), LONG, LONG)),
    "ettin_400m": Published(395, *ETTIN, (5e-4, 5e-4, 2.5e-4), ETTIN_ENDS, (1e-5,) * 3, ((1e4, 1e4), LONG, LONG)),
    "mmbert_small": Published(
        140,
        (2300, 600, 100),
        (1024, 8192, 8192),
        (0.3, 0.15, 0.05),
        (8e-4, 4e-4, 4e-4),
        (1, 1, 0.04),
        (8e-5, 4e-5, 4e-5),
        ((1e4, 1e4), LONG, LONG),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_recipe(name: str) -> None:
    published, config = PUBLISHED[name], load_config(name)
    stages = config.stages
    assert num_parameters(config.model, MASKED_LM_ALONE) / 1e6 == pytest.approx(published.million_parameters, rel=0.01)
    assert tuple(stage.sequence_length for stage in stages) == published.lengths
    assert tuple(stage.peak_learning_rate for stage in stages) == published.peak_rates
    for stage, billions in zip(stages, published.billion_tokens, strict=True):
        assert 0 <= stage.tokens - billions * 10**9 < stage.global_batch_tokens, "at most one step more"
    assert tuple(stage.masking_rate(stage.first_step) for stage in stages) == published.masks
    assert tuple(stage.masking_rate(stage.last_step - 1) for stage in stages) == published.masks
    for stage, share in zip(stages, published.last_shares, strict=True):
        assert stage.learning_rate(stage.last_step - 1) == pytest.approx(share * stage.peak_learning_rate, rel=0.06)
    decoupled = [stage.weight_decay * stage.peak_learning_rate for stage in stages]
    assert decoupled == pytest.approx(published.decoupled_decay, rel=2e-3), "AdamW multiplies by the learning rate"
    assert tuple((s.model.global_rope_theta, s.model.local_rope_theta) for s in stages) == published.rope_bases
    assert config.optimizer.name == "stable_adamw" and all(stage.gradient_clipping == 0 for stage in stages)


CONTINUED = ("continue_domain", "extend_context")


@pytest.mark.parametrize("name", [*PUBLISHED, *CONTINUED, "eurobert_210m"])
def test_a_preset_is_short_and_names_its_sources(name: str) -> None:
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80
    assert any("github.com/" in line or "arXiv" in line for line in lines[:8])


def test_the_batch_of_modernbert_base_grows_over_50_billion_tokens() -> None:
    """From 768 to 4,608 rows, each size for the same number of steps (Warner et al. 2024, section 2.2)."""
    stage = load_config("modernbert_base").stages[0]
    assert stage.batch_warmup is not None
    sizes = [global_batch_tokens(step, stage) // 1024 for step in range(stage.batch_warmup.duration.steps)]
    assert sorted(set(sizes)) == [768, 1536, 2304, 3072, 3840]
    assert sum(sizes) * 1024 == pytest.approx(50e9, rel=1e-3)


def test_eurobert_210m_has_the_sizes_and_rates_of_its_sources() -> None:
    """config.json of EuroBERT/EuroBERT-210m (66d72a0), and the defaults of its training library."""
    config = load_config("eurobert_210m")
    model, optimizer = config.model, config.optimizer
    assert (model.num_hidden_layers, model.hidden_size, model.intermediate_size) == (12, 768, 3072)
    assert (model.num_attention_heads, model.key_value_heads, model.padded_vocab_size) == (12, 12, 128_256)
    assert (model.max_position_embeddings, model.layer_norm_eps, model.tie_word_embeddings) == (8192, 1e-5, False)
    first, last = config.stages
    assert [stage.model.global_rope_theta for stage in config.stages] == [1e4, 250_000.0]
    assert [stage.sequence_length for stage in config.stages] == [2048, 8192]
    assert first.tokens + last.tokens == pytest.approx(5e12, rel=1e-6)
    assert (optimizer.name, optimizer.learning_rate, optimizer.beta2) == ("adamw", 1e-4, 0.95)
    assert (optimizer.eps, optimizer.weight_decay, first.gradient_clipping) == (1e-5, 0.1, 1.0)
    assert first.learning_rate(first.last_step - 1) == 1e-4 and last.learning_rate(last.last_step - 1) < 1e-9
    assert (config.data.mask_share, config.data.random_share) == (1.0, 0.0)


def test_a_context_is_extended_as_in_the_last_two_stages_of_modernbert_base() -> None:
    config, whole = load_config("extend_context"), load_config("modernbert_base")
    assert config.init_from is not None and config.adopt == ("rope", "positions")
    for ours, theirs in zip(config.stages, whole.stages[1:], strict=True):
        assert (ours.sequence_length, ours.tokens, ours.weight_decay) == (8192, theirs.tokens, theirs.weight_decay)
        assert ours.global_batch_tokens == theirs.global_batch_tokens and ours.gradient_clipping == 0
        assert (ours.model.global_rope_theta, ours.model.local_rope_theta) == MODERN_BASES[1]
        for place in (1000, 5000, theirs.steps - 1):  # the warmup is over after 3e9 tokens
            rate = theirs.learning_rate(theirs.first_step + place)
            assert ours.learning_rate(ours.first_step + place) == pytest.approx(rate)
            assert ours.masking_rate(ours.first_step + place) == 0.3


def test_a_domain_is_continued_as_bioclinical_modernbert_with_one_warmup_and_decay() -> None:
    """phase1_base.yaml of BioClinical-ModernBERT; Gururangan et al. 2020: 12,500 steps of 2,048 rows of 512."""
    config = load_config("continue_domain")
    (stage,) = config.stages
    assert config.init_from == "answerdotai/ModernBERT-base" and config.adopt == ()
    assert 0 <= stage.tokens - 13e9 < stage.global_batch_tokens
    assert stage.tokens == pytest.approx(12_500 * 2048 * 512, rel=0.01)
    assert (stage.sequence_length, stage.global_batch_tokens, stage.micro_batch_tokens) == (8192, 576 * 8192, 12 * 8192)
    assert stage.peak_learning_rate == 3e-4 and stage.weight_decay * 3e-4 == pytest.approx(1e-5, rel=2e-3)
    assert (stage.model.global_rope_theta, stage.model.local_rope_theta) == MODERN_BASES[1]
    assert [source.weight for source in stage.data.shards] == [0.95, 0.05]
    rates = [stage.learning_rate(step) / 3e-4 for step in range(stage.steps)]
    assert rates.index(max(rates)) / stage.steps == pytest.approx(0.06, abs=0.001) and rates[-1] < 0.001


H100_BYTES = 79 * 2**30


@pytest.mark.parametrize("name", [*PUBLISHED, *CONTINUED, "eurobert_210m"])
def test_micro_batches_of_published_recipes_fill_8_gpus_of_80_gb_and_leave_few_rows_empty(name: str) -> None:
    """By the estimate: nine tenths at most, and all of the card on one GPU, which holds the whole optimizer. Rows that
    the global batch does not fill cost more than a larger micro-batch gains, and so do those of a small model's ramp-up
    beyond 98,304 tokens, with which matrices are large enough."""
    config = load_config(name)
    for stage in config.stages:
        alone, on_eight = (sum(planned(config, ranks).memory_in_stage(stage, 1).values()) for ranks in (1, 8))
        assert on_eight <= 0.9 * H100_BYTES and alone <= H100_BYTES
        assert alone >= 0.45 * H100_BYTES or stage.micro_batch_tokens >= 98_304
        assert batch_arithmetic(stage, 8).padding_share <= 0.045


GPU_PRESETS = [
    *(*PUBLISHED, *CONTINUED),
    "eurobert_210m",
    "bert_base",
    "bert_large",
    "bert_large_phased",
    "bert_large_64gpu",
    "modern_large",
    "roberta_base",
    "small_gpu",
    "xlmr_base",
]


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_the_doctor_warns_of_no_preset_on_8_gpus_of_80_gb(name: str) -> None:
    config = with_own_precision(load_config(name), "cuda")
    run = planned(config, 64 if name.endswith("_64gpu") else 8, gpu="h100-80")
    found = [*check_batches(run), *check_memory(run)]
    assert [finding for finding in found if finding.level != "ok"] == []


BEFORE = {
    "bert_base": (65_536,),
    "bert_large": (32_768,),
    "bert_large_phased": (4_096, 16_384),
    "modernbert_large": (45_056, 45_056, 49_152, 49_152),
    "ettin_17m": (147_456, 191_976, 95_988),
    "ettin_68m": (98_304, 143_982, 63_992),
    "ettin_150m": (73_728, 127_984, 95_988),
    "ettin_400m": (49_152, 47_994, 15_998),
    "mmbert_small": (49_152, 65_536, 65_536),
}
"""Micro-batches as of commit a83ab877 (modernbert_large: 17145182), by stage, where they were others."""


@pytest.mark.parametrize("name", BEFORE)
def test_a_run_of_an_earlier_preset_resumes_under_the_present_one(name: str) -> None:
    """The resumed run logs the size of its micro-batches as the one change; the batch and its order are the same."""
    config = load_config(name)
    values = config.model_dump(mode="json")
    items = values["training"]["stages"] or [values["training"]]
    for item, tokens in zip(items, BEFORE[name], strict=True):
        item["micro_batch_tokens"] = tokens
    before = RunConfig.model_validate(values)
    assert check_compatible(saved_with(before), config, IDENTITY, 2, NUMERICS) == [
        f"stage {number} micro_batch_tokens was {tokens} and is {stage.micro_batch_tokens}"
        for number, (tokens, stage) in enumerate(zip(BEFORE[name], config.stages, strict=True))
        if tokens != stage.micro_batch_tokens
    ]
