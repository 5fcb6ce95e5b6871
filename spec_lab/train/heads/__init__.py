"""The heads that can be trained, by their names in `drafter=`."""

from __future__ import annotations

from collections.abc import Mapping

from spec_lab.train.head import HeadRecipe
from spec_lab.train.heads.block import Dflash, Dflash2, Domino, Dspark, Lilicorr
from spec_lab.train.heads.draft_model import DraftModel
from spec_lab.train.heads.eagle3 import Eagle3
from spec_lab.train.heads.frozen_kv import FrozenKv
from spec_lab.train.heads.mtp_eagle import MtpEagle
from spec_lab.train.heads.p_eagle import PEagle

ALL: tuple[type[HeadRecipe], ...] = (
    *(Eagle3, MtpEagle, FrozenKv, DraftModel, PEagle),
    *(Dflash, Dspark, Domino, Dflash2, Lilicorr),
)
HEADS: Mapping[str, type[HeadRecipe]] = {kind.name: kind for kind in ALL}
