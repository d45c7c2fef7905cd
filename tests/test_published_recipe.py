"""The published constants that the defaults and presets promise, each as a literal beside its source.

A literal, never the imported constant: a changed default must fail here, whatever else still agrees with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from data_prep.config.preparation_config import DeduplicationSettings
from data_prep.deduplication import similarity_search
from trainer import load_config
from trainer.config.data_settings import DataSettings
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.config.training_settings import OptimizerSettings, ScheduleSettings, TrainingSettings
from trainer.data import masking
from trainer.data.batch import IGNORED, Batch
from trainer.engine.optimizer import build_optimizer
from trainer.finetuning.finetune_settings import FitSettings
from trainer.model.layers import ACTIVATIONS
from trainer.model.positions import rotation
from trainer.objectives.pretraining import PretrainingModel

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}

# google-research/bert: modeling.py (BertConfig), optimization.py (AdamWeightDecayOptimizer), create_pretraining_data.py
BERT = {
    "hidden_size": 768,  # Devlin et al. 2018, section 3: BERT-base is L=12, H=768, A=12
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,  # section 3, footnote 3: 4H
    "hidden_act": "gelu",  # appendix A.2
    "hidden_dropout_prob": 0.1,  # appendix A.2
    "max_position_embeddings": 512,  # appendix A.2
    "type_vocab_size": 2,  # section 3: segments A and B (BertConfig says 16, the published files 2)
    "vocab_size": 30522,  # bert_config.json of uncased_L-12_H-768_A-12
    "initializer_range": 0.02,  # BertConfig
    "layer_norm_eps": 1e-12,  # modeling.py: tf.contrib.layers.layer_norm, whose variance_epsilon is 1e-12
    "position_embedding": "learned",
    "norm_position": "post",
    "norm": "layernorm",
    "embedding_norm": True,
    "bias": True,
    "local_attention": None,
    "output_bias": "zeros",  # modeling.py, get_masked_lm_output: tf.zeros_initializer
}
# Warner et al. 2024, section 2.1 and table 4; config.json of answerdotai/ModernBERT-base and -large
MODERNBERT = {
    "position_embedding": "rotary",
    "norm_position": "pre",
    "hidden_act": "geglu",
    "bias": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "embedding_norm": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# Liu et al. 2019, and config.json of FacebookAI/roberta-base: 514 positions, of which the first two are unused
ROBERTA = {
    "max_position_embeddings": 512,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "norm_position": "post",
}
# Liu et al. 2019, table 9, column BASE
ROBERTA_BASE = {
    "model.vocab_size": 50265,  # config.json of FacebookAI/roberta-base
    "model.num_hidden_layers": 12,
    "model.hidden_size": 768,
    "model.intermediate_size": 3072,
    "model.num_attention_heads": 12,
    "model.hidden_dropout_prob": 0.1,
    "schedule.warmup.number": 24_000,
    "schedule.name": "linear",
    "optimizer.learning_rate": 6e-4,
    "optimizer.weight_decay": 0.01,
    "optimizer.eps": 1e-6,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.98,
    "training.global_batch_tokens": 8192 * 512,
    "training.gradient_clipping": 0.0,
    "max_steps": 500_000,
}
# Conneau et al. 2020, section 3: 1.5M updates of 8,192 rows; config.json of FacebookAI/xlm-roberta-base
XLMR_BASE = {"max_steps": 1_500_000, "training.global_batch_tokens": 8192 * 512, "model.vocab_size": 250002}
MASKING = {
    "mlm_probability": 0.15,  # Devlin et al. 2018, section 3.1
    "mask_share": 0.8,  # section 3.1: 80% [MASK], 10% a random token, 10% unchanged
    "random_share": 0.1,
    "final_mlm_probability": None,  # a constant rate
    "mask_unit": "token",
    "mean_span_words": 3.0,  # Raffel et al. 2019 (T5), section 3.3.4: spans of 3 on average
    "short_seq_probability": 0.1,  # create_pretraining_data.py: short_seq_prob
    "sequence_length": 512,  # Devlin et al. 2018, appendix A.2
}
OPTIMIZER = {
    "learning_rate": 1e-4,  # Devlin et al. 2018, appendix A.2
    "beta1": 0.9,  # appendix A.2
    "beta2": 0.999,  # appendix A.2
    "eps": 1e-6,  # optimization.py: epsilon=1e-6
    "weight_decay": 0.01,  # appendix A.2
}
SCHEDULE = {"name": "linear", "final_ratio": 0.0, "warmup.number": 0, "decay_duration.number": 0}
# Devlin et al. 2018, appendix A.2: 256 sequences, 1,000,000 steps of which 90% at length 128, 10,000 steps of warmup
BERT_LARGE_STAGED = {
    "optimizer.learning_rate": 1e-4,
    "optimizer.beta2": 0.999,
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.01,
    "schedule.name": "linear",
    "training.gradient_clipping": 1.0,
    "model.hidden_size": 1024,
    "model.num_hidden_layers": 24,
    "model.num_attention_heads": 16,
    "model.intermediate_size": 4096,
    "data.sentence_pairs": "next_sentence",
    "data.mlm_probability": 0.15,
}
# Warner et al. 2024, tables 3 and 4, and config.json of answerdotai/ModernBERT-large
MODERN_LARGE = {
    "model.vocab_size": 50368,
    "model.hidden_size": 1024,
    "model.num_hidden_layers": 28,
    "model.num_attention_heads": 16,
    "model.intermediate_size": 2624,
    "model.max_position_embeddings": 8192,
    "data.sequence_length": 1024,
    "data.mlm_probability": 0.3,
    "optimizer.learning_rate": 5e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.98,
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.02,  # decoupled 1e-5 divided by the peak rate of 5e-4
    "schedule.name": "warmup_stable_decay",
}
# Lee et al. 2021, section 4.2 (5-grams, a Jaccard similarity of 0.8); datasketch's default of 128 permutations; the
# weight of missed pairs and the leaders of a group are this project's (tests/benchmarks/near_duplicates.py).
NEAR_DUPLICATES = {"threshold": 0.8, "ngram_tokens": 5, "num_hashes": 128, "exact": True, "near": False}
FINE_TUNING = {  # Devlin et al. 2018, appendix A.3 (batch 32, 3 epochs) and run_classifier.py (warmup_proportion 0.1)
    "epochs": 3,
    "batch_size": 32,
    "weight_decay": 0.01,
    "warmup_share": 0.1,
}


def preset(name: str) -> Callable[[], Any]:
    return lambda: load_config(name, [])


TABLES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "bert": (lambda: ModelSettings(family="bert"), BERT),
    "modernbert": (lambda: ModelSettings(family="modernbert"), MODERNBERT),
    "roberta": (lambda: ModelSettings(family="roberta"), ROBERTA),
    "xlm-roberta": (lambda: ModelSettings(family="xlm-roberta"), ROBERTA),
    "roberta_base": (preset("roberta_base"), ROBERTA_BASE),
    "xlmr_base": (preset("xlmr_base"), XLMR_BASE),
    "masking": (lambda: DataSettings(shards="shards"), MASKING),
    "optimizer": (OptimizerSettings, OPTIMIZER),
    "schedule": (ScheduleSettings, SCHEDULE),
    "clipping": (TrainingSettings, {"gradient_clipping": 1.0}),  # optimization.py: clip_norm=1.0
    "spans": (lambda: masking, {"MAX_SPAN_WORDS": 10}),  # Joshi et al. 2019, section 3.1: l_max = 10
    "bert_large_phased": (preset("bert_large_phased"), BERT_LARGE_STAGED),
    "modern_large": (preset("modern_large"), MODERN_LARGE),
    "near-duplicates": (DeduplicationSettings, NEAR_DUPLICATES),
    "bands": (lambda: similarity_search, {"FALSE_NEGATIVE_WEIGHT": 0.98, "MAX_LEADERS": 8}),
    "bands of the defaults": (lambda: similarity_search.choose_bands(0.8, 128), {"num_bands": 17, "rows": 7}),
    "fine-tuning": (FitSettings, FINE_TUNING),
}


def value_of(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


@pytest.mark.parametrize("table", TABLES)
def test_a_default_is_the_published_constant(table: str) -> None:
    make, expected = TABLES[table]
    owner = make()
    assert {path: value_of(owner, path) for path in expected} == expected


def test_the_published_stages_are_those_of_the_preset() -> None:
    config = preset("bert_large_phased")()
    stages = [(stage.steps, stage.sequence_length, stage.global_batch_tokens) for stage in config.stages]
    assert stages == [(900_000, 128, 256 * 128), (100_000, 512, 256 * 512)]
    assert config.schedule.warmup.in_steps(config.max_steps) == 10_000


ONE_PREDICTION = Batch(
    *(torch.zeros(4, dtype=torch.int64) for _ in range(3)),
    cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
    masked_positions=torch.tensor([1, 0]),
    labels=torch.tensor([0, IGNORED]),
    sequence_length=4,
)


def test_the_constants_reach_optimizer_model_and_loss() -> None:
    """What is configured is also what is computed with."""
    bert = PretrainingModel(ModelSettings(family="bert", **SMALL), objectives_of("next_sentence"))
    modern = PretrainingModel(ModelSettings(family="modernbert", **SMALL))
    bert.initialize(0)
    decayed, others = build_optimizer(bert, OptimizerSettings()).param_groups
    assert {name: decayed[name] for name in ("lr", "betas", "eps")} == {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.01, 0.0)  # none on biases and norms
    for model, eps in ((bert, 1e-12), (modern, 1e-5)):
        assert {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)} == {eps}
    # modeling.py: truncated_normal_initializer(stddev=0.02), which draws again beyond two deviations
    matrices = torch.cat([parameter.flatten() for parameter in bert.parameters() if parameter.dim() > 1]).detach()
    assert 0.0395 < matrices.abs().max() <= 0.04
    assert matrices.std().item() == pytest.approx(0.02 * 0.8796, rel=0.02)  # of a normal cut at two deviations
    # the exact GELU, x Phi(x) (Hendrycks and Gimpel 2016); its tanh approximation gives 0.841192
    assert ACTIVATIONS["gelu"](torch.tensor(1.0)).item() == pytest.approx(0.8413447, abs=2e-7)
    # no label smoothing: -log(e^2 / (e^2 + 1))
    with torch.no_grad():  # the logits are the biases alone
        bert.encoder.embeddings.word_embeddings.weight.zero_()
        bert.mlm_head.bias.fill_(-1e4)[:2].copy_(torch.tensor([2.0, 0.0]))
    loss = bert(ONE_PREDICTION)["masked_lm"]["loss"]
    assert loss.item() == pytest.approx(0.1269280, abs=1e-6)
    # Su et al. 2021, section 3.4.2: the angle of pair i at position m is m theta^(-2i/d)
    turned = rotation(torch.tensor([1]), head_size=4, theta=10_000.0)
    assert turned.cosine.flatten()[:2].tolist() == pytest.approx([math.cos(1.0), math.cos(0.01)], abs=1e-7)
