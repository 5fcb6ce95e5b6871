"""A whole training: texts, head, proof, loop, real decoding, and the finished head with `training.json` and a card.

Everything that a killed training needs to continue lies in `work/` of its folder until it has finished.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import torch

from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.train.config import TrainConfig
from spec_lab.train.data import Recorded, Texts, learnt_and_held_out
from spec_lab.train.group import Processes, joined
from spec_lab.train.head import HeadRecipe
from spec_lab.train.loop import Training, Watch
from spec_lab.train.proof import Proof, Prover
from spec_lab.train.serving import Serving, runs_of, target_path
from spec_lab.train.target import FrozenTarget
from spec_lab.train.truth import Truth

log = logging.getLogger(__name__)

RECORD, CARD = "training.json", "README.md"
MOST_ROWS = 64
"""The most held-out rows for teacher forcing."""
PLANNED_STEPS, TIMED_STEPS = 6, 2
"""The steps of a plan, and how many of the last of them are timed: the first ones compile, the fourth is captured."""


def train_head(config: TrainConfig, folder: Path) -> None:
    """Train a head, and write it into `folder`.

    Raises:
        UserError: data, target or settings cannot be used, or `folder` holds a training of others.
        NotServed: the training forward and the engine disagree.
        TrainingDiverged: a loss is no longer finite.
    """
    if config.dtype not in ("auto", "float32", "bfloat16"):
        raise UserError(f"dtype={config.dtype}: gradients need float32 or bfloat16")
    if (folder / RECORD).exists():
        raise UserError(f"{folder} has a finished head; choose another hydra.run.dir, or delete it")
    with joined(config.device) as (group, device):
        if group.size > config.optimisation.batch_size:
            raise UserError(f"optimisation.batch_size={config.optimisation.batch_size} is below the {group.size} GPUs")
        path = target_path(config.target)
        runs, held_out = runs_of(config, folder, path, device, group)
        learnt, measured = learnt_and_held_out(runs, held_out, config.held_out_share)
        dtype = torch.bfloat16 if (device.type == "cuda" and config.dtype == "auto") else config.dtype
        dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.replace("auto", "float32"))
        target = FrozenTarget.load(path, device, dtype, config.row_length)
        job = HeadJob(config, folder, path, target, learnt=learnt, held_out=measured, group=group)
        if config.plan:
            print(job.plan())
        elif group.rank:
            job.training(job.module()).run(job.checkpoint, job.settings(), None)
        else:
            job.run(runs)


@dataclass(frozen=True, slots=True)
class HeadJob:
    """A training whose texts are there.

    Attributes:
        path: the target's checkpoint, which the engine loads separately.
    """

    config: TrainConfig
    folder: Path
    path: Path
    target: FrozenTarget
    learnt: Texts
    held_out: Texts
    group: Processes

    @property
    def head(self) -> HeadRecipe:
        """The kind of head."""
        kind: HeadRecipe = self.config.drafter
        return kind

    @property
    def checkpoint(self) -> Path:
        """The file from which a killed training continues."""
        return self.folder / "work" / "checkpoint.pt"

    def settings(self) -> str:
        """Return what a resumed training must share with the one that was killed."""
        own = asdict(self.config)
        return json.dumps([own, self.learnt.num_tokens, self.held_out.num_tokens], sort_keys=True)

    def module(self) -> Any:
        """Return the head that training starts from."""
        return self.head.build(self.target, self.learnt, self.config.seed).to(self.target.device)

    def training(self, module: Any) -> Training:
        """Return the training of a head."""
        return Training.of(self.config, module, self.target, self.learnt, self.group)

    def run(self, runs: list[Recorded]) -> None:
        """Train, and write the best weights, the record and the card."""
        config, work, started = self.config, self.folder / "work", time.perf_counter()
        work.mkdir(parents=True, exist_ok=True)
        prover = Prover.of(self.path, self.some_tokens(), config.evaluation.num_draft_tokens, self.head)
        module = self.module()
        before = self.export(prover, module, work / "untrained")
        self.rounded(prover, work / "untrained")
        prover.write_layouts(config.layouts, work / "untrained")
        prover.require_oracle()
        log.info("proved: training and serving differ by %.2g in logits", max(before.differences))
        with tracked(config, self.folder) as record:
            truth = self.truth(prover, module, record)
            truth.begin(work / "untrained")
            training = self.training(module)
            watch = Watch(config.evaluation.every, lambda step, loss: record(step, {"loss": loss}), truth.look)
            curve = training.run(self.checkpoint, self.settings(), watch)
        after, rounded = prover.prove(truth.folder), self.rounded(prover, truth.folder)
        facts = {
            "config": asdict(config),
            "target": {"path": self.path.name, **asdict(runs[0].origin)},
            "data": [{"folder": str(run.folder), "workload": run.workload, **run.sampling} for run in runs],
            "texts": len(self.learnt),
            "tokens": self.learnt.num_tokens,
            "written_tokens": self.learnt.num_written,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "steps": training.done,
            "training_seconds": training.seconds,
            "seconds": time.perf_counter() - started,
            "device": device_name(self.target.device),
            "processes": self.group.size,
            "torch": torch.__version__,
            "losses": curve,
            **truth.report(),
            "proof": {"before": asdict(before), "after": asdict(after), "in_bfloat16": rounded},
        }
        for file in truth.folder.iterdir():
            shutil.copy(file, self.folder / file.name)
        prover.write_layouts(config.layouts, self.folder)
        (self.folder / CARD).write_text(card(self.head, facts), encoding="utf-8")
        (self.folder / RECORD).write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")
        shutil.rmtree(work)

    def export(self, prover: Prover, module: Any, folder: Path) -> Proof:
        """Write a head, and prove what was written."""
        shutil.rmtree(folder, ignore_errors=True)  # a killed training left it
        self.head.save(module, self.target, folder)
        return prover.prove(folder)

    def rounded(self, prover: Prover, folder: Path) -> float | None:
        """Compare with the engine in bfloat16, where the head is to be used so; see `Prover.prove_rounded`."""
        device = self.target.device
        return prover.prove_rounded(folder, device) if self.target.in_16_bits else None

    def some_tokens(self) -> torch.Tensor:
        """Return the ids of a few held-out texts."""
        return torch.cat([torch.from_numpy(text.ids) for text in self.held_out.texts[:4]])

    def requests(self) -> list[Request]:
        """Return held-out prompts that leave room for an answer."""
        knobs, positions = self.config.evaluation, read_model_config(self.path).max_position_embeddings
        longest = positions - knobs.max_new_tokens
        fitting = Texts([text for text in self.held_out.texts if text.prompt_length <= longest])
        found = fitting.in_turn(knobs.num_prompts)
        if not found:
            raise UserError(
                f"evaluation.max_new_tokens={knobs.max_new_tokens} leaves no held-out prompt room; lower it"
            )
        return [
            Request(str(number), text.category, tuple(text.ids[: text.prompt_length].tolist()), knobs.max_new_tokens)
            for number, text in enumerate(found)
        ]

    def truth(self, prover: Prover, module: Any, record: Any) -> Truth:
        """Return what decodes with the head while it is trained."""
        knobs, head, target = self.config.evaluation, self.head, self.target
        requests = self.requests()
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        batch = f"batch_size={min(knobs.batch_size, len(requests))}"
        serving = Serving.load(
            self.path, target.device, knobs.num_draft_tokens, longest, batch, of_drafter=head.run_words
        )
        rows = self.held_out.packed(self.config.row_length, self.config.seed).rows(slice(0, MOST_ROWS))
        rows = rows.to(target.device)

        def forced() -> Mapping[str, Any]:
            size = self.config.optimisation.batch_size
            return head.forced(module, target, rows, knobs.num_draft_tokens, size).report()

        def export(folder: Path) -> object:
            return self.export(prover, module, folder)

        return Truth(
            head.name, serving, requests, export, forced=forced, folder=self.folder / "work" / "best", log=record
        )

    def plan(self) -> str:
        """Take a few steps, and return an estimate of the whole training."""
        config, device = self.config, self.target.device
        knobs = replace(config.optimisation, num_steps=PLANNED_STEPS, num_warmup_steps=1, max_seconds=None)
        times: list[float] = []

        def look(step: int) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter())

        module = self.module()
        training = Training.of(replace(config, optimisation=knobs), module, self.target, self.learnt, self.group)
        with tempfile.TemporaryDirectory() as folder:
            training.run(Path(folder) / "none.pt", "", Watch(1, lambda step, loss: None, look))
        seconds = (times[-1] - times[-1 - TIMED_STEPS]) / TIMED_STEPS
        steps, limit = config.optimisation.num_steps, config.optimisation.max_seconds
        steps = steps if limit is None else min(steps, int(limit / seconds))
        weights = sum(parameter.numel() for parameter in module.parameters())
        tokens = steps * config.optimisation.batch_size * config.row_length
        peak = f", {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB of the GPU" if device.type == "cuda" else ""
        return (
            f"texts: {len(self.learnt):,} with {self.learnt.num_tokens:,} tokens, of which the target wrote "
            f"{self.learnt.num_written:,}\n"
            f"head: {weights / 1e6:.2f} M parameters, {2 * weights / 1e6:.1f} MB in bfloat16\n"
            f"training: {steps:,} steps of {seconds:.3f} s, {tokens:,} tokens ({tokens / self.learnt.num_tokens:.1f} "
            f"times the texts), {steps * seconds:.0f} s{peak}\n"
            f"disk: {weights * (2 * 12 + 3 * 2) / 1e6:.0f} MB until it ends. Proofs and real decoding come on top."
        )


def device_name(device: torch.device) -> str:
    """Return the name of a device for a card."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def tracked(config: TrainConfig, folder: Path) -> Iterator[Any]:
    """Yield a function that receives a step and figures by name, and logs them to W&B if `wandb` names a project."""
    if config.wandb is None:
        yield lambda step, figures: None
        return
    import wandb

    mode: Any = "online" if wandb.api.api_key else "offline"
    run = wandb.init(project=config.wandb, dir=str(folder), name=folder.name, config=asdict(config), mode=mode)
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")  # a resumed training logs some steps again

    def record(step: int, figures: Mapping[str, Any]) -> None:
        run.log({"step": step, **{name: value for name, value in figures.items() if value is not None}})

    try:
        yield record
    finally:
        run.finish()


def card(head: HeadRecipe, facts: Mapping[str, Any]) -> str:
    """Return the README.md of a head from its record; no figure is typed in by hand."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True, keep_trailing_newline=True
    )
    best = next(point for point in facts["points"] if point["step"] == facts["best_step"])
    rows = [*facts["lines"].items(), *((f"step {point['step']}", point["decoded"]) for point in facts["points"])]
    return environment.get_template("card.md.jinja").render(facts, head=head, best=best, rows=rows)
