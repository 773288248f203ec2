"""Small random models, one for each mechanism by which the families of transformers differ.

FAMILIES maps the name of a family to its model type and the fields that make it like the published models: their
pattern of layers, scales and caps. Sizes come from SIZES. A family of one mechanism stands for the others that have it.
"""

from unittest import mock

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.models.gemma3n import modeling_gemma3n

V = 48  # vocabulary
# The size of each field that a configuration has and doesn't leave at None.
SIZES = dict(vocab_size=V, vocab_size_per_layer_input=V, max_position_embeddings=64)
SIZES |= dict(hidden_size=32, num_hidden_layers=2, intermediate_size=48, initializer_range=0.2)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8)
SIZES |= dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
SIZES |= dict(d_model=32, n_layers=2, n_heads=4, ffn_dim=48, word_embed_proj_dim=32, init_std=0.2)
SIZES |= dict(bos_token_id=2, eos_token_id=2, pad_token_id=2)
# Mixtures of experts.
SIZES |= dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2)
SIZES |= dict(n_group=1, topk_group=1, n_shared_experts=1, moe_intermediate_size=16)
SIZES |= dict(shared_expert_intermediate_size=16, shared_intermediate_size=48)
SIZES |= dict(first_k_dense_replace=1, num_dense_layers=1, decoder_sparse_step=1)
# Linear attention, state spaces and convolutions.
SIZES |= dict(linear_num_key_heads=2, linear_num_value_heads=2)
SIZES |= dict(linear_key_head_dim=8, linear_value_head_dim=8, block_ff_dim=48)
SIZES |= dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=4, mamba_d_ssm=64, mamba_n_groups=1)
SIZES |= dict(mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=4, n_groups=2, state_size=4)
SIZES |= dict(chunk_size=4, mamba_chunk_size=4, mamba_dt_rank=4, time_step_rank=4)
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
    """The number of layers and their types, from their first letters: s, f, l and c."""
    names = ("sliding_attention", "full_attention", "linear_attention", "conv")
    kinds = {name[0]: name for name in names}
    types = [kinds[letter] for letter in pattern]
    return dict(num_hidden_layers=len(types), layer_types=types)


def long_rope(first_length):
    """Positions that turn by other angles in a sequence longer than first_length."""
    rope = dict(rope_type="longrope", rope_theta=1e4, long_factor=[4.0] * 4, short_factor=[1.0] * 4)
    return dict(rope_parameters=rope, original_max_position_embeddings=first_length)


GLOBAL_LOCAL = dict(attention_types=[[["global", "local"], 1]])
# The texts of the tests are longer than a short window, and shorter than a long one.
SHORT, LONG = dict(sliding_window=6), dict(sliding_window=64)

FAMILIES = {
    # Attention to all tokens, in a model without experts.
    "Llama": ("llama", {}),
    "Llama, tied head": ("llama", dict(tie_word_embeddings=True)),
    "Llama, one key head": ("llama", dict(num_key_value_heads=1)),
    "Qwen2": ("qwen2", {}),  # biases of queries, keys and values
    "Qwen3": ("qwen3", {}),  # norms of queries and keys
    "OLMo 2": ("olmo2", {}),  # norms after attention and MLP
    "Gemma": ("gemma", {}),  # scaled embeddings, norms of 1 + weight
    "Phi, bias in the head": ("phi", {}),
    "SmolLM3": ("smollm3", dict(num_hidden_layers=4)),  # some layers without positions
    "Granite 3": ("granite", dict(logits_scaling=6.0)),
    "Cohere": ("cohere", dict(logit_scale=0.25)),
    "HyperCLOVA X": ("hyperclovax", dict(logits_scaling=0.5)),
    "MiniCPM3": ("minicpm3", MLA | dict(dim_model_base=10)),  # MLA, scaled logits
    "Diff Llama": ("diffllama", {}),  # the difference of two attentions
    # Positions.
    "GPT-2": ("gpt2", {}),  # learned positions
    "OPT, positions from 2": ("opt", {}),
    "GPT-NeoX": ("gpt_neox", {}),  # a part of each head is rotated
    "Falcon": ("falcon", {}),
    "BLOOM": ("bloom", {}),  # ALiBi
    "MPT": ("mpt", {}),  # ALiBi
    "Falcon, ALiBi": ("falcon", dict(alibi=True)),
    "GPT-Neo": ("gpt_neo", GLOBAL_LOCAL | dict(window_size=64)),
    "Phi-4-mini": ("phi3", long_rope(32)),
    # Mixtures of experts.
    "Mixtral": ("mixtral", {}),
    "Qwen2 MoE": ("qwen2_moe", {}),  # an expert for all tokens
    "Qwen3 MoE": ("qwen3_moe", {}),
    "DeepSeek V2": ("deepseek_v2", MLA | dict(topk_method="greedy", num_experts_per_tok=2)),
    "GLM-4.7 Flash": ("glm4_moe_lite", MLA),  # MLA, groups of experts
    # States and convolutions.
    "Qwen3.5": ("qwen3_5_text", layers("llf")),  # a delta rule
    "LFM2": ("lfm2", layers("cfc")),  # convolutions
    "Granite 4 H": ("granitemoehybrid", layers("lfl") | dict(logits_scaling=6.0)),  # Mamba 2
    "Jamba": ("jamba", dict(attn_layer_period=2, attn_layer_offset=1)),  # Mamba
    "Nemotron-H": ("nemotron_h", {}),  # a layer has a state, attention, or an MLP
    "Falcon-H1": ("falcon_h1", dict(lm_head_multiplier=0.4)),  # a layer has a state and attention
    "Zaya": ("zaya", dict(num_experts_per_tok=1)),  # convolutions inside of attention
    # Windows, in all layers or in some.
    "Mistral, short window": ("mistral", SHORT),
    "Mistral, long window": ("mistral", LONG),
    "Cohere 2": ("cohere2", layers("ssf") | dict(logit_scale=0.25) | SHORT),
    "Gemma 2": ("gemma2", layers("sf") | dict(final_logit_softcapping=3.0) | SHORT),
    "Gemma 3, short window": ("gemma3_text", layers("ssf") | SHORT),
    "Gemma 3, long window": ("gemma3_text", layers("ssf") | LONG),
    # Some layers use the keys of others.
    "Gemma 3n": ("gemma3n_text", layers("sfsf") | dict(final_logit_softcapping=3.0) | SHORT),
    "Gemma 4": ("gemma4_text", layers("sfsf") | dict(final_logit_softcapping=3.0) | SHORT),
    "gpt-oss": ("gpt_oss", layers("sf") | SHORT),  # attention sinks, experts
    "LFM3": ("lfm3", layers("csf") | SHORT),  # convolutions and windows
    "Ettin": ("modernbert-decoder", SHORT),  # its head has two layers and a norm
    # As they are published, with a vision part.
    "Ministral 3": ("mistral3", {}),
    "Qwen3-VL": ("qwen3_vl", {}),
    "Qwen3.5 as published": ("qwen3_5", layers("llf")),
    "Gemma 3 4B": ("gemma3", layers("ssf") | SHORT),
    "Gemma 3n as published": (
        "gemma3n",
        layers("sfsf") | dict(final_logit_softcapping=3.0) | SHORT,
    ),
    "Gemma 4 as published": ("gemma4", layers("sfsf") | dict(final_logit_softcapping=3.0) | SHORT),
}
# check_gap refuses these: sampler and trainer compute them differently.
DIFFERENT = {
    "GPT-Neo, short window": ("gpt_neo", GLOBAL_LOCAL | dict(window_size=6)),
    "Phi-4-mini, beyond its first length": ("phi3", long_rope(12)),
    "Mamba": ("mamba", {}),
    "PaliGemma": ("paligemma", {}),
    "PhiMoE": ("phimoe", {}),
}
# transformers raises an error before a token is sampled.
FAILING = {
    "RWKV": ("rwkv", {}),
}
ALL = FAMILIES | DIFFERENT | FAILING
# transformers 5.19 leaves out Gemma 2's cap on the attention scores, and doesn't know LFM3.
NEED_523 = ["Gemma 2", "LFM3"]
IS_OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)


def small(config_class, given):
    """A configuration of this class, with the given fields, and SIZES where it has them."""
    known = config_class().to_dict() | dict.fromkeys(config_class.attribute_map, True)
    sizes = {name: size for name, size in SIZES.items() if known.get(name) is not None}
    return config_class(**sizes | given)


def small_config(family, **changes):
    """The configuration of this family's small model, with these changes."""
    kind, fields = ALL[family]
    fields = fields | changes
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
    # The parts of Gemma 3n for images and sounds need timm, which isn't installed. No test uses them.
    from_config = AutoModel.from_config

    def only_text(config, **options):
        is_text = "vision" not in config.model_type and "audio" not in config.model_type
        return from_config(config, **options) if is_text else torch.nn.Identity()

    with mock.patch.object(modeling_gemma3n.AutoModel, "from_config", only_text):
        model = auto_class.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and "A_log" not in name:
                weight += 0.2 * torch.randn_like(weight)
            elif weight.ndim > 1 and weight.std() < 0.1:
                weight *= 0.15 / weight.std().clamp(min=0.02)
    return model.eval()
