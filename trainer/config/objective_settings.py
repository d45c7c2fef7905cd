"""`objectives`: what a run, or a stage of it, trains the model to predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from data_prep.base.settings import SettingError, Settings
from data_prep.base.validation import first_problem
from trainer.config.custom_code import is_custom

PairTask = Literal["next_sentence", "sentence_order"]
SentencePairs = Literal["none", "next_sentence", "sentence_order"]

MASKED_LM = "masked_lm"
SENTENCE_PAIRS = "sentence_pairs"
CAUSAL = "causal"
DISTILLATION = "distillation"
HIDDEN_STATES = "hidden_states"
OF_TEACHER = (DISTILLATION, HIDDEN_STATES)
"""Objectives that compare the model with `teacher`, at the tokens that masked_lm predicts."""
BUILT_IN = (MASKED_LM, SENTENCE_PAIRS, CAUSAL, *OF_TEACHER)
OF_TOKENS = (MASKED_LM, CAUSAL)
"""Objectives that predict tokens of the vocabulary, with one head."""


class DistillationSettings(Settings):
    """`settings` of the objective distillation."""

    temperature: PositiveFloat = Field(2.0, le=1e3)


class HiddenStatesSettings(Settings):
    """`settings` of the objective hidden_states."""

    teacher_hidden_size: PositiveInt | None = Field(None, le=2**17)


class ObjectiveSettings(Settings):
    """An item of `objectives`."""

    name: str = Field(
        description="masked_lm, sentence_pairs, causal, distillation, hidden_states, or module:Class of your own"
    )
    weight: PositiveFloat = Field(1.0, description="factor of its mean loss in the sum over all objectives")
    task: PairTask | None = Field(
        None, description="of sentence_pairs: next_sentence (the default) or sentence_order, as data.sentence_pairs"
    )
    settings: dict[str, bool | int | float | str] = Field(
        {},
        description="arguments of your own class, by name; of distillation: temperature (default 2); of hidden_states: "
        "teacher_hidden_size (default: that of the model)",
    )

    @model_validator(mode="after")
    def _check_name(self) -> ObjectiveSettings:
        if self.name not in BUILT_IN and not self.is_own:
            near = _OTHER_NAMES.get(self.name.lower())
            raise SettingError(
                f"the objective {self.name!r} is unknown",
                fix=f"write name: {near}"
                if near
                else f"name one of {', '.join(BUILT_IN)}, or your own as module:Class",
                code="unknown-objective",
            )
        if self.name in _SETTINGS:
            self._check_settings(_SETTINGS[self.name])
        elif self.settings and not self.is_own:
            raise SettingError(
                f"the objective {self.name} has settings, which only {', '.join(_SETTINGS)} and a class of your own "
                "take",
                fix="remove `settings`",
                code="setting-without-effect",
            )
        if self.task is not None and self.name != SENTENCE_PAIRS:
            raise SettingError(
                f"the objective {self.name} has task={self.task}, which only sentence_pairs takes",
                fix="remove `task`",
                code="setting-without-effect",
            )
        return self

    def _check_settings(self, schema: type[Settings]) -> None:
        try:
            schema.model_validate(self.settings)
        except ValidationError as error:
            wrong, known = first_problem(error), ", ".join(schema.model_fields)
            raise SettingError(
                f"the objective {self.name} has settings={self.settings} ({wrong})",
                fix=f"correct `settings`, which may have {known}",
                code="invalid-objective-settings",
            ) from None

    @property
    def is_own(self) -> bool:
        """Whether it is a class of the user's."""
        return is_custom(self.name)

    @property
    def sentence_pairs(self) -> SentencePairs:
        """What `data.sentence_pairs` is with this objective."""
        return "none" if self.name != SENTENCE_PAIRS else self.task or "next_sentence"


_OTHER_NAMES = {
    **dict.fromkeys(("mlm",), MASKED_LM),
    **dict.fromkeys(("nsp", "next_sentence", "sop"), SENTENCE_PAIRS),
    **dict.fromkeys(("clm", "causal_lm", "next_token"), CAUSAL),
    **dict.fromkeys(("kd", "distill", "knowledge_distillation", "teacher"), DISTILLATION),
}
_SETTINGS: Mapping[str, type[Settings]] = {DISTILLATION: DistillationSettings, HIDDEN_STATES: HiddenStatesSettings}

Objectives = tuple[ObjectiveSettings, ...]


MASKED_LM_ALONE = (ObjectiveSettings(name=MASKED_LM),)


def objectives_of(sentence_pairs: SentencePairs) -> Objectives:
    """Return what `data.sentence_pairs` is the short form of."""
    if sentence_pairs == "none":
        return MASKED_LM_ALONE
    return *MASKED_LM_ALONE, ObjectiveSettings(name=SENTENCE_PAIRS, task=sentence_pairs)


def sentence_pairs_of(objectives: Sequence[ObjectiveSettings]) -> SentencePairs:
    """Return the sentence pairs that the rows of these objectives consist of."""
    return next((each.sentence_pairs for each in objectives if each.name == SENTENCE_PAIRS), "none")


def is_causal(objectives: Sequence[ObjectiveSettings]) -> bool:
    """Return whether these objectives see unmasked rows under a causal mask."""
    return any(each.name == CAUSAL for each in objectives)


def check_objectives(objectives: Sequence[ObjectiveSettings], where: str) -> None:
    """Check a list of objectives; `where` names it.

    Raises:
        SettingError: it is empty, names one twice, or names causal beside others.
    """
    names = [each.name for each in objectives]
    if not names:
        raise SettingError(f"{where} is empty", fix="name an objective, or remove it", code="no-objective")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingError(f"{where} names {twice} twice", fix="remove one of them", code="duplicate-objective")
    if is_causal(objectives) and len(names) > 1:
        others = " and ".join(name for name in names if name != CAUSAL)
        raise SettingError(
            f"{where} names {CAUSAL} with {others}: a pass through the model has one mask, and {CAUSAL} hides "
            "later tokens, which the others see",
            fix=f"train {CAUSAL} in a stage of its own (training.stages)",
            code="causal-with-others",
        )
    if (taught := next((name for name in names if name in OF_TEACHER), None)) and MASKED_LM not in names:
        raise SettingError(
            f"{where} names {taught} without {MASKED_LM}, whose predictions and head it trains",
            fix=f"add {{name: {MASKED_LM}}}, with a small weight if labels are to count little",
            code="teacher-without-masked-lm",
        )


def is_taught(objectives: Sequence[ObjectiveSettings]) -> bool:
    """Return whether these objectives compare the model with a teacher."""
    return any(each.name in OF_TEACHER for each in objectives)


def published(objectives: Sequence[ObjectiveSettings]) -> Objectives:
    """Return the objectives whose heads an export has: not the user's own, nor what only training needs."""
    return tuple(each for each in objectives if not each.is_own and each.name not in OF_TEACHER)


def union(lists: Sequence[Objectives]) -> Objectives:
    """Return every objective of the lists once, in the order of `BUILT_IN` and of their first use.

    Raises:
        SettingError: two lists set one objective up differently (weights may differ).
    """
    found: dict[str, ObjectiveSettings] = {}
    for each in (each for objectives in lists for each in objectives):
        known = found.setdefault(each.name, each)
        if (known.settings, known.sentence_pairs) != (each.settings, each.sentence_pairs):
            raise SettingError(
                f"two stages set the objective {each.name} up differently",
                fix="give it the same task and settings in all stages: the model has one head for it",
                code="objectives-differ",
            )
    ordered = [found.pop(name) for name in BUILT_IN if name in found]
    return (*ordered, *found.values())
