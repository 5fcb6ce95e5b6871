"""`python -m spec_lab.train`: trains a drafter for the shipped target, or a new target and a drafter for it.

Exit codes are those of `python -m spec_lab`: 0 finished, 1 failed, 2 refused, 130 interrupted.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from spec_lab.program.ending import guarded, leave, print_trouble
from spec_lab.train.menu import train_folder, train_menu, trained_by

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from spec_lab.record.schema import Status
    from spec_lab.train.config import TrainConfig

Action = Callable[[Any], object]
"""What is done with the pipeline that is composed."""
READ_FOR = {"tokenizer": "target", "corpus": "target", "generations": "drafter"}
"""Sets of keys that are read only where this group's part is trained."""
READ_FOR_POCKET = ("tokenizer", "generations")
"""Those that targets of other families do not read: their vocabulary is the shipped one, their drafters learn on the
corpus."""
READ_FOR_TEXTS = ("prompts", "writing")
"""Those that are read where a target that is taken as it lies writes its texts first."""

INTRODUCTION = """\
spec_lab.train: trains a drafter for the shipped target, or a new target and a drafter for it, and writes their cards.

  python -m spec_lab.train drafter=mtp_eagle
  python -m spec_lab.train target=pocket drafter=eagle3
  python -m spec_lab.train debug=smoke
  python -m spec_lab.train target=smollm2_135m drafter=eagle3 prompts=[FILE] output_dir=DIR

With one of these a training for target=hf or target=smollm2_135m does something else:

  --plan: take a few steps, say what all of them will take, and keep nothing
  --show-data=N: print N of the texts, with the tokens that count marked
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what `arguments` (default: those of the process) say and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(arguments), train_menu(), "interrupted; the same command goes on from here")


def _run(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        from spec_lab.program.help import describe_menu

        print(f"{INTRODUCTION}\n{describe_menu(train_menu())}")
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
    from spec_lab.program.own_options import check_own_options, typed_folders
    from spec_lab.train.options import SCHEMAS

    arguments, action = action_of(arguments)
    menu = train_menu()
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
    from spec_lab.train.sharing import refuse_to_share

    is_multirun = any(text in ("-m", "--multirun") or text.startswith("hydra.mode=") for text in arguments)
    if not is_multirun or any(flag in FLAGS_THAT_SHOW for flag in arguments):
        return
    configs: list[TrainConfig] = []

    def compose(composed: DictConfig) -> None:
        with suppress(UserError):  # a job that is refused does not end the others, and is refused when its turn comes
            configs.append(config_of(composed))

    with redirect_stdout(io.StringIO()):  # Hydra announces its jobs, of which none is run here
        call_hydra(compose, arguments, train_folder())
    refuse_to_share(configs)


@contextmanager
def _scratch_folder() -> Iterator[None]:
    """Hydra writes of a multirun what nobody reads: into a folder that goes again; each job makes its `output_dir`."""
    from omegaconf import OmegaConf

    with tempfile.TemporaryDirectory() as folder:
        OmegaConf.register_new_resolver("scratch_folder", lambda: folder, replace=True)
        yield


def action_of(arguments: Sequence[str]) -> tuple[list[str], Action]:
    """Return the arguments without the flag that says what else is done, and what that is: training, by default.

    Raises:
        UserError: `--show-data` is not given a number.
    """
    from spec_lab.core.errors import UserError

    kept = [word for word in arguments if word.partition("=")[0] not in ("--plan", "--show-data")]
    flags = [word for word in arguments if word not in kept]
    if not flags:
        return kept, lambda pipeline: pipeline.run()
    name, _, number = flags[-1].partition("=")
    if name == "--plan":
        return kept, lambda pipeline: print(pipeline.plan())
    if not number.isdigit():
        raise UserError(f"{flags[-1]}: write --show-data=3, the number of texts to be shown")
    return kept, lambda pipeline: print(pipeline.show_data(int(number)))


def _train(composed: DictConfig, action: Action) -> Status:
    """Hydra's task: one composed training. Errors become a status, so that a multirun goes on."""
    from hydra.core.hydra_config import HydraConfig

    from spec_lab.train.checks import refuse

    try:
        config = config_of(composed)
        refuse_unread(HydraConfig.get().overrides.task, config)
        refuse(config)
        from spec_lab.train.recipes import build_pipeline

        action(build_pipeline(config))
    except Exception as error:
        return print_trouble(error, train_menu())
    return "finished"


def config_of(composed: DictConfig) -> TrainConfig:
    """Return the typed form of a composed training.

    Raises:
        UserError: a key has no value, or nothing reads it.
    """
    from spec_lab.program.compose import to_typed
    from spec_lab.train.config import TrainConfig

    config = to_typed(composed, train_menu())
    assert isinstance(config, TrainConfig)
    return config


def refuse_unread(overrides: Iterable[str], config: TrainConfig) -> None:
    """Refuse settings of stages that these options leave out.

    Raises:
        UserError: `corpus.row_length=256` beside target=shipped, or `generations...` beside drafter=none.
    """
    from spec_lab.core.errors import UserError
    from spec_lab.train.options import target_option

    writes_first = config.texts is None and target_option(config.target).path is not None
    is_trained = {"target": config.trained_target is not None, "drafter": config.trained_drafter is not None}
    for override in overrides:
        key = override.partition("=")[0]
        group = READ_FOR.get(key.partition(".")[0])
        if key.partition(".")[0] in READ_FOR_TEXTS and not writes_first:
            raise UserError(f"{key} is read where texts are written: leave it out, or choose target=hf and no texts=")
        if key.partition(".")[0] in READ_FOR_POCKET and not config.target.writes_texts:
            raise UserError(f"{key} is not read by the target chosen; leave it out or choose target=pocket")
        if group is not None and not is_trained[group]:
            options = "|".join(trained_by(group))
            raise UserError(f"{key} is not read by the options chosen; leave it out or choose {group}={options}")


if __name__ == "__main__":
    leave(main())
