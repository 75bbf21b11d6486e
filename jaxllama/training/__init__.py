"""Training: from one TOML file to a run folder with a model that ``jaxllama.load`` reads.

    config = load_train_config("run.toml")
    result = train(config, "runs/run", progress=True)

``config`` has the contents of a file, ``loop`` runs it, and ``run_directory`` keeps its outputs.
``optimizer`` is a thin layer over optax, and ``checkpoint`` writes states. ``forward`` and
``loss`` are the model in training. ``distill`` and ``quantization_aware`` are two further
objectives. In ``sampler`` an engine answers prompts, and the trainer learns from ``rewards`` by
``policy``. ``corpus`` makes text without a download.
"""

from __future__ import annotations

from jaxllama.model.flops import flops_per_token
from jaxllama.training.config import TrainConfig, load_train_config, train_config_from_dict
from jaxllama.training.loop import TrainResult, train

__all__ = [
    "TrainConfig",
    "TrainResult",
    "flops_per_token",
    "load_train_config",
    "train",
    "train_config_from_dict",
]
