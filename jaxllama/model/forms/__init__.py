"""The forms of a layer: the order of its norm, mixer, feed-forward and sums.

    FORMS[layer.form.name]        the form's computation, an object as ``sequential.Sequential``

A form is one file, whose ``FORM`` computes.  ``forms.parameters`` has the parameters of a layer,
and imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllama.model.forms.sequential import Sequential


class _Forms(dict[str, "Sequential"]):
    """The forms by name, imported when they are asked for."""

    def __missing__(self, name: str) -> Sequential:
        form: Sequential = importlib.import_module(f"{__name__}.{name}").FORM
        return self.setdefault(name, form)


FORMS = _Forms()
