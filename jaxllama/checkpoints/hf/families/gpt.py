"""Families of GPT-2's and GPT-NeoX's line: LayerNorm with a bias, feed-forwards without a gate.

GPT-2, OPT and their kin have a learned table of positions; GPT-J, GPT-NeoX, Phi and Falcon have
RoPE and parallel sublayers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllama.checkpoints.hf.family import BIAS, Family, Fields
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.names import Names

_GPT2_TENSORS = Names(
    embed="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}",
    mixer_norm="ln_1",
    mixer="attn.",
    mlp_norm="ln_2",
    norm="transformer.ln_f",
    qkv=("c_attn",),
    o="c_proj",
    gate_up=("c_fc",),
    down="c_proj",
    is_transposed=True,
)
_GPTJ_TENSORS = dataclasses.replace(
    _GPT2_TENSORS,
    qkv=Names.qkv,
    o="out_proj",
    gate_up=("fc_in",),
    down="fc_out",
    is_transposed=False,
)
_NEOX_TENSORS = Names(
    embed="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}",
    mixer="attention.",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("query_key_value",),
    o="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
    is_by_head=True,
)
_OPT_TENSORS = Names(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}",
    mixer_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    mlp="",
    norm="model.decoder.final_layer_norm",
    o="out_proj",
    gate_up=("fc1",),
    down="fc2",
)

_LINE = {"norm": "layer", "norm_bias": True, "gated_mlp": False}
_BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
_LEARNED = {"learned_positions": 0}
_HEADS = ("num_key_value_heads", "head_dim")  # which follow from other keys
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
}
# Options of classifiers.
_SUMMARY = (
    "summary_activation",
    "summary_first_dropout",
    "summary_last_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)
_GPT2_INERT = (
    *_SUMMARY,
    "n_ctx",
    "reorder_and_upcast_attn",
    "gradient_checkpointing",
)


def _four_times(read: JsonReader) -> Fields:
    """Return the feed-forward's width where a file has none."""
    return {"intermediate_size": 4 * read.size("hidden_size")}


def _rotary_share(read: JsonReader) -> Fields:
    """Return GPT-J's share of a head's features that turn."""
    head_dim = read.size("hidden_size") // read.size("num_attention_heads")
    if not head_dim:
        raise read.error("num_attention_heads", "must not exceed hidden_size")
    return {
        **_four_times(read),
        "partial_rotary_factor": read.size("rotary_dim", 64) / head_dim,
    }


def _rotary_dim(cfg: ModelConfig) -> Fields:
    turning = cfg.rope.rotary_dim
    return {"rotary_dim": cfg.head_dim if turning is None else turning}


def _gpt_neo_window(read: JsonReader) -> Fields:
    """Return the fields of GPT-Neo's local layers, and of scores without a division."""
    n = read.size("num_hidden_layers")
    entries: Any = read.config.get("attention_types")
    if entries is None:
        entries = [[["global", "local"], n // 2]]
    pattern: list[Any] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        is_pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list)
        if not is_pair or type(entry[1]) is not int or not 0 <= entry[1] <= n:
            raise read.error("attention_types", "expected pairs of kinds and a count")
        pattern += entry[0] * entry[1]
    if len(pattern) != n or not all(kind in ("global", "local") for kind in pattern):
        raise read.error("attention_types", f"must name {n} layers 'global' or 'local'")
    local = tuple(i for i, kind in enumerate(pattern) if kind == "local")
    head_dim = read.size("hidden_size") // read.size("num_attention_heads")
    return {
        "sliding_window": read.size("window_size", 256) if local else None,
        "window_layers": local,
        "stored.query": head_dim**0.5,
    }


def _gpt_neo_to_hf(cfg: ModelConfig) -> Fields:
    """Return the keys of a config: each layer's kind, as one repeated pattern, and the window."""
    kinds = ["global" if layer.window is None else "local" for layer in cfg.layers]
    window = {} if cfg.sliding_window is None else {"window_size": cfg.sliding_window}
    return {"attention_types": [[kinds, 1]], **window}


def _falcon(read: JsonReader) -> Fields:
    """Return the fields of Falcon's three forms of heads and of parallel sublayers."""
    is_new = read.flag("new_decoder_architecture", False)
    heads, is_parallel = read.size("num_attention_heads"), read.flag("parallel_attn", True)
    if is_new and not is_parallel:
        raise read.error("parallel_attn", "must be true with new_decoder_architecture")
    n_norms = read.size("num_ln_in_parallel_attn", 2 if is_new else 1)
    if n_norms > 1 + is_new:
        raise read.error("num_ln_in_parallel_attn", "2 needs new_decoder_architecture")
    n_kv = heads
    if is_new:
        n_kv = read.size("num_key_value_heads", heads)
    elif read.flag("multi_query", True):
        n_kv = 1
    return {
        "n_kv_heads": n_kv,
        "parallel_block": is_parallel,
        "parallel_norms": is_parallel and n_norms == 2,
    }


def _falcon_to_hf(cfg: ModelConfig) -> Fields:
    is_new = cfg.parallel_norms or cfg.n_kv_heads not in (1, cfg.n_heads)
    keys: Fields = {
        "new_decoder_architecture": is_new,
        "multi_query": cfg.n_kv_heads == 1,
        "parallel_attn": cfg.parallel_block,
        "num_key_value_heads": cfg.n_kv_heads,
        "alibi": False,
    }
    return keys | ({"num_ln_in_parallel_attn": 1 + cfg.parallel_norms} if is_new else {})


def _opt_width(read: JsonReader) -> Fields:
    """Return no fields.  Raises JaxLlamaError where embeddings have a width of their own."""
    width = read.size("hidden_size")
    if read.size("word_embed_proj_dim", width) != width:
        raise read.error("word_embed_proj_dim", f"only hidden_size ({width}) is supported")
    return {}


def _bigcode_to_hf(cfg: ModelConfig) -> Fields:
    if cfg.n_kv_heads not in (1, cfg.n_heads):
        raise JaxLlamaError(f"n_kv_heads = {cfg.n_kv_heads}: this family has 1 or {cfg.n_heads}")
    return {"multi_query": cfg.n_kv_heads == 1}


_GPT2 = Family(
    ("GPT2LMHeadModel",),
    keys=_GPT2_INERT,
    fixed={
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    },
    facts={**_LINE, **_BIASES, **_LEARNED},
    eps="layer_norm_epsilon",
    activation="activation_function",
    is_nope=lambda *_: True,
    names=_GPT2_NAMES,
    derived=_four_times,
    absent=_HEADS,
    unused_endings=(".attn.bias", ".attn.masked_bias"),
    tensors=_GPT2_TENSORS,
)
_GPTJ = Family(
    ("GPTJForCausalLM",),
    defaults={"partial_rotary_factor": None},
    keys=("rotary_dim", *_GPT2_INERT, "scale_attn_weights"),
    to_hf=_rotary_dim,
    fixed={"tie_word_embeddings": (False, None), "rotary": (True, None)},
    facts={**_LINE, "mlp_bias": True, "head_bias": True, "parallel_block": True},
    stored={"interleaved": True},
    eps="layer_norm_epsilon",
    activation="activation_function",
    names=_GPT2_NAMES,
    derived=_rotary_share,
    absent=(*_HEADS, "partial_rotary_factor", "rope_theta", "rope_scaling"),
    unused_endings=(".attn.bias", ".attn.masked_bias", ".attn.causal_mask"),
    tensors=_GPTJ_TENSORS,
)


FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    "gpt_bigcode": dataclasses.replace(
        _GPT2,
        architectures=("GPTBigCodeForCausalLM",),
        keys=(
            *_GPT2_INERT,
            "multi_query",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
            "inference_runner",
            "max_batch_size",
            "max_sequence_length",
            "pad_key_length",
            "pre_allocate_kv_cache",
            "validate_runner_input",
        ),
        fields=lambda read: {
            "n_kv_heads": 1 if read.flag("multi_query", True) else read.size("num_attention_heads")
        },
        to_hf=_bigcode_to_hf,
        fixed={"scale_attn_weights": (True, None), "add_cross_attention": (False, None)},
        tensors=dataclasses.replace(_GPT2_TENSORS, is_transposed=False, is_by_head=True),
    ),
    "gpt_neo": Family(
        ("GPTNeoForCausalLM",),
        keys=(
            "attention_types",
            "attention_layers",
            "window_size",
            "embed_dropout",
            "resid_dropout",
            "gradient_checkpointing",
            *_SUMMARY,
        ),
        fields=_gpt_neo_window,
        to_hf=_gpt_neo_to_hf,
        facts={**_LINE, "o_bias": True, "mlp_bias": True, **_LEARNED},
        eps="layer_norm_epsilon",
        activation="activation_function",
        is_nope=lambda *_: True,
        names={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        derived=_four_times,
        absent=_HEADS,
        unused_endings=(".attn.attention.bias", ".attn.attention.masked_bias"),
        tensors=dataclasses.replace(
            _GPT2_TENSORS, mixer="attn.attention.", qkv=Names.qkv, o="out_proj", is_transposed=False
        ),
    ),
    "opt": Family(
        ("OPTForCausalLM",),
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
        keys=("dropout", "layerdrop", "init_std", "activation_dropout", "word_embed_proj_dim"),
        same=tuple(("enable_bias", field, True) for field in _BIASES),
        fields=_opt_width,
        fixed={
            "do_layer_norm_before": (True, None),
            "_remove_final_layer_norm": (False, None),
            "layer_norm_elementwise_affine": (True, None),
        },
        facts={**_LINE, "norm_eps": 1e-5, "learned_positions": 2},
        activation="activation_function",
        is_nope=lambda *_: True,
        names={"intermediate_size": "ffn_dim"},
        absent=_HEADS,
        tensors=_OPT_TENSORS,
    ),
    "gptj": _GPTJ,
    "gpt_neox": Family(
        ("GPTNeoXForCausalLM",),
        same=(
            ("use_parallel_residual", "parallel_block", True),
            ("use_parallel_residual", "parallel_norms", True),
            ("attention_bias", "qkv_bias", True),
            ("attention_bias", "o_bias", True),
        ),
        facts={**_LINE, "mlp_bias": True},
        eps="layer_norm_eps",
        names={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        absent=_HEADS,
        unused_endings=(".attention.bias", ".attention.masked_bias"),
        tensors=_NEOX_TENSORS,
    ),
    "nanochat": Family(
        ("NanoChatForCausalLM",),
        same=(*BIAS, ("final_logit_softcapping", "logit_softcap", 15.0)),
        facts={
            "norm_weight": False,
            "gated_mlp": False,
            "qk_norm": "head",
            "qk_norm_last": True,
            "embed_norm": True,
        },
        stored={"flipped": True},
        tensors=Names(gate_up=("fc1",), down="fc2"),
    ),
    "phi": Family(
        ("PhiForCausalLM",),
        fixed={"qk_layernorm": (False, None), "tie_word_embeddings": (False, None)},
        facts={**_LINE, **_BIASES, "head_bias": True, "parallel_block": True},
        eps="layer_norm_eps",
        tensors=Names(o="dense", gate_up=("fc1",), down="fc2", norm="model.final_layernorm"),
    ),
    "falcon": Family(
        ("FalconForCausalLM", "RWForCausalLM"),
        keys=(
            "new_decoder_architecture",
            "multi_query",
            "parallel_attn",
            "num_ln_in_parallel_attn",
            "apply_residual_connection_post_layernorm",
        ),
        same=tuple(("bias", field, False) for field in _BIASES),
        fields=_falcon,
        to_hf=_falcon_to_hf,
        fixed={"alibi": (False, None)},
        facts=_LINE,
        eps="layer_norm_epsilon",
        activation="activation",
        names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        others={
            "n_embed": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
        },
        derived=_four_times,
        absent=("head_dim",),
        tensors=dataclasses.replace(
            _NEOX_TENSORS,
            embed="transformer.word_embeddings",
            layer="transformer.h.{}",
            mixer="self_attention.",
            norm="transformer.ln_f",
            head="lm_head",
            parallel_norms=("ln_attn", "ln_mlp"),
        ),
    ),
}
