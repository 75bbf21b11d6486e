"""Training: one TOML file to a run folder with a model that ``jaxllama.load`` reads.

    config = load_train_config("run.toml")
    result = train(config, "runs/run", progress=True)

``config`` says what a file may hold, ``loop`` runs it, ``run_directory`` keeps what it writes,
``checkpoint`` and ``optimizer`` are thin over orbax and optax; ``forward`` and ``loss`` are the
model as training sees it; ``distill`` and ``quantization_aware`` are two more things to minimise;
``flops`` counts work.  ``corpus`` makes text that needs no download.
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
