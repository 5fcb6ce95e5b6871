"""`python -m spec_lab.train.texts`: the texts that drafters for a target learn on, written by the target itself.

python -m spec_lab.train.texts target=smollm2_135m num_texts=100 output_dir=texts
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from spec_lab.core.ending import ended, leave
from spec_lab.core.errors import UserError
from spec_lab.menu.bounds import out_of_bounds
from spec_lab.train.texts.settings import TextsConfig, sampling_problem

if TYPE_CHECKING:
    from spec_lab.menu.chosen import Chosen

INTRODUCTION = """\
spec_lab.train.texts: lets a target write the texts that a drafter for it is trained on.

  python -m spec_lab.train.texts target=smollm2_135m num_texts=100 output_dir=texts

The same command continues an interrupted one. With one of these flags it does something else:

  --plan: estimate the cost by a short probe, and write nothing
  --plan=RATE: the same without the probe, for a rate in tokens a second
  --show-data=N: print N of the texts in output_dir, with the tokens that count marked

Its keys, in addition to those of a run such as target, device, dtype and kernels:

  output_dir=DIR: the folder of the texts
"""

READ = {"target", "device", "dtype", "kernels", "attention", "graph", "cache", "recurrent", "num_threads", "extensions"}
"""The parts of a run's configuration that writing texts reads."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `arguments` (default: those of the process), and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return ended(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(INTRODUCTION + "".join(f"  {_described(field)}\n" for field in dataclasses.fields(TextsConfig)), end="")
        return 0
    config, output_dir, words = parse([word for word in arguments if not word.startswith("--")])
    flags = dict(_flag(word) for word in arguments if word.startswith("--"))
    if len(flags) > 1:
        raise UserError(f"{' '.join(flags)}: each does something different; give only one of them")
    from spec_lab.train.texts.prompts import refuse_missing
    from spec_lab.train.texts.write import choose_target

    refuse_missing(config.prompts)
    chosen = choose_target(words, config)
    if "--show-data" in flags:
        _show(chosen, output_dir, flags["--show-data"])
    elif "--plan" in flags:
        _plan(chosen, config, output_dir, flags["--plan"])
    else:
        _write(chosen, config, output_dir)
    return 0


def _flag(word: str) -> tuple[str, int | None]:
    """Return a flag and its number; raise UserError for an unknown flag."""
    name, _, value = word.partition("=")
    if name not in ("--plan", "--show-data") or (value and not (value.isdecimal() and int(value) > 0)):
        raise UserError(f"{word} is not an option; use --plan, --plan=RATE, --show-data=N or --help")
    return name, int(value) if value else None


def _write(chosen: Chosen, config: TextsConfig, output_dir: Path) -> None:
    from spec_lab.train.texts.job import write_texts
    from spec_lab.train.texts.plan import plan_texts, refuse_what_does_not_fit
    from spec_lab.train.texts.write import Writer

    refuse_what_does_not_fit([plan_texts(chosen, config)], output_dir, None)
    folder = write_texts(Writer.load(chosen, config), config, output_dir)
    for kind in ("prompts", "followups", "answers"):
        counts = folder.header.counts(kind)
        if counts:
            print(f"{kind}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    print(folder.root)


def _plan(chosen: Chosen, config: TextsConfig, output_dir: Path, rate: int | None) -> None:
    from spec_lab.train.texts.job import probe
    from spec_lab.train.texts.plan import Rate, format_plan, plan_texts, refuse_what_does_not_fit
    from spec_lab.train.texts.prompts import as_many_as_prompts
    from spec_lab.train.texts.write import Writer
    from spec_lab.wiring.memory import memory_of
    from spec_lab.wiring.models import resolve_device

    config = as_many_as_prompts(config)
    if rate is None:
        found = probe(Writer.load(chosen, config), config)
        print(
            f"a probe: {found.tokens_per_second:.0f} tokens/s, prompts of {found.prompt_tokens:.0f} tokens, answers of "
            f"{found.answer_tokens:.0f}"
        )
    else:
        found = Rate(rate, config.max_prompt_tokens, config.max_new_tokens)
    plan = plan_texts(chosen, config, found)
    print(format_plan([plan]))
    refuse_what_does_not_fit([plan], output_dir, memory_of(resolve_device(chosen.config.device)))


def _show(chosen: Chosen, output_dir: Path, number: int | None) -> None:
    from spec_lab.train.texts.folder import Texts
    from spec_lab.train.texts.show import show_texts
    from spec_lab.workloads.tokenizer import TargetTokenizer

    texts, tokenizer = Texts.load(output_dir), TargetTokenizer(chosen.target_folder)
    if texts.header.written_by.tokenizer != tokenizer.digest():
        raise UserError(
            f"output_dir={output_dir}: these texts were written by {texts.header.written_by.target}; name that target"
        )
    print(show_texts(texts, tokenizer, 3 if number is None else number, in_colour=sys.stdout.isatty()))


def _described(field: dataclasses.Field[object]) -> str:
    default = field.default_factory() if callable(field.default_factory) else field.default
    return f"{field.name}={'null' if default is None else default}: {field.metadata['help']}"


def parse(arguments: Sequence[str]) -> tuple[TextsConfig, Path, list[str]]:
    """Return the settings of the texts, their folder, and the overrides for the target's run.

    Raises:
        UserError: a setting has a wrong value or is not read, or there is no folder.
    """
    own = {field.name for field in dataclasses.fields(TextsConfig)}
    mine = [word for word in arguments if word.partition("=")[0] in own]
    folders = [word.partition("=")[2] for word in arguments if word.startswith("output_dir=")]
    if not folders or not folders[-1]:
        raise UserError("output_dir has no value; set output_dir=DIR, the folder of the texts")
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TextsConfig), OmegaConf.from_dotlist(mine)))
    for found in [*out_of_bounds(config), sampling_problem(config, "", bool(config.prompts))]:
        if found:
            raise UserError(found)
    others = [word for word in arguments if word not in mine and not word.startswith("output_dir=")]
    _refuse_unread(others)
    return config, Path(folders[-1]), others


def _refuse_unread(words: Sequence[str]) -> None:
    """Refuse settings of a run that the writing of texts does not read, such as `drafter=` and `workload.limit=`."""
    for word in words:
        part = re.split(r"[=.]", word.lstrip("+~"))[0]
        if part not in READ:
            raise UserError(f"{word}: {part} is not read when texts are written; leave it out")


if __name__ == "__main__":
    leave(main)
