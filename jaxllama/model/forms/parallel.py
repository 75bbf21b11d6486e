"""A layer whose two sublayers read the same stream.

    stream += o(mixer(norm(stream))) + down(act(up(norm(stream))))

Both sublayers have one norm, or each has a norm of its own.

Source: GPT-J (Wang and Komatsuzaki, 2021); PaLM (arXiv 2204.02311).
"""

from __future__ import annotations

from jaxllama.config import LayerConfig
from jaxllama.model import linear
from jaxllama.model.experts.feed import feed_experts
from jaxllama.model.forms.sequential import Sequential, inner
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.typing import Params


class ParallelSublayers(Sequential):
    """The computation of the form."""

    def feed(
        self, layer: LayerConfig, p: Params, stream: Stream, before: Stream, ops: LayerOps = linear
    ) -> Stream:
        """The second half, which reads the stream without the mixer's part."""
        if layer.feed is None:
            return stream
        if layer.experts is not None:
            return feed_experts(layer, p, stream, ops, before)
        y, _ = inner(layer, p["mlp"], before, p.get("mlp_norm", p.get("mixer_norm")), ops)
        return ops.linear_add(y, p["mlp"]["down"], stream, layer, p.get("mlp_out_norm"))


FORM = ParallelSublayers()
