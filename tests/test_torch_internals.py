"""The private names of torch that the lab uses: each one is there, and there are no others.

When a new torch fails here, mend the place that the message names, or keep the upper bound of torch in pyproject.toml.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet

from spec_lab.engine.torch_internals import OperatorMode

ROOT = Path(__file__).parents[1]
ADD = torch.ops.aten.add.Tensor
INTERNALS, LINEAR = "spec_lab/engine/torch_internals.py", "spec_lab/models/linear.py"
LONG_PROMPTS = "spec_lab/attention/long_prompts.py"
TAPE, RULES = "spec_lab/engine/tape.py", "spec_lab/engine/tape_rules.py"

USED: dict[str, dict[str, Any]] = {
    INTERNALS: {
        "torch.utils._python_dispatch": importlib.import_module("torch.utils"),
        "_should_skip_dynamo": OperatorMode.__base__,
        "torch._C._dispatch_has_kernel_for_dispatch_key": torch._C,
        "torch._C.DispatchKey": torch._C,
        "_op": ADD,
        "_op_dk": ADD,
        "_schema": ADD,
        "_cdata": torch.empty(0).untyped_storage(),
    },
    TAPE: {"_aten._to_copy": torch.ops.aten},
    RULES: {"_aten._index_put_impl_": torch.ops.aten},
    LONG_PROMPTS: {"torch.ops.aten._scaled_dot_product_cudnn_attention": torch.ops.aten},
    LINEAR: {
        "torch.ops.mkldnn._reorder_linear_weight": torch.ops.mkldnn,
        "torch.ops.mkldnn._linear_pointwise": torch.ops.mkldnn,
    },
}
"""By file and by the name as it is written there: what has to have it."""


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in USED.items() for name in names])
def test_torch_has_the_private_names_that_are_used(file: str, name: str) -> None:
    if "mkldnn" in name and not torch.backends.mkldnn.is_available():
        pytest.skip("a torch without oneDNN, which models/linear.py does without")
    attribute = name.rsplit(".", 1)[-1]
    assert hasattr(USED[file][name], attribute), (
        f"torch {torch.__version__} has no {name} any more: mend {file}, or keep torch below this version"
    )


CHAIN = re.compile(r"\b(?:torch|_aten|aten)(?:\.\w+)*\._(?!_)\w+(?:\.\w+)*")
ATTRIBUTE = re.compile(r"(?<!self)(?<!cls)\.(_op|_op_dk|_schema|_overloadpacket|_handle|_cdata|_typed_storage)\b")


def private_names(source: str) -> set[str]:
    """Private names of torch in a source: chains that begin with torch, and attributes that its operators have."""
    return set(CHAIN.findall(source)) | set(ATTRIBUTE.findall(source))


def test_no_other_private_name_of_torch_is_used() -> None:
    files = [*(ROOT / "spec_lab").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    found = {str(file.relative_to(ROOT)): private_names(file.read_text()) for file in files}
    unknown = {
        file: extra
        for file, names in found.items()
        if (extra := {name for name in names if not name.startswith(tuple(USED.get(file, ("nothing",))))})
    }
    assert unknown == {}, "give it a public form, or a name in USED that says which torch has it"


def test_torch_is_bounded_for_as_long_as_private_names_are_used() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [bound] = [SpecifierSet(line.removeprefix("torch")) for line in dependencies if re.match(r"torch\b", line)]
    assert torch.__version__.split("+")[0] in bound
    assert "2.99" not in bound
