"""The Flax modules: composed by a user, and to the bit what the pure functions compute."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.config import ExpertsConfig, LatentConfig, RopeConfig
from jaxllama.model import linear
from jaxllama.model.declare import Declared
from jaxllama.model.decoder import embed_tokens, forward, logits
from jaxllama.model.linear import Stream
from jaxllama.model.mixers import MIXERS
from jaxllama.model.param import tensor
from jaxllama.model.records import whole_rows
from jaxllama.model.shardings import specs
from jaxllama.model.stacked import runs
from jaxllama.modules import (
    Attention,
    Decoder,
    DecoderLayer,
    GatedDeltaNet,
    GatedLinearAttention,
    LatentAttention,
    LayerNorm,
    MixtureOfExperts,
    RMSNorm,
    ShortConvolution,
    SwiGLU,
    stack_layers,
    unstack_layers,
)
from pallas_kernels.operands import Columns
from pallas_kernels.qtensor import QTensor
from tests.helpers.arrays import as_jax
from tests.helpers.compiling import results_of
from tests.helpers.models import DELTA, FAMILIES, GLA, LLAMA, params_of, relative_error, tokens_of

KINDS = ("gla", "attention", "delta", "short_conv", "latent")
CFG = LLAMA.replace(
    n_layers=len(KINDS),
    n_kv_heads=4,
    layer_types=KINDS,
    gla=GLA,
    delta=DELTA,
    latent=LatentConfig(kv_rank=12, d_nope=6, d_rope=2, d_v=6, q_rank=10),
    rope=RopeConfig(theta=10000.0, rotary_dim=2),
    mixers={"short_conv": {"width": 48}},
)
MIXER_MODULES = {
    "attention": Attention,
    "gla": GatedLinearAttention,
    "delta": GatedDeltaNet,
    "short_conv": ShortConvolution,
    "latent": LatentAttention,
}
ROWS, WIDTH = 2, 7
LENGTHS = as_jax([7, 4], jnp.int32)


def activations(width: int = CFG.d_model, seed: int = 0) -> jax.Array:
    drawn = np.random.default_rng(seed).standard_normal((ROWS, WIDTH, width))
    return as_jax(drawn, jnp.float32)


def assert_same(got, want) -> None:
    """Two trees of arrays are equal to the bit."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


class UserModel(nn.Module):
    """A user's model: their own layers around each of ours."""

    @nn.compact
    def __call__(self, x, lengths=None):
        x = nn.Dense(CFG.d_model, name="widen")(x)
        for kind, mixer in MIXER_MODULES.items():
            y, _ = mixer(CFG, name=kind)(RMSNorm(CFG, name=f"{kind}_norm")(x), lengths=lengths)
            x = x + y
        x = x + SwiGLU(CFG, name="mlp")(LayerNorm(CFG, name="mlp_norm")(x))
        x, _ = nn.remat(DecoderLayer)(CFG, 1, name="layer")(x, lengths=lengths)
        return nn.Dense(3, name="answer")(x)


def drawn(shapes):
    """Values for a tree of shapes, drawn by numpy, because an initializer compiles a program."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: 0.3 * rng.standard_normal(s.shape, np.float32), shapes)


@functools.cache
def user_model():
    """(input, boxed shapes of the variables)."""
    x = activations(5)
    return x, jax.eval_shape(UserModel().init, jax.random.key(0), x)


def test_a_users_model_inits_with_the_tables_shapes_and_axes():
    _, variables = user_model()
    params = nn.unbox(variables)["params"]
    assert set(params) == {
        "widen",
        "answer",
        "layer",
        "mlp",
        "mlp_norm",
        *KINDS,
        *(f"{kind}_norm" for kind in KINDS),
    }
    table = jax.eval_shape(functools.partial(jl.init_params, CFG), jax.random.key(0))
    for index, kind in enumerate(KINDS):
        assert jax.tree.map(jnp.shape, params[kind]) == jax.tree.map(
            jnp.shape, table[f"layer_{index}"]["mixer"]
        )
    assert jax.tree.map(jnp.shape, params["layer"]) == jax.tree.map(jnp.shape, table["layer_1"])
    axes = nn.get_partition_spec(variables)["params"]
    assert axes["attention"]["qkv"]["weight"] == jax.P("model", None)
    assert axes["layer"]["mlp"]["down"]["weight"] == jax.P(None, "model")
    assert axes["gla"]["gk_1"]["bias"] == jax.P("model")
    assert axes["mlp_norm"]["weight"] == jax.P(None)


def test_tabulate_names_every_module_and_counts_every_parameter():
    x, variables = user_model()
    said = UserModel().tabulate(jax.random.key(0), x, console_kwargs={"width": 200})
    count = sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert f"Total Parameters: {count:,}" in said
    for module in (*MIXER_MODULES.values(), DecoderLayer, SwiGLU, RMSNorm, LayerNorm):
        assert f" {module.__name__} " in said, module
    assert "layer/mixer/qkv" in said and "[2,7,32]" in said


def test_the_gradient_with_remat_is_the_gradient():
    """XLA may fuse the two programs differently: 1e-5 of the largest value and not the bit."""

    class Small(nn.Module):
        remat: bool

        @nn.compact
        def __call__(self, x, lengths):
            layer = nn.remat(DecoderLayer) if self.remat else DecoderLayer
            x, _ = layer(CFG, 1, name="layer")(nn.Dense(CFG.d_model)(x), lengths=lengths)
            return x

    x = activations(5)
    params = jax.jit(Small(False).init)(jax.random.key(0), x, LENGTHS)
    layer = nn.unbox(params)["params"]["layer"]
    np.testing.assert_array_equal(layer["mlp_norm"]["weight"], 1.0)
    assert 0.015 < np.std(np.asarray(layer["mixer"]["qkv"]["weight"])) < 0.025

    def loss(params, remat):
        return jnp.mean(Small(remat).apply(params, x, LENGTHS) ** 2)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    want, got = gradient(params, False), gradient(params, True)
    worst = jax.tree.map(relative_error, got, want)
    assert max(jax.tree.leaves(worst)) < 1e-5
    assert "remat" in str(jax.make_jaxpr(loss, static_argnums=1)(params, True))
    assert "remat" not in str(jax.make_jaxpr(loss, static_argnums=1)(params, False))


def test_padding_reaches_no_valid_token():
    x, variables = user_model()
    run, params = jax.jit(UserModel().apply), drawn(nn.unbox(variables))
    spoiled = np.array(x)
    spoiled[1, 4:] = 1e3
    got, other = (np.asarray(run(params, one, LENGTHS)) for one in (x, spoiled))
    np.testing.assert_array_equal(got[1, :4], other[1, :4])
    assert (got[0] == other[0]).all() and np.abs(got[1, 4:] - other[1, 4:]).max() > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixer_is_its_pure_functions(kind):
    """By itself, in a config that has no layer of its kind."""
    cfg = CFG.replace(n_layers=1, layer_types=("attention" if kind == "gla" else "gla",))
    params = params_of(CFG)[f"layer_{KINDS.index(kind)}"]["mixer"]
    module, x = MIXER_MODULES[kind](cfg), activations()
    got, state = jax.jit(module.apply)({"params": params}, x)
    own, mixer = module.layer(), MIXERS[kind].mix

    @jax.jit
    def pure(params, x):
        read = mixer.inputs(own, params)
        if kind == "attention":
            projected = linear.linear(x, read)
        else:
            projected = [Columns.whole(linear.linear(x, weight)) for weight in read]
        heads, _ = mixer.mix(own, params, projected, None, whole_rows(own, ROWS, WIDTH))
        return linear.linear(heads, params["o"])

    assert state is None and np.abs(got).max() > 0.1
    assert_same(got, pure(params, x))


def test_a_layers_window_and_positions_are_its_own():
    cfg = LLAMA.replace(sliding_window=3, window_layers=(1,), nope_layers=(0,))
    params, x = params_of(cfg)["layer_0"]["mixer"], activations()
    of = [jax.jit(Attention(cfg, index).apply)({"params": params}, x)[0] for index in range(2)]
    assert np.abs(of[0] - of[1]).max() > 1e-3
    assert Attention(cfg).layer().window is None
    assert Attention(cfg, 1).layer().window == 3


@pytest.mark.core
def test_layers_one_by_one_are_the_decoder_to_the_bit():
    """A ragged prompt and then a step, with the states that the layers make."""
    params, tokens = params_of(CFG), tokens_of(CFG, ROWS, WIDTH + 1)
    layers = [DecoderLayer(CFG, index) for index in range(CFG.n_layers)]

    @jax.jit
    def by_hand(params, tokens, lengths, start, states):
        x, new = embed_tokens(CFG, params, tokens, jnp.float32), []
        for index, layer in enumerate(layers):
            own = {"params": params[f"layer_{index}"]}
            x, state = layer.apply(own, x, states[index], lengths, start)
            new.append(state)
        return x, tuple(new)

    run = jax.jit(forward, static_argnums=0)
    cache = jl.init_cache(CFG, ROWS, 16)
    states = tuple(layer.init_state(ROWS, 16) for layer in layers)
    assert_same(states, cache.layers)
    start = jnp.zeros(ROWS, jnp.int32)
    for new, lengths in ((tokens[:, :WIDTH], LENGTHS), (tokens[:, WIDTH:], jnp.ones_like(start))):
        hidden, cache = run(CFG, params, new, lengths, cache)
        x, states = by_hand(params, new, lengths, start, states)
        is_new = np.arange(new.shape[1])[None, :] < np.asarray(lengths)[:, None]
        assert_same(np.asarray(x)[is_new], np.asarray(hidden.x)[is_new])
        assert_same(states, cache.layers)
        start = start + lengths
    with pytest.raises(ValueError, match="a state and start"):
        layers[0].apply({"params": params["layer_0"]}, x, states[0])


EXPERTS = ExpertsConfig(n_experts=4, n_active=2, d_ff=16)
GLA_MODULE, INPUT = GatedLinearAttention(CFG, 1), np.zeros((2, 5, CFG.d_model), np.float32)
REFUSED = [
    (RMSNorm(CFG), (INPUT[..., 1:],), r"x\[2, 5, 31\]: expected \[..., D\] with D = 32"),
    (LayerNorm(CFG), (INPUT.astype(int),), "x: int32: expected floats"),
    (SwiGLU(CFG), (INPUT[..., 1:],), r"x\[2, 5, 31\]: expected"),
    (MixtureOfExperts(CFG), (INPUT,), "experts = None: is needed by MixtureOfExperts"),
    (MixtureOfExperts(CFG.replace(experts=EXPERTS)), (INPUT[..., 1:],), r"x\[2, 5, 31\]: expected"),
    (GLA_MODULE, (INPUT[0],), r"x\[5, 32\]: expected \[B, T, D\] with D = 32"),
    (GLA_MODULE, (INPUT, None, np.ones(2)), "lengths: float32: expected integers"),
    (GLA_MODULE, (INPUT, None, np.ones(3, int)), r"lengths\[3\]: expected 2, one for each row"),
    (GLA_MODULE, (INPUT, 0, None, np.ones(1, int)), r"start\[1\]: expected 2, one for each row"),
    (GatedLinearAttention(LLAMA), (INPUT,), "gla = None: is needed by layers of type 'gla'"),
    (GatedDeltaNet(LLAMA), (INPUT,), "delta = None: is needed by layers of type 'delta'"),
    (DecoderLayer(CFG, 5), (INPUT,), "index = 5: .* has layers 0 to 4"),
    (DecoderLayer(CFG, -1), (INPUT,), "index = -1: .* has layers 0 to 4"),
    (DecoderLayer(CFG), (INPUT[..., 1:],), r"x\[2, 5, 31\]: expected \[B, T, D\]"),
    (Decoder(CFG), (np.ones((2, 5)),), "tokens: float32: expected integers"),
    (Decoder(CFG), (np.ones((2, 5), int), np.ones(3, int)), r"lengths\[3\]: expected 2"),
]


@pytest.mark.parametrize(("module", "arguments", "message"), REFUSED)
def test_a_module_names_the_operand_or_option_that_does_not_fit(module, arguments, message):
    with pytest.raises(jl.JaxLlamaError, match=message):
        jax.eval_shape(module.init, jax.random.key(0), *arguments)


def test_a_feed_forward_is_dense_or_a_mixture_by_its_class():
    """The config's first layer may be another kind of layer."""

    def shapes(module):
        x = jnp.zeros((2, 5, CFG.d_model))
        params = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
        assert jax.eval_shape(module.apply, params, x).shape == x.shape
        return module.layer(), jax.tree.map(jnp.shape, params)

    dense = shapes(SwiGLU(CFG))
    assert dense == shapes(SwiGLU(CFG.replace(experts=EXPERTS)))
    assert dense == shapes(SwiGLU(CFG.replace(bare_layers=(0,))))
    sparse = shapes(MixtureOfExperts(CFG.replace(experts=EXPERTS)))
    later = CFG.replace(experts=EXPERTS, expert_layers=(1,))
    assert sparse == shapes(MixtureOfExperts(later))
    assert sparse[1]["params"]["experts_down"]["weight"] == (4, 32, 16)


def test_parameters_are_drawn_around_their_means():
    for mean, std in ((2.0, 0.5), (1.0, 0.0)):
        param = tensor("a_log", 4096, mean=mean, std=std)
        drawn = np.asarray(Declared(param, (None,)).init(jax.random.key(0)).value)
        np.testing.assert_allclose([drawn.mean(), drawn.std()], [mean, std], atol=0.03)


def test_the_decoder_is_forward_and_its_init_is_init_params():
    cfg, tokens = FAMILIES["hybrid"], tokens_of(FAMILIES["hybrid"], ROWS, WIDTH)
    model = Decoder(cfg)

    def both(module, tokens, lengths):  # both methods on one instance
        hidden, _ = module(tokens, lengths)
        return hidden, module.logits(hidden)

    @jax.jit
    def init(key):
        return model.init(key, tokens, LENGTHS, method=both)

    params = nn.unbox(init(jax.random.key(0)))["params"]
    assert_same(params, jl.init_params(cfg, jax.random.key(0)))
    # The values of a seed do not change with the modules' classes.
    first = jl.init_params(LLAMA, jax.random.key(0))["layer_1"]["mixer"]["qkv"]["weight"][0, :3]
    np.testing.assert_allclose(first, [-0.00810016, -0.02287127, -0.00784928], rtol=1e-5)
    run = functools.partial(model.apply, method=both)
    hidden, scores = jax.jit(run)({"params": params}, tokens, LENGTHS)

    @jax.jit
    def pure(params):
        hidden, _ = forward(cfg, params, tokens, LENGTHS)
        return hidden, logits(cfg, params, hidden)

    assert_same((hidden, scores), pure(params))


def test_quantized_parameters_are_taken_as_they_are():
    """linen's check of shapes knows no QTensor; boxed or not, and with the head that quantizing a
    tied model adds."""
    cfg = FAMILIES["mha-tied-bias"].first_layers(1)
    params = jl.quantize_params(params_of(cfg), "w8a8,head=w8a8")
    tokens = tokens_of(cfg, ROWS, WIDTH)
    assert isinstance(params["head"]["weight"], QTensor)
    assert isinstance(params["layer_0"]["mlp"]["down"]["weight"], QTensor)
    model = Decoder(cfg)
    want, _ = jax.jit(forward, static_argnums=0)(cfg, params, tokens, LENGTHS)
    got, _ = jax.jit(model.apply)({"params": params}, tokens, LENGTHS)
    assert_same(got, want)
    scores = model.apply({"params": params}, got, method="logits")
    assert_same(scores, logits(cfg, params, got))
    x = activations()
    mixer = params["layer_0"]["mixer"]
    boxed = jax.tree.map(
        lambda leaf: nn.Partitioned(leaf, (None,)), mixer, is_leaf=lambda x: isinstance(x, QTensor)
    )
    run = jax.jit(Attention(cfg).apply)
    assert_same(run({"params": boxed}, x), run({"params": mixer}, x))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_axes_are_those_of_sharded_parameters(name):
    cfg, tokens = FAMILIES[name], jnp.zeros((1, 4), jnp.int32)
    shapes = jax.eval_shape(Decoder(cfg).init, jax.random.key(0), tokens)
    found = nn.get_partition_spec(shapes)["params"]
    want = specs(nn.unbox(shapes)["params"])

    def same(a, b):
        assert [*a] == [*b] + [None] * (len(a) - len(b)), (a, b)

    jax.tree.map(same, found, want, is_leaf=lambda x: isinstance(x, jax.P))


@pytest.mark.slow
def test_a_mesh_takes_the_model_by_its_metadata():
    """Eight devices in a process of its own: each has its share, and XLA partitions the layers."""
    for said in results_of("modules_child"):
        assert said["error"] < 1e-5 and said["size"] > 0.1
        assert said["parts"] == [1, 8]


# Layers that are alike


PATTERN = FAMILIES["hybrid"].replace(n_layers=5, layer_types=("gla", "attention") * 2 + ("gla",))


@pytest.mark.parametrize(
    ("cfg", "names"),
    [
        (LLAMA.replace(n_layers=80), ["layers_0_80_1"]),
        (LLAMA.replace(n_layers=1), ["layer_0"]),
        (PATTERN, ["layers_0_4_2", "layers_1_4_2", "layer_4"]),
        (
            LLAMA.replace(n_layers=8, sliding_window=4, window_layers=(0, 1, 3, 4, 6, 7)),
            ["layers_0_6_3", "layers_1_6_3", "layers_2_6_3", "layers_6_8_1"],
        ),
        (
            FAMILIES["hybrid"].replace(n_layers=6, layer_types=("attention", *("gla",) * 5)),
            ["layer_0", "layers_1_6_1"],
        ),
        (CFG, [f"layer_{index}" for index in range(5)]),
    ],
)
def test_as_few_layers_as_possible_are_compiled(cfg, names):
    found = [name for run in runs(cfg) for name in run.names]
    assert found == names
    tokens = jnp.zeros((1, 4), jnp.int32)
    shapes = jax.eval_shape(Decoder(cfg, scan=True).init, jax.random.key(0), tokens)
    stacked = nn.unbox(shapes)["params"]
    assert {*stacked} == {*names, "embed", "norm", "head"}
    per_layer = jax.eval_shape(functools.partial(jl.init_params, cfg), jax.random.key(0))
    want = jax.eval_shape(functools.partial(stack_layers, cfg), per_layer)
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, want)


@pytest.mark.core
def test_stacking_and_back_is_the_same_tree():
    """For floats, for moments inside another tree, and for quantized weights."""
    params = params_of(PATTERN)
    tree = {"params": params, "moments": (jax.tree.map(lambda x: -x, params), jnp.int32(3))}
    stacked = stack_layers(PATTERN, tree)
    assert stacked["moments"][0]["layers_1_4_2"]["mixer"]["qkv"]["weight"].shape == (2, 64, 32)
    back = unstack_layers(stacked)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert_same(back, tree)
    small = jl.quantize_params(params, "w8a16")
    copies = jax.tree.map(jnp.copy, small)
    layer = jax.tree.leaves(copies["layer_0"])
    released = stack_layers(PATTERN, copies, release=True)
    jax.tree.map(np.testing.assert_array_equal, released, stack_layers(PATTERN, small))
    assert all(leaf.is_deleted() for leaf in layer)
    back = unstack_layers(stack_layers(PATTERN, small))
    assert jax.tree.structure(back) == jax.tree.structure(small)
    assert_same(back, small)
    with pytest.raises(
        jl.JaxLlamaError, match="layer_3: its parameters are not stored as layer_1's"
    ):
        stack_layers(PATTERN, {**params, "layer_3": small["layer_3"]})
    with pytest.raises(jl.JaxLlamaError, match=r"layers_0_8_2: an array \[.*\] is not of 4 layers"):
        unstack_layers({"layers_0_8_2": stacked["params"]["layers_1_4_2"]})
    with pytest.raises(jl.JaxLlamaError, match="layer_4: the tree has this layer, and the config"):
        stack_layers(PATTERN.first_layers(4), params)
    with pytest.raises(jl.JaxLlamaError, match="layer_2: the config has this layer, and the tree"):
        stack_layers(PATTERN, {name: node for name, node in params.items() if name != "layer_2"})


@pytest.mark.slow
def test_a_loops_numbers_and_gradients_are_those_of_the_layers():
    """A loop's body is a program of its own, whose sums XLA may order differently: 1e-5 of the
    largest value for float32."""
    params, tokens = params_of(PATTERN), tokens_of(PATTERN, ROWS, WIDTH)
    stacked = stack_layers(PATTERN, params)

    def loss(model, params):
        hidden, _ = model.apply({"params": params}, tokens, LENGTHS)
        return jnp.mean(hidden.x[1, :4] ** 2), hidden

    gradient = jax.jit(jax.value_and_grad(loss, argnums=1, has_aux=True), static_argnums=0)
    (value, hidden), want = gradient(Decoder(PATTERN), params)
    learned = [name for name in want if name not in ("norm", "head")]  # the loss reads no logits
    (got, x), grads = gradient(Decoder(PATTERN, scan=True, remat=True), stacked)
    assert relative_error(got, value) < 1e-6
    assert relative_error(x.x, hidden.x) < 1e-5
    grads = unstack_layers(grads)
    worst = {name: jax.tree.map(relative_error, grads[name], want[name]) for name in learned}
    assert max(jax.tree.leaves(worst)) < 1e-5
    with pytest.raises(ValueError, match="takes whole sequences"):
        cache = jl.init_cache(PATTERN, ROWS, 16)
        Decoder(PATTERN, scan=True).apply({"params": stacked}, tokens, LENGTHS, cache)


def test_a_loop_traces_each_layer_once():
    def products(n_layers, scan):
        cfg = LLAMA.replace(n_layers=n_layers)
        model, tokens = Decoder(cfg, scan=scan, remat=True), jnp.zeros((1, 4), jnp.int32)
        shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens))
        return str(jax.make_jaxpr(model.apply)(shapes, tokens)).count("dot_general")

    assert products(2, True) == products(12, True) > 0
    assert products(12, False) == 6 * products(2, False)


def test_flaxs_own_scan_takes_a_layer():
    """``nn.scan`` over ``DecoderLayer``, with remat, on the stacked tree of ``Decoder``."""
    cfg = LLAMA.replace(n_layers=3)
    stacked = stack_layers(cfg, params_of(cfg))
    layers = nn.scan(
        nn.remat(DecoderLayer, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=cfg.n_layers,
        metadata_params={nn.PARTITION_NAME: None},
    )(cfg)
    x, tokens = activations(), tokens_of(cfg, ROWS, WIDTH)
    shapes = jax.eval_shape(layers.init, jax.random.key(0), x, None, LENGTHS)
    axes = nn.get_partition_spec(shapes)["params"]
    assert axes["mixer"]["o"]["weight"] == jax.P(None, None, "model")

    @jax.jit
    def both(stacked):
        x = embed_tokens(cfg, stacked, tokens, jnp.float32)
        x, _ = layers.apply({"params": stacked["layers_0_3_1"]}, x, None, LENGTHS)
        return x, Decoder(cfg, scan=True).apply({"params": stacked}, tokens, LENGTHS)[0].x

    assert_same(*both(stacked))


def test_a_stream_of_one_array_is_the_streams_sum():
    x = as_jax([1.0, 2.0], jnp.bfloat16)
    assert_same(Stream(x, x).total, x + x)
