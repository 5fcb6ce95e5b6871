"""`python -m spec_lab.train`: trains a drafter for a target, and writes its card.

  python -m spec_lab.train drafter=mtp_eagle
  python -m spec_lab.train debug=smoke
  python -m spec_lab.train target=smollm2_135m drafter=eagle3 prompts=[FILE] output_dir=DIR

With one of these flags it does something else:

  --plan: take a few steps, estimate the cost of all of them, and keep nothing
  --show-data=N: print N of the texts, with the tokens that count marked

Exit codes are those of `python -m spec_lab`: 0 finished, 1 failed, 2 refused, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from spec_lab.core.ending import ended, leave, print_error
from spec_lab.core.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from spec_lab.train.config import TrainConfig

Action = Callable[[Any], object]
"""What to do with the composed pipeline, such as training."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (default: those of the process), and return the exit code."""
    return ended(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    from spec_lab.app.compose import call_hydra, conf_folder, store
    from spec_lab.train.options import SCHEMAS

    arguments, action = action_of(arguments)
    store(SCHEMAS)
    errors: list[Exception] = []

    def train(composed: DictConfig) -> None:
        try:
            _train(composed, action)
        except Exception as error:  # the other jobs of a multirun go on
            errors.append(error)
            print_error(error)

    code = call_hydra(train, arguments, conf_folder() / "train")
    return code or (0 if not errors else 2 if all(isinstance(error, UserError) for error in errors) else 1)


def action_of(arguments: Sequence[str]) -> tuple[list[str], Action]:
    """Return the arguments without the action's flag, and the action; training is the default.

    Raises:
        UserError: `--show-data` has no number above 0, `--plan` has one, or several flags are given.
    """
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


def _train(composed: DictConfig, action: Action) -> None:
    """Hydra's task: one composed training."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from spec_lab.train.checks import refuse

    config: Any = OmegaConf.to_object(composed)
    refuse_unread(HydraConfig.get().overrides.task, config)
    refuse(config)
    from spec_lab.train.head_pipeline import build_pipeline

    action(build_pipeline(config))


def refuse_unread(overrides: Iterable[str], config: TrainConfig) -> None:
    """Refuse overrides of keys that a training with the chosen options does not read.

    Raises:
        UserError: for instance, `writing.num_texts=100` with `texts=FOLDER`.
    """
    for override in overrides:
        key = override.partition("=")[0]
        for names, is_read, remedy in _readers(config):
            if not is_read and any(key == name or key.startswith(f"{name}.") for name in names):
                raise UserError(f"{key} is not read by the chosen options; leave it out, or choose {remedy}")


def _readers(config: TrainConfig) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Yield keys, whether this training reads them, and the options that read them."""
    yield ("prompts", "writing"), config.texts is None, "no texts="
    of_questions = "evaluation.limit_per_category"
    yield (of_questions,), bool(config.evaluation.prompts), "evaluation.prompts=[FILE]"


if __name__ == "__main__":
    leave(main)
