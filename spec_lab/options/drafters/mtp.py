"""drafter=mtp_eagle and mtp_vanilla: multi-token prediction modules, as DeepSeek, GLM, MiMo and Qwen ship them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.checkpoints.config import num_mtp_modules, read_keys
from spec_lab.config.choices import Choice, Weights
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.options.drafters.eagle3 import recurrent_drafter
from spec_lab.options.drafters.weights import WeightsConfig

if TYPE_CHECKING:
    import torch

    from spec_lab.build.lab import Lab
    from spec_lab.checkpoints.mtp_checkpoint import MtpConfig
    from spec_lab.core.protocols import Drafter
    from spec_lab.models.mtp import MtpModule

    Tensors = Mapping[str, torch.Tensor]


class NormChoice(Choice):
    """The side of a final norm on which a hidden state is taken."""

    auto = "auto", "as the engines do for this family"
    pre_norm = "pre_norm"
    post_norm = "post_norm"


class ModuleRows(Choice):
    """The rows over which a module of vanilla MTP runs after a round."""

    text = "text", "K + 1 and the drafts before it: its cache holds every pair of the text"
    window = "window", "K, as TensorRT-LLM: its cache has holes and pairs of drafts"


@dataclass
class MtpConfigBase(WeightsConfig):
    """The keys of both drafters. Their modules may also lie in the target's checkpoint."""

    hands_hidden_on = True

    target_hidden: NormChoice = knob(NormChoice.auto, "which hidden state of the target the module reads")
    recycled_hidden: NormChoice = knob(NormChoice.auto, "which hidden state of the module the next draft reads")

    @property
    def num_modules(self) -> int:
        """The number of modules that are read."""
        return 1

    def folder(self, run: Run) -> Path:
        """Return `drafter.path`, else `target.path`, else the folder of the weights shipped for the target.

        Raises:
            UserError: there are fewer modules than are read.
        """
        is_of_target = self.path is None and getattr(run.target, "path", None) is not None
        folder = run.target.folder if is_of_target else super().folder(run)
        if (found := num_mtp_modules(read_keys(folder))) < self.num_modules:
            raise UserError(
                f"{folder}: its config names {found} MTP modules, and drafter={self.name} reads {self.num_modules}; "
                "use drafter=mtp_eagle, fewer drafts, or another drafter.path"
            )
        return folder

    def key(self, run: Run) -> tuple[Any, ...]:
        return *super().key(run), self.num_modules

    def read(self, lab: Lab) -> tuple[MtpConfig, list[dict[str, torch.Tensor]]]:
        """Read the modules, or make random ones. In their config, the knobs `target_hidden` and `recycled_hidden`
        apply unless they are `auto`."""
        from spec_lab.checkpoints.mtp_checkpoint import load_mtp
        from spec_lab.checkpoints.random_weights import random_mtp
        from spec_lab.core.types import NormSide

        target = lab.target.config
        if self.weights == Weights.random:
            mtp, tensors = random_mtp(target, self.num_modules, lab.dtype, lab.device, lab.run.seed + 1)
        else:
            mtp, tensors = load_mtp(self.folder(lab.run), target, self.num_modules, lab.dtype, lab.device)
        typed = {"target_hidden": self.target_hidden, "recycled_hidden": self.recycled_hidden}
        sides: Any = {name: NormSide(str(side)) for name, side in typed.items() if side != NormChoice.auto}
        return replace(mtp, **sides), tensors

    def model(self, lab: Lab, config: MtpConfig, tensors: Sequence[Tensors]) -> list[MtpModule]:
        """Make a module from each of `tensors`; all share the target's embedding and head."""
        from spec_lab.models.linear import make_linear
        from spec_lab.models.mtp import MtpModule
        from spec_lab.models.rope import rotary_table

        target, plan = lab.target, config.layer.only_layer
        head = make_linear(target.head_weight)
        rotary = rotary_table(plan.rope, plan.head_dim, target.num_positions, lab.dtype, lab.device)
        return [
            MtpModule(
                config,
                of_module,
                embedding=target.embedding,
                head=head,
                rotary=rotary,
                backend=lab.backend,
                kernels=lab.kernels,
            )
            for of_module in tensors
        ]


@option("drafter", "mtp_eagle")
class MtpEagle(MtpConfigBase):
    """One MTP module, reused for every draft (TensorRT-LLM's MTP-Eagle, SGLang's NextN)."""

    drafts_trees = True
    ingests_in_graphs = True

    def drafter(self, lab: Lab, model: list[MtpModule]) -> Drafter[Any]:
        from spec_lab.core.types import FeatureSpec

        (module,), mtp = model, model[0].config
        return recurrent_drafter(self, lab, module, FeatureSpec(final_hidden=mtp.target_hidden), mtp.layer.only_layer)


@option("drafter", "mtp_vanilla")
class MtpVanilla(MtpConfigBase):
    """An MTP module for each draft, over a window of the last tokens (TensorRT-LLM's MTP vanilla)."""

    rows: ModuleRows = knob(ModuleRows.text, "the rows of each module after a round")

    @property
    def num_modules(self) -> int:
        return self.num_draft_tokens

    def drafter(self, lab: Lab, model: list[MtpModule]) -> Drafter[Any]:
        from spec_lab.core.types import FeatureSpec
        from spec_lab.drafters.mtp_vanilla import MtpVanillaDrafter
        from spec_lab.drafters.mtp_window import MtpWindow

        mtp, num_modules = model[0].config, len(model)
        window = MtpWindow(
            lab.limits.num_slots,
            num_modules,
            hidden_size=mtp.layer.hidden_size,
            dtype=lab.dtype,
            device=lab.device,
            kernels=lab.kernels,
        )
        return MtpVanillaDrafter(
            modules=model,
            caches=lab.cache(mtp.layer.layers * num_modules).layers,
            window=window,
            features=FeatureSpec(final_hidden=mtp.target_hidden),
            backend=lab.backend,
            prune=lab.kept,
            picker=lab.picker(self),
            only_window=self.rows == ModuleRows.window,
        )
