"""Offloaded models give the resident model's tokens, and every policy the same bits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.decoding.sampling import Sampling
from jaxllama.engine.engine import Engine
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.offloaded.executor import SCHEME
from jaxllama.language_model import LanguageModel
from jaxllama.model.cache import init_cache
from jaxllama.model.lora import attach
from jaxllama.offload.policy import Policy, Shares
from jaxllama.offload.store import Store, is_stored
from jaxllama.offload.timeline import Recorder
from jaxllama.placement import Placement
from jaxllama.quantization.quantize import quantize_params
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels.qtensor import packed_bytes, quantize
from tests.helpers import lora_cases
from tests.helpers.cases import slow
from tests.helpers.models import FAMILIES, HYBRIDS, check_same, params_of

# A long prompt in each batch of two or four, so that every batch has the same padded width.
PROMPTS = [[5, 6, 7], list(range(3, 24)), [9, 8, 7, 6, 5], list(range(40, 61))]
NEW = 20  # more than a tail: the snapshot is rewritten once
CONFIGS = FAMILIES | HYBRIDS
DELTA = ("delta", "kda", *HYBRIDS)
WIDE = FAMILIES["gqa"].replace(d_model=64, head_dim=16, d_ff=128)  # groups of 64 divide it
NARROW = WIDE.first_layers(1)  # the schedule over several layers has tests of its own


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLAMA_OFFLOAD_DIR", str(tmp_path))
    return tmp_path


def offloaded(cfg, params, policy: Policy | str, dtype=jnp.float32, **options) -> LanguageModel:
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    place = Placement(policy, dtype, **options)
    return place.model(cfg, place.tree(jax.tree.map(np.asarray, params)), None)


def bits(outs) -> list:
    """Tokens, and the logprobs' exact values."""
    return [(out.tokens, out.logprobs, out.finish_reason) for out in outs]


def assert_same(got: list, want: list) -> None:
    """The resident model's tokens; and its bits where XLA compiles the whole program as it does
    its units: in jax 0.10 it does, newer ones fuse across layers (seen: 3e-6 in a logprob)."""
    for (tokens, logprobs, reason), (own, own_logprobs, own_reason) in zip(got, want, strict=True):
        assert (tokens, reason) == (own, own_reason)
        if jax.__version__.startswith("0.10."):
            assert logprobs == own_logprobs
        np.testing.assert_allclose(logprobs, own_logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    """A tied model, its parameters, and what it generates in batches of two, run unit by unit with
    everything on the device; which is what the resident model says."""
    cfg = FAMILIES["mha-tied-bias"]
    params = params_of(cfg)
    lm = LanguageModel(cfg, params, None)
    want = bits(lm.generate(PROMPTS[:2], NEW)) + bits(lm.generate(PROMPTS[2:], NEW))
    policy = Policy(gpu_batch_size=2)
    place = Placement(policy, jnp.float32, directory=tmp_path_factory.mktemp("resident"))
    off = place.model(cfg, place.tree(jax.tree.map(np.asarray, params)), None)
    found = bits(off.generate(PROMPTS, NEW))
    assert_same(found, want)
    return cfg, params, found


percent = st.sampled_from([(100, 0), (0, 100), (0, 0), (30, 40)])


policies = given(
    weights=percent,
    cache=percent,
    activations=percent,
    count=st.sampled_from([1, 2]),
    overlap=st.booleans(),
    sep_layer=st.booleans(),
)


def draws(count: int) -> settings:
    """Return settings of as many examples, always the same."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


def check_policy(resident, weights, cache, activations, count, overlap, sep_layer) -> None:
    cfg, params, expected = resident
    policy = Policy(*weights, *cache, *activations, 2, count, overlap, sep_layer)
    assert bits(offloaded(cfg, params, policy).generate(PROMPTS, NEW)) == expected


@draws(3)
@policies
def test_any_policy_gives_the_resident_model_s_bits(folder, resident, **policy):
    check_policy(resident, **policy)


@pytest.mark.slow
@draws(12)
@policies
def test_any_policy_gives_the_resident_model_s_bits_in_more_draws(folder, resident, **policy):
    check_policy(resident, **policy)


@pytest.mark.core
@pytest.mark.parametrize(
    "name",
    [
        "hybrid",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mqa-window", *DELTA)),
    ],
)
def test_every_family_and_its_logits(folder, name):
    cfg = CONFIGS[name]
    params = params_of(cfg)
    lm, off = LanguageModel(cfg, params, None), offloaded(cfg, params, "30 40 30 40 30 40")
    assert_same(bits(off.generate(PROMPTS, 4)), bits(lm.generate(PROMPTS, 4)))
    tokens = np.zeros((2, 5), np.int32)
    tokens[0], tokens[1, :3] = [4, 5, 6, 7, 8], [9, 10, 11]
    got, want = off.logits(tokens, [5, 3]), lm.logits(tokens, [5, 3])
    np.testing.assert_allclose(got[1, :3], want[1, :3], atol=1e-5)
    assert (got == want).all() or not jax.__version__.startswith("0.10.")


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        *slow(("sep_layer=true overlap=false", False), ("", False), ("", True)),
    ],
)
def test_compressed_is_the_compressed_resident_model(folder, options, tied):
    cfg = NARROW.replace(tie_embeddings=tied)
    params = params_of(cfg)
    lm = LanguageModel(cfg, quantize_params(params, SCHEME), None)
    text = f"0 40 0 100 100 0 compress_weight=true compress_cache=true {options}"
    off = offloaded(cfg, params, text)
    want = lm.generate(PROMPTS, NEW, kv_dtype="int4")
    assert_same(bits(off.generate(PROMPTS, NEW)), bits(want))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["0 100 50 50 100 0 cpu_attention=true", "0 100 0 50 0 0"])
def test_cpu_attention_sparsity_and_prefill_in_pieces(folder, policy):
    params = params_of(NARROW)
    cfg = NARROW.replace(attn_sparsity=0.4)
    want = bits(LanguageModel(cfg, params, None).generate(PROMPTS, NEW, chunk=9))
    off = offloaded(NARROW, params, f"{policy} attn_sparsity=0.4 prefill_batch_size=9")
    assert_same(bits(off.generate(PROMPTS, NEW)), want)


def ended(tokens: list[int], stop: int) -> list[int]:
    """Return the tokens up to the first stop token."""
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


@functools.cache
def free_rows() -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts whose snapshot has 16 columns, and the sparse resident model's answers."""
    prompts = [prompt[:15] for prompt in PROMPTS]
    cfg = WIDE.replace(attn_sparsity=0.3, eos_token_ids=())
    lm = LanguageModel(cfg, params_of(cfg), None)
    return prompts, [out.tokens for out in lm.generate(prompts, NEW)]


@pytest.mark.parametrize(
    "options",
    [
        *slow("100 0 0 100 100 0", "100 0 30 40 100 0 gpu_batch_size=3"),
        "100 0 50 50 100 0 cpu_attention=true prefill_batch_size=9",
    ],
)
def test_rows_that_stop_early_leave_the_others_as_they_are(folder, options):
    """A row that stopped has a position that no part of the cache holds.  With batches of three,
    the second batch is one prompt and one row without any."""
    prompts, free = free_rows()
    # The last row stops first, at position 16: the row behind its values is past the snapshot.
    stop = free[3][1]
    want = [ended(row, stop) for row in free]
    assert (len(want[3]), len(want[0])) == (2, NEW)
    cfg = WIDE.replace(eos_token_ids=(stop,))
    off = offloaded(cfg, params_of(WIDE), f"{options} attn_sparsity=0.3")
    assert [out.tokens for out in off.generate(prompts, NEW)] == want


@pytest.mark.slow
def test_sampling_streaming_and_rows_over_several_blocks(folder):
    params = params_of(NARROW)
    sampling = [
        Sampling(temperature=0.8, top_k=5),
        Sampling(temperature=1.0, repetition_penalty=1.3),
        Sampling(),
        Sampling(temperature=1.2, top_p=0.9),
    ]
    prompts, sampling, seeds = PROMPTS[1:] + PROMPTS[:2], sampling + sampling[:1], [1, 2, 3, 4, 5]
    free = LanguageModel(NARROW.replace(eos_token_ids=()), params, None)
    want = free.generate(prompts, NEW, sampling, seeds)
    stop = want[1].tokens[5]
    off = offloaded(
        NARROW.replace(eos_token_ids=(stop,)), params, "0 100 100 0 100 0 gpu_batch_size=2"
    )
    seen = []
    got = off.generate(prompts, NEW, sampling, seeds, on_text=lambda *pair: seen.append(pair))
    assert [out.tokens for out in got] == [ended(out.tokens, stop) for out in want]
    assert got[1].finish_reason == "stop"
    for one, other in zip(got, want, strict=True):  # another batch size: sums in another order
        np.testing.assert_allclose(one.logprobs, other.logprobs[: len(one.tokens)], atol=1e-4)


@pytest.mark.slow
def test_whole_program_contraction_is_all_that_differs(folder):
    """Per-token int8 activations: XLA rounds once where two units round twice; 2e-6 is some ulps
    of logits of size 10."""
    params = quantize_params(params_of(WIDE), "w8a8")
    want = LanguageModel(WIDE, params, None).generate(PROMPTS, 6)
    got = offloaded(WIDE, params, "0 100 100 0 100 0").generate(PROMPTS, 6)
    check_same(got, want)


@pytest.mark.parametrize("draft", [None, *slow("ngram")])
def test_rows_have_their_adapters_beside_weights_that_stream(folder, draft):
    """The resident model's bits and logits; with drafts its tokens."""
    cfg = FAMILIES["gqa"].first_layers(1).replace(eos_token_ids=())
    factors = [lora_cases.factors(cfg, seed) for seed in (1, 2)]

    def adapted(lm: LanguageModel) -> LanguageModel:
        params = attach(tensor_table(lm.config), lm.params, factors)
        return dataclasses.replace(lm, params=params, adapters=("one", "two"))

    lm = adapted(LanguageModel(cfg, params_of(cfg), None))
    off = adapted(offloaded(cfg, params_of(cfg), "0 100 100 0 0 100 gpu_batch_size=2"))
    prompts, names = [[5, 6, 7]] * 3 + [[9, 8]], ["two", None, "one", None]
    want = [
        out
        for rows in (slice(0, 2), slice(2, 4))
        for out in lm.generate(prompts[rows], 8, adapter=names[rows])
    ]
    assert len({tuple(out.tokens) for out in want[:3]}) == 3
    if draft is not None:
        got = off.generate(prompts[:3], 8, adapter=names[:3], draft=draft, draft_tokens=3)
        assert [out.tokens for out in got] == [out.tokens for out in want[:3]]
        return
    assert_same(bits(off.generate(prompts, 8, adapter=names)), bits(want))
    tokens, lengths = np.array([[4, 5, 6, 7]] * 2, np.int32), [4, 3]
    scores = off.logits(tokens, lengths, adapter=["one", "two"])
    wanted = lm.logits(tokens, lengths, adapter=["one", "two"])
    np.testing.assert_allclose(scores[:, :3], wanted[:, :3], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "policies"),
    [
        ("gqa", ["0 100 30 40 0 100 gpu_batch_size=2 num_gpu_batches=2"]),
        *slow(
            (
                "hybrid",
                [
                    "100 0 100 0 100 0 gpu_batch_size=5",
                    "0 100 0 100 30 40 gpu_batch_size=5 sep_layer=true overlap=false "
                    "prefill_batch_size=4",
                ],
            ),
            ("gqa", ["30 40 0 100 100 0 gpu_batch_size=3 cpu_attention=true"]),
            ("gqa", ["30 40 0 100 100 0 gpu_batch_size=3 attn_sparsity=0.4"]),
        ),
    ],
)
def test_deterministic_rows_have_the_same_bits_in_every_batch(folder, name, policies):
    """Alone, in other company and places, and of any chunk; the tokens are the resident model's."""
    cfg = FAMILIES[name].first_layers(1) if name == "gqa" else FAMILIES[name]
    # Short prompts have programs of one width.
    prompts = PROMPTS if name == "hybrid" else [PROMPTS[0], PROMPTS[2], [7, 7]]
    params, found = params_of(cfg), []
    for policy in policies:
        off = offloaded(cfg, params, policy, deterministic=True)
        together = bits(off.generate(prompts, 6))
        for row, prompt in enumerate(prompts):
            assert bits(off.generate([prompt], 6, chunk=None if row else 4)) == [together[row]]
        company = [[8, 9, 10], *reversed(prompts)]
        assert bits(off.generate(company, 6))[1:] == together[::-1]
        found.append(together)
    assert all(other == found[0] for other in found)
    own = cfg if "sparsity" not in policies[0] else off.config
    want = LanguageModel(own, params, None).generate(prompts, 6)
    assert [out.tokens for out in want] == [tokens for tokens, *_ in found[0]]


def test_a_deterministic_model_is_refused_what_has_no_fixed_shape(folder):
    cfg = FAMILIES["gqa"]
    with pytest.raises(JaxLlamaError, match="deterministic and cpu_attention need the cache all"):
        offloaded(cfg, {}, "0 100 50 50 100 0 cpu_attention=true", deterministic=True)
    off = offloaded(cfg, params_of(cfg), "0 100 100 0 100 0", deterministic=True)
    with pytest.raises(JaxLlamaError, match="policy: a deterministic model takes no draft"):
        off.generate([[5, 6]], 2, draft="ngram")


# The store


DTYPES = ("float32", "bfloat16", "float16", "int4", "int8", "float8_e4m3fn")


@settings(max_examples=10, deadline=None, derandomize=True)
@given(device=st.integers(0, 100), host=st.integers(0, 100), dtype=st.sampled_from(DTYPES))
def test_store_gives_back_the_bits_and_counts_them(tmp_path_factory, device, host, dtype):
    shares = Shares(device, min(host, 100 - device))
    store = Store(tmp_path_factory.getbasetemp())
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 8, (3, 7, 6)).astype(np.float32).astype(jnp.dtype(dtype))
    tree = store.put({"x": x, "v": x[0, 0]}, shares)
    back = store.get(tree)
    assert back["x"].shape == x.shape and back["x"].dtype == x.dtype
    assert (np.asarray(back["x"]) == np.asarray(x)).all()
    assert sum(tree["x"].nbytes) == packed_bytes(x.size, x.dtype)
    for got, share in zip(tree["x"].nbytes, (shares.device, shares.host, shares.disk), strict=True):
        assert abs(got - packed_bytes(x.size, x.dtype) * share / 100) <= packed_bytes(6, x.dtype)
    assert not is_stored(tree["v"]) and (np.asarray(back["v"]) == np.asarray(x[0, 0])).all()


def test_store_keeps_quantized_trees_and_reuses_freed_disk(tmp_path):
    store, drawn = Store(tmp_path), np.random.default_rng(0).standard_normal((64, 64))
    make = jax.jit(functools.partial(quantize, dtype="int4", group_size=32, symmetric=False))
    w = jax.device_get(make(drawn.astype(np.float32)))
    size = 0
    for _ in range(3):
        stored = store.put(w, Shares(10, 30))
        for got, want in zip(jax.tree.leaves(store.get(stored)), jax.tree.leaves(w), strict=True):
            assert got.dtype == want.dtype and (np.asarray(got) == np.asarray(want)).all()
        size = size or store.disk.nbytes
        store.free(stored)
    assert store.disk.nbytes == size


def test_of_rows_only_those_that_are_asked_for_move(tmp_path, monkeypatch):
    """From host memory and from disk, as a sparse step reads values."""
    x = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    store, put, moved = Store(tmp_path), jax.device_put, []
    tree = store.put({"x": x}, Shares(25, 50), pinned=False)
    monkeypatch.setattr(jax, "device_put", lambda x, *on: moved.append(x.nbytes) or put(x, *on))
    rows = np.array([12, 20, 35], np.int32)  # the first ten are on the device, the last on disk
    np.testing.assert_array_equal(store.take(tree, rows)["x"], x[rows])
    assert moved == [3 * 8 * 4]


# Policies


def test_policy_text_goes_both_ways():
    text = "20 80 0 100 0 100 gpu_batch_size=4 num_gpu_batches=3 overlap=false compress_cache=true"
    policy = Policy.parse(text)
    assert (policy.weights, policy.cache.disk, policy.block_size) == ((20, 80), 0, 12)
    assert str(policy) == text and Policy.parse(str(policy)) == policy
    assert Policy.parse("0,100,0,0,0,0").cache.disk == 100


@pytest.mark.parametrize(
    "text, words",
    [
        ("20 80 0", "expected six percentages"),
        ("20 x 0 0 0 0", "weights_host = 'x': expected a percentage"),
        ("20 90 0 0 0 0", "weights: 20% + 90% exceed 100%"),
        ("-1 0 0 0 0 0", "weights_device = -1: must be 0 to 100"),
        ("0 0 0 0 0 0 batch=3", "unknown option 'batch'; allowed: gpu_batch_size"),
        ("0 0 0 0 0 0 overlap=1", "overlap = '1': expected true or false"),
        ("0 0 0 0 0 0 gpu_batch_size=0", "gpu_batch_size = 0: must be at least 1"),
        ("0 0 0 50 0 0 cpu_attention=true", "no cache may be on disk"),
        ("0 0 0 0 0 0 attn_sparsity=2", "attn_sparsity = 2.0: must be in (0, 1]"),
    ],
)
def test_bad_policies_are_one_line(text, words):
    with pytest.raises(JaxLlamaError) as error:
        Policy.parse(text)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_scheme_and_compression_must_agree(folder):
    with pytest.raises(JaxLlamaError, match="compress_weight is w4a16-g64-zero"):
        Placement(Policy(compress_weight=True), jnp.float32, "w8a16")


# What happened when


class InOrder(Recorder):
    """The times alone cannot tell: who waits for a result may look late."""

    def __init__(self):
        super().__init__()
        self.begun: list[str] = []

    def watching(self, lane, *what):
        self.begun.append(lane)
        return super().watching(lane, *what)


def test_the_recorder_sees_every_load(folder):
    """In the serial order no weights load before the unit ahead of them is computed.  (That they do
    in the overlapped one is for a quiet machine's clock to say: ``plan --timeline``.)"""
    params = params_of(WIDE)
    for overlap in ("false", "true prefill_batch_size=2"):  # whose pieces share a load
        off = offloaded(WIDE, params, f"0 100 0 100 0 100 gpu_batch_size=2 overlap={overlap}")
        off.generate(PROMPTS[:2], 2)
        recorder = InOrder()
        dataclasses.replace(
            off, executor=dataclasses.replace(off.executor, recorder=recorder)
        ).generate(PROMPTS[:2], 3)
        events = recorder.finish()
        lanes = {event.lane for event in events}
        assert lanes == {
            "load weights",
            "load cache",
            "load hidden",
            "compute",
            "store cache",
            "store hidden",
        }
        loads = [event for event in events if event.lane == "load weights"]
        computed = [event for event in events if event.lane == "compute"]
        assert len(computed) == 3 * 3 and len(loads) == len(computed)
        if overlap == "false":
            assert recorder.begun == ["load weights", "compute"] * len(computed)


@pytest.mark.parametrize(
    ("name", "draft", "policy"),
    [
        ("mqa-window", "ngram", "0 40 100 0 100 0 gpu_batch_size=3"),
        ("hybrid", "model", "0 0 100 0 100 0 gpu_batch_size=2 num_gpu_batches=2 overlap=false"),
        ("hybrid", "ngram", "0 100 100 0 30 40 gpu_batch_size=3 num_gpu_batches=2 sep_layer=true"),
        ("gla-conv-groups", "model", "0 100 100 0 100 0"),
        ("delta", "ngram", "0 100 100 0 100 0 gpu_batch_size=4"),
        ("kda", "model", "0 100 100 0 30 40 gpu_batch_size=3 num_gpu_batches=2"),
        ("qwen3.5", "model", "0 0 100 0 100 0 gpu_batch_size=2 num_gpu_batches=2 overlap=false"),
        ("kimi", "ngram", "0 40 100 0 0 100 gpu_batch_size=4 sep_layer=true"),
        ("mha-tied-bias", "model", "0 0 100 0 0 100 gpu_batch_size=4"),
    ],
)
@pytest.mark.parametrize("draft_tokens", [3, 0])
@pytest.mark.slow
def test_a_draft_changes_no_tokens(folder, name, draft, policy, draft_tokens):
    """Of four rows in batches that do not divide them, with penalties, bias and noise; one of them
    repeats.  Its own resident twin is right about all that is greedy, in fewer passes."""
    cfg = CONFIGS[name].replace(eos_token_ids=())
    params = params_of(cfg)
    lm, off = LanguageModel(cfg, params, None), offloaded(cfg, params, policy)
    samplings = [
        Sampling(logit_bias={5: 50.0}),
        Sampling(),
        Sampling(temperature=0.8),
        Sampling(temperature=0.7, repetition_penalty=1.3, logit_bias={7: 2.0}),
    ]
    want = lm.generate(PROMPTS, NEW, samplings, seed=3)
    own = lm if draft == "model" else "ngram"
    got = off.generate(PROMPTS, NEW, samplings, seed=3, draft=own, draft_tokens=draft_tokens)
    check_same(got, want, 1e-4)
    right = got if draft == "model" else got[:1]
    assert all(out.accepted > NEW // 2 for out in right)
    assert draft == "ngram" or all(out.accepted == out.drafted for out in got)


def test_an_offloaded_draft_ends_where_stop_strings_do(folder):
    cfg = FAMILIES["gqa"].first_layers(1).replace(vocab_size=256)
    lm = LanguageModel(cfg, params_of(cfg), Tokenizer.byte_level())
    off = dataclasses.replace(
        offloaded(cfg, params_of(cfg), "0 100 100 0 100 0"), tokenizer=lm.tokenizer
    )
    sampling = Sampling(temperature=1.0, logit_bias={97: 50.0, 98: 49.0})
    [free] = lm.generate(["abab"], NEW, sampling)
    stop = [free.text[5:8]]
    [want] = lm.generate(["abab"], NEW, sampling, stop=stop)
    [got] = off.generate(["abab"], NEW, sampling, stop=stop, draft="ngram")
    assert (got.text, got.tokens) == (want.text, want.tokens)
    assert got.finish_reason == want.finish_reason == "stop"
    assert "".join(off.stream("abab", NEW, sampling, draft="ngram")) == free.text


def test_a_draft_is_refused_where_the_cache_is_not_on_the_device():
    cfg = FAMILIES["gqa"].first_layers(1)
    for policy in ("0 100 50 50 100 0", "0 100 0 100 100 0 cpu_attention=true sep_layer=true"):
        with pytest.raises(JaxLlamaError, match="policy: a draft needs the whole cache"):
            offloaded(cfg, params_of(cfg), policy).generate([[5, 6]], 2, draft="ngram")


@pytest.mark.parametrize(
    "option", ["attn_sparsity=0.5", "cpu_attention=true", "compress_cache=true"]
)
def test_a_policy_s_options_of_the_cache_need_keys_and_values(option, folder):
    cfg = FAMILIES["gla"]
    with pytest.raises(JaxLlamaError, match=f"policy: {option.split('=')[0]}: tiny has no layer"):
        offloaded(cfg, params_of(cfg), f"0 100 0 100 0 100 {option}")


def test_a_kv_dtype_needs_keys_and_values(folder):
    cfg = FAMILIES["gla"]
    resident = LanguageModel(cfg, params_of(cfg), None)
    for lm in (resident, offloaded(cfg, resident.params, "0 100 0 100 0 100")):
        with pytest.raises(JaxLlamaError, match="kv_dtype: tiny has no layer with keys and values"):
            lm.generate([[1, 2]], 2, kv_dtype="int8")
        with pytest.raises(JaxLlamaError, match="kv_dtype: tiny has no layer with keys and values"):
            Engine(lm, kv_dtype="int8")
    with pytest.raises(JaxLlamaError, match="cache dtype 'int8': tiny has no layer with keys"):
        init_cache(cfg, 1, 8, "int8")
