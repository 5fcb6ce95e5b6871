"""`python -m spec_lab.train`: trains a drafter for an existing target, or a new target and a drafter for it.

Exit codes are those of `python -m spec_lab`: 0 finished, 1 failed, 2 refused, 130 interrupted.
"""

from __future__ import annotations

from spec_lab.program.interrupts import end_at_signals

if __name__ == "__main__":
    end_at_signals()

import io
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from spec_lab.program.ending import guarded, leave, print_trouble

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from spec_lab.program.options import Menu
    from spec_lab.record.recorder import Status
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
    arguments = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(arguments), _menu, "interrupted; the same command continues from here")


def _menu() -> Menu:
    """Return the menu. Its module is imported late: that takes a second, in which Ctrl-C must already work."""
    from spec_lab.train.menu import train_menu

    return train_menu()


def _run(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        from spec_lab.program.help import describe_menu

        print(f"{INTRODUCTION}\n{describe_menu(_menu())}")
        return 0
    if "--version" in arguments:
        from spec_lab.program.help import version_text

        print(version_text())
        return 0
    from spec_lab.cli.job import worst_exit_code
    from spec_lab.cli.session import call_hydra, check_came_to_jobs
    from spec_lab.program.compose import store_schemas
    from spec_lab.program.launchers import refuse_launcher
    from spec_lab.program.overrides import check_arguments
    from spec_lab.program.own_options import check_own_options, refuse_misplaced, typed_folders
    from spec_lab.train.menu import train_folder
    from spec_lab.train.options import SCHEMAS

    arguments, action = action_of(arguments)
    menu = _menu()
    refuse_misplaced(arguments, menu)
    checked = check_arguments(arguments, menu)
    check_own_options(typed_folders(checked), train_folder(), menu.groups)
    refuse_launcher(checked, "a training")
    store_schemas(SCHEMAS)
    statuses: list[Status] = []
    with _scratch_folder():
        _refuse_to_share(checked)
        call_hydra(lambda composed: statuses.append(_train(composed, action)), checked, train_folder())
    check_came_to_jobs(len(statuses), checked)
    return worst_exit_code(statuses)


def _refuse_to_share(arguments: Sequence[str]) -> None:
    """Compose all jobs of a multirun before the first is trained, and refuse those that cannot share their folder."""
    from spec_lab.cli.session import call_hydra
    from spec_lab.core.errors import UserError
    from spec_lab.program.flags import FLAGS_THAT_SHOW
    from spec_lab.train.menu import train_folder
    from spec_lab.train.sharing import refuse_to_share

    is_multirun = any(text in ("-m", "--multirun") or text.startswith("hydra.mode=") for text in arguments)
    if not is_multirun or any(flag in FLAGS_THAT_SHOW for flag in arguments):
        return
    configs: list[TrainConfig] = []

    def compose(composed: DictConfig) -> None:
        with suppress(UserError):  # a refused job does not stop the others; it is refused again when its turn comes
            configs.append(config_of(composed))

    with redirect_stdout(io.StringIO()):  # Hydra announces jobs, but none is run here
        call_hydra(compose, arguments, train_folder())
    refuse_to_share(configs)


@contextmanager
def _scratch_folder() -> Iterator[None]:
    """Give Hydra a temporary folder for the files that it writes in a multirun. Nothing reads these files.

    The configuration names it `${scratch_folder:}`. Each job makes its `output_dir` itself.
    """
    from omegaconf import OmegaConf

    with tempfile.TemporaryDirectory() as folder:
        OmegaConf.register_new_resolver("scratch_folder", lambda: folder, replace=True)
        yield


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


def _train(composed: DictConfig, action: Action) -> Status:
    """Hydra's task: one composed training. Errors become a status, so that a multirun goes on."""
    from hydra.core.hydra_config import HydraConfig

    from spec_lab.core.errors import is_interruption
    from spec_lab.train.checks import refuse

    try:
        config = config_of(composed)
        refuse_unread(HydraConfig.get().overrides.task, config)
        refuse(config)
        from spec_lab.train.recipes import build_pipeline

        action(build_pipeline(config))
    except Exception as error:
        if is_interruption(error):
            raise KeyboardInterrupt from error
        return print_trouble(error, _menu())
    return "finished"


def config_of(composed: DictConfig) -> TrainConfig:
    """Return the typed form of a composed training.

    Raises:
        UserError: a key has no value, or nothing reads it.
    """
    from spec_lab.program.compose import to_typed
    from spec_lab.train.config import TrainConfig

    config = to_typed(composed, _menu())
    assert isinstance(config, TrainConfig)
    return config


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
    leave(main())
