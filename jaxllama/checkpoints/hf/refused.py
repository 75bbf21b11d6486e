"""The causal language models of transformers that are refused, with what each would need.

``REFUSED[model_type]`` is the reason, which the error of ``hf.config`` gives.  ``WRAPPERS`` are the
types with image or audio input whose text decoder, a family of ``hf.families``, is read.  The guide
shows both tables.  A test goes through every type of transformers: each is loaded or stands here,
as do some types of other libraries.
"""

from __future__ import annotations

WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "ministral3",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
}
# Types of text decoders that are a family of another name.
TEXT_TYPES = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
# Architectures of EAGLE-3 heads, which ``hf.eagle3`` reads, the first one written.
HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_REASONS: dict[str, str] = {
    "the decoder of an encoder-decoder": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet
        """,
    "an encoder, also if it runs as a decoder": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert
        modernbert-decoder rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta
        xlm-roberta-xl xmod
        """,
    "an early decoder, which newer models have replaced": """
        biogpt codegen ctrl gpt-sw3 gpt_neox_japanese openai-gpt persimmon xglm
        """,
    "mixer: two streams of attention with relative positions": "xlnet",
    "image input": """
        cohere_compass_text emu3 fuyu git got_ocr2 llama4 mllama trocr phi4_multimodal
        minimax_m3_vl_text dots3_note dots3_note_text gemma3n
        """,
    "audio input or output": """
        moshi moss_transcribe_diarize musicgen musicgen_melody whisper
        """,
    "mixer: two layers of attention from latents, and experts that skip one": "longcat_flash",
    "mixer: sparse attention by an indexer, with other parts": """
        axk2 deepseek_v4 hy_v4 qwen4_exp qwen4_exp_text
        """,
    "mixer: linear attention beside attention from latents with RoPE": "bailing_hybrid",
    "mixer: attention with linear biases (ALiBi)": "bloom mpt",
    "mixer: Mamba-1, whose decay is one number a feature and state": """
        falcon_mamba jamba mamba zamba
        """,
    "mixer: a gated linear recurrence (RG-LRU)": "recurrent_gemma",
    "mixer: RWKV-4's time mixing": "rwkv",
    "mixer: RWKV-7's time mixing, which writes by another key than it erases by": "rwkv7",
    "mixer: xLSTM": "xlstm",
    "mixer: lightning attention": "minimax",
    "mixer: differential attention": "diffllama",
    "mixer: attention with a mask that depends on values": "doge",
    "mixer: attention over hashed or local blocks": "reformer",
    "mixer: attention in chunks, with positions in some layers": "llama4_text",
    "mixer: convolutions of q, k and v before attention": "zaya",
    "mixer: attention with relative position logits and short convolutions": """
        inkling_text inkling2_text inkling2_loop_text
        """,
    "mixer: attention whose heads experts choose": "jetmoe",
    "mixer: attention whose gate has biases or scales of its own": "beam dory",
    "mixer: attention with a gate of softplus": "laguna",
    "mixer: attention with keys wider than values, and two sizes of heads": "mimo_v2_flash",
    "mixer: a stream of four copies (AltUp)": "gemma3n_text",
    "mixer: attention over the keys of another model, which it drafts for": """
        gemma4_assistant gemma4_unified_assistant
        """,
    "mixer: short convolutions beside gated attention": "lfm3",
    "mixer: byte patches and cross attention between them": "blt",
    "mixer: a loop over the layers": "hrm_text",
    "mixer: attention with relative position biases": "cpmant",
}
REFUSED = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}
