"""What cannot work together, for drafters. Pure functions like those of `compatibility`; imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from spec_lab.config import (
    Eagle3DrafterConfig,
    FrozenKvDrafterConfig,
    MtpDrafterConfig,
    MtpVanillaDrafterConfig,
    NgramDrafterConfig,
    RunConfig,
    TargetConfig,
    TrainedDrafterConfig,
)
from spec_lab.errors import UserError, not_among
from spec_lab.models.config import MTP_COUNT_KEYS, read_num_mtp_modules

MAX_DRAFT_TOKENS = 16
NORM_SIDES = ("auto", "pre_norm", "post_norm")
FROZEN_KV_POSITIONS = ("last", "bonus")
NUM_SHIPPED_MODULES = 3


def drafting_needs_tokens(config: RunConfig) -> str | None:
    drafter = config.drafter
    if drafter.name == "none":
        if drafter.num_draft_tokens == 0:
            return None
        return (
            f"drafter=none drafts nothing, so drafter.num_draft_tokens={drafter.num_draft_tokens} has no meaning; "
            "leave it out or choose drafter=eagle3"
        )
    if 1 <= drafter.num_draft_tokens <= MAX_DRAFT_TOKENS:
        return None
    if drafter.num_draft_tokens == 0:
        return (
            f"drafter={drafter.name} with drafter.num_draft_tokens=0 drafts nothing; "
            "use drafter=none or drafter.num_draft_tokens=3"
        )
    return (
        f"drafter.num_draft_tokens={drafter.num_draft_tokens} is outside 1..{MAX_DRAFT_TOKENS}; "
        "use drafter.num_draft_tokens=3"
    )


def ngram_lengths(config: RunConfig) -> str | None:
    drafter = config.drafter
    if not isinstance(drafter, NgramDrafterConfig) or 1 <= drafter.min_ngram <= drafter.max_ngram:
        return None
    return (
        f"drafter.min_ngram={drafter.min_ngram} must be at least 1 and at most drafter.max_ngram={drafter.max_ngram}; "
        "use drafter.min_ngram=2 drafter.max_ngram=4"
    )


def trained_drafter_needs_weights(config: RunConfig) -> str | None:
    """Shipped are weights for the pocket target. Of MTP modules in the target's own folder, see `mtp_modules`."""
    drafter = config.drafter
    if not isinstance(drafter, TrainedDrafterConfig):
        return None
    if drafter.path is not None:
        return missing_folder("drafter.path", drafter.path)
    if config.target.name == "pocket" or (isinstance(drafter, MtpDrafterConfig) and config.target.name == "hf"):
        return None
    return no_weights_shipped(drafter, config.target)


def no_weights_shipped(drafter: TrainedDrafterConfig, target: TargetConfig) -> str:
    """The refusal of a drafter without a path; for MTP modules the target's own folder was searched before."""
    was_searched = isinstance(drafter, MtpDrafterConfig) and target.path is not None
    searched = f", and the config.json of target.path={target.path} names no MTP modules" if was_searched else ""
    return (
        f"no weights of drafter={drafter.name} are shipped for target={target.name}{searched}; "
        "give some with drafter.path=FOLDER or choose drafter=ngram"
    )


def eagle3_window(config: RunConfig) -> str | None:
    drafter = config.drafter
    if not isinstance(drafter, Eagle3DrafterConfig) or drafter.window is None or drafter.window >= 1:
        return None
    return (
        f"drafter.window={drafter.window} hides a row from itself; use drafter.window=1 or more, or "
        "drafter.window=null for all keys"
    )


def mtp_hidden_states(config: RunConfig) -> str | None:
    drafter = config.drafter
    if not isinstance(drafter, MtpDrafterConfig):
        return None
    return not_among("drafter.target_hidden", drafter.target_hidden, NORM_SIDES) or not_among(
        "drafter.recycled_hidden", drafter.recycled_hidden, NORM_SIDES
    )


def mtp_modules(config: RunConfig) -> str | None:
    """Whether there are modules, by config.json alone, and for mtp_vanilla one for each draft."""
    drafter, target = config.drafter, config.target
    if not isinstance(drafter, MtpDrafterConfig):
        return None
    if drafter.path is None and target.name == "pocket":
        return _too_few_modules(drafter, NUM_SHIPPED_MODULES, f"{NUM_SHIPPED_MODULES} are shipped")
    knob, path = ("target.path", target.path) if drafter.path is None else ("drafter.path", drafter.path)
    if path is None or missing_folder(knob, path):
        return None
    try:
        num_modules = read_num_mtp_modules(Path(path), knob)
    except UserError as error:
        return str(error)
    if num_modules:
        return _too_few_modules(drafter, num_modules, f"{knob}={path} has {num_modules}")
    if drafter.path is None:
        return no_weights_shipped(drafter, target)
    return (
        f"drafter.path={path} names no MTP modules in its config.json ({' or '.join(MTP_COUNT_KEYS)}); "
        "give the folder of a checkpoint that has some"
    )


def _too_few_modules(drafter: MtpDrafterConfig, num_modules: int, there_are: str) -> str | None:
    if not isinstance(drafter, MtpVanillaDrafterConfig) or drafter.num_draft_tokens <= num_modules:
        return None
    return (
        f"drafter.num_draft_tokens={drafter.num_draft_tokens}: drafter=mtp_vanilla has a module for each draft, and "
        f"{there_are}; use drafter.num_draft_tokens={num_modules} or drafter=mtp_eagle"
    )


def frozen_kv_knobs(config: RunConfig) -> str | None:
    drafter = config.drafter
    if not isinstance(drafter, FrozenKvDrafterConfig):
        return None
    if drafter.topk != 1:
        return (
            f"drafter.topk={drafter.topk} is not built: drafter=frozen_kv drafts a chain, and branches would need a "
            "tree mask in verify; use drafter.topk=1"
        )
    return not_among("drafter.position", drafter.position, FROZEN_KV_POSITIONS)


def oracle_is_greedy(config: RunConfig) -> str | None:
    if config.drafter.name != "oracle":
        return None
    if config.acceptance.name != "strict" and config.sampling.temperature <= 0:
        return (
            f"drafter=oracle replays a strict greedy continuation, which acceptance={config.acceptance.name} does not "
            "follow; use acceptance=strict"
        )
    if config.sampling.temperature <= 0:
        return None
    return (
        "drafter=oracle replays a greedy continuation, which sampling.temperature="
        f"{config.sampling.temperature} does not follow; use sampling.temperature=0"
    )


def missing_folder(knob: str, path: str) -> str | None:
    """The refusal of a path that is no folder."""
    return None if Path(path).is_dir() else f"{knob}={path} is no folder; give the folder of a checkpoint"


DRAFTER_CHECKS: tuple[Callable[[RunConfig], str | None], ...] = (
    drafting_needs_tokens,
    ngram_lengths,
    trained_drafter_needs_weights,
    eagle3_window,
    mtp_hidden_states,
    mtp_modules,
    frozen_kv_knobs,
    oracle_is_greedy,
)
