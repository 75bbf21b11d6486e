"""``load`` builds a LanguageModel from wherever its weights are stored.

    load(source, dtype, quantize, policy=..., mesh=..., exact=..., adapters=...) -> LanguageModel

``load`` reads, casts and places the weights one at a time. They go to one device, to the devices of
a mesh (each reads its own part, ``model.shardings``), or where a policy says (``offload``). A
preset's weights are fetched once (``checkpoints.hub``).

On one CPU the codes of quantized weights are laid out for ``pallas_kernels.cpu``, which rounds
activations to 8 bits, as llama.cpp does. ``exact`` keeps float32 throughout, and so does a CPU that
the kernels do not support. ``load`` warns (SpeedWarning) where ``quantize`` then makes a model
slower.

Modules that only some sources need are imported where they are used. This saves half a second at a
program's start.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllama import generation
from jaxllama.checkpoints import hub, peft, pooling
from jaxllama.checkpoints.gguf import load as gguf
from jaxllama.checkpoints.gguf.file import NO_VOCABULARY, GGUFFile, opened
from jaxllama.checkpoints.hf import eagle3
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.compiler_options import check_sums
from jaxllama.config import ModelConfig, load_config, preset_names, preset_sampling
from jaxllama.decoding.sampling import Sampling
from jaxllama.errors import JaxLlamaError, SpeedWarning, WeightWarning
from jaxllama.files import exists
from jaxllama.kept import LEAST_LAYERS, KeptPrograms, trim
from jaxllama.language_model import LanguageModel
from jaxllama.model import lora
from jaxllama.model.cache import default_dtype
from jaxllama.model.eagle3 import Drafter
from jaxllama.model.layout import handles, lay_out, slow_on_cpu
from jaxllama.model.records import float_dtype
from jaxllama.model.shardings import leaf_readers, place_params, shard_params
from jaxllama.parallel.mesh import make_mesh
from jaxllama.progress import working
from jaxllama.text.rows import short
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import Leaf
from pallas_kernels.cpu import CpuWeight, prepare_tree

if TYPE_CHECKING:
    from jaxllama.offload.policy import Policy
    from jaxllama.placement import Placement


_SMALL = 1 << 16  # bytes
Place = Callable[[tuple[str, ...], Any], Any]  # (path, leaf) to the tree's value of a parameter


def load(
    source: str | Path = "smollm2-135m",
    dtype: DTypeLike | None = None,
    quantize: str | None = None,
    *,
    policy: str | Policy | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    deterministic: bool = False,
    random: bool = False,
    exact: bool = False,
    revision: str | None = None,
    progress: bool = False,
    adapters: Mapping[str, str | Path] | None = None,
    merge: bool = False,
) -> LanguageModel:
    """Return the LanguageModel of a preset, a directory, a .gguf file or a hub id.

    Parameters
    ----------
    source : str or Path
        A preset's name, a directory of Hugging Face's or flash-linear-attention's files, a .gguf
        file, or a hub id. ":layers=N" at its end selects the model of the first N layers, for use
        as a draft.
    dtype : data-type, optional
        Type of weights and activations: float32, bfloat16 or float16. The default is bfloat16 on a
        GPU and float32 on a CPU.
    quantize : str, optional
        A scheme of ``quantize_params``, such as "w8a8". Weights are rounded as they are read. They
        are the same on one device, on a mesh and under a policy.
    policy : str or Policy, optional
        Where weights, cache and activations are stored, for models larger than the device
        (``offload``): a Policy, or its text, such as "20 80 0 100 0 100". It excludes ``mesh`` and
        ":layers=N".
    mesh : str, mapping or Mesh, optional
        Several devices, such as "data=1,model=4" (``parallel``). Each device reads its own part.
        With ``quantize`` each process reads and rounds whole weights, and its devices keep theirs.
    deterministic : bool
        Makes the results independent of the batch. See ``LanguageModel``.
    random : bool
        Random weights of the preset's shape and a byte tokenizer, for benchmarks and tests. Presets
        without published weights (GLA and hybrids) always load this way, with a WeightWarning.
    exact : bool
        On a CPU, compute products of quantized weights in float32. Weights of a GGUF file then
        become floats, which take four to eight times the memory. Without it, the products round
        activations to 8 bits. It has no effect on GPUs, with 16-bit activations, or with ``mesh``.
        With ``policy`` it has no effect on a file's own codes.
    revision : str, optional
        Branch, tag or commit of a hub id. The source may also name it: "org/name@revision".
    progress : bool
        Show a progress bar on stderr.
    adapters : mapping of str to path, optional
        PEFT directories of LoRA adapters by name, for ``generate(adapter=)`` and requests. They
        stay beside weights of any scheme, on one device (``model.lora``). With ``policy`` the
        factors stay on the device.
    merge : bool
        Add the one adapter to the weights instead, in float32 and before quantization. A merged
        adapter costs no time and works with ``mesh`` too.

    Returns
    -------
    LanguageModel
        The model, ready to run.

    Raises
    ------
    JaxLlamaError
        If the source cannot be read, or the arguments exclude each other. The message names what
        was tried.
    """
    whole, layers = first_layers(source)
    if layers is not None and policy is not None:
        raise JaxLlamaError(f"{source}: policy and layers exclude each other")
    if "flax.serialization" in sys.modules:
        from jaxllama.model.flax_state import register

        register()
    if not isinstance(adapters, Mapping | None):
        raise JaxLlamaError(f"adapters = {short(adapters)}: expected a mapping of names to paths")
    adapters = dict(adapters or {})
    _check_adapters(adapters, merge, mesh is not None)
    enable_compilation_cache()
    if mesh is not None and policy is not None:
        raise JaxLlamaError("policy and mesh exclude each other: one device offloads")
    grid = None if mesh is None else make_mesh(mesh)  # before anything else starts the devices
    if grid is not None:
        check_sums(grid)
    dtype = float_dtype(default_dtype() if dtype is None else dtype)
    if not random and is_random_preset(whole):
        warnings.warn(
            f"{whole}: no trained weights are published for this preset: its weights are random; "
            f"with trained ones: {', '.join((*hub.WHEELS, *hub.REPOSITORIES))}",
            WeightWarning,
            stacklevel=2,
        )
        random = True
    if random and revision is not None:
        raise JaxLlamaError(f"revision = {revision!r}: random weights have none")
    if quantize is not None:
        from jaxllama.quantization.scheme import parse

        if not isinstance(quantize, str):
            raise JaxLlamaError(f"quantize = {short(quantize)}: expected text, such as 'w8a8'")
        parse(quantize)
    programs = None
    if policy is None and mesh is None:
        programs = KeptPrograms((str(whole), revision, dtype.name, quantize, random, exact, merge))
    if random and merge:
        raise JaxLlamaError("merge goes into a checkpoint's weights, and these are random")
    order = _Order(
        whole,
        dtype,
        quantize,
        None if policy is None else _placement(policy, dtype, quantize, deterministic, exact),
        grid,
        deterministic,
        random,
        exact,
        revision,
        progress,
        merge,
    )
    factors = []
    if adapters:
        found = read_config(whole, random, revision, progress)
        factors = [peft.read(path, found) for path in adapters.values()]
    model = _random(order) if random else _read(order, factors[0] if merge else None)
    if model.tokenizer is not None:
        model.tokenizer.check_vocab(model.cfg.vocab_size)
    names = () if merge else tuple(adapters)
    lm = _ready(order, model, programs)
    if names:
        params = lora.attach(tensor_table(lm.config), lm.params, factors)
        lm = dataclasses.replace(lm, params=params, adapters=names)
    if lm.programs is not None:
        lm.programs.wait()
        trim()
    return lm if layers is None else lm.first_layers(layers)


@dataclasses.dataclass(frozen=True)
class _Order:
    """The checked arguments of ``load``; place: of a policy, grid: of a mesh."""

    source: str | Path
    dtype: jnp.dtype
    quantize: str | None
    place: Placement | None
    grid: Mesh | None
    deterministic: bool
    random: bool
    exact: bool
    revision: str | None
    progress: bool
    merge: bool


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model as its files have it, with parameters where they were read to."""

    cfg: ModelConfig
    params: generation.Params
    tokenizer: Tokenizer | None
    sampling: Sampling | None = None
    pooling: pooling.Pooling | None = None
    classifier: Any = None


def _placement(
    policy: str | Policy, dtype: jnp.dtype, quantize: str | None, deterministic: bool, exact: bool
) -> Placement:
    from jaxllama.offload.policy import Policy
    from jaxllama.placement import Placement

    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    if not isinstance(policy, Policy):
        raise JaxLlamaError(
            f"policy = {short(policy)}: expected a Policy, or its text, such as '20 80 0 100 0 100'"
        )
    return Placement(policy, dtype, quantize, deterministic, exact=exact)


def _random(order: _Order) -> _Model:
    """Return the preset with random weights, in the scheme, and a byte tokenizer."""
    from jaxllama.quantization.random_params import check_memory, random_params

    cfg, place = load_config(order.source), order.place
    if place is None and order.grid is None:
        check_memory(cfg, order.dtype, order.quantize)
    scheme = order.quantize if place is None else place.scheme
    lays_out = not order.exact and _has_handlers(place, order.grid, order.dtype)
    put = _laid_out if lays_out else place
    key, progress = jax.random.key(0), order.progress
    params = random_params(cfg, key, order.dtype, scheme, put, order.grid, progress=progress)
    params = jax.device_put(params) if lays_out else params
    return _Model(cfg, params, Tokenizer.byte_level())


def _read(order: _Order, added: peft.Factors | None) -> _Model:
    """Return the model of files; added: the adapter that is merged into its weights."""
    source, grid = order.source, order.grid
    path = hub.resolve(source, order.revision, progress=order.progress)
    is_gguf = path.suffix == ".gguf"
    sampling = None if is_gguf else hf.read_sampling(path)
    if sampling is None and str(source) in preset_names():
        said = preset_sampling(source)
        sampling = Sampling(**said) if said else None
    is_packed = not is_gguf and hf.is_packed(path)
    if added is not None and (is_gguf or is_packed):
        raise JaxLlamaError(
            f"{source}: merge goes into the floats of a Hugging Face directory, and this has none: "
            "leave merge out, and the adapter stands beside the weights"
        )
    scheme = order.quantize if order.place is None else order.place.scheme
    if is_packed and scheme is not None:  # codes are not rounded again
        order = dataclasses.replace(order, quantize=_for_codes(source, path, scheme, order.place))
    keeps_codes = not order.exact and order.quantize is None and (is_gguf or is_packed)
    keeps_codes = keeps_codes and _has_handlers(order.place, grid, order.dtype)
    here = _laid_out if keeps_codes else lambda _, leaf: jax.device_put(leaf)
    if is_gguf:
        model = _of_gguf(path, order, here, keeps_codes)
    else:
        model = _of_directory(path, order, here, added)
    params = jax.device_put(model.params) if keeps_codes else model.params
    if str(source) in preset_names():
        hf.check_preset(load_config(source), model.cfg)
    return dataclasses.replace(model, params=params, sampling=sampling)


def _for_codes(source: str | Path, path: Path, scheme: str, place: Placement | None) -> str:
    """Return the scheme that gives FP8 codes of a packed checkpoint activations in FP8, too.

    Raises JaxLlamaError for another scheme, other codes, or a policy.
    """
    if scheme == "fp8-block-a8" and place is None:
        found, count = re.subn(r"=fp8-block(?=,|$)", f"={scheme}", str(stored_scheme(path)))
        if count:
            return found
    raise JaxLlamaError(
        f"{source}: its weights are already quantized, so quantize={scheme!r} is not for it: "
        "leave that out, or start from the model in floats"
    )


def _of_gguf(path: Path, order: _Order, here: Place, keeps_codes: bool) -> _Model:
    # The tokenizer is built while weights are laid out: both take tenths of a second.
    with opened(path) as file, ThreadPoolExecutor(1, "jaxllama-load") as beside:
        reading = beside.submit(_tokenizer_of_gguf, file)
        cfg = gguf.read_config(file)
        keep = here if order.grid is None else lambda _, leaf: leaf
        put, finish = _rounded(order.quantize, cfg, keep, order.place)
        params = gguf.load_params(
            file,
            cfg,
            order.dtype,
            keep_quantized=keeps_codes,
            laid_out=keeps_codes,
            progress=order.progress,
            place=put,
        )
        tokenizer = reading.result()
    params = finish(params)
    params = params if order.grid is None else shard_params(cfg, params, order.grid)[1]
    return _Model(cfg, params, tokenizer)


def _tokenizer_of_gguf(file: GGUFFile) -> Tokenizer | None:
    has_text = file.string("tokenizer.ggml.model", "none") not in NO_VOCABULARY
    return Tokenizer.from_gguf(file) if has_text else None


def _of_directory(path: Path, order: _Order, here: Place, added: peft.Factors | None) -> _Model:
    cfg, keep, stream, dtype = hf.read_config(path), here, None, order.dtype
    if order.grid is not None:
        keep, stream = leaf_readers(cfg, order.grid, dtype)
    put, finish = _rounded(order.quantize, cfg, keep, order.place)
    stream = stream if order.quantize is None else None  # a weight is rounded as a whole
    cfg, params = hf.load(
        path, dtype=dtype, progress=order.progress, place=put, stream=stream, added=added
    )
    params = finish(params)
    has_tokenizer = exists(path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path / "tokenizer.json") if has_tokenizer else None
    vectors, classifier = pooling.read(path), hf.read_classifier(path)
    return _Model(cfg, params, tokenizer, pooling=vectors, classifier=classifier)


def _ready(order: _Order, model: _Model, programs: KeptPrograms | None) -> LanguageModel:
    """Return the model with its parameters in the scheme and the layout in which they are used."""
    cfg, params, grid, quantize = model.cfg, model.params, order.grid, order.quantize
    if order.place is not None:
        lm = order.place.model(cfg, params, model.tokenizer)
        return dataclasses.replace(lm, sampling=model.sampling, pooling=model.pooling)
    if grid is None and not order.exact:
        with working("laying out weights", show=order.progress and quantize is not None):
            params = lay_out(params, donate=True)
            if quantize is not None:
                jax.block_until_ready(params)
    if grid is not None:
        cfg, params = place_params(cfg, params, grid)
    if quantize is not None and not order.exact and (reason := slow_on_cpu(params)) is not None:
        warnings.warn(f"{quantize}: {reason}", SpeedWarning, stacklevel=3)
    head = None if model.classifier is None else jnp.asarray(model.classifier)
    return LanguageModel(
        cfg,
        params,
        model.tokenizer,
        order.deterministic,
        model.sampling,
        (),
        order.exact,
        programs if cfg.n_layers >= LEAST_LAYERS else None,
        pooling=model.pooling,
        classifier=head,
    )


def is_random_preset(source: str | Path) -> bool:
    """Return whether ``load`` gives this preset random weights, as it does for GLA presets without
    published weights.
    """
    name = str(source)
    if name not in preset_names() or name in hub.REPOSITORIES:
        return False
    return "gla" in load_config(name).layer_types


def is_drafter(directory: str | Path) -> bool:
    """Return whether ``load_drafter`` reads this folder."""
    return eagle3.is_drafter(directory)


def load_drafter(
    directory: str | Path, dtype: DTypeLike | None = None, quantize: str | None = None
) -> Drafter:
    """Return the head of a folder, which drafts for a model as ``generate``'s ``draft``.

    Parameters
    ----------
    directory : str or Path
        A folder with config.json and safetensors of an EAGLE-3 head (``LlamaForCausalLMEagle3``),
        as others publish them and ``train`` writes them.
    dtype : data-type, optional
        Type of the weights, which must be the model's. The default is ``load``'s.
    quantize : str, optional
        Scheme of its weights, as for ``load``, without calibration. The head then costs less time,
        and its drafts are right a little less often. The tokens stay the same.

    Returns
    -------
    Drafter
        The head, beside any model whose hidden states it was trained on.

    Raises
    ------
    JaxLlamaError
        If the folder has no such head, or a key or tensor of it does not fit. The message names it.
    """
    dtype = float_dtype(default_dtype() if dtype is None else dtype)
    found = eagle3.load(directory, dtype)
    params = jax.device_put(found.params)
    if quantize is not None:
        from jaxllama.quantization.quantize import quantize_params

        params = lay_out(quantize_params(params, quantize))
    return dataclasses.replace(found, params=params)


def first_layers(source: str | Path) -> tuple[str | Path, int | None]:
    """Return (source, N) for "source:layers=N", and (source, None) for any other source."""
    name, mark, count = str(source).rpartition(":layers=")
    if not mark:
        return source, None
    if not count.isdecimal():
        raise JaxLlamaError(f"{source}: layers={count}: expected a whole number")
    return name, int(count)


def _check_adapters(adapters: dict[str, str | Path], merge: bool, on_mesh: bool) -> None:
    for name in adapters:
        if not isinstance(name, str) or not name:
            raise JaxLlamaError(f"adapters: the name {name!r} is not a text")
    if merge and len(adapters) != 1:
        raise JaxLlamaError(f"merge takes one adapter, and there are {len(adapters)}")
    if on_mesh and adapters and not merge:
        raise JaxLlamaError("adapters beside a mesh: only one, merged into the weights")


def _rounded(
    scheme: str | None, cfg: ModelConfig, keep: Place, place: Placement | None
) -> tuple[Place, Callable[[generation.Params], generation.Params]]:
    """Return (place, finish): what a loader calls with each parameter, and with the whole tree.

    keep: ``keep(path, leaf)`` returns the tree's value of a parameter where there is no ``place``.
    """
    if place is not None:
        place.fit(cfg)
        return place, lambda params: params  # ``place.model`` finishes the tree
    if scheme is None:
        return keep, lambda params: params
    from jaxllama.quantization.quantize import Rounder
    from jaxllama.quantization.scheme import parse

    put = Rounder(parse(scheme), keep, cfg)
    return put, put.finish


def _has_handlers(place: Placement | None, grid: Mesh | None, dtype: jnp.dtype) -> bool:
    """Return whether ``pallas_kernels.cpu`` multiplies the quantized weights of a model loaded with
    these arguments.
    """
    return place is None and grid is None and handles(dtype)


def _laid_out(_: object, leaf: Leaf) -> Leaf:
    """Return a leaf in the layout that one CPU's kernels read.

    Leaves are laid out one at a time, so that no weight is held twice. A leaf without such a layout
    is only placed on the device. Small arrays remain numpy arrays, because one ``device_put`` each
    takes as long as reading them.
    """
    if isinstance(leaf, CpuWeight):
        return leaf
    leaf = prepare_tree(leaf)
    if isinstance(leaf, CpuWeight) or leaf.nbytes < _SMALL:
        return leaf
    return jax.block_until_ready(jax.device_put(leaf))


def read_config(
    source: str | Path, random: bool = False, revision: str | None = None, progress: bool = False
) -> ModelConfig:
    """Return the config that ``load`` would give the model, without reading its weights."""
    if random or str(source) in preset_names():
        return load_config(source)
    path = hub.resolve(source, revision, progress=progress)
    return gguf.read_config(path) if path.suffix == ".gguf" else hf.read_config(path)


def stored_scheme(source: str | Path, revision: str | None = None) -> str | None:
    """Return the scheme of a model's own codes, such as "none,experts_gate_up=mxfp4"; None for
    floats, and for GGUF files.

    Names whose weights differ between layers have the first one's.
    """
    if str(source) in preset_names():
        return None
    path = hub.resolve(source, revision)
    if path.suffix == ".gguf" or not hf.is_packed(path):
        return None
    from jaxllama.quantization.scheme import text_of

    return text_of(hf.packed_examples(path))


def enable_compilation_cache() -> None:
    """Keep compiled programs in jaxllama's cache folder, unless the user chose another folder."""
    config: Any = jax.config  # its options are made at import, where no type checker sees them
    if config.jax_compilation_cache_dir is None and config.jax_enable_compilation_cache:
        folder = hub.cache_dir() / "xla"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            warnings.warn(f"no compilation cache: {folder}: {error.strerror}", stacklevel=2)
            return
        if os.access(folder, os.W_OK):
            jax.config.update("jax_compilation_cache_dir", str(folder))
            # A small model's prefill compiles in less than jax's limit of a second; keep it too.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
