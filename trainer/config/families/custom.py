"""Models of any combination of options."""

from __future__ import annotations

from trainer.config.families.family import Family


class Custom(Family):
    """It starts from the options of BERT, fixes none and guarantees no export.

    Such a model trains, is evaluated and fills masks here. If its options are those of a published family, it is
    exported as a model of that family.
    """

    name = "custom"
