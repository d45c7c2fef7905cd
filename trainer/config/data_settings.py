"""`data`: the shards that are read, and what a sample is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from data_prep.base.settings import Settings
from trainer.config.setting_types import Probability


class WeightedShards(Settings):
    """One component of a mixture of data sets."""

    url: str = Field(min_length=1, description="folder or URL of a shard set (it holds manifest.json)")
    weight: PositiveFloat | None = Field(
        None,
        description="share of the samples, relative to the other components; by default its tokens to the power of "
        "data.sampling_alpha",
    )


class DataSettings(Settings):
    """Which shards are read, and what a sample is."""

    shards: str | tuple[WeightedShards, ...] = Field(
        description="folder or URL of the shards, or a list of {url, weight}"
    )
    sampling_alpha: Probability = Field(
        1.0, description="tempers a mixture without weights: 1 draws by tokens, 0 from all components alike"
    )
    tokenizer: str | None = Field(
        None, min_length=1, description="tokenizer folder; by default the copy that the shards carry"
    )
    sequence_length: PositiveInt = Field(
        512, description="places in a row, special tokens included; a run with training.stages takes theirs"
    )
    sentence_pairs: Literal["none", "next_sentence", "sentence_order"] = Field(
        "none",
        description="a second task over packed sentence pairs: next_sentence (BERT: does B follow A, or is it from "
        "another document?) or sentence_order (ALBERT: do A and B stand in their order?)",
    )
    short_seq_probability: Probability = Field(
        0.1, description="share of sentence pairs with a shortened target length"
    )
    mlm_probability: Annotated[float, Field(gt=0.0, le=0.8)] = Field(
        0.15, description="share of the tokens that are predicted"
    )
    final_mlm_probability: Annotated[float, Field(gt=0.0, le=0.8)] | None = Field(
        None, description="that share at the last step, reached linearly from mlm_probability; by default it stays"
    )
    mask_unit: Literal["token", "word", "span"] = Field(
        "token", description="what is masked together: single tokens, whole words, or spans of words"
    )
    mean_span_words: Annotated[float, Field(ge=1.0)] = Field(
        3.0, description="mean length of a span, in words; lengths are geometric and at most 10"
    )
    mask_share: Probability = Field(0.8, description="share of the predicted tokens replaced by [MASK]")
    random_share: Probability = Field(0.1, description="share of the predicted tokens replaced by a random token")
    num_workers: Annotated[int, Field(ge=0, le=1024)] = Field(
        1, description="processes a rank that build batches; 0 builds them in the rank itself"
    )
    cache_dir: str | None = Field(
        None, min_length=1, description="folder for copies of remote shards; by default the user's cache folder"
    )
    cache_bytes: PositiveInt = Field(
        100_000_000_000,
        description="size that the copies of remote shards may reach, in bytes, for all ranks of a node",
    )
    on_corrupt_shard: Literal["error", "skip"] = Field(
        "error",
        description="error stops at a shard that is damaged or missing; skip names it, counts its rows and goes on",
    )

    @model_validator(mode="after")
    def _weights(self) -> DataSettings:
        if not self.shards:
            raise ValueError("data.shards is empty; name the folder of a shard set, or a list of {url, weight}")
        given = [component.weight is not None for component in self.components]
        if any(given) and not all(given):
            number = given.index(False)
            raise ValueError(
                f"data.shards[{number}] has no weight and others have; give every component one, or none (then they "
                "are drawn by tokens and data.sampling_alpha)"
            )
        if all(given) and self.sampling_alpha != 1.0:
            raise ValueError(
                f"data.sampling_alpha={self.sampling_alpha} tempers shares by tokens, and data.shards gives weights; "
                "leave out the one or the other"
            )
        return self

    @model_validator(mode="after")
    def _shares(self) -> DataSettings:
        if self.mask_share + self.random_share > 1.0 + 1e-9:
            raise ValueError(
                f"data.mask_share={self.mask_share} and data.random_share={self.random_share} sum to more than 1; "
                "lower one of them (the rest of the predicted tokens is kept as it is)"
            )
        return self

    @property
    def has_sentence_pairs(self) -> bool:
        """Whether the model judges sentence pairs, and so has a pooler and a head for them."""
        return self.sentence_pairs != "none"

    @property
    def max_mlm_probability(self) -> float:
        """The largest share of the tokens that any step predicts."""
        return max(self.mlm_probability, self.evaluated_mlm_probability)

    @property
    def evaluated_mlm_probability(self) -> float:
        """The share at the end of training, which evaluation uses throughout, so that its losses compare."""
        return self.mlm_probability if self.final_mlm_probability is None else self.final_mlm_probability

    @property
    def components(self) -> tuple[WeightedShards, ...]:
        """The mixture, one entry for a plain folder."""
        return (WeightedShards(url=self.shards),) if isinstance(self.shards, str) else self.shards
