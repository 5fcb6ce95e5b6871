"""The configs of decoders with latent attention: DeepSeek-V3 and V3.2, Kimi-K2, GLM-4.7-Flash (`glm4_moe_lite`).

`head_dim` and `num_key_value_heads` in such files say nothing: what attention has follows from `kv_lora_rank` and its
neighbours. Both spellings of the rotary embedding are read, as in `plain`.
"""

from __future__ import annotations

from typing import Any

from spec_lab.errors import UserError
from spec_lab.models.config import MAX_LAYERS, ModelConfig
from spec_lab.models.families.plain import declared_dtype, refuse_unsupported
from spec_lab.models.families.yarn import read_rope_or_yarn
from spec_lab.models.json_input import ConfigFields
from spec_lab.models.latent_sizes import LatentSizes
from spec_lab.models.plan import LayerPlan

LATENT_ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
)


def read_deepseek_v3(config: dict[str, Any], source: str) -> ModelConfig:
    """Read DeepSeek-V3, R1, V3.1, V3.2 or Kimi-K2. V3.2 runs as far as its indexer would choose every key."""
    fields = ConfigFields(config, source)
    family = "kimi_k2" if fields.values.get("model_type") == "kimi_k2" else "deepseek_v3"
    return _read(fields, family, default_eps=1e-6)


def read_glm4_moe_lite(config: dict[str, Any], source: str) -> ModelConfig:
    """Read GLM-4.7-Flash."""
    return _read(ConfigFields(config, source), "glm4_moe_lite", default_eps=1e-5)


def refuse_deepseek_v2(config: dict[str, Any], source: str) -> ModelConfig:
    """Refuse DeepSeek-V2, whose router chooses in another way (softmax scores, the best expert of each group)."""
    raise UserError(
        f"{source}: DeepSeek-V2's routing is not supported; use a DeepSeek-V3, Kimi-K2 or GLM-4.7-Flash one"
    )


def _read(fields: ConfigFields, family: str, default_eps: float) -> ModelConfig:
    refuse_unsupported(fields)
    vocab_size = fields.integer("vocab_size")
    max_positions = fields.integer("max_position_embeddings", 4096)
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    plan = read_latent_plan(fields, max_positions)
    _refuse_sparse(fields, family, num_layers)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        rms_norm_eps=fields.number("rms_norm_eps", default_eps),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=(plan,) * num_layers,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        bos_token_id=fields.optional_integer("bos_token_id") if "bos_token_id" in fields.values else 0,
        torch_dtype=declared_dtype(fields),
        max_dense_positions=fields.integer("index_topk") if fields.has("index_topk") else None,
    )


def read_latent_plan(fields: ConfigFields, max_positions: int) -> LayerPlan:
    """Read the plan of a layer with latent attention and a dense MLP."""
    scored = read_rope_or_yarn(fields, max_positions)
    rotated = fields.integer("qk_rope_head_dim", 64)
    if rotated % 2:
        raise UserError(f"{fields.source}: qk_rope_head_dim {rotated} is odd; the rotary embedding needs an even one")
    if "q_lora_rank" not in fields.values:
        raise UserError(f"{fields.source}: q_lora_rank is missing; null says that queries have no narrow step")
    sizes = LatentSizes(
        q_lora_rank=fields.optional_integer("q_lora_rank", least=1),
        kv_lora_rank=fields.integer("kv_lora_rank", 512),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rotated,
        v_head_dim=fields.integer("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
        bias=fields.flag("attention_bias"),
        mscale=scored.mscale,
    )
    return LayerPlan(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=rotated,
        rope=scored.rope,
        intermediate_size=fields.integer("intermediate_size"),
        latent=sizes,
    )


def _refuse_sparse(fields: ConfigFields, family: str, num_layers: int) -> None:
    """Refuse layers of experts, which come with the next piece."""
    types = fields.texts("mlp_layer_types")
    num_dense = types.count("dense") if types else fields.integer("first_k_dense_replace", 1, least=0)
    if num_dense < num_layers:
        raise UserError(f"{fields.source}: layers of experts are not supported yet ({family}); use a dense checkpoint")
