"""LoRA adapters: merged and beside the weights, the same numbers as PEFT and as plain numpy.

Bound: 1e-5 of the largest logit in float32.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxllama as jl
from jaxllama import generation
from jaxllama.checkpoints import peft as adapter_files
from jaxllama.checkpoints.folding import fold_rows, unfold_rows
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.tables import tensor_table as param_table
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.language_model import LanguageModel
from jaxllama.model import linear
from jaxllama.model.linear import Stream
from jaxllama.model.lora import Adapted, attach, chosen, factors, for_rows, with_rows
from jaxllama.model.mixers.gla import mix as gla
from jaxllama.quantization.quantize import quantize_params
from pallas_kernels.qtensor import QTensor, dequantize
from pallas_kernels.rows.swiglu import swiglu
from tests.helpers import lora_cases
from tests.helpers.arrays import as_jax
from tests.helpers.models import FAMILIES, LLAMA, relative_error
from tests.helpers.parity_cases import CASES, params_of, tokens_of
from tests.helpers.seeded import seeded_params

BOUND = 1e-5
ONE_LAYER = LLAMA.replace(n_layers=1, layer_types=())
WEIGHTS = "model.safetensors"
ROWS = [2, 0, 1, 2]


def saved(path: Path, name: str) -> Path:
    """A checkpoint of a tiny model."""
    if name in CASES:
        return hf.save(path, CASES[name], params_of(name))
    return hf.save(path, FAMILIES[name], seeded_params(FAMILIES[name]))


def scores(lm: LanguageModel, rows: list[int] | None = None, n: int = 32) -> np.ndarray:
    """Logits ``[B, n, V]`` of the same tokens in every row; rows: their adapters."""
    batch = 1 if rows is None else len(rows)
    params = lm.params if rows is None else for_rows(lm.params, as_jax(rows, jnp.int32))
    tokens = np.tile(tokens_of("llama-gqa")[:n], (batch, 1))
    lengths = jnp.full((batch,), n, jnp.int32)
    return np.asarray(generation.logits(lm.config, params, as_jax(tokens), lengths))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def two_adapters(cfg: ModelConfig) -> list[adapter_files.Factors]:
    """The second of another rank and for fewer modules."""
    return [lora_cases.factors(cfg, 1), lora_cases.factors(cfg, 2, rank=2, only="[qv]_proj")]


# What is read


@pytest.mark.parametrize(
    "name",
    [
        *(x for x in CASES if "-" not in x),
        "granite-bias",
        "phi3-partial-longrope",
        "cohere-bias",
        "gla",
    ],
)
def test_factors_are_folded_like_the_weights_they_are_added_to(name, tmp_path):
    """Multipliers, the order of RoPE's rows, fused tensors: the tree of a checkpoint to which
    ``scale B A`` was added by numpy, merged while reading and as factors."""
    base = saved(tmp_path / "base", name)
    cfg, plain = hf.load(base)
    checkpoint = load_file(base / WEIGHTS)
    raw = lora_cases.tensors(cfg, 1)
    path = lora_cases.write(tmp_path / "adapter", raw, r=4, lora_alpha=3, use_rslora=True)
    save_file(lora_cases.merged(cfg, checkpoint, raw, 3 / 2), tmp_path / "base" / WEIGHTS)
    _, want = hf.load(base)
    save_file(checkpoint, base / WEIGHTS)
    read = adapter_files.read(path, cfg)
    _, merged = hf.load(base, added=read)
    adapted = attach(param_table(cfg), plain, [{}, read])
    for index, layer in enumerate(f"layer_{i}" for i in range(cfg.n_layers)):
        for room, name in (
            ("mixer", "qkv"),
            ("mixer", "qkvz"),
            ("mixer", "q"),
            ("mixer", "o"),
            ("mlp", "gate_up"),
        ):
            if (product := want[layer].get(room, {}).get(name)) is None:
                continue
            if name == "qkvz" and cfg.stored.family == "lara_mini":  # rows of a tensor take none
                assert "lora" not in adapted[layer][room][name]
                continue
            lora = adapted[layer][room][name]["lora"]
            assert not np.any(lora.added(0))
            beside = plain[layer][room][name]["weight"] + lora.added(1)
            for got in (merged[layer][room][name]["weight"], beside):
                np.testing.assert_allclose(got, product["weight"], rtol=0, atol=2e-6)
            assert relative_error(beside, plain[layer][room][name]["weight"]) > 0.1, index


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "cohere"])
def test_the_rows_of_a_factor_go_there_and_back(name):
    """In the order of RoPE's rows, and of a matrix that the file has transposed."""
    for param in param_table(CASES[name]).values():
        for source in param.sources:
            if len(source.shape) == 2:
                b = np.arange(2.0 * source.n_rows).reshape(-1, 2)
                np.testing.assert_allclose(unfold_rows(source, fold_rows(source, b)), b)


@pytest.mark.core
def test_merging_leaves_what_has_no_factors_alone(tmp_path):
    base = saved(tmp_path / "base", "llama-gqa")
    raw = lora_cases.tensors(CASES["llama-gqa"], 1, only="layers.1.*q_proj")
    path = lora_cases.write(tmp_path / "adapter", raw)
    plain = jl.load(base)
    lm = jl.load(base, adapters={"one": path}, merge=True)
    assert lm.adapters == ()
    changed = jax.tree.map(
        lambda a, b: not same(np.asarray(a), np.asarray(b)), lm.params, plain.params
    )
    assert changed["layer_1"]["mixer"]["qkv"]["weight"] and sum(jax.tree.leaves(changed)) == 1


# PEFT asks transformers for a name that is going away.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "llama-gqa", "qwen3", "cohere"])
def test_peft_s_own_files_and_merged_weights(name, tmp_path):
    """With a rank and an alpha of their own for some modules."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    base = saved(tmp_path / "base", name)
    torch.manual_seed(0)
    options = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=name == "qwen3",
        target_modules="all-linear",
        rank_pattern={"down_proj": 3, "layers.1.self_attn.o_proj": 2},
        alpha_pattern={"o_proj": 5},
        init_lora_weights=False,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, options)
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = torch.from_numpy(tokens_of("llama-gqa")[None, :32].astype(np.int64))
    with torch.no_grad():
        want = adapted.merge_and_unload()(tokens).logits.numpy()
    adapters = {"it": tmp_path / "adapter"}
    assert relative_error(scores(jl.load(base, adapters=adapters, merge=True)), want) <= BOUND
    lm = jl.load(base, adapters=adapters)
    assert relative_error(scores(lm, [1]), want) <= BOUND < 0.01 < relative_error(scores(lm), want)
    assert same(np.asarray(lm.logits(tokens, [32], adapter="it")), scores(lm, [1]))
    fixed = dataclasses.replace(lm, deterministic=True)
    assert same(np.asarray(fixed.logits(tokens, [32], adapter="it")), scores(fixed, [1]))
    assert relative_error(scores(fixed, [1]), want) <= BOUND
    with pytest.raises(jl.JaxLlamaError, match="adapter = 'other'"):
        lm.logits(tokens, [32], adapter="other")


def test_a_multimodal_model_s_text_adapter_is_the_decoder_s(tmp_path):
    cfg = CASES["gemma3_text"]
    raw = lora_cases.tensors(cfg, 1, only="q_proj")
    path = lora_cases.write(tmp_path / "plain", raw)
    inner = {name.replace("model.layers", "model.language_model.layers"): raw[name] for name in raw}
    other = lora_cases.write(tmp_path / "multimodal", inner)
    want, got = adapter_files.read(path, cfg), adapter_files.read(other, cfg)
    assert got.keys() == want.keys() and jax.tree.all(jax.tree.map(same, got, want))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA': only 'LORA' is supported"),
        ({"peft_type": None}, "missing key"),
        ({"use_dora": True}, "lora_magnitude_vector is missing"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']: only None"),
        ({"bias": "all"}, "bias = 'all': only 'none' is supported"),
        ({"lora_bias": True}, "lora_bias = True: only False"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True: only False"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa': only True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication = [[0, 2]]: only None"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices = [3]: only None"),
        ({"r": 0}, "r = 0: must be between 1 and 65536"),
        ({"r": "four"}, "r = 'four': expected an integer"),
        ({"lora_alpha": "x"}, "lora_alpha = 'x': expected a finite number"),
        ({"use_rslora": "yes"}, "use_rslora = 'yes': expected true or false"),
        ({"rank_pattern": [3]}, "rank_pattern = [3]: expected an object of module to number"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj = 0: must be between 1"),
        ({"alpha_pattern": {"(q": 3}}, "alpha_pattern.(q: no regular expression"),
        ({"rank_pattern": {"q_proj": 3}}, "but r = 3 and the model want [3, 32] and [32, 3]"),
        ({"lora_alpha": 1e30, "alpha_pattern": {"q_proj": 1e30}}, "numbers that are NaN or"),
    ],
)
def test_configs_that_are_not_two_factors_are_refused_by_name(config, says, tmp_path):
    raw = lora_cases.tensors(LLAMA, 1, only="layers.0.*q_proj")
    raw = {name: value * np.float32(1e10) for name, value in raw.items()}
    path = lora_cases.write(tmp_path, raw, **config)
    with pytest.raises(JaxLlamaError) as error:
        adapter_files.read(path, LLAMA)
    assert says in str(error.value) and str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base_model.model.lm_head.lora_A.weight": (4, 32)}, "no such product in its layers"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 97)}, "only lora_A and"),
        ({"Q.lora_magnitude_vector": (32,)}, "is there, but use_dora is not set"),
        (
            {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": (4, 32)},
            "tiny has no such product",
        ),
        (
            {"base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight": (4, 32)},
            "v_proj: lora_B is missing",
        ),
        ({"Q.lora_A.weight": (4, 31)}, "and [32, 4]; the adapter is for another model"),
        ({"Q.lora_A.weight": (4,)}, "F32[4] is no factor"),
    ],
)
def test_tensors_that_are_no_factors_of_the_model_are_refused_by_name(change, says, tmp_path):
    raw = lora_cases.tensors(LLAMA, 1, only="layers.0.*q_proj")
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    for name, shape in change.items():
        raw[name.replace("Q.", f"{module}.")] = np.zeros(shape, np.float32)
    with pytest.raises(JaxLlamaError) as error:
        adapter_files.read(lora_cases.write(tmp_path, raw), LLAMA)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_missing_damaged_or_newer(tmp_path):
    with pytest.raises(JaxLlamaError, match=r"adapter_config.json: No such file"):
        adapter_files.read(tmp_path, LLAMA)
    lora_cases.write(tmp_path, {})
    with pytest.raises(JaxLlamaError, match="there are no tensors in it"):
        adapter_files.read(tmp_path, LLAMA)
    raw = lora_cases.tensors(LLAMA, 1, only="q_proj")
    lora_cases.write(tmp_path, raw, a_new_idea=2, lora_dropout=0.1, revision="main")
    with pytest.warns(WeightWarning, match=r"adapter_config.json: not part .*: 'a_new_idea'$"):
        adapter_files.read(tmp_path, LLAMA)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(JaxLlamaError, match=r"adapter_config.json: not JSON"):
        adapter_files.read(tmp_path, LLAMA)


# What is computed


@pytest.mark.core
@pytest.mark.parametrize("scheme", [None, "w8a8"])
def test_a_product_adds_each_row_s_own_factors(scheme):
    """The norm's output in floats times both factors, whatever the weight is; rows without an
    adapter have the bits of a product without."""
    params = seeded_params(LLAMA)
    if scheme is not None:
        params = quantize_params(jax.device_put(params), scheme)
    adapted = attach(param_table(LLAMA), params, two_adapters(LLAMA))
    p = chosen(for_rows(adapted, as_jax(ROWS, jnp.int32)))["layer_0"]
    base = params["layer_0"]
    x = as_jax(np.random.default_rng(0).normal(size=(4, 3, 32)), jnp.float32)

    @jax.jit
    def run(p, base, x):
        mlp, plain = p["mlp"], base["mlp"]
        h = linear.norm(Stream(x), p["mlp_norm"], LLAMA)[0]
        y, _ = linear.norm_linear(Stream(x), p["mlp_norm"], mlp["gate_up"], LLAMA)
        gated, _ = linear.norm_linear(
            Stream(x), p["mlp_norm"], mlp["gate_up"], LLAMA, into=mlp["down"]
        )
        added = linear.linear_add(gated, mlp["down"], Stream(x), LLAMA).total
        codes = gated.codes if isinstance(gated, Adapted) else gated
        without = linear.linear(h, plain["gate_up"]), x + linear.linear(codes, plain["down"], "f4")
        return h, y, swiglu(y), added, *without

    h, y, gated, added, plain_y, plain_added = map(np.asarray, run(p, base, x))

    def term(product: str, x: np.ndarray) -> np.ndarray:
        lora, out = adapted["layer_0"]["mlp"][product].get("lora"), []
        for row, number in zip(x.astype(np.float64), ROWS, strict=True):
            added = lora.added(max(number - 1, 0)).astype(np.float64)
            out.append(row @ added.T * (number > 0))
        return np.stack(out)

    want = plain_y + term("gate_up", h)
    assert relative_error(y, want) <= 1e-6 and same(y[1], plain_y[1])
    gate, up = np.split(want, 2, axis=-1)
    assert relative_error(gated, gate / (1 + np.exp(-gate)) * up) <= 1e-6
    assert relative_error(added, plain_added + term("down", gated)) <= 1e-6


def test_several_products_of_one_input_have_their_own():
    """GLA's projections."""
    cfg = FAMILIES["gla"]
    params = seeded_params(cfg)
    adapted = attach(param_table(cfg), params, two_adapters(cfg))
    p = chosen(for_rows(adapted, as_jax(ROWS, jnp.int32)))["layer_0"]
    x = as_jax(np.random.default_rng(0).normal(size=(4, 3, 32)), jnp.float32)
    got, _ = linear.norm_linear(
        Stream(x), p["mixer_norm"], gla.inputs(cfg.layers[0], p["mixer"]), cfg
    )
    h = linear.norm(Stream(x), p["mixer_norm"], cfg)[0]
    for name, columns in zip(gla.widths(cfg.layers[0]), got, strict=True):
        want = linear.linear(h, p["mixer"][name])
        assert same(np.asarray(columns.value), np.asarray(want))
        plain = linear.linear(h, params["layer_0"]["mixer"][name])
        changed = [not same(np.asarray(a), np.asarray(b)) for a, b in zip(want, plain, strict=True)]
        assert changed == [name in "qv", False, name in "qkvg", name in "qv"]


def _in_floats(params):
    return jax.tree.map(
        lambda leaf: dequantize(leaf) if isinstance(leaf, QTensor) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QTensor),
    )


def test_beside_a_quantized_base_it_is_the_dequantized_one_with_the_product_added():
    base = quantize_params(jax.device_put(seeded_params(ONE_LAYER)), "w8a16")
    factors = two_adapters(ONE_LAYER)
    params = attach(param_table(ONE_LAYER), base, factors)
    lm = LanguageModel(ONE_LAYER, params, None, adapters=("one", "two"), exact=True)
    floats = jax.device_get(jax.jit(_in_floats)(base))
    got = scores(lm, ROWS)
    for number, adapters in ((0, []), (1, factors[:1]), (2, factors[1:])):
        tree = attach(param_table(ONE_LAYER), floats, adapters) if adapters else floats
        for room in ("mixer", "mlp"):
            for product in tree["layer_0"][room].values():
                lora = product.pop("lora", None)
                if lora is not None:
                    added = lora.added(0)
                    product["weight"] = product["weight"] + added
        want = scores(LanguageModel(ONE_LAYER, tree, None))[0]
        for row in np.flatnonzero(np.array(ROWS) == number):
            assert relative_error(got[row], want) <= BOUND


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_batch_with_several_adapters_is_each_row_under_its_own(deterministic):
    """Ragged prompts in chunks, then the loop."""
    params = attach(
        param_table(ONE_LAYER), jax.device_put(seeded_params(ONE_LAYER)), two_adapters(ONE_LAYER)
    )
    lm = LanguageModel(ONE_LAYER, params, None, deterministic, adapters=("one", "two"))
    prompts = [tokens_of("llama-gqa")[:n].tolist() for n in (13, 13, 13, 9)]
    names = ["two", None, "one", "two"]
    mixed = lm.generate(prompts, 8, adapter=names, chunk=7)
    assert len({tuple(out.tokens) for out in mixed[:3]}) == 3
    for name in ("one", "two", None):
        if name is None and not deterministic:  # then it is the base model's program
            continue
        alike = lm.generate(prompts, 8, adapter=name, chunk=7)
        for out, alone, own in zip(mixed, alike, names, strict=True):
            assert own != name or out == alone
    if deterministic:
        assert lm.generate(prompts[:1], 8, adapter="two", chunk=7) == mixed[:1]


def test_a_tree_without_rows_is_the_base_model_s_program():
    """And one decode step with rows reads each factor once, without a gather."""
    params = jax.device_put(seeded_params(LLAMA))
    adapted = attach(param_table(LLAMA), params, two_adapters(LLAMA))
    cache, tokens = jl.init_cache(LLAMA, 4, 16), jnp.ones((4,), jnp.int32)

    def text(params) -> str:
        return generation.decode_step.lower(LLAMA, params, tokens, cache).as_text()

    base, rows = text(params), text(for_rows(adapted, as_jax(ROWS, jnp.int32)))
    assert text(adapted) == base
    count = lambda op: rows.count(op) - base.count(op)  # noqa: E731
    # Four products, and of seven tensors that are fused in them second factors of their own.
    assert count("stablehlo.dot_general") == (4 + 7) * LLAMA.n_layers
    assert count("stablehlo.gather") == 0


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ("three", "adapter = 'three': tiny has 'one', 'two'"),
        (["one"], "adapter: 1 entries for 2"),
        (3, "adapter = 3: expected a name, or one a row"),
        ([3, None], "adapter = 3: tiny has"),
    ],
)
def test_an_adapter_that_is_not_there_is_named(adapter, says):
    lm = LanguageModel(LLAMA, {}, None, adapters=("one", "two"))
    with pytest.raises(JaxLlamaError, match=says):
        lm.generate([[1], [2]], 4, adapter=adapter)
    with pytest.raises(JaxLlamaError, match="tiny has none"):
        LanguageModel(LLAMA, {}, None).generate([[1]], 4, adapter="one")


def test_where_an_adapter_cannot_be_is_said_in_one_line(tmp_path):
    base = saved(tmp_path / "base", "llama-gqa")
    raw = lora_cases.tensors(CASES["llama-gqa"], 1, only="q_proj")
    one = {"one": lora_cases.write(tmp_path / "one", raw)}
    for options, says in (
        ({"adapters": one, "mesh": "model=1"}, "adapters beside a mesh: only one, merged"),
        ({"adapters": {**one, "two": one["one"]}, "merge": True}, "merge takes one adapter"),
        ({"merge": True}, "merge takes one adapter, and there are 0"),
        ({"adapters": {"": one["one"]}}, "the name '' is not a text"),
    ):
        with pytest.raises(JaxLlamaError, match=says):
            jl.load(base, **options)
    with pytest.raises(JaxLlamaError, match="these are random"):
        jl.load("llama-3.2-1b", random=True, adapters=one, merge=True)


def test_merged_adapters_go_with_a_mesh_and_a_policy(tmp_path):
    base = saved(tmp_path / "base", "granite")
    raw = lora_cases.tensors(CASES["granite"], 1)
    one = {"one": lora_cases.write(tmp_path / "one", raw)}
    want = jl.load(base, adapters=one, merge=True)
    on_mesh = jl.load(base, adapters=one, merge=True, mesh="model=1")
    offloaded = jl.load(base, adapters=one, merge=True, policy=jl.Policy())
    for path in (("layer_0", "mixer", "qkv"), ("layer_1", "mlp", "down")):
        for lm in (on_mesh, offloaded):
            tree, got = want.params, lm.params
            for key in path:
                tree, got = tree[key], got[key]
            weight = got["weight"].device if lm is offloaded else got["weight"]
            assert same(np.asarray(tree["weight"]), np.asarray(weight))


def test_adapters_lie_on_the_device_beside_weights_that_a_policy_moves(tmp_path):
    base = saved(tmp_path / "base", "llama-gqa")
    raw = lora_cases.tensors(CASES["llama-gqa"], 1, only="q_proj")
    one = {"one": lora_cases.write(tmp_path / "one", raw)}
    want = jl.load(base, adapters=one)
    lm = jl.load(base, adapters=one, policy="0 100 100 0 100 0")
    assert lm.adapters == ("one",) and lm.params["layer_0"]["mixer"]["qkv"]["weight"].moves
    for got, own in zip(factors(lm.params), factors(want.params), strict=True):
        assert all(map(same, jax.tree.leaves(got), jax.tree.leaves(own)))


@pytest.mark.parametrize("scheme", [None, pytest.param("w8a8", marks=pytest.mark.slow)])
def test_magnitudes_scale_a_whole_row_of_the_product(scheme):
    """DoRA's formula in float64, in a fused product of which one tensor has magnitudes; a row
    without the adapter is the base's."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    cfg = FAMILIES["mha-tied-bias"].first_layers(1)
    params = {"layer_0": {"mixer": {"qkv": {"weight": draw(96, 32), "bias": draw(96)}}}}
    params |= {"norm": {"weight": draw(32)}}
    tree = jax.device_put(params)
    tree = tree if scheme is None else quantize_params(tree, scheme)
    name = "model.layers.0.self_attn.{}_proj.weight".format
    adapter = {
        name("k"): (draw(3, 32), draw(32, 3), 1 + draw(32)),
        name("v"): (draw(2, 32), draw(32, 2)),
    }
    adapted = attach(param_table(cfg), tree, [adapter])
    node = with_rows(adapted, jnp.array([1, 0]))["layer_0"]["mixer"]["qkv"]
    x = draw(2, 5, 32)
    got = np.asarray(linear.linear(jnp.asarray(x), node))
    w = params["layer_0"]["mixer"]["qkv"]["weight"].astype(np.float64)
    if scheme is not None:
        w = np.asarray(dequantize(node["weight"]), np.float64)
    bias = params["layer_0"]["mixer"]["qkv"]["bias"]
    whole = w.copy()
    a, b, m = adapter[name("k")]
    whole[32:64] += b.astype(np.float64) @ a
    whole[32:64] *= (m / np.linalg.norm(whole[32:64], axis=1))[:, None]
    a, b = adapter[name("v")]
    whole[64:] += b.astype(np.float64) @ a
    tolerance = 1e-5 if scheme is None else 0.03
    assert relative_error(got[0], x[0] @ whole.T + bias) < tolerance
    assert relative_error(got[1], x[1] @ w.T + bias) < tolerance
