"""A family of one's own: any combination of options."""

from __future__ import annotations

from trainer.config.families.family import Family


class Custom(Family):
    """It starts from the options of BERT, fixes none and guarantees no export.

    Such a model trains, is evaluated and fills masks here; one whose options are those of a published family is
    exported as that.
    """

    name = "custom"
