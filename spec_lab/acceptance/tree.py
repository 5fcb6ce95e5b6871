"""Acceptance rules that judge a tree of drafts from the root down, and one that imposes a path.

Each row of a tree names its parent, which precedes it. Row 0, the root, and rows without a draft are their own parents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_kernels.noise_reference import Use, race, round_key
from spec_lab.acceptance.distribution import SamplingParams, law_of, truncated
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.acceptance.synthetic import SyntheticAcceptance, round_draws
from spec_lab.core.draft_tree import climb
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.tree_protocols import JudgedRows, Walk
from spec_lab.core.types import Verification


def follow_tree(
    logits: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, active: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call `follow` with the argmax of each row."""
    return follow(logits.argmax(dim=-1), drafts, parents, active, depth)


def draw_tree(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    temperature: float | None,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call `follow` with a token drawn from each row; `temperature` is as in `law_of`."""
    seeds = slot_seeds.index_select(0, slot_ids).unsqueeze(1)
    rows = torch.arange(drafts.shape[1], device=seeds.device)
    keys = round_key(seeds, kv_lens.unsqueeze(1), rows, Use.EMIT)
    return follow(race(law_of(logits, temperature), keys), drafts, parents, active, depth)


def impose_path(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
    rates: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the first path with as many drafts as there are `rates` above the round's draw, or the longest path.

    The first n of the tokens are the path's drafts, and then the argmax of its last row. The other arguments and the
    results are those of `follow`.
    """
    imposed = (round_draws(slot_ids, slot_seeds, kv_lens).unsqueeze(1) < rates).sum(dim=1, keepdim=True)
    _, depths = climb(parents, depth)
    num_accepted = torch.minimum(imposed, depths.amax(dim=1, keepdim=True))
    last = (depths == num_accepted).int().argmax(dim=1, keepdim=True)
    row, path = last, [last] * (depth + 1)
    for level in range(depth, -1, -1):
        path[level] = row
        row = torch.where(num_accepted >= level, parents.gather(1, row), row)
    rows = behind_stays(torch.cat(path, dim=1), num_accepted, drafts.shape[1])
    best = logits.argmax(dim=-1).gather(1, last)
    tokens = drafts.gather(1, rows).roll(-1, dims=1).scatter(1, num_accepted, best)
    return tokens, torch.where(active, num_accepted.squeeze(1) + 1, 0), rows


class StrictTreeAcceptance(StrictAcceptance):
    """Follows the target's argmax from the root as long as a child of the current row holds it."""

    def __init__(self, kernels: KernelSet = TORCH_FORMS) -> None:
        super().__init__(kernels)
        self._follow = kernels.get(Op.FOLLOW_TREE, follow_tree)

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        tokens, num_emitted, path = self._follow(judged.logits, judged.tokens, judged.parents, judged.active, depth)
        return Walk(Verification(tokens, num_emitted), path)


class OneHotTreeAcceptance(RejectionAcceptance):
    """Draws each token from the target, and follows the child that holds it.

    SGLang's `tree_speculative_sampling_target_only` instead tries the children one after another. At thresholds of 1
    its output has the same distribution. The drafts are not sampled, so the drafter's probabilities are not used.
    """

    def __init__(self, sampling: SamplingParams, seeds: SlotSeeds, kernels: KernelSet = TORCH_FORMS) -> None:
        super().__init__(METHODS["one_hot"], sampling, seeds, kernels=kernels)
        self._draw = draw_tree if sampling.temperature == 0 else kernels.get(Op.DRAW_TREE, draw_tree)

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        logits, temperature = truncated(judged.logits, self._sampling)
        tokens, num_emitted, path = self._draw(
            logits,
            judged.tokens,
            judged.parents,
            judged.active,
            judged.slot_ids,
            self._seeds.values,
            judged.kv_lens,
            temperature,
            depth,
        )
        return Walk(Verification(tokens, num_emitted), path)


class SyntheticTreeAcceptance(SyntheticAcceptance):
    """Imposes the number of accepted drafts. Accepts the first path of that length, or the longest path if none is that
    long."""

    def __init__(
        self, rates: Sequence[float], seeds: SlotSeeds, device: torch.device, kernels: KernelSet = TORCH_FORMS
    ) -> None:
        super().__init__(rates, seeds, device, kernels)
        self._impose = kernels.get(Op.IMPOSE_PATH, impose_path)

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        tokens, num_emitted, path = self._impose(
            judged.logits,
            judged.tokens,
            judged.parents,
            judged.active,
            self._rates,
            judged.slot_ids,
            self._seeds.values,
            judged.kv_lens,
            depth,
        )
        return Walk(Verification(tokens, num_emitted), path)


def follow(
    chosen: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, active: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the target's chosen tokens from the root of each tree as long as a child of the
    current row holds the token.

    Args:
        chosen: [batch, N] the token that the target chose after each row.
        drafts: [batch, N] the tokens of the rows.
        parents: [batch, N].
        active: [batch] bool.
        depth: the most drafts that are followed.

    Returns:
        The tokens [batch, depth + 1], n [batch], and the rows of the path [batch, depth + 1].

        The first n tokens are emitted; n is 0 for inactive requests. They are the tokens in `chosen` along the path.
        The last of them is the target's token after the path.
    """
    is_draft = torch.arange(chosen.shape[1], device=chosen.device) > 0
    row = torch.zeros_like(chosen[:, :1])
    goes_on = active.unsqueeze(1)
    path, num_accepted = [row], torch.zeros_like(row)
    for _ in range(depth):
        hits = is_draft & (parents == row) & (drafts == chosen.gather(1, row))
        goes_on = goes_on & hits.any(dim=1, keepdim=True)
        row = torch.where(goes_on, hits.int().argmax(dim=1, keepdim=True), row)
        num_accepted = num_accepted + goes_on
        path.append(row)
    rows = behind_stays(torch.cat(path, dim=1), num_accepted, chosen.shape[1])
    return chosen.gather(1, rows), torch.where(active, num_accepted.squeeze(1) + 1, 0), rows


def behind_stays(path: torch.Tensor, num_accepted: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Keep the first `num_accepted` + 1 ([batch, 1]) rows of `path` [batch, depth + 1].

    After them column j holds row j, as in a chain, or the last row if there is no row j.
    """
    columns = torch.arange(path.shape[1], device=path.device)
    return torch.where(columns <= num_accepted, path, columns.clamp(max=num_rows - 1))
