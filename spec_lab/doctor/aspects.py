"""Lists the choices that a drafter's checkpoint leaves open: how a run makes each, and the alternatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
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
Factory = Callable[[Any, Any], DrafterMaker]


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a checkpoint.

    Attributes:
        make: makes the maker of drafters. It is called when the reading is scored, so that one is in memory at a time.
        min_draft_tokens: 2 if the reading cannot change the first draft.
    """

    name: str
    make: Callable[[], DrafterMaker]
    min_draft_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Aspect:
    """A choice, how this run makes it, and the alternatives."""

    name: str
    configured: str
    readings: list[Reading]


def aspects_of(lab: Lab) -> list[Aspect]:
    """List the choices in reading the run's drafter. `lab` has the parts that its checkpoint is read beside."""
    option: Any = lab.run.drafter
    if isinstance(option, Eagle3):
        return eagle3_aspects(option, *option.read(lab), lab.target.config.num_layers)
    if isinstance(option, FrozenKv):
        return frozen_kv_aspects(option, *option.read(lab))
    if isinstance(option, MtpConfigBase):
        config, modules = option.read(lab)
        aspects = mtp_aspects(option, config, modules)
        return [*aspects, order_aspect(option, config, modules)] if isinstance(option, MtpVanilla) else aspects
    return block_aspects(option, *option.read(lab), lab.target.num_positions) if isinstance(option, Dflash) else []


def read_as(option: Any, config: Any, tensors: Any) -> DrafterMaker:
    """Return what makes the drafters of `option` from a config and tensors that are read otherwise."""
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
    if not windows:
        return [Aspect("attention window", "all keys", [])]
    # A window as long as any text hides no key. With no window at all, a layer that is causal because it has a window
    # would not be causal.
    layers = tuple(replace(plan, window=plan.window and longest) for plan in config.body.layers)
    whole = replace(config, body=replace(config.body, layers=layers), most_context=None)
    every_key = Reading("all keys", partial(read_as, option, whole, tensors))
    return [Aspect("attention window", f"{' and '.join(map(str, sorted(windows)))} keys", [every_key])]


USUAL_THETA = 10000.0
# The products that read the layer's input, in grouped-query attention and in latent attention.
ATTENTION_INPUTS = tuple(
    f"midlayer.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
)


def eagle3_aspects(option: Eagle3, head: Eagle3Config, tensors: Tensors, num_layers: int) -> list[Aspect]:
    """List the choices in reading an EAGLE-3 head: its taps, the order of its inputs, its norms and its window.

    A head with a token map also has a choice of maps, and one with latent attention a choice of RoPE's theta.
    """
    factory, window = partial(read_as, option), option.window
    swapped = _swap_halves(tensors, [name for name in ATTENTION_INPUTS if name in tensors])
    order = Reading("hidden before embedding", partial(factory, head, swapped))
    aspects = [
        _tap_aspect(head, tensors, num_layers, factory),
        Aspect("concat order", "embedding before hidden", [order]),
        _eagle3_norm_aspect(head, tensors, factory),
    ]
    if window is None:
        aspects.append(Aspect("attention window", "all keys", []))
    else:
        every_key = Reading("all keys", partial(read_as, replace(option, window=None), head, tensors))
        aspects.append(Aspect("attention window", f"{window} keys", [every_key]))
    if "d2t" in tensors:
        maps = _other_maps(tensors["d2t"], head.target_vocab_size)
        others = [Reading(name, partial(factory, head, {**tensors, "d2t": d2t})) for name, d2t in maps.items()]
        aspects.append(Aspect("d2t offsets", "draft id + d2t", others))
    if head.layer.only_layer.latent is not None:
        aspects.append(_theta_aspect(head, tensors, factory))
    return aspects


def _theta_aspect(head: Eagle3Config, tensors: Tensors, factory: Factory) -> Aspect:
    """Compare with theta 10000, which TorchSpec used to train heads with latent attention regardless of their
    config."""
    plan = head.layer.only_layer
    readings = []
    if plan.rope.theta != USUAL_THETA:
        usual = replace(plan, rope=replace(plan.rope, theta=USUAL_THETA))
        changed = replace(head, layer=replace(head.layer, layers=(usual,)))
        readings.append(Reading(f"{USUAL_THETA:g}", partial(factory, changed, tensors)))
    return Aspect("rope theta", f"{plan.rope.theta:g}", readings)


def _tap_aspect(head: Eagle3Config, tensors: Tensors, num_layers: int, factory: Factory) -> Aspect:
    taps = head.tap_layer_inputs or default_tap_layer_inputs(num_layers)
    readings = []
    for name, other in _other_taps(taps, num_layers).items():
        changed = replace(head, tap_layer_inputs=other)
        readings.append(Reading(f"{name} (inputs of {_listed(other)})", partial(factory, changed, tensors)))
    return Aspect("tap ids", f"inputs of layers {_listed(taps)}", readings)


def _eagle3_norm_aspect(head: Eagle3Config, tensors: Tensors, factory: Factory) -> Aspect:
    residual = replace(head, norm_before_residual=not head.norm_before_residual)
    output = replace(head, norm_output=not head.norm_output)
    readings = [
        Reading(f"norm_before_residual {_word(residual.norm_before_residual)}", partial(factory, residual, tensors)),
        Reading(f"norm_output {_word(output.norm_output)}", partial(factory, output, tensors), 2),
    ]
    stored = f"norm_before_residual {_word(head.norm_before_residual)}, norm_output {_word(head.norm_output)}"
    return Aspect("norm order", stored, readings)


def frozen_kv_aspects(option: FrozenKv, assistant: AssistantConfig, tensors: Tensors) -> list[Aspect]:
    """List the choices in reading an assistant: its inputs, the position of its queries, and its KV sources."""
    factory = partial(read_as, option)
    others = [position for position in FrozenKvPosition if position != option.position]
    sources = assistant.kv_sources
    swapped = _swap_halves(tensors, ("pre_projection.weight",))
    return [
        Aspect(
            "concat order",
            "embedding before hidden",
            [Reading("hidden before embedding", partial(factory, assistant, swapped))],
        ),
        Aspect(
            "query position",
            option.position,
            [Reading(other, partial(read_as, replace(option, position=other), assistant, tensors)) for other in others],
        ),
        Aspect(
            "KV source layers",
            f"layers {_listed(sources)}",
            [
                Reading(f"layers {_listed(other)}", partial(factory, assistant.reading(other), tensors))
                for other in other_sources(assistant)
            ],
        ),
    ]


def mtp_aspects(option: MtpConfigBase, mtp: MtpConfig, modules: Sequence[Tensors]) -> list[Aspect]:
    """List the choices in reading any MTP module."""
    factory = partial(read_as, option)
    swapped = [_swap_halves(tensors, (PROJECTION,)) for tensors in modules]
    target_hidden = replace(mtp, target_hidden=_other_side(mtp.target_hidden))
    recycled_hidden = replace(mtp, recycled_hidden=_other_side(mtp.recycled_hidden))
    both = replace(target_hidden, recycled_hidden=recycled_hidden.recycled_hidden)
    return [
        Aspect(
            "concat order",
            "embedding before hidden",
            [Reading("hidden before embedding", partial(factory, mtp, swapped))],
        ),
        Aspect(
            "norm order",
            f"target_hidden {mtp.target_hidden}, recycled_hidden {mtp.recycled_hidden}",
            [
                Reading(f"target_hidden {target_hidden.target_hidden}", partial(factory, target_hidden, modules)),
                Reading(
                    f"recycled_hidden {recycled_hidden.recycled_hidden}", partial(factory, recycled_hidden, modules), 2
                ),
                Reading("both on the other side", partial(factory, both, modules), 2),
            ],
        ),
    ]


def order_aspect(option: MtpConfigBase, mtp: MtpConfig, modules: Sequence[Tensors]) -> Aspect:
    """Return the choice of the modules' order."""
    orders = {f"modules {_listed([index + 1 for index in other])}": other for other in _other_orders(len(modules))}
    return Aspect(
        "module order",
        f"modules {_listed(range(1, len(modules) + 1))}",
        [
            Reading(name, partial(read_as, option, mtp, [modules[index] for index in other]))
            for name, other in orders.items()
        ],
    )


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


def _listed(layers: Sequence[int]) -> str:
    return " ".join(map(str, layers))


def _word(flag: bool) -> str:
    return str(flag).lower()
