"""Whatever stands in a checkpoint's files, reading them succeeds or ends in one line that names the file."""

from __future__ import annotations

import json
import struct
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spec_lab.checkpoints.checkpoint import open_tensors, stored_tensors
from spec_lab.checkpoints.config import ModelConfig, read_num_mtp_modules
from spec_lab.checkpoints.eagle3_checkpoint import load_eagle3
from spec_lab.checkpoints.eagle3_config import read_eagle3_config
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.gemma4_assistant_config import AssistantTarget, read_assistant_config
from spec_lab.checkpoints.json_input import parse_json, read_json
from spec_lab.checkpoints.mtp_checkpoint import load_mtp
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.errors import UserError
from tests.one_line import read_or_refused
from tests.tiny_assistant import make_tiny_assistant
from tests.tiny_checkpoints import make_tiny_eagle3, make_tiny_target, rewrite_config
from tests.tiny_latent import make_latent_eagle3, make_latent_target
from tests.tiny_mtp import make_tiny_mtp

OF_EVERY_TYPE: tuple[Any, ...] = (None, True, -1, 10**400, 1e400, "x", [], [[1]], ["x"], {}, {"x": [1]})
few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400])
    | st.floats()
    | st.text(max_size=5)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checkpoints")
    kinds = ("llama", "qwen3", "eagle3", "speculators", "mtp", "assistant", "deepseek_v3", "latent_eagle3")
    made = {kind: base / kind for kind in kinds}
    make_tiny_target(made["llama"], "llama", num_hidden_layers=8)
    make_tiny_target(made["qwen3"], "qwen3", num_hidden_layers=8)
    target = read_model_config(made["qwen3"])
    make_tiny_eagle3(made["eagle3"], target, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]})
    make_tiny_eagle3(made["speculators"], target, "speculators")
    make_tiny_mtp(made["mtp"], "ours", target)
    make_tiny_assistant(made["assistant"], target)
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    make_latent_target(made["deepseek_v3"], quantization_config=quantized)
    make_latent_eagle3(made["latent_eagle3"], target)
    return made


def read(kind: str, folder: Path, target: ModelConfig) -> Any:
    """Read what a run reads of the checkpoint before its weights."""
    if kind in ("eagle3", "speculators", "latent_eagle3"):
        return read_eagle3_config(folder, target)
    if kind == "assistant":
        return read_assistant_config(folder, AssistantTarget.from_model_config(target))
    if kind == "mtp":
        read_num_mtp_modules(folder, "drafter.path")
        return load_mtp(folder, target, 1, torch.float32, "cpu")
    return decoder_tensor_shapes(read_model_config(folder))


def all_keys(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Yield the path to every value of a config, nested ones too."""
    paths = []
    for key, value in config.items():
        paths.append((*path, key))
        if isinstance(value, dict):
            paths += all_keys(value, (*path, key))
    return paths


def with_value(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return config | {first: with_value(config[first], tuple(rest), value) if rest else value}


@pytest.mark.parametrize(
    "kind",
    ["llama", "qwen3", "eagle3", "speculators", "mtp", "assistant", "deepseek_v3", "latent_eagle3"],
)
def test_any_value_of_any_key_is_read_or_refused(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    target = read_model_config(folders["qwen3"])
    folder = tmp_path / kind
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(folders[kind] / "model.safetensors")
    extra = ("eos_token_id", "layer_types", "max_window_layers", "rope_scaling", "rope_parameters", "text_config")
    extra += ("use_sliding_window", "num_nextn_predict_layers", "quantization_config", "eagle_config", "rope_theta")
    extra += ("partial_rotary_factor", "original_max_position_embeddings", "per_layer_config", "kv_source_layers")
    whole = json.loads((folders[kind] / "config.json").read_text())
    paths = all_keys(whole) + [(key,) for key in extra]

    def check(path: tuple[str, ...], value: Any) -> None:
        (folder / "config.json").write_text(json.dumps(with_value(whole, path, value)))
        read_or_refused(lambda: read(kind, folder, target), folder)

    for path, value in product(paths, OF_EVERY_TYPE):
        check(path, value)
    few(given(st.sampled_from(paths), VALUES)(check))()


@few
@given(st.binary(max_size=60))
@example(b"[" * 100_000)
@example(b'{"a": ' * 100_000)
@example(b'{"vocab_size": ' + b"9" * 6000 + b"}")
@example(b'{"model_type": "\\ud800"}')
@example(b"\xff\xfe{")
@example(b"null")
def test_any_bytes_are_json_or_refused(folders: dict[str, Path], content: bytes) -> None:
    path = folders["llama"].parent / "any.json"
    path.write_bytes(content)
    read_or_refused(lambda: read_json(path), path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("9" * 6000, "6000 digits"),
        ('{"a": ["\\uD83D"]}', "surrogate"),
        ('{"\\udfff": 1}', "surrogate"),
    ],
)
def test_json_that_python_does_not_read_or_show_has_a_reason_of_a_line(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)


def test_a_key_of_two_values_is_refused_in_a_file_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1, "b": {"c": 2, "c": 2}, "a": 1}')
    assert read_json(path) == {"a": 1, "b": {"c": 2}}
    path.write_text('{"a": 1, "b": {"c": 2, "c": 3}}')
    with pytest.raises(UserError, match="the key 'c' occurs twice, with 2 and 3") as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_a_whole_surrogate_pair_is_text() -> None:
    assert parse_json('"\\ud83d\\ude00"') == "\N{GRINNING FACE}"


def header(entries: Any, data: bytes = b"\0" * 64) -> bytes:
    """Write a safetensors file with this header."""
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (16,), offsets: Any = (0, 64)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_FILES = {
    "empty": b"",
    "short": b"\x10\0\0",
    "text": b"not a safetensors file at all",
    "a web page": b"<!doctype html><html></html>" * 100,
    "a pickle": b"\x80\x04\x95" + b"\0" * 100,
    "header longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "header that is a list": header([1]),
    "header of another encoding": struct.pack("<Q", 4) + b'{"\xff}',
    "dtype of no name": header({"norm": entry(dtype="Q7")}),
    "dtype of another type": header({"norm": entry(dtype=5)}),
    "name with a line break": header({"no\nrm": entry()}),
    "shape that does not fit": header({"norm": entry(shape=(17,))}),
    "negative shape": header({"norm": entry(shape=(-1,))}),
    "shape past 64 bits": header({"norm": entry(shape=(2**62, 2**62))}),
    "offsets past the end": header({"norm": entry(offsets=(0, 6400))}),
    "offsets the wrong way": header({"norm": entry(offsets=(64, 0))}),
    "overlapping": header({"norm": entry(), "more": entry(offsets=(32, 96))}, b"\0" * 96),
    "hole": header({"norm": entry(offsets=(4, 68))}, b"\0" * 68),
    "cut short": header({"norm": entry()})[:-1],
    "nested deeply": struct.pack("<Q", 5 * 10**4) + b'{"a":' * 10**4,
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(BAD_FILES[name])
    with pytest.raises(
        UserError,
        match=r"model\.safetensors: truncated, corrupt or not a "
        r"safetensors file \(.*\); fetch",
    ):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "eagle3"])
def test_any_byte_of_a_header_may_be_wrong(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    target = read_model_config(folders["qwen3"])
    whole = (folders[kind] / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((folders[kind] / "config.json").read_bytes())
    length = 8 + struct.unpack("<Q", whole[:8])[0]

    def load() -> None:
        if kind == "eagle3":
            load_eagle3(tmp_path, target, torch.float32, "cpu")
        else:
            dict(open_tensors(tmp_path, decoder_tensor_shapes(read_model_config(tmp_path)), torch.float32, "cpu"))

    @few
    @given(st.integers(0, length - 1), st.binary(min_size=1, max_size=4), st.integers(0, len(whole)))
    def check(start: int, changed: bytes, end: int) -> None:
        content = whole[:start] + changed + whole[start + len(changed) :]
        (tmp_path / "model.safetensors").write_bytes(content if end % 3 else content[:end])
        read_or_refused(load, tmp_path)

    check()


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        (5, "weight_map must be an object"),
        ({}, "no weight_map"),
        ({"norm": 5}, "5"),
        ({"norm": "../elsewhere.safetensors"}, "elsewhere"),
        ({"norm": "/etc/passwd"}, "passwd"),
        ({"norm": "a\0b"}, "plain"),
        ({"norm": ["model-1.safetensors"]}, "plain"),
        ({"norm": ""}, "plain"),
        ({"norm": ".."}, "plain"),
        ({"norm": "missing.safetensors"}, "missing.safetensors"),
    ],
)
def test_an_index_names_files_of_its_own_folder(tmp_path: Path, weight_map: Any, reason: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=reason) as caught:
        stored_tensors(tmp_path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_millions_of_layers_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "llama", num_hidden_layers=1)
    rewrite_config(tmp_path, num_hidden_layers=10**7)
    with pytest.raises(UserError, match="num_hidden_layers must be at most"):
        read_model_config(tmp_path)
    rewrite_config(tmp_path, num_hidden_layers=10_000)
    with pytest.raises(UserError, match=r"do not fit config\.json \(89991 missing"):
        dict(open_tensors(tmp_path, decoder_tensor_shapes(read_model_config(tmp_path)), torch.float32, "cpu"))
