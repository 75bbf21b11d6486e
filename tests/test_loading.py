"""A quantized file on a CPU: its own codes by default, float32 where it is asked for; what a start
costs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import jaxllama as jl
from benchmarks.loops import most_repeated, read_prompts
from jaxllama.checkpoints.gguf import load as gguf_load
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.save import save
from jaxllama.config import CheckpointForm, ExpertsConfig, preset_sampling
from jaxllama.errors import SpeedWarning
from jaxllama.executors.resident import ResidentDecoding
from jaxllama.experiments import workloads
from jaxllama.experiments.settings import SpeedSettings
from jaxllama.generation import prefill
from jaxllama.language_model import LanguageModel
from jaxllama.model import decoder
from jaxllama.model.cache import init_cache
from jaxllama.model.layout import handles
from jaxllama.placement import Placement
from jaxllama.quantization import random_params
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.scheme import SCHEMES, is_packed
from pallas_kernels.cpu import CpuWeight, unavailable
from pallas_kernels.dispatch import choices
from pallas_kernels.qtensor import QTensor, dequantize
from tests.checkpoints.test_gguf import Tiny
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.compiling import environment
from tests.helpers.models import FAMILIES, HYBRIDS, LLAMA, tokens_of
from tests.helpers.packed_cases import write_case
from tests.helpers.seeded import seeded_params

ROOT = Path(__file__).parents[1]
handlers = pytest.mark.skipif(
    (reason := unavailable()) is not None, reason=reason.text if reason else ""
)


def kinds(params) -> set[type]:
    """Of the matrices."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QTensor | CpuWeight))
    return {type(leaf) for leaf in leaves if len(leaf.shape) == 2}


def assert_same(got, want) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want
    )


def assert_near(got, want) -> None:
    """As far away as activations of 8 bits take a model of one layer of large random weights."""
    error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert 0 < error < 0.1


def scores(lm) -> np.ndarray:
    return np.asarray(lm.logits(tokens_of(lm.config, 2, 9), np.array([9, 9])))


TYPES = [Type.Q4_1, *slow(Type.Q8_0, Type.Q4_0, Type.Q5_1)]


@pytest.fixture(scope="module", params=TYPES, ids=str)
def file(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own") / "tiny.gguf"
    Tiny(vocab=264, type=request.param, tokenizer="llama").write(path)
    return path


@handlers
def test_a_gguf_file_runs_in_its_own_codes(file: Path, tmp_path: Path) -> None:
    lm, exact = jl.load(file), jl.load(file, exact=True)
    floats = type(exact.params["norm"]["weight"])
    assert kinds(lm.params) == {CpuWeight} and kinds(exact.params) == {floats}
    assert_near(scores(lm), scores(exact))
    # What is saved is the file's own codes, to the bit.
    lm.save(tmp_path / "m")
    kept = gguf_load.load_params(file, lm.config, np.float32, keep_quantized=True)
    assert_same(hf.load(tmp_path / "m")[1], kept)
    assert_same(jl.load(tmp_path / "m").params, lm.params)
    # Quantized weights stay what they are.
    assert kinds(quantize_params(lm.params, "w8a16")) == {CpuWeight}


@pytest.mark.core
@handlers
@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_a_packed_directory_runs_in_its_own_codes(name: str, tmp_path: Path) -> None:
    folder, _ = write_case(tmp_path / "m", name)
    lm, exact = jl.load(folder), jl.load(folder, exact=True)
    assert CpuWeight in kinds(lm.params) and QTensor not in kinds(lm.params)
    assert QTensor in kinds(exact.params) and CpuWeight not in kinds(exact.params)
    assert_near(scores(lm), scores(exact))
    params = hf.load(folder)[1]
    assert_same(exact.params, params)


@handlers
def test_who_asks_for_something_else_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    Tiny(vocab=264, type=Type.Q4_0, tokenizer="llama").write(path)
    for options in (
        {"dtype": "bfloat16"},
        {"quantize": "w8a16", "exact": True},
        {"mesh": "model=1"},
        {"policy": jl.Policy()},
    ):
        assert CpuWeight not in kinds(jl.load(path, **options).params)


@pytest.fixture(scope="module")
def floats(tmp_path_factory) -> Path:
    cfg = LLAMA.replace(vocab_size=264, n_layers=1, layer_types=(), tie_embeddings=True)
    return LanguageModel(cfg, seeded_params(cfg), None).save(tmp_path_factory.mktemp("f") / "m")


def by_experiment(path: Path, scheme: str) -> LanguageModel:
    experiment = SimpleNamespace(models={}, find=lambda name: Path(name))
    return workloads._model(experiment, SpeedSettings(model=str(path), scheme=scheme), 0)


def by_params(path: Path, scheme: str) -> LanguageModel:
    lm = jl.load(path)
    params = jl.quantize_params(lm.params, scheme, cfg=lm.config)
    return dataclasses.replace(lm, params=params)


def drawn(path: Path, scheme: str) -> LanguageModel:
    preset = path.parent / "tiny.toml"
    preset.write_text(PRESET)
    return jl.load(preset, quantize=scheme, random=True)


PRESET = """
vocab_size = 264
d_model = 32
n_layers = 1
tie_embeddings = true
bos_token_id = 1
eos_token_ids = [2]
n_heads = 4
n_kv_heads = 2
head_dim = 8
d_ff = 48
norm_eps = 1e-5
max_position = 64
rope = {theta = 10000.0}
"""
WAYS = {
    "load": lambda path, scheme: jl.load(path, quantize=scheme),
    "random": drawn,
    "quantize_params": by_params,
    "experiment": by_experiment,
}


@handlers
@pytest.mark.parametrize(
    "way, scheme",
    [
        *((way, "w4a8-g16") for way in WAYS),
        ("load", "w8a16"),
        *(
            pytest.param("load", x, marks=pytest.mark.slow)
            for x in ("w4a16-g16", "w8a8", "fp8-block")
        ),
    ],
)
def test_every_way_to_a_quantized_model_leads_to_the_handlers(way, scheme, floats, tmp_path):
    """The same model saved and loaded is the same, in layout and bits."""
    lm = WAYS[way](floats, scheme)
    saved = jl.load(lm.save(tmp_path / "m"))
    assert CpuWeight in kinds(lm.params) and QTensor not in kinds(lm.params)
    assert jax.tree.structure(lm.params) == jax.tree.structure(saved.params)
    assert_same(lm.params, saved.params)


@handlers
@pytest.mark.parametrize(
    "options, words",
    [
        ({"quantize": "w4a16-g8"}, "w4a16-g8: .* groups of 8 columns"),
        ({"quantize": "w8a16", "dtype": "bfloat16"}, "w8a16: .* float32, not bfloat16"),
    ],
)
def test_a_quantized_model_without_a_handler_says_so(options, words, floats):
    with pytest.warns(SpeedWarning, match=words) as said:
        lm = jl.load(floats, **options)
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert QTensor in kinds(lm.params)
    jl.load(floats, exact=True, **options)  # as it was asked for: no warning


def test_without_handlers_a_file_is_floats(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "tiny.gguf"
    Tiny(vocab=264, type=Type.Q4_0, tokenizer="llama").write(path)
    want = jl.load(path, exact=True)
    monkeypatch.setenv("JAXLLAMA_CPU_ISA", "off")
    assert_same(jl.load(path).params, want.params)


# --- memory --------------------------------------------------------------------------------------


def write_model(path: Path, d: int, f: int, layers: int, vocab: int) -> None:
    """A file of random Q4_0 blocks."""
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    heads, kv = d // 64, d // 256
    for key, value in {
        "block_count": layers,
        "context_length": 512,
        "embedding_length": d,
        "vocab_size": vocab,
        "feed_forward_length": f,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "rope.dimension_count": 64,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 1e4)
    # The smallest tokenizer that there is: bytes, and names that no text has.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, vocab))])
    writer.add_token_merges(["a b"])

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = rng.integers(0, 256, (rows, columns // 32, 18), np.uint8)
        blocks[..., :2] = np.full(1, 0.01, "<f2").view(np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=Type.Q4_0)

    matrix("token_embd.weight", vocab, d)
    writer.add_tensor("output_norm.weight", np.ones(d, np.float32))
    for layer in range(layers):
        for name, *shape in (
            ("attn_q", heads * 64, d),
            ("attn_k", kv * 64, d),
            ("attn_v", kv * 64, d),
            ("attn_output", d, heads * 64),
            ("ffn_gate", f, d),
            ("ffn_up", f, d),
            ("ffn_down", d, f),
        ):
            matrix(f"blk.{layer}.{name}.weight", *shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(d, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@handlers
def test_loading_holds_little_beside_the_tree(tmp_path: Path) -> None:
    """What numpy holds at most: the tree, which is as large as the file, and a layer's codes."""
    path = tmp_path / "m.gguf"
    write_model(path, 512, 1024, 16, 512)
    jl.load(path)  # imports
    tracemalloc.start()
    jl.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.25 * path.stat().st_size


@handlers
@pytest.mark.slow
def test_peak_memory_of_loading_half_a_gigabyte(tmp_path: Path) -> None:
    """<= 1.15 times the file, above what the process holds once jax and jaxllama have started."""
    path = tmp_path / "m.gguf"
    write_model(path, 2048, 8192, 18, 4096)
    assert path.stat().st_size > 500e6
    program = """
        import sys
        import jax
        from jaxllama import loading
        from pallas_kernels.cpu import unavailable
        def status(key):
            with open("/proc/self/status") as file:
                line = next(line for line in file if line.startswith(key))
            return int(line.split()[1]) * 1024
        jax.block_until_ready(jax.numpy.ones(8) + 1)
        assert unavailable() is None
        before = status("VmRSS")
        lm = loading.load(sys.argv[1])
        print(status("VmHWM") - before, int(lm.params["layer_3"]["mlp"]["down"]["weight"].ndim))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    grown, ndim = map(int, result.stdout.split())
    assert ndim == 2 and grown <= 1.15 * path.stat().st_size


# --- the first token -----------------------------------------------------------------------------


def test_a_start_and_a_cpus_first_call_import_nothing_that_they_do_not_need() -> None:
    """Pallas Mosaic GPU would be a tenth of the CPU time of a process's first text."""
    program = """
        import sys
        import jaxllama.loading
        print(sorted(sys.modules))
        import jax, jax.numpy as jnp
        import jaxllama as jl
        from jaxllama.model.layout import handles, lay_out
        from tests.helpers.models import LLAMA
        cfg = LLAMA.replace(n_layers=1, layer_types=("attention",), head_dim=64)
        params = lay_out(jl.quantize_params(jl.init_params(cfg, jax.random.key(0)), "w8a16"))
        cache = jl.init_cache(cfg, 1, 8)
        prompt = jnp.ones((1, 5), jnp.int32), jnp.array([5], jnp.int32)
        jax.eval_shape(lambda *prompt: jl.prefill(cfg, params, *prompt, cache), *prompt)
        jl.decode_step.trace(cfg, params, prompt[1], cache)
        print(handles(jnp.float32), "jax.experimental.mosaic" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    start, call = result.stdout.splitlines()
    ours = ("jaxllama.offload", "jaxllama.quantization.quantize", "jaxllama.model.flax_state")
    for name in ("flax", "optax", "llvmlite", "gguf", "jax.extend", *ours):
        assert f"'{name}'" not in start
    assert call.split() == [str(handles(jnp.float32)), "False"]


def test_layers_that_are_alike_are_traced_once(monkeypatch) -> None:
    cfg = LLAMA.replace(n_layers=4, layer_types=("attention",) * 4, d_ff=160)
    params, traced, half = jax.device_put(seeded_params(cfg)), [], decoder._block
    once = jax.jit(lambda *args: traced.append(1) or half(*args), static_argnums=(0, 1))
    monkeypatch.setattr(decoder, "_block_once", once)
    cache = init_cache(cfg, 1, 16)
    tokens = jnp.ones((1, 5), jnp.int32)
    step = lambda p, t, n, c: prefill.__wrapped__(cfg, p, t, n, c)  # noqa: E731
    jax.eval_shape(step, params, tokens, as_jax([5]), cache)
    assert 1 <= len(traced) <= 2  # the first layer's stream has nothing pending
    # Who asks which implementation each op gets is told of every layer.
    norms = [c for c in choices(step, params, tokens, as_jax([5]), cache) if c.op == "rms_norm"]
    assert len(norms) == 2 * 4 + 1


def test_the_first_token_waits_for_no_loop(monkeypatch) -> None:
    cfg = LLAMA
    lm = jl.LanguageModel(cfg, jax.device_put(seeded_params(cfg)), jl.Tokenizer.byte_level())
    [want] = lm.generate([[5, 6, 7]], 4)

    def never(*_):
        raise AssertionError("the loop ran")

    monkeypatch.setattr(ResidentDecoding, "advance", never)
    [got] = lm.generate([[5, 6, 7]], 1)
    assert got.tokens == want.tokens[:1]


# --- first impressions ---------------------------------------------------------------------------


def test_the_demo_has_sampling_of_its_own(tmp_path: Path) -> None:
    own = jl.Sampling(**preset_sampling("smollm2-135m"))
    assert own.temperature > 0 and own.has_penalties
    assert preset_sampling("llama-3.2-1b") == {}
    path = tmp_path / "tiny.gguf"
    Tiny(vocab=264, type=Type.Q4_0, tokenizer="llama").write(path)
    assert jl.load(path).sampling is None  # a file of somebody's


def test_loops_are_counted_by_four_tokens() -> None:
    assert most_repeated([1, 2, 3]) == 0
    assert most_repeated([1, 2, 3, 4, 5]) == 1
    assert most_repeated([1, 2, 3, 4] * 6) == 6
    prompts = read_prompts()
    assert len(set(prompts)) == len(prompts) == 40 and all(prompts)


# One way to quantize at load

ROUNDED = LLAMA.replace(d_model=64, head_dim=16, d_ff=128, vocab_size=96, tie_embeddings=True)
MIXTURE = ROUNDED.replace(
    experts=ExpertsConfig(4, 2, 128), stored=CheckpointForm(family="mixtral"), tie_embeddings=False
)
EVERY_SCHEME = [
    "w4a8-g32,down=w4a16-g32,head=w4a16-g32",
    *slow(
        "w4a16-g32,embed=w8a16",
        *(name for name in SCHEMES if name != "fp8-static"),
        "w8a16-g32-zero",
        "w4a16-g32-sym",
        "w4a8-fp8-g32",
        "w8a8,down=w4a16,head=none",
        "none,layer_1/*=w4a16-g32",
    ),
]


def weights_of(params) -> dict[tuple[str, ...], np.ndarray]:
    """All leaves as floats, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed)
    return {
        tuple(key.key for key in path): np.asarray(
            dequantize(leaf) if isinstance(leaf, QTensor) else leaf, np.float32
        )
        for path, leaf in leaves
    }


def check_one_way(folder, scheme, monkeypatch, meshes=("data=1,model=1",)):
    """load(quantize) has the weights of quantize_params, on a mesh and under a policy too."""
    lm = jl.load(folder, jnp.float32, scheme, exact=True)
    want = weights_of(lm.params)
    floats = jl.load(folder, jnp.float32).params
    found = {"quantize_params": weights_of(quantize_params(floats, scheme, cfg=lm.config))}
    for mesh in meshes:
        divided = jl.load(folder, jnp.float32, scheme, mesh=mesh)
        found[mesh] = weights_of(divided.executor.whole(lm.config, divided.params))
    stored, store = {}, Placement._store

    def recorded(self, path, leaf):
        stored[path] = leaf
        return store(self, path, leaf)

    monkeypatch.setattr(Placement, "_store", recorded)
    jl.load(folder, jnp.float32, scheme, exact=True, policy="100 0 100 0 100 0")
    found["policy"] = {
        path: own for path, leaf in stored.items() for own in weights_of({"": leaf}).values()
    }
    for name, got in found.items():
        assert set(got) == set(want), name
        for path, values in want.items():
            np.testing.assert_array_equal(got[path], values, f"{name}: {path}")


@pytest.mark.parametrize("scheme", EVERY_SCHEME)
def test_a_scheme_gives_the_same_weights_on_a_mesh_and_under_a_policy(
    scheme, tmp_path, monkeypatch
):
    monkeypatch.setenv("JAXLLAMA_OFFLOAD_DIR", str(tmp_path))
    save(tmp_path / "model", ROUNDED, seeded_params(ROUNDED))
    check_one_way(tmp_path / "model", scheme, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [MIXTURE, FAMILIES["hybrid"], HYBRIDS["qwen3.5"]])
def test_every_kind_of_layer_is_rounded_in_one_way(cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLAMA_OFFLOAD_DIR", str(tmp_path))
    save(tmp_path / "model", cfg, seeded_params(cfg))
    check_one_way(
        tmp_path / "model", "w4a16-g32,down=w8a16,o=w8a16,qkv=w8a16,qkvz=w8a16", monkeypatch
    )


@pytest.mark.slow
def test_a_divided_model_has_the_weights_of_one_device(tmp_path):
    save(tmp_path / "model", ROUNDED, seeded_params(ROUNDED))
    program = f"""
        from _pytest.monkeypatch import MonkeyPatch
        from tests.test_loading import check_one_way
        for scheme in ("w4a16-g32", "w4a8-g32", "fp8-block", "w8a8"):
            with MonkeyPatch.context() as patch:
                check_one_way({str(tmp_path / "model")!r}, scheme, patch, ["data=1,model=2"])
    """
    code = textwrap.dedent(program)
    own = environment(2) | {"JAXLLAMA_OFFLOAD_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, env=own
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": [1, 2, 3]}, r"policy = \[1, 2, 3\]: expected a Policy, or its text"),
        ({"mesh": [1, 2]}, r"mesh = \[1, 2\]: expected text such as 'data=1,model=4'"),
        ({"quantize": 8}, "quantize = 8: expected text, such as 'w8a8'"),
        ({"quantize": "w4a17"}, "w4a17' is not one of .* as in w4a16-sym"),
        ({"adapters": ["a"]}, r"adapters = \['a'\]: expected a mapping of names to paths"),
    ],
)
def test_arguments_of_another_type_are_named(options, said):
    with pytest.raises(jl.JaxLlamaError, match=said):
        jl.load("gla-340m", random=True, **options)


@pytest.mark.parametrize("where", ["the host's memory", "the device's memory"])
def test_memory_is_asked_before_weights_are_drawn(where, monkeypatch):
    def drawn(*_, **__):
        raise AssertionError("weights were drawn")

    stats = {"bytes_limit": 3 * 10**9, "bytes_in_use": 10**9} if where[4] == "d" else None
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(random_params.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(random_params, "available_memory", lambda: 2 * 10**9)
    monkeypatch.setattr(random_params, "random_params", drawn)
    with pytest.raises(jl.JaxLlamaError, match=r"llama-3.1-8b: .* 32.1 GB, and 2.0 GB of memory"):
        jl.load("llama-3.1-8b", random=True)
    with pytest.raises(jl.JaxLlamaError, match="weights need 6.1 GB, and 2.0 GB"):
        jl.load("llama-3.1-8b", quantize="w4a16", random=True)
