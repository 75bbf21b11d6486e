"""Two layers whose mixers stand side by side: both read one normed input.

    x       = norm(stream)
    stream += o_1(mixer_1(x))            the first layer, which has no feed-forward
    stream += o_2(mixer_2(x))            the second one
    stream += feed(norm(stream))

The first layer hands x to the second one (``Stream.handed``).

Source: Falcon-H1 (arXiv 2507.22448).
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxllama.config import Beside, LayerConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model import linear
from jaxllama.model.forms.sequential import Sequential
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.typing import Params, Tree


class SideBySide(Sequential):
    """The computation of the form."""

    def read(
        self,
        layer: LayerConfig,
        p: Params,
        stream: Stream,
        weights: Params | Sequence[Params],
        ops: LayerOps = linear,
    ) -> tuple[Tree, Stream]:
        """Return the products of the mixer's input, and the stream."""
        assert isinstance(layer.form, Beside)
        if layer.form.reads:
            if stream.handed is None:
                raise JaxLlamaError(
                    "this layer reads the input of the layer before, which is not here"
                )
            y, _ = ops.norm_linear(Stream(stream.handed), None, weights, layer)
            return y, stream._replace(handed=None)
        normed, stream = linear.norm(stream, p.get("mixer_norm"), layer)
        y, _ = ops.norm_linear(Stream(normed), None, weights, layer)
        return y, stream._replace(handed=normed)


FORM = SideBySide()
