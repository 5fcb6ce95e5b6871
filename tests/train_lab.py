"""What tests of the trainer share: runs as they are recorded, tiny heads of all kinds, and trainings of seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spec_lab.checkpoints.block_config import HeadKind
from spec_lab.checkpoints.digest import target_digest
from spec_lab.checkpoints.families import read_model_config
from spec_lab.record.models import Request, Run, Target
from spec_lab.record.names import REQUESTS_FILE
from spec_lab.record.recorder import write_run
from spec_lab.train.config import Evaluation, Optimisation, TargetChoice, TrainConfig
from spec_lab.train.data import Recorded, Texts, read_run
from spec_lab.train.group import ALONE
from spec_lab.train.head import HeadRecipe
from spec_lab.train.heads import Dflash, Dflash2, DraftModel, Dspark, Eagle3, FrozenKv, MtpEagle, PEagle
from spec_lab.train.loop import Training, Watch
from spec_lab.train.target import FrozenTarget
from spec_lab.workloads.chat_template import template_digest

CPU = torch.device("cpu")
UNROLLED: dict[str, Any] = {"intermediate_size": 24, "head_dim": 8, "num_unrolled_steps": 2}
OF_BLOCKS: dict[str, Any] = {"draft_vocab_size": 40, "num_anchors": 6}
HEADS: Mapping[str, HeadRecipe] = {
    "eagle3": Eagle3(draft_vocab_size=40, **UNROLLED),
    "mtp_eagle": MtpEagle(**UNROLLED),
    "draft_model": DraftModel(intermediate_size=24, head_dim=8, hidden_size=16),
    "frozen_kv": FrozenKv(hidden_size=16, intermediate_size=24, num_unrolled_steps=2),
    "dspark": Dspark(block_size=4, head_rank=8, num_anchors=6, draft_vocab_size=None),
    "dflash": Dflash(head=HeadKind.markov, head_rank=8, alone_loss=1.0, **OF_BLOCKS),
    "dflash2": Dflash2(block_size=5, head_rank=8, head_topk=4, **OF_BLOCKS),
    "p_eagle": PEagle(num_drafts=4, **OF_BLOCKS),
}


def record_run(
    folder: Path, target: Path, texts: Sequence[tuple[str, Sequence[int], Sequence[int]]] = (), **changes: Any
) -> Path:
    """Record `texts`, each an id, a prompt and an output, as a run of this target would; without any, some that no
    target wrote. `changes` are of the record, or the name of the workload in its configuration."""
    vocab_size, generator = read_model_config(target).vocab_size, torch.Generator().manual_seed(3)
    lengths = torch.randint(9, 35, (24,), generator=generator).tolist()
    drawn = [torch.randint(3, vocab_size, (5 + each,), generator=generator).tolist() for each in lengths]
    texts = texts or [(f"p{number}", ids[:5], ids[5:]) for number, ids in enumerate(drawn)]
    run = Run(
        status="finished",
        config={"workload": {"name": changes.pop("workload", "jsonl")}},
        target=Target(
            digest=changes.pop("digest", target_digest(target)),
            template=changes.pop("template", template_digest(target)),
        ),
        sampling={"temperature": 0.0},
    )
    write_run(folder, run.model_copy(update=changes))
    rows = [
        Request(id=name, category="abc"[number % 3], prompt_ids=list(prompt), output_ids=list(output))
        for number, (name, prompt, output) in enumerate(texts)
    ]
    (folder / REQUESTS_FILE).write_text("".join(f"{row.model_dump_json()}\n" for row in rows))
    return folder


def texts_of(folder: Path) -> Texts:
    found: Recorded = read_run(folder)
    return Texts(found.texts)


def small(target: Path, head: HeadRecipe, texts: Path, **changes: Any) -> TrainConfig:
    """A training of six steps."""
    config = TrainConfig(
        target=TargetChoice("hf", str(target)),
        drafter=head,
        data=str(texts),
        held_out_share=0.2,
        row_length=48,
        optimisation=Optimisation(
            num_steps=6, batch_size=2, num_warmup_steps=2, checkpoint_every=3, log_every=2, max_seconds=None
        ),
        evaluation=Evaluation(max_new_tokens=8, every=2),
        device="cpu",
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def losses(
    head: HeadRecipe,
    target: FrozenTarget,
    texts: Texts,
    checkpoint: Path,
    watch: Watch | None = None,
    num_steps: int = 4,
    **knobs: Any,
) -> tuple[Any, list[float]]:
    """Train a head of its kind for a few steps, which go over the texts more than once, and return it with the loss of
    each step."""
    optimisation = Optimisation(
        **{"num_steps": num_steps, "batch_size": 8, "num_warmup_steps": 2, "log_every": 1, "max_seconds": None} | knobs
    )
    config = TrainConfig(drafter=head, row_length=48, optimisation=optimisation)
    module = head.build(target, texts, 0)
    curve = Training.of(config, module, target, texts, ALONE).run(checkpoint, "", watch)
    return module, [loss for _, loss in curve]
