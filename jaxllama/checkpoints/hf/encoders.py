"""Families of encoders that run as decoders (``is_decoder``), and GPT-1, whose norms are theirs.

In BERT's line a norm follows each sum with the stream, and the embeddings' norm comes before the
first layer.  The head has a dense layer of its own, and the bias of the vocabulary.  A config.json
without ``is_decoder`` is an encoder's and is refused.  ``hf.families`` adds ``FAMILIES`` to its own
table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllama.checkpoints.hf.family import ACTIVATIONS, Family, Fields
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ModelConfig

_LINE = {
    "norm": "layer",
    "norm_bias": True,
    "gated_mlp": False,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "head_bias": True,
    "head_transform": True,
    "head_transform_bias": True,
}
_NO_TRANSFORM = {"head_transform": False, "head_transform_bias": False}
_BEHIND: Mapping[str, Any] = {"pre_norms": False, "sum_norms": "all_but_last", "embed_norm": True}
_ABSENT = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling")
_DEFAULTS = {
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}
_FIXED: Mapping[str, tuple[object, ...]] = {
    "is_decoder": (True,),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "position_embedding_type": ("absolute", None),
}
# Options of training and of classifiers.
_INERT = (
    "pad_token_id",
    "is_decoder",
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
    "embedding_dropout",
    "mlp_dropout",
    "embedding_size",
    "classifier_dropout",
    "chunk_size_feed_forward",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_last_dropout",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "task_type_vocab_size",
)


def _decoder(read: JsonReader) -> None:
    """Raise JaxLlamaError for an encoder's config.json."""
    if not read.flag("is_decoder", False):
        raise read.error("is_decoder", "must be true; without it the model is an encoder")


def _bert(read: JsonReader) -> Fields:
    _decoder(read)
    return {"token_types": read.size("type_vocab_size")}


def _bert_to_hf(cfg: ModelConfig) -> Fields:
    return {"is_decoder": True, "type_vocab_size": cfg.token_types}


def _roberta(read: JsonReader) -> Fields:
    """Return the fields; positions begin behind the number of the padding token."""
    first = read.natural("pad_token_id", 1) + 1
    most = read.size("max_position_embeddings") - first
    if most < 1:
        raise read.error("max_position_embeddings", f"must exceed {first}")
    return {**_bert(read), "learned_positions": first, "max_position": most}


def _roberta_to_hf(cfg: ModelConfig) -> Fields:
    first = cfg.learned_positions or 0
    return {
        **_bert_to_hf(cfg),
        "pad_token_id": first - 1,
        "max_position_embeddings": cfg.max_position + first,
    }


def _sized(read: JsonReader) -> Fields:
    """Return the fields of a file with ``embedding_size``, which is the head's width, too."""
    width, layers = read.size("embedding_size", read.size("hidden_size")), read.size("hidden_size")
    own = None if width == layers else width
    return {**_bert(read), "embed_width": own, "head_width": own}


def _sized_to_hf(cfg: ModelConfig) -> Fields:
    return {**_bert_to_hf(cfg), "embedding_size": cfg.embed_width or cfg.d_model}


def _rembert(read: JsonReader) -> Fields:
    return {
        **_bert(read),
        "embed_width": read.size("input_embedding_size", 256),
        "head_width": read.size("output_embedding_size", 1664),
    }


def _rembert_to_hf(cfg: ModelConfig) -> Fields:
    return {
        **_bert_to_hf(cfg),
        "input_embedding_size": cfg.embed_width or cfg.d_model,
        "output_embedding_size": cfg.head_width or cfg.d_model,
    }


def _generation(read: JsonReader) -> Fields:
    _decoder(read)
    return {}


_BERT = Family(
    ("BertLMHeadModel",),
    defaults=_DEFAULTS,
    keys=_INERT,
    fields=_bert,
    to_hf=_bert_to_hf,
    fixed=_FIXED,
    facts={**_LINE, **_BEHIND, "learned_positions": 0},
    eps="layer_norm_eps",
    is_nope=lambda *_: True,
    absent=_ABSENT,
    unused_endings=(".position_ids", ".token_type_ids"),
    unused=("bert.pooler.", "cls.seq_relationship."),
)
_ROBERTA = dataclasses.replace(
    _BERT,
    architectures=("RobertaForCausalLM",),
    defaults={**_DEFAULTS, "eos_token_id": 2},
    fields=_roberta,
    to_hf=_roberta_to_hf,
    # the head's activation is always this one
    fixed={**_FIXED, "hidden_act": ("gelu", None)},
    facts={**_LINE, **_BEHIND},
    unused=("roberta.pooler.",),
)
_BEFORE = {"pre_norms": True, "sum_norms": "none"}


def _modernbert(read: JsonReader) -> Fields:
    if read.config.get("classifier_activation", "gelu") != read.text("hidden_activation", "gelu"):
        raise read.error("classifier_activation", "must be hidden_activation")
    return {}


def _first_gpt(read: JsonReader) -> Fields:
    """Return the activation: GPT-1's "gelu" means the tanh form."""
    return {"activation": "gelu_tanh"} if read.config.get("afn") == "gelu" else {}


FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "ernie": dataclasses.replace(
        _BERT,
        architectures=("ErnieForCausalLM",),
        fixed={**_FIXED, "use_task_id": (False, None)},
        unused=("ernie.pooler.", "cls.seq_relationship."),
    ),
    "electra": dataclasses.replace(
        _BERT,
        architectures=("ElectraForCausalLM",),
        defaults={**_DEFAULTS, "embedding_size": 128},
        fields=_sized,
        to_hf=_sized_to_hf,
        fixed={**_FIXED, "hidden_act": ("gelu", None)},
    ),
    "roformer": dataclasses.replace(
        _BERT,
        architectures=("RoFormerForCausalLM",),
        defaults={**_DEFAULTS, "max_position_embeddings": 1536},
        fields=_sized,
        to_hf=_sized_to_hf,
        fixed={**_FIXED, "rotary_value": (False, None), "rope_theta": (10000.0, None)},
        facts={**_LINE, **_BEHIND},
        stored={"interleaved": True},
        is_nope=None,
        unused_endings=(".embed_positions.weight",),
    ),
    "rembert": dataclasses.replace(
        _BERT,
        architectures=("RemBertForCausalLM",),
        defaults={
            **_DEFAULTS,
            "bos_token_id": 312,
            "eos_token_id": 313,
            "tie_word_embeddings": False,
        },
        keys=(*_INERT, "input_embedding_size", "output_embedding_size", "classifier_dropout_prob"),
        fields=_rembert,
        to_hf=_rembert_to_hf,
        fixed={**_FIXED, "tie_word_embeddings": (False, None)},
        unused=("rembert.pooler.",),
    ),
    "bert-generation": dataclasses.replace(
        _BERT,
        architectures=("BertGenerationDecoder",),
        defaults={
            **{key: value for key, value in _DEFAULTS.items() if key != "type_vocab_size"},
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        fields=_generation,
        to_hf=lambda cfg: {"is_decoder": True},
        facts={**_LINE, **_BEHIND, "learned_positions": 0, **_NO_TRANSFORM},
    ),
    "megatron-bert": dataclasses.replace(
        _BERT,
        architectures=("MegatronBertForCausalLM",),
        facts={**_LINE, "learned_positions": 0},
    ),
    "roberta": _ROBERTA,
    "camembert": dataclasses.replace(_ROBERTA, architectures=("CamembertForCausalLM",)),
    "xlm-roberta": dataclasses.replace(_ROBERTA, architectures=("XLMRobertaForCausalLM",)),
    "data2vec-text": dataclasses.replace(
        _ROBERTA, architectures=("Data2VecTextForCausalLM",), unused=("data2vec_text.pooler.",)
    ),
    "roberta-prelayernorm": dataclasses.replace(
        _ROBERTA,
        architectures=("RobertaPreLayerNormForCausalLM",),
        facts={**_LINE, "embed_norm": True},
        unused=("roberta_prelayernorm.pooler.",),
    ),
    "xlm-roberta-xl": dataclasses.replace(
        _ROBERTA,
        architectures=("XLMRobertaXLForCausalLM",),
        defaults={**_ROBERTA.defaults, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        facts=_LINE,
    ),
    "modernbert-decoder": Family(
        ("ModernBertDecoderForCausalLM",),
        defaults={
            "hidden_activation": "gelu",
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "bos_token_id": 50281,
            "eos_token_id": 50282,
            "tie_word_embeddings": True,
            "sliding_window": 64,
            "rope_theta": 160_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        keys=(
            *_INERT,
            "classifier_activation",
            "global_attn_every_n_layers",
            "local_attention",
            "initializer_cutoff_factor",
            "cls_token_id",
            "sep_token_id",
        ),
        same=(
            ("attention_bias", "qkv_bias", False),
            ("attention_bias", "o_bias", False),
            ("mlp_bias", "mlp_bias", False),
            ("norm_bias", "norm_bias", False),
            ("decoder_bias", "head_bias", True),
            ("classifier_bias", "head_transform_bias", False),
        ),
        fields=_modernbert,
        to_hf=lambda cfg: {"classifier_activation": _hf_activation(cfg), "pad_token_id": 0},
        facts={"norm": "layer", "embed_norm": True, "first_norm": False, "head_transform": True},
        eps="norm_eps",
        activation="hidden_activation",
        window=lambda i, read: bool(i % read.size("global_attn_every_n_layers", 3)),
        is_local=True,
        absent=(*_ABSENT, "partial_rotary_factor"),
    ),
    "openai-gpt": Family(
        ("OpenAIGPTLMHeadModel",),
        defaults={
            "afn": "gelu",
            "n_positions": 512,
            "max_position_embeddings": 512,
            "layer_norm_epsilon": 1e-5,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": True,
        },
        keys=(*_INERT, "n_ctx", "predict_special_tokens"),
        facts={
            **_LINE,
            "head_bias": False,
            **_NO_TRANSFORM,
            "learned_positions": 0,
            "pre_norms": False,
            "sum_norms": "all_but_last",
        },
        fields=_first_gpt,
        to_hf=lambda cfg: {"afn": _hf_activation(cfg).replace("gelu_pytorch_tanh", "gelu")},
        eps="layer_norm_epsilon",
        activation="afn",
        is_nope=lambda *_: True,
        names={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        derived=lambda read: {"intermediate_size": 4 * read.size("hidden_size")},
        absent=(*_ABSENT, "intermediate_size"),
        unused_endings=(".attn.bias",),
    ),
}


def _hf_activation(cfg: ModelConfig) -> str:
    return next(hf for hf, ours in ACTIVATIONS.items() if ours == cfg.activation)
