"""`python -m spec_lab.train`: trains a drafter for an existing target, or a new target and a drafter for it.

Exit codes are those of `python -m spec_lab`: 0 finished, 1 failed, 2 refused, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from spec_lab.core.ending import ended, leave

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from spec_lab.train.config import TrainConfig

Action = Callable[[Any], object]
"""What to do with the composed pipeline, such as training."""
INTRODUCTION = """\
spec_lab.train: trains a drafter for an existing target, or a new target and a drafter for it, and writes their cards.

  python -m spec_lab.train drafter=mtp_eagle
  python -m spec_lab.train target=pocket drafter=eagle3
  python -m spec_lab.train debug=smoke
  python -m spec_lab.train target=smollm2_135m drafter=eagle3 prompts=[FILE] output_dir=DIR

With one of these flags a training for target=hf or target=smollm2_135m does something else:

  --plan: take a few steps, estimate the cost of all of them, and keep nothing
  --show-data=N: print N of the texts, with the tokens that count marked
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (default: those of the process), and return the exit code."""
    return ended(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    from spec_lab.app.compose import call_hydra, conf_folder, store
    from spec_lab.train.options import SCHEMAS

    arguments, action = action_of(arguments)
    store(SCHEMAS)
    codes = [0]
    code = call_hydra(lambda composed: codes.append(_train(composed, action)), arguments, conf_folder() / "train")
    return code or max(codes)


def action_of(arguments: Sequence[str]) -> tuple[list[str], Action]:
    """Return the arguments without the action's flag, and the action; training is the default.

    Raises:
        UserError: `--show-data` has no number above 0, `--plan` has one, or several flags are given.
    """
    from spec_lab.core.errors import UserError

    kept = [word for word in arguments if word.partition("=")[0] not in ("--plan", "--show-data")]
    flags = [word for word in arguments if word not in kept]
    if not flags:
        return kept, lambda pipeline: pipeline.run()
    if len(flags) > 1:
        raise UserError(f"{' '.join(flags)}: each does something different; give only one of them")
    if flags[0] == "--plan":
        return kept, lambda pipeline: print(pipeline.plan())
    flag, _, number = flags[0].partition("=")
    if flag == "--plan":
        raise UserError(f"{flags[0]}: --plan has no number here, since it measures the rate itself; write --plan")
    if not number.isdecimal() or int(number) == 0:
        raise UserError(f"{flags[0]}: write --show-data=3, the number of texts to be shown")
    return kept, lambda pipeline: print(pipeline.show_data(int(number)))


def _train(composed: DictConfig, action: Action) -> int:
    """Hydra's task: one composed training. A refusal becomes an exit code, so that a multirun goes on."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from spec_lab.train.checks import refuse
    from spec_lab.train.recipes import build_pipeline

    def train() -> None:
        config: Any = OmegaConf.to_object(composed)
        refuse_unread(HydraConfig.get().overrides.task, config)
        refuse(config)
        action(build_pipeline(config))

    return ended(train)


def refuse_unread(overrides: Iterable[str], config: TrainConfig) -> None:
    """Refuse overrides of keys that a training with the chosen options does not read.

    Raises:
        UserError: for instance, `corpus.row_length=256` with target=shipped, or `generations...` with drafter=none.
    """
    from spec_lab.core.errors import UserError

    for override in overrides:
        key = override.partition("=")[0]
        for names, is_read, remedy in _readers(config):
            if not is_read and any(key == name or key.startswith(f"{name}.") for name in names):
                raise UserError(f"{key} is not read by the chosen options; leave it out, or choose {remedy}")


def _readers(config: TrainConfig) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Yield keys, whether this training reads them, and the options that read them."""
    from spec_lab.train.options import TARGETS, target_option

    target = target_option(config.target)
    is_frozen = target.path is not None
    yield ("prompts", "writing"), is_frozen and config.texts is None, "target=hf and no texts="
    yield ("packing", "evaluation.every"), is_frozen, "target=hf"
    yield (
        ("evaluation.limit_per_category",),
        not is_frozen or bool(config.evaluation.prompts),
        "evaluation.prompts=[FILE]",
    )
    of_ours = ("generations", "num_workers", "evaluation.rows_per_forward", "evaluation.samples_per_category")
    yield of_ours, not is_frozen, "target=shipped"
    # New targets other than pocket use the shipped vocabulary, and their drafters are trained on the corpus.
    yield ("tokenizer", "generations"), config.target.writes_texts, "target=pocket"
    targets = "|".join(option.name for option in TARGETS if option.recipe is not None)
    yield ("tokenizer", "corpus"), config.trained_target is not None, f"target={targets}"
    drafters = "|".join(target.drafters)
    yield ("generations",), config.trained_drafter is not None, f"drafter={drafters}"


if __name__ == "__main__":
    leave(main)
