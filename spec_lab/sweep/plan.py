"""Makes a `Sweep` that is ready to run from the command line, and prints it for `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from spec_lab.core.errors import UserError
from spec_lab.menu.config import RunConfig
from spec_lab.menu.refusals.run import admit
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import EXIT_CODES, print_refusal
from spec_lab.program.folder import Study, study_place
from spec_lab.program.ground import ground_of
from spec_lab.program.overrides import extensions_in
from spec_lab.sweep.file import RUN_CAP, SearchMethod, read_sweep_file
from spec_lab.sweep.search import Search, Tried
from spec_lab.sweep.session import Sweep
from spec_lab.sweep.space import check_space, override_key

PREVIEWED = 10
OUTPUT_DIR = "output_dir"


def plan_sweep(path: Path, overrides: Sequence[str], count: int | None, seed: int, fresh: bool) -> Sweep:
    """Read and check everything; nothing is written.

    Raises:
        UserError: the sweep cannot be run.
    """
    file = read_sweep_file(path)
    for text in overrides:
        if override_key(text) == "fresh":
            raise UserError(f"{text}: a sweep has --fresh instead")
        if override_key(text) == "dry_run":
            raise UserError(f"{text}: a sweep has --dry-run instead")
    check_space(file, overrides)
    caps = [cap for cap in (file.run_cap, count) if cap is not None]
    if not caps and file.method != SearchMethod.grid:
        raise UserError(f"{path}: method {file.method} never ends by itself; add --count 20, or {RUN_CAP}: 20 to it")
    search = Search(file, seed)
    search.rehearse()
    typed = tuple(text for text in overrides if override_key(text) != OUTPUT_DIR)
    content = [file.config, sorted(typed), seed]  # not the number of runs: a larger one continues the sweep
    ground = ground_of([*file.overrides, *typed, file.parameters], extensions_in([*file.overrides, *typed]))
    folder = study_place(_output_dir(overrides), Study(file.path.stem, content), ground, fresh)
    return Sweep(file, search, typed, min(caps, default=None), folder, ground)


def preview(sweep: Sweep) -> int:
    """Print the first runs that the search proposes before it has any result, with their refusals; return the exit
    code."""
    refused = False
    tried: list[Tried] = []
    most = 1 if sweep.file.method == SearchMethod.bayes else min(sweep.limit or PREVIEWED, PREVIEWED)
    while len(tried) < most:
        parameters = sweep.search.propose(len(tried), tried)
        if parameters is None:
            break
        refused |= _preview_one(sweep, len(tried), parameters)
        tried.append(Tried(parameters, "interrupted", None))
    return EXIT_CODES["refused" if refused else "finished"]


def _preview_one(sweep: Sweep, number: int, parameters: dict[str, Any]) -> bool:
    overrides = sweep.overrides_of(parameters)
    print(f"[{number + 1}] {' '.join(overrides)}")
    try:
        config, _ = compose_run(overrides)
        admit(config)
    except UserError as error:
        print_refusal(error)
        return True
    return False


def _output_dir(overrides: Sequence[str]) -> Path:
    parser = OverridesParser.create()
    typed = [str(parser.parse_override(text).value()) for text in overrides if override_key(text) == OUTPUT_DIR]
    return Path(typed[-1] if typed else RunConfig.output_dir)
