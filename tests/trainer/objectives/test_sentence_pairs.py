from __future__ import annotations

from trainer.config.model_settings import ModelSettings
from trainer.config.run_settings import HealthSettings
from trainer.objectives.sentence_pairs import SentencePairs

SIZES = ModelSettings(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16)


def test_pairs_at_chance_or_too_good_too_soon_are_reported():
    settings = HealthSettings(plateau_steps=1000, chance_margin=0.02, suspicious_pair_accuracy=0.99)
    objective = SentencePairs(SIZES)

    def warning(step: int, accuracy: float) -> str | None:
        return objective.warning(step, {"loss": 0.7, "accuracy": accuracy}, settings)

    assert "51.0%" in warning(1000, 0.51)
    assert warning(999, 0.51) is None and warning(1000, 0.53) is None
    assert "after only 50 steps" in warning(50, 0.995)
    assert warning(101, 0.995) is None and warning(50, 0.98) is None


def test_the_task_is_its_name_in_log_lines():
    assert [SentencePairs(SIZES, task).label for task in ("next_sentence", "sentence_order")] == ["nsp", "sop"]
