"""The names of a decoder's parts in a family of checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TypeVar

from jaxllama.config import CheckpointForm, LayerConfig
from jaxllama.typing import Params, ParamsDict

MixerNames = TypeVar("MixerNames")


@dataclasses.dataclass(frozen=True)
class MTPNames:
    """The names of a head for multi-token prediction: its layer, norms and first product."""

    layer: str = "mtp.layers.0"
    embed_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    fc: str = "mtp.fc"
    norm: str = "mtp.norm"


@dataclasses.dataclass(frozen=True)
class LayerInputNames:
    """The names of further inputs of every layer; the last three are a layer's."""

    table: str = "model.embed_tokens_per_layer"
    project: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    out_norm: str = "post_per_layer_input_norm"


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of a decoder's parts in a family of checkpoints.

    layer: is formatted with the layer's index.
    mixer, mlp: prefixes of their tensors' names.  other_mlp: a prefix that files may have instead
    of ``mlp``.
    qkv, gate_up: a single name means that the file has them in one tensor.
    gate: the gate of attention's heads, where it is a tensor apart from q.
    embedded_norm: the norm of a token's embedding in the layer of an EAGLE-3 head.
    inner_norms: the norms before the last products of mixer and feed-forward.
    positions: the table of learned positions.  embed_norm: the norm of embeddings.
    other_norms: names of norms that files may have instead, by the usual name.
    is_by_head: q|k|v in one tensor are ordered by kv head: the q heads that read it, k, v.
    parallel_norms: names of the two norms of a parallel block, where it has two.
    is_transposed: weights of products are [in, out].
    is_halved: a layer's mixer and its feed-forward are two layers of the file.
    is_paired: two layers, whose mixers stand side by side, are one of the file.
    shared: prefix of the block that layers share, behind the first such layer's name.
    reads: what follows the name of a layer that reads what such a block has written.
    mixers: the own names of each kind of mixer, in a type of that mixer.
    layer_scale: the number by which a layer multiplies the stream.
    """

    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    mixer_norm: str = "input_layernorm"
    embedded_norm: str = ""
    mixer: str = "self_attn."
    mixer_out_norm: str = "post_self_attn_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp."
    other_mlp: str = ""
    mlp_out_norm: str = "post_mlp_layernorm"
    norm: str = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    gate: str = ""
    o: str = "o_proj"
    sinks: str = "sinks"
    down: str = "down_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    positions: str = ""
    inner_norms: tuple[str, str] = ("attn_sub_norm", "ffn_sub_norm")
    embed_norm: str = "embed_norm"
    other_norms: Params = dataclasses.field(default_factory=ParamsDict)
    is_by_head: bool = False
    is_transposed: bool = False
    parallel_norms: tuple[str, str] | None = None
    is_halved: bool = False
    is_paired: bool = False
    shared: str = ""
    reads: str = ""
    mixers: Params = dataclasses.field(default_factory=ParamsDict)
    mtp: MTPNames = MTPNames()
    layer_inputs: LayerInputNames = LayerInputNames()
    layer_scale: str = "layer_scalar"

    def of(self, kind: str, default: MixerNames) -> MixerNames:
        """The names of a mixer of this kind; default: where the family has none of its own."""
        return self.mixers.get(kind, default)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a checkpoint has a model's parameters, and in which form.

    present: the names of its tensors, where a family has had more than one name for a thing; empty
    for the library's present names.
    """

    names: Names = Names()
    stored: CheckpointForm = CheckpointForm()
    present: Collection[str] = ()

    def residual(self, layer: LayerConfig) -> float:
        """Return the multiplier of the products that write the stream; a norm after them has it
        instead."""
        return 1.0 if layer.form.post_norms else self.stored.residual
