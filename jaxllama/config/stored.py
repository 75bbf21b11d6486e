"""The differences between a checkpoint's tensors and the parameters."""

from __future__ import annotations

import dataclasses

from jaxllama.config.reader import requirement


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """Multipliers of a layer's products and of their inputs, which loading folds into the weights.

    Parameters
    ----------
    attention_input, key, attention_output : float
        Multipliers of attention's input, of its keys and of its output.
    ssm_input, ssm_output : float
        Multipliers of the input and the output of a Mamba-2 mixer.
    ssm_parts : tuple of float
        Multipliers of its z, x, B, C and dt.
    gate, down : float
        Multipliers of the feed-forward's gate and of its output.

    Notes
    -----
    Source: Falcon-H1 (arXiv 2507.22448), after maximal update parametrization (2203.03466).
    """

    attention_input: float = 1.0
    key: float = 1.0
    attention_output: float = 1.0
    ssm_input: float = 1.0
    ssm_parts: tuple[float, ...] = (1.0,) * 5
    ssm_output: float = 1.0
    gate: float = 1.0
    down: float = 1.0

    def __post_init__(self) -> None:
        need = requirement(self, "stored.products.")
        need(len(self.ssm_parts) == 5, "ssm_parts", "must be five numbers")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value,)
            need(all(values), field.name, "must not be 0")


UNMULTIPLIED = Multipliers()


@dataclasses.dataclass(frozen=True)
class CheckpointForm:
    """The differences between a checkpoint's tensors and the parameters, which loading folds.

    Parameters
    ----------
    family : str
        Family of the tensors' names (``checkpoints.hf``) and of the class in transformers.
    embed : float
        Multiplier of the embedding.
    query : float
        Multiplier of q, or of its norm's weight.
    residual : float
        Multiplier of the outputs that o and down add to the stream.
    logits : float
        Multiplier of the last norm's weight.
    norm_offset : float
        Number added to the weights of norms (Gemma's 1 + w).
    flipped : bool
        Whether RoPE turns the other way (nanochat).
    shared : float
        Multiplier of the output of the expert that every token passes.
    interleaved : bool
        Whether RoPE rotates features 2i and 2i + 1 together, and not i and i + H/2.
    products : Multipliers, optional
        Multipliers of single products (Falcon-H1).

    Notes
    -----
    Sources: Granite (arXiv 2408.13359), Gemma 2 (2408.00118).
    """

    family: str = "llama"
    embed: float = 1.0
    query: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    norm_offset: float = 0.0
    interleaved: bool = False
    shared: float = 1.0
    flipped: bool = False
    products: Multipliers | None = None

    def __post_init__(self) -> None:
        need = requirement(self, "stored.")
        for key in ("embed", "query", "residual", "logits", "shared"):
            need(getattr(self, key) != 0, key, "must not be 0")
