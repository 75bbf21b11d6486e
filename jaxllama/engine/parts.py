"""The parts of an engine for a model: its options, scheduler and runner.

A model on a device or a mesh has rows in ``slots``. An offloaded model runs in ``blocks``.
"""

from __future__ import annotations

import math

from jax.sharding import Mesh

from jaxllama.engine import blocks
from jaxllama.engine.adapters import AdapterSlots
from jaxllama.engine.divided import AnyScheduler, DividedScheduler
from jaxllama.engine.options import EngineOptions, ResolvedOptions
from jaxllama.engine.runner import Runner
from jaxllama.engine.scheduler import Scheduler
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model.eagle3 import Drafter
from jaxllama.parallel.mesh import MODEL_AXIS, mesh_of, row_axes
from jaxllama.parallel.sequence import sequence_shards
from jaxllama.typing import Options


def parts_of(
    lm: LanguageModel, draft: str | LanguageModel | Drafter | None, asked: Options
) -> tuple[ResolvedOptions, AnyScheduler, Runner | blocks.BlockRunner]:
    """Return options, scheduler and runner of an engine with the options ``asked``.

    Raises JaxLlamaError for options that the model does not support.
    """
    if lm.executor.block_size is None:
        return _of_slots(lm, draft, asked)
    if draft is not None:
        asked = {**asked, "draft": draft}
    options = blocks.options_of(lm, asked)
    return options, blocks.BlockScheduler(lm, options), blocks.BlockRunner(lm, options)


def _of_slots(
    lm: LanguageModel, draft: str | LanguageModel | Drafter | None, asked: Options
) -> tuple[ResolvedOptions, AnyScheduler, Runner]:
    mesh = mesh_of(lm.params)
    devices = 1 if mesh is None else mesh.shape[MODEL_AXIS]
    drafting = lm.drafting(draft, asked.get("draft_tokens", 0))
    by = draft.config if isinstance(draft, LanguageModel | Drafter) else draft
    asked = {"deterministic": lm.deterministic, **asked, "draft": by}
    wanted = EngineOptions(**asked)
    if wanted.lora_slots and mesh is not None:
        raise JaxLlamaError("lora_slots: a model on a mesh takes only merged adapters")
    if wanted.has_tiers and mesh is not None:
        name = "disk_cache" if wanted.host_cache_gb is None else "host_cache_gb"
        raise JaxLlamaError(
            f"{name} = {getattr(wanted, name)}: a model on a mesh keeps its prefixes on its "
            "devices alone: leave it out"
        )
    adapters = AdapterSlots(
        lm.config, lm.params, lm.adapters, wanted.lora_slots, wanted.max_lora_rank
    )
    parts = _parts(mesh, wanted)
    shards = 1 if parts > 1 else sequence_shards(mesh, 1, shares_pages=True)
    options = wanted.resolve(lm.config, lm.dtype, devices, shards, parts)
    cfg = lm.config.replace(fixed_sums=options.deterministic)
    runner = Runner(cfg, lm.params, options, adapters, drafting)
    slots = options.max_slots // parts
    schedulers = [
        Scheduler(
            max_slots=slots,
            pages=pages,
            chunk=options.piece,
            token_budget=options.token_budget,
            widths=options.widths,
            steps_per_call=options.steps_per_call,
            recompute=not options.deterministic,
            may_share=runner.may_share,
            reach=lambda rows: options.pass_widths(options.size(rows))[-1],
            transfers=runner.transfers,
            first_slot=part * slots,
        )
        for part, pages in enumerate(runner.pools)
    ]
    scheduler = schedulers[0] if parts == 1 else DividedScheduler(schedulers)
    return options, scheduler, runner


def _parts(mesh: Mesh | None, wanted: EngineOptions) -> int:
    """Return the number of parts of the devices that have slots and pages of their own.

    It is 1 if the devices do not divide the slots: then they share the tokens of long prompts.
    Drafts and a deterministic engine's programs have one part too.
    """
    if mesh is None or wanted.draft is not None or wanted.deterministic:
        return 1
    parts = math.prod(mesh.shape[axis] for axis in row_axes(mesh))
    return parts if wanted.max_slots % parts == 0 else 1
