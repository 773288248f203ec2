"""Small random models of the families that transformers has, for test_sampling.py and test_cuda.py.

FAMILIES maps the name of a family to its model type and the fields that make it like the published models: their
pattern of layers, scales and caps. Sizes come from SIZES.
"""

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

V = 48  # vocabulary
HEAD = dict(head_dim=8)
# The size of each field that a configuration has and doesn't leave at None.
SIZES = dict(vocab_size=V, vocab_size_per_layer_input=V, max_position_embeddings=64)
SIZES |= dict(hidden_size=32, num_hidden_layers=4, intermediate_size=48, initializer_range=0.2)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8)
SIZES |= dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4)
SIZES |= dict(d_model=32, n_layers=2, n_heads=4, ffn_dim=48, word_embed_proj_dim=32, init_std=0.2)
SIZES |= dict(attention_heads=4)
SIZES |= dict(bos_token_id=2, eos_token_id=2, pad_token_id=2)
# Mixtures of experts.
SIZES |= dict(num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4)
SIZES |= dict(num_experts_per_tok=2, moe_topk=2, n_group=1, topk_group=1, n_shared_experts=1)
SIZES |= dict(moe_intermediate_size=16, shared_expert_intermediate_size=16, num_shared_experts=1)
SIZES |= dict(expert_ffn_hidden_size=16, ffn_hidden_size=48, shared_intermediate_size=48)
SIZES |= dict(first_k_dense_replace=1, num_dense_layers=1, decoder_sparse_step=1)
# Linear attention, state spaces and convolutions.
SIZES |= dict(linear_num_key_heads=2, linear_num_value_heads=2)
SIZES |= dict(linear_key_head_dim=8, linear_value_head_dim=8, block_ff_dim=48)
SIZES |= dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=4, mamba_d_ssm=64, mamba_n_groups=1)
SIZES |= dict(mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=4, n_groups=2, state_size=4)
SIZES |= dict(chunk_size=4, mamba_chunk_size=4, mamba_dt_rank=4, time_step_rank=4, lru_width=32)
# Gemma 3n and 4.
SIZES |= dict(hidden_size_per_layer_input=8, laurel_rank=4, altup_num_inputs=2, global_head_dim=16)
SIZES |= dict(num_kv_shared_layers=2)
# Keys and values compressed together.
SIZES |= dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
MLA = dict(num_key_value_heads=4, head_dim=4)
# The part that sees images, which no test uses.
VISION_SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, image_size=28)
VISION_SIZES |= dict(num_attention_heads=4, patch_size=14, head_dim=8, depth=1, num_heads=4)
VISION_SIZES |= dict(out_hidden_size=32, deepstack_visual_indexes=[0])


def layers(pattern):
    """The types of four layers, from their first letters: s, f, l and c."""
    names = ("sliding_attention", "full_attention", "linear_attention", "conv")
    kinds = {name[0]: name for name in names}
    return dict(layer_types=[kinds[letter] for letter in pattern])


SHORT, LONG = dict(sliding_window=6), dict(sliding_window=64)
GLOBAL_LOCAL = dict(attention_types=[[["global", "local"], 2]])


def long_rope(first_length):
    """Positions that turn by other angles in a sequence longer than first_length."""
    rope = dict(rope_type="longrope", rope_theta=1e4, long_factor=[4.0] * 4, short_factor=[1.0] * 4)
    return dict(rope_parameters=rope, original_max_position_embeddings=first_length)


# These see all tokens, or have no window in the published models.
WHOLE = {
    "Llama": ("llama", {}),
    "Llama, tied head": ("llama", dict(tie_word_embeddings=True)),
    "Apertus": ("apertus", {}),
    "Arcee": ("arcee", {}),
    "Aria": ("aria_text", {}),
    "A.X K1": ("axk1", MLA),
    "Bamba": ("bamba", dict(attn_layer_indices=[1])),
    "Bailing (Ring 2.5)": ("bailing_hybrid", MLA | layers("llfl")),
    "BitNet": ("bitnet", {}),
    "BioGPT": ("biogpt", {}),
    "BLOOM": ("bloom", {}),
    "CodeGen": ("codegen", {}),
    "DBRX": (
        "dbrx",
        dict(
            ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
            attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ),
    ),
    "dots.llm1": ("dots1", dict(n_shared_experts=1, num_experts_per_tok=2)),
    "Cohere": ("cohere", dict(logit_scale=0.25)),
    "CTRL": ("ctrl", {}),
    "DeepSeek V2": ("deepseek_v2", MLA | dict(topk_method="greedy", num_experts_per_tok=2)),
    "DeepSeek V3": ("deepseek_v3", MLA),
    "Diff Llama": ("diffllama", {}),
    "Doge": ("doge", {}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", {}),
    "Falcon": ("falcon", {}),
    "Falcon, ALiBi": ("falcon", dict(alibi=True)),
    "Falcon-H1": ("falcon_h1", dict(lm_head_multiplier=0.4)),
    "FlexOlmo": ("flex_olmo", {}),
    "Gemma": ("gemma", {}),
    "GLM-4": ("glm", {}),
    "GLM-4 0414": ("glm4", {}),
    "GLM-4.5": ("glm4_moe", {}),
    "GLM-4.7 Flash": ("glm4_moe_lite", MLA),
    "GPT-2": ("gpt2", {}),
    "GPT BigCode": ("gpt_bigcode", {}),
    "GPT-J": ("gptj", {}),
    "GPT-Neo": ("gpt_neo", GLOBAL_LOCAL | dict(window_size=64)),
    "Pythia": ("gpt_neox", {}),
    "GPT-NeoX Japanese": ("gpt_neox_japanese", {}),
    "Granite 3": ("granite", dict(logits_scaling=6.0)),
    "Granite 3 MoE": ("granitemoe", dict(logits_scaling=6.0)),
    "Granite, shared experts": ("granitemoeshared", dict(logits_scaling=6.0)),
    "Granite 4 H": ("granitemoehybrid", layers("llfl") | dict(logits_scaling=6.0)),
    "Granite 4, dense": ("granitemoehybrid", layers("ffff") | dict(logits_scaling=6.0)),
    "Helium": ("helium", {}),
    "HRM": ("hrm_text", {}),
    "Hunyuan": ("hunyuan_v1_dense", HEAD),
    "Hunyuan MoE": ("hunyuan_v1_moe", HEAD),
    "Hunyuan 3": ("hy_v3", {}),
    "Jais 2": ("jais2", {}),
    "Jamba": ("jamba", dict(attn_layer_period=2, attn_layer_offset=1)),
    "JetMoE": ("jetmoe", {}),
    "LFM2": ("lfm2", layers("cfcc")),
    "LFM2 MoE": ("lfm2_moe", layers("cfcc")),
    "LongCat": ("longcat_flash", MLA | dict(num_layers=2)),
    "MiniCPM3": ("minicpm3", MLA | dict(dim_model_base=10)),
    "MiniMax M2": ("minimax_m2", {}),
    "Ministral 3, text": ("ministral3", {}),
    "Ministral 3, with its vision part": ("mistral3", {}),
    "Mixtral": ("mixtral", {}),
    "MPT": ("mpt", {}),
    "nanochat": ("nanochat", {}),
    "Nemotron": ("nemotron", dict(num_key_value_heads=2)),
    "Nemotron-H": ("nemotron_h", {}),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMoE": ("olmoe", {}),
    "OLMo Hybrid": ("olmo_hybrid", layers("lllf")),
    "OPT": ("opt", {}),
    "Persimmon": ("persimmon", {}),
    "Phi": ("phi", {}),
    "Phi-4": ("phi3", {}),
    "Phi-4-mini": ("phi3", long_rope(32)),
    "Qwen2.5": ("qwen2", {}),
    "Qwen2 MoE": ("qwen2_moe", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3 MoE": ("qwen3_moe", {}),
    "Qwen3-VL": ("qwen3_vl", {}),
    "Qwen2.5-VL": (
        "qwen2_5_vl",
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])),
    ),
    "Qwen3.5": ("qwen3_5_text", layers("lllf")),
    "Qwen3.5 MoE": ("qwen3_5_moe_text", layers("lllf")),
    "Qwen3-Next": ("qwen3_next", layers("lllf")),
    "Seed-OSS": ("seed_oss", {}),
    "SmolLM3": ("smollm3", {}),
    "SmolVLM": ("smolvlm", {}),
    "Solar Open": ("solar_open", {}),
    "StableLM": ("stablelm", {}),
    "XGLM": ("xglm", {}),
    "Youtu": ("youtu", MLA),
    "Zaya": ("zaya", dict(num_experts_per_tok=1)),
}
# Some or all layers of these see a window only. Each is tested with a window below and above the length of its texts.
WINDOWED = {
    "AFM": ("afmoe", layers("sssf")),
    "Cohere 2": ("cohere2", layers("sssf") | dict(logit_scale=0.25)),
    "Cohere 2 MoE": ("cohere2_moe", layers("sssf") | dict(logit_scale=0.25)),
    "CWM": ("cwm", layers("fsss")),
    "EXAONE 4": ("exaone4", layers("sssf")),
    "EXAONE MoE": ("exaone_moe", layers("sssf")),
    "Gemma 2": ("gemma2", layers("sfsf") | dict(final_logit_softcapping=3.0)),
    "Gemma 3": ("gemma3_text", layers("sssf")),
    "Gemma 3 4B, with its vision part": ("gemma3", layers("sssf")),
    "Gemma 3n": ("gemma3n_text", layers("sfsf") | dict(final_logit_softcapping=3.0)),
    "Gemma 4": ("gemma4_text", layers("sfsf") | dict(final_logit_softcapping=3.0)),
    "Gemma 4 MoE": (
        "gemma4_text",
        layers("sfsf")
        | dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16),
    ),
    "Gemma 4, with its vision part": (
        "gemma4",
        layers("sfsf") | dict(final_logit_softcapping=3.0),
    ),
    "gpt-oss": ("gpt_oss", layers("sfsf")),
    "Granite SWA": ("granite_swa", layers("sfsf") | dict(logits_scaling=6.0)),
    "Laguna": ("laguna", layers("fsss")),
    "LFM3": ("lfm3", layers("csfc")),
    "MiMo V2": ("mimo_v2_flash", layers("fsss")),
    "Ministral": ("ministral", HEAD | layers("sssf")),
    "Mistral": ("mistral", {}),
    "Mixtral, window": ("mixtral", {}),
    "Olmo 3": ("olmo3", layers("sssf")),
    "Phi-3": ("phi3", {}),
    "Qwen2, window": ("qwen2", layers("fssf") | dict(use_sliding_window=True)),
    "SmolLM3, window": ("smollm3", layers("fssf") | dict(use_sliding_window=True)),
    "Starcoder 2": ("starcoder2", {}),
    "VaultGemma": ("vaultgemma", layers("sfsf") | dict(final_logit_softcapping=3.0)),
}
FAMILIES = dict(WHOLE)
for _name, (_kind, _fields) in WINDOWED.items():
    FAMILIES[f"{_name}, longer than its window"] = (_kind, _fields | SHORT)
    FAMILIES[f"{_name}, within its window"] = (_kind, _fields | LONG)
# check_head refuses these.
UNKNOWN_HEADS = {
    "Aya Vision": ("aya_vision", {}),
    "Ettin": ("modernbert-decoder", SHORT),
    "HyperCLOVA X": ("hyperclovax", dict(logits_scaling=0.5)),
    "RecurrentGemma": ("recurrent_gemma", {}),
}
# check_gap refuses these: sampler and trainer compute them differently.
DIFFERENT = {
    "Doge, longer than its window": ("doge", dict(keep_window_size=6)),
    "GPT-Neo, longer than its window": ("gpt_neo", GLOBAL_LOCAL | dict(window_size=6)),
    "Phi-4-mini, beyond its first length": ("phi3", long_rope(12)),
    "Falcon Mamba": ("falcon_mamba", {}),
    "Mamba": ("mamba", {}),
    "Mamba 2": ("mamba2", dict(num_heads=8)),
    "PaliGemma": ("paligemma", {}),
    "PhiMoE": ("phimoe", {}),
}
# transformers raises an error before a token is sampled.
FAILING = {
    "DeepSeek V3.2": ("deepseek_v32", MLA),
    "Llama 4": ("llama4_text", dict(attention_chunk_size=64)),
    "MiniMax": ("minimax", {}),
    "RWKV": ("rwkv", {}),
}
ALL = FAMILIES | UNKNOWN_HEADS | DIFFERENT | FAILING


def small(config_class, given):
    """A configuration of this class, with the given fields, and SIZES where it has them."""
    known = config_class().to_dict() | dict.fromkeys(config_class.attribute_map, True)
    sizes = {name: size for name, size in SIZES.items() if known.get(name) is not None}
    return config_class(**sizes | given)


def small_config(family):
    """The configuration of this family's small model."""
    kind, fields = ALL[family]
    config_class = CONFIG_MAPPING[kind]
    if "vision_config" not in config_class.sub_configs:
        return small(config_class, fields)
    default = config_class()
    text = small(type(default.text_config), fields)
    # Without images Gemma 4 needs no configuration of this part, so its default is None.
    default_vision = default.vision_config or config_class.sub_configs["vision_config"]()
    known = default_vision.to_dict()
    vision = {name: size for name, size in VISION_SIZES.items() if name in known}
    return config_class(text_config=text.to_dict(), vision_config=vision)


def random_model(config):
    """A random model whose logits vary by some units. Its biases and norms aren't 0 and 1."""
    torch.manual_seed(0)
    is_text_model = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = AutoModelForCausalLM if is_text_model else AutoModelForImageTextToText
    model = auto_class.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and "A_log" not in name:
                weight += 0.2 * torch.randn_like(weight)
            elif weight.ndim > 1 and weight.std() < 0.1:
                weight *= 0.15 / weight.std().clamp(min=0.02)
    return model.eval()
