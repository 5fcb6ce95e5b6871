"""Lists the choices that a drafter's checkpoint leaves open: how a run makes each, and the alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from spec_lab.build.engine import DrafterMaker
from spec_lab.build.lab import Lab
from spec_lab.checkpoints.block_config import BlockConfig
from spec_lab.checkpoints.eagle3_checkpoint import Eagle3Config, default_tap_layer_inputs
from spec_lab.checkpoints.gemma4_assistant_checkpoint import AssistantConfig, form_of_kv, owns_kv
from spec_lab.checkpoints.mtp_checkpoint import PROJECTION, MtpConfig
from spec_lab.core.errors import UserError
from spec_lab.core.protocols import Drafter
from spec_lab.core.types import NormSide
from spec_lab.options.drafters.blocks import Dflash
from spec_lab.options.drafters.eagle3 import Eagle3
from spec_lab.options.drafters.frozen_kv import FrozenKv, FrozenKvPosition
from spec_lab.options.drafters.mtp import MtpConfigBase, MtpVanilla

Tensors = Mapping[str, torch.Tensor]
Reading = tuple[Any, Any, Any]
"""One way to read a checkpoint: an option, and the config and tensors that its `model` takes."""


@dataclass(frozen=True, slots=True)
class Aspect:
    """A choice, how this run makes it, and the other readings by name."""

    name: str
    configured: str
    others: Mapping[str, Reading]


def aspects_of(lab: Lab) -> list[Aspect]:
    """List the choices in reading the run's drafter that can be made otherwise. `lab` has the parts that its checkpoint
    is read beside."""
    option: Any = lab.run.drafter
    found: list[Aspect] = []
    if isinstance(option, Eagle3):
        found = eagle3_aspects(option, *option.read(lab), lab.target.config.num_layers)
    elif isinstance(option, FrozenKv):
        found = frozen_kv_aspects(option, *option.read(lab))
    elif isinstance(option, MtpConfigBase):
        found = mtp_aspects(option, *option.read(lab))
    elif isinstance(option, Dflash):
        found = block_aspects(option, *option.read(lab), lab.target.num_positions)
    return [aspect for aspect in found if aspect.others]


def read_as(option: Any, config: Any, tensors: Any) -> DrafterMaker:
    """Return what makes the drafters of a reading, which share a model that is made with the first."""
    kept: list[Any] = []

    def make(lab: Lab) -> Drafter[Any]:
        if not kept:
            kept.append(option.model(lab, config, tensors))
        drafter: Drafter[Any] = option.drafter(lab, kept[0])
        return drafter

    return make


def block_aspects(option: Dflash, config: BlockConfig, tensors: Tensors, longest: int) -> list[Aspect]:
    """List the one choice in reading a block drafter, the attention window, with its alternative."""
    windows = {window for plan in config.body.layers if (window := config.window_of(plan)) is not None}
    # A window as long as any text hides no key. With no window at all, a layer that is causal because it has a window
    # would not be causal.
    layers = tuple(replace(plan, window=plan.window and longest) for plan in config.body.layers)
    whole = replace(config, body=replace(config.body, layers=layers), most_context=None)
    others = {"all keys": (option, whole, tensors)} if windows else {}
    return [Aspect("attention window", f"{' and '.join(map(str, sorted(windows)))} keys", others)]


USUAL_THETA = 10000.0
"""With this TorchSpec trained heads with latent attention, whatever their config says."""
# The products that read the layer's input, in grouped-query attention and in latent attention.
ATTENTION_INPUTS = tuple(
    f"midlayer.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
)


def eagle3_aspects(option: Eagle3, head: Eagle3Config, tensors: Tensors, num_layers: int) -> list[Aspect]:
    """List the choices in reading an EAGLE-3 head: its taps, the order of its inputs, its norms and its window.

    A head with a token map also has a choice of maps, and one with latent attention a choice of RoPE's theta.
    """
    taps, window, plan = head.tap_layer_inputs, option.window, head.layer.only_layer
    usual = replace(head.layer, layers=(replace(plan, rope=replace(plan.rope, theta=USUAL_THETA)),))
    norms: dict[str, Any] = {name: not getattr(head, name) for name in ("norm_before_residual", "norm_output")}
    maps = _other_maps(tensors["d2t"], head.target_vocab_size) if "d2t" in tensors else {}
    return [
        Aspect(
            "tap ids",
            f"inputs of layers {_listed(taps)}",
            {
                f"{name} (inputs of {_listed(other)})": (option, replace(head, tap_layer_inputs=other), tensors)
                for name, other in _other_taps(taps, num_layers).items()
            },
        ),
        _order(option, head, _swap_halves(tensors, [name for name in ATTENTION_INPUTS if name in tensors])),
        Aspect(
            "norm order",
            ", ".join(f"{name} {not other}" for name, other in norms.items()),
            {f"{name} {value}": (option, replace(head, **{name: value}), tensors) for name, value in norms.items()},
        ),
        Aspect(
            "attention window",
            f"{window} keys",
            {} if window is None else {"all keys": (replace(option, window=None), head, tensors)},
        ),
        Aspect(
            "d2t offsets",
            "draft id + d2t",
            {name: (option, head, {**tensors, "d2t": d2t}) for name, d2t in maps.items()},
        ),
        Aspect(
            "rope theta",
            f"{plan.rope.theta:g}",
            {f"{USUAL_THETA:g}": (option, replace(head, layer=usual), tensors)}
            if plan.latent is not None and plan.rope.theta != USUAL_THETA
            else {},
        ),
    ]


def frozen_kv_aspects(option: FrozenKv, assistant: AssistantConfig, tensors: Tensors) -> list[Aspect]:
    """List the choices in reading an assistant: its inputs, the position of its queries, and its KV sources."""
    others = [position for position in FrozenKvPosition if position != option.position]
    return [
        _order(option, assistant, _swap_halves(tensors, ("pre_projection.weight",))),
        Aspect(
            "query position",
            option.position,
            {other: (replace(option, position=other), assistant, tensors) for other in others},
        ),
        Aspect(
            "KV source layers",
            f"layers {_listed(assistant.kv_sources)}",
            {
                f"layers {_listed(other)}": (option, assistant.reading(other), tensors)
                for other in other_sources(assistant)
            },
        ),
    ]


def mtp_aspects(option: MtpConfigBase, mtp: MtpConfig, modules: Sequence[Tensors]) -> list[Aspect]:
    """List the choices in reading MTP modules; only `mtp_vanilla` has several, and an order of them."""
    sides: dict[str, Any] = {
        "target_hidden": _other_side(mtp.target_hidden),
        "recycled_hidden": _other_side(mtp.recycled_hidden),
    }
    orders = _other_orders(len(modules)) if isinstance(option, MtpVanilla) else []
    return [
        _order(option, mtp, [_swap_halves(tensors, (PROJECTION,)) for tensors in modules]),
        Aspect(
            "norm order",
            f"target_hidden {mtp.target_hidden}, recycled_hidden {mtp.recycled_hidden}",
            {f"{name} {side}": (option, replace(mtp, **{name: side}), modules) for name, side in sides.items()}
            | {"both on the other side": (option, replace(mtp, **sides), modules)},
        ),
        Aspect(
            "module order",
            f"modules {_numbered(range(len(modules)))}",
            {f"modules {_numbered(other)}": (option, mtp, [modules[index] for index in other]) for other in orders},
        ),
    ]


def _order(option: Any, config: Any, swapped: Any) -> Aspect:
    return Aspect("concat order", "embedding before hidden", {"hidden before embedding": (option, config, swapped)})


def _other_taps(taps: tuple[int, int, int], num_layers: int) -> dict[str, tuple[int, int, int]]:
    """Return other taps: one layer later (if the ids name outputs), one earlier (if 1 was added to ids of inputs), and
    the default."""
    candidates: dict[str, tuple[int, ...]] = {
        "one later, as outputs": tuple(tap + 1 for tap in taps),
        "one earlier": tuple(tap - 1 for tap in taps),
    }
    with suppress(UserError):  # a target with too few layers has no default
        candidates["the default"] = default_tap_layer_inputs(num_layers)
    found: dict[str, tuple[int, int, int]] = {}
    for name, (low, middle, high) in candidates.items():
        other = low, middle, high
        if low >= 0 and high < num_layers and other not in (taps, *found.values()):
            found[name] = other
    return found


def _other_orders(num_modules: int) -> list[tuple[int, ...]]:
    """Return other orders: two neighbours exchanged, all shifted by one place either way, and reversed; for up to three
    modules, all orders."""
    stored = tuple(range(num_modules))
    exchanged = [(*stored[:low], low + 1, low, *stored[low + 2 :]) for low in range(num_modules - 1)]
    candidates = [*exchanged, (*stored[1:], *stored[:1]), (*stored[-1:], *stored[:-1]), stored[::-1]]
    return [other for other in dict.fromkeys(candidates) if other != stored]


def _other_maps(d2t: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return other token maps: offsets to neighbouring target ids, and `d2t` read as target ids if it can be such."""
    draft_ids = torch.arange(len(d2t), device=d2t.device)
    maps = {f"every id {shift:+d}": (draft_ids + d2t + shift) % vocab_size - draft_ids for shift in (-1, 1)}
    if int(d2t.min()) >= 0 and int(d2t.max()) < vocab_size:
        maps["d2t as target ids"] = d2t - draft_ids
    return maps


def other_sources(assistant: AssistantConfig) -> list[tuple[int, ...]]:
    """Return other source layers: the nearest earlier and later layers of the same kind, for all layers of the head or
    for those of one kind; the last layers of the kind, as in engines; and the same layers in reverse."""
    sources, plans = assistant.kv_sources, assistant.target.layers
    forms = [(*form_of_kv(plan), owns_kv(plan)) for plan in plans]
    sliding = [plan.window is not None for plan in plans]
    last = {sliding[index]: index for index, plan in enumerate(plans) if owns_kv(plan)}
    candidates = [
        tuple(_beside(forms, source, step) if sliding[source] in kinds else source for source in sources)
        for step in (-1, 1)
        for kinds in ((True, False), (True,), (False,))
    ]
    candidates += [tuple(last[sliding[source]] for source in sources), sources[::-1]]
    fitting = [
        other
        for other in dict.fromkeys(candidates)
        if all(0 <= index < len(plans) for index in other)
        and all(forms[new] == forms[old] for new, old in zip(other, sources, strict=True))
    ]
    return [other for other in fitting if other != sources]


def _beside(forms: Sequence[object], source: int, step: int) -> int:
    """Return the nearest layer in one direction whose KV has the same form as that of `source`; -1 if there is none."""
    index = source + step
    while 0 <= index < len(forms):
        if forms[index] == forms[source]:
            return index
        index += step
    return -1


def _swap_halves(tensors: Tensors, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors, with the two halves of inputs exchanged in the named weights [out, 2 * width]."""
    return {**tensors, **{name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1) for name in names}}


def _other_side(side: NormSide) -> NormSide:
    return NormSide.PRE_NORM if side is NormSide.POST_NORM else NormSide.POST_NORM


def _listed(layers: Iterable[int]) -> str:
    return " ".join(map(str, layers))


def _numbered(modules: Iterable[int]) -> str:
    return _listed(index + 1 for index in modules)
