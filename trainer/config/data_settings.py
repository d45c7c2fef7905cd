"""`data`: which shards a run reads, and what a sample is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from data_prep.base.settings import PathText, Probability, SettingError, Settings, Weight
from trainer.config.custom_code import is_custom
from trainer.config.objective_settings import SentencePairs

MaskUnit = Literal["token", "word", "span"]
MaskingRate = Annotated[float, Field(gt=0.0, le=0.8)]


class WeightedShards(Settings):
    """One component of a mixture of data sets."""

    url: PathText = Field(min_length=1, description="directory or URL of a data set (it contains manifest.json)")
    weight: Weight | None = Field(
        None,
        description="share of the samples relative to the other components; by default its number of tokens to the "
        "power of data.sampling_alpha",
    )


Shards = PathText | tuple[WeightedShards, ...]


class DataSettings(Settings):
    """Which shards a run reads, and what a sample is."""

    shards: Shards = Field(description="directory or URL of a data set, or a list of {url, weight} (a mixture)")
    sampling_alpha: Probability = Field(
        1.0,
        description="exponent for a mixture without weights: 1 samples proportionally to tokens, 0 uniformly over "
        "components",
    )
    tokenizer: PathText | None = Field(
        None,
        min_length=1,
        description="tokenizer directory or name on the Hugging Face Hub; by default the copy beside the shards",
    )
    sequence_length: PositiveInt = Field(
        512, description="length of a row in tokens, special tokens included; training.stages set their own"
    )
    sentence_pairs: SentencePairs = Field(
        "none",
        description="second task on sentence pairs: next_sentence (NSP of BERT: does B follow A, or is it from "
        "another document?) or sentence_order (SOP of ALBERT: are A and B in their original order?); the short form of "
        "objectives=[{name: masked_lm}, {name: sentence_pairs, task: ...}]",
    )
    short_seq_probability: Probability = Field(
        0.1, description="share of sentence pairs with a random shorter target length"
    )
    mlm_probability: MaskingRate = Field(0.15, description="share of tokens to predict (masking rate)")
    final_mlm_probability: MaskingRate | None = Field(
        None, description="masking rate at the last step, reached linearly; by default mlm_probability throughout"
    )
    mask_unit: MaskUnit = Field("token", description="unit of masking: single tokens, whole words, or spans of words")
    masking: str | None = Field(
        None,
        description="a masking of your own as module:function; by default that of this project, with mask_unit, "
        "mask_share and random_share",
    )
    mean_span_words: Annotated[float, Field(ge=1.0)] = Field(
        3.0, description="mean span length in words; lengths are geometric, at most 10"
    )
    mask_share: Probability = Field(0.8, description="share of predicted tokens replaced by [MASK]")
    random_share: Probability = Field(0.1, description="share of predicted tokens replaced by a random token")
    num_workers: Annotated[int, Field(ge=0, le=1024)] = Field(
        1, description="worker processes per rank that build batches; 0 builds them in the rank itself"
    )
    cache_dir: PathText | None = Field(
        None, min_length=1, description="directory for copies of remote shards; by default ~/.cache/clozeworks"
    )
    cache_bytes: PositiveInt = Field(
        100_000_000_000,
        description="maximum size of the copies of remote shards in bytes, for all ranks of a node together",
    )
    on_corrupt_shard: Literal["error", "skip"] = Field(
        "error",
        description="error stops the run at a damaged or missing shard; skip warns, skips its rows and counts them",
    )

    @model_validator(mode="after")
    def _weights(self) -> DataSettings:
        if not self.shards:
            raise SettingError(
                "data.shards is empty",
                fix="set it to the directory or URL of a data set, or to a list of {url, weight}",
                code="empty-shards",
            )
        given = [component.weight is not None for component in self.components]
        if any(given) and not all(given):
            number = given.index(False)
            raise SettingError(
                f"data.shards[{number}] has no weight and other components have one",
                fix="give every component a weight, or none (tokens and data.sampling_alpha then decide)",
                code="weight-of-some-components",
            )
        if all(given) and self.sampling_alpha != 1.0:
            raise SettingError(
                f"data.sampling_alpha={self.sampling_alpha} contradicts the weights in data.shards",
                fix="leave out data.sampling_alpha or the weights",
                code="sampling-alpha-with-weights",
            )
        return self

    @model_validator(mode="after")
    def _check_masking(self) -> DataSettings:
        if self.masking is not None and not is_custom(self.masking):
            raise SettingError(
                f"data.masking={self.masking} is not module:function",
                fix="set data.masking=null for the masking of this project (data.mask_unit is its unit), or name a "
                "function of your own",
                code="unknown-masking",
            )
        return self

    @model_validator(mode="after")
    def _shares(self) -> DataSettings:
        if self.mask_share + self.random_share > 1.0 + 1e-9:
            raise SettingError(
                f"data.mask_share={self.mask_share} plus data.random_share={self.random_share} exceeds 1",
                fix="lower one of them (the remaining predicted tokens stay unchanged)",
                code="mask-shares-exceed-one",
            )
        return self

    @property
    def has_sentence_pairs(self) -> bool:
        """Whether rows consist of sentence pairs."""
        return self.sentence_pairs != "none"

    @property
    def max_mlm_probability(self) -> float:
        """Largest masking rate of any step."""
        return max(self.mlm_probability, self.evaluated_mlm_probability)

    @property
    def evaluated_mlm_probability(self) -> float:
        """Masking rate at the end of training, which `valid/own_mlm_loss` is measured with at every step."""
        return self.mlm_probability if self.final_mlm_probability is None else self.final_mlm_probability

    @property
    def components(self) -> tuple[WeightedShards, ...]:
        """Components of the mixture; one for a plain URL."""
        return (WeightedShards(url=self.shards),) if isinstance(self.shards, str) else self.shards
