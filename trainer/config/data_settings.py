"""`data`: which shards a run reads, and what a sample is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from data_prep.base.settings import PathText, Probability, SettingError, Settings, Weight
from trainer.config.custom_code import is_custom
from trainer.config.masking_law import MEAN_TOLERANCE, MOST_MASKED, Law, LossWeight, MaskingLaw, capacity, law_of
from trainer.config.objective_settings import SentencePairs

MaskUnit = Literal["token", "word", "span"]
MaskingRate = Annotated[float, Field(gt=0.0, le=MOST_MASKED)]


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
    mlm_probability: MaskingRate = Field(
        0.15, description="share of tokens to predict (masking rate); with masking_law the mean rate"
    )
    final_mlm_probability: MaskingRate | None = Field(
        None,
        description="masking rate at the last step, reached linearly; by default mlm_probability throughout. The short "
        "form of masking_law={name: linear, from: mlm_probability, to: final_mlm_probability}",
    )
    masking_law: MaskingLaw | None = Field(
        None,
        description="{name, from, to, stratified}: how the masking rate of a row is chosen; by default mlm_probability "
        "in all rows of a step",
    )
    loss_weight: LossWeight = Field(
        "none",
        description="weight of a row in the masked_lm loss: elbo is the probability of its number of hidden tokens. "
        "The mean loss then bounds the negative log-likelihood of the text per token (a masked diffusion model). "
        "It needs rates from 0 to 1 (uniform or cosine), mask_share=1 and random_share=0",
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
        description="what a damaged or missing shard does: error stops the run; skip warns, skips its rows and counts "
        "them",
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

    @model_validator(mode="before")
    @classmethod
    def _fill_mean(cls, values: Any) -> Any:
        """Set `mlm_probability` to the mean that the ends of `masking_law` imply, where it is not set."""
        if not isinstance(values, Mapping) or "mlm_probability" in values or not (law := values.get("masking_law")):
            return values
        try:
            mean = MaskingLaw.model_validate(law).mean
        except ValidationError:  # of the field, which says so
            return values
        return values if mean is None or mean > MOST_MASKED else {**values, "mlm_probability": mean}

    @model_validator(mode="after")
    def _check_law(self) -> DataSettings:
        if self.masking_law is None:
            return self
        named = f"data.masking_law={self.masking_law.name}"
        if self.final_mlm_probability is not None:
            raise SettingError(
                f"{named} contradicts data.final_mlm_probability={self.final_mlm_probability:g}, which is the short "
                "form of the linear law",
                fix="set data.final_mlm_probability=null",
                code="masking-law-and-final-rate",
            )
        mean, (_, highest) = self.masking_law.mean, self.law.support
        if highest > MOST_MASKED and self.loss_weight == "none":
            raise SettingError(
                f"{named} hides up to {highest:.3g} of the tokens of a row, more than {MOST_MASKED:g}",
                fix="lower the rates (data.masking_law.to, or data.mlm_probability), or have the loss weighted as a "
                "bound (data.loss_weight=elbo)",
                code="masking-rate-too-high",
            )
        if mean is not None and abs(mean - self.mlm_probability) > MEAN_TOLERANCE:
            raise SettingError(
                f"data.mlm_probability={self.mlm_probability:g} contradicts the ends of {named}, whose mean is "
                f"{mean:.4g}",
                fix=f"set data.mlm_probability={mean:.4g}, or leave it out, or remove the ends (data.masking_law.from "
                "and to)",
                code="masking-law-and-mean",
            )
        return self

    @model_validator(mode="after")
    def _check_weight(self) -> DataSettings:
        """Check that the weighted loss is a bound."""
        if self.loss_weight == "none":
            return self
        named, law = f"data.loss_weight={self.loss_weight}", self.law
        if not law.is_drawn or law.support != (0.0, 1.0):
            raise SettingError(
                f"{named} needs every number of hidden tokens to be possible, and data.masking_law draws none below "
                f"{law.support[0]:g} or above {law.support[1]:g} of a row"
                if law.is_drawn
                else f"{named} needs a rate for every row, and data.masking_law={law.name} has one for all rows",
                fix="set data.masking_law={name: uniform, from: 0, to: 1} (or cosine) and data.mlm_probability to its "
                "mean, or data.loss_weight=none",
                code="weight-without-bound",
            )
        others = {
            "data.mask_share": (self.mask_share, 1.0, "some hidden tokens are not [MASK]"),
            "data.random_share": (self.random_share, 0.0, "some hidden tokens are not [MASK]"),
            "data.mask_unit": (self.mask_unit, "token", "not all sets of tokens are equally probable"),
            "data.masking": (self.masking, None, "a masking of your own decides what is hidden"),
        }
        for name, (value, needed, why) in others.items():
            if value != needed:
                raise SettingError(
                    f"{named} contradicts {name}={value}: {why}",
                    fix=f"set {name}={'null' if needed is None else needed}, or data.loss_weight=none",
                    code="weight-without-bound",
                )
        return self

    @property
    def law(self) -> Law:
        """How the masking rate of a row is chosen."""
        return law_of(self.masking_law, self.mlm_probability, self.final_mlm_probability)

    @property
    def in_short_form(self) -> DataSettings:
        """The settings with a law of the step alone as the rates of the first and the last one, to compare them."""
        if self.masking_law is None or self.law.is_drawn:
            return self
        first, last = self.law.first, self.law.last
        final = last if self.masking_law.name == "linear" else None
        return self.model_copy(update={"mlm_probability": first, "final_mlm_probability": final, "masking_law": None})

    @property
    def has_capacity_of_law(self) -> bool:
        """Whether the room for labels follows from a law that draws rates; a masking of the user's own has any."""
        return self.law.is_drawn and self.masking is None

    def room_for_labels(self, num_rows: int, sequence_length: int) -> int:
        """Return how many labels a micro-batch of masked rows has room for."""
        if self.has_capacity_of_law:
            return capacity(self.law, num_rows, sequence_length)
        return num_rows * math.ceil(self.max_mlm_probability * sequence_length)

    @property
    def has_sentence_pairs(self) -> bool:
        """Whether rows consist of sentence pairs."""
        return self.sentence_pairs != "none"

    @property
    def max_mlm_probability(self) -> float:
        """Largest masking rate of any row."""
        return self.law.support[1]

    @property
    def evaluated_mlm_probability(self) -> float:
        """Masking rate at the end of training, which `valid/own_mlm_loss` is measured with at every step; the mean of a
        law that draws rates."""
        return self.law.final_rate

    @property
    def components(self) -> tuple[WeightedShards, ...]:
        """Components of the mixture; one for a plain URL."""
        return (WeightedShards(url=self.shards),) if isinstance(self.shards, str) else self.shards
