"""LanguageModel: text in, text out; buckets, streaming, stop strings, bad input."""

from __future__ import annotations

import dataclasses
import json
import weakref

import jax
import numpy as np
import pytest

import jaxllama as jl
from jaxllama import loading
from jaxllama.decoding.rows import Rows
from jaxllama.decoding.sampling import History, Sampling, SamplingParams
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.executors.resident import ResidentDecoding
from jaxllama.language_model import LanguageModel
from jaxllama.model.shardings import shard_params
from jaxllama.parallel.mesh import make_mesh
from jaxllama.text.rows import bucket
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels import cpu
from pallas_kernels.qtensor import RowBlocks, quantize
from tests.helpers.models import FAMILIES, LLAMA, params_of

# Tests that draw share these, and with them the compiled loop of one row, and of two.
NEW = 24
HOT = Sampling(temperature=1.0, top_k=40)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    """A random model over bytes; a short context, so that its limit is easy to reach."""
    cfg = LLAMA.first_layers(1).replace(vocab_size=256, eos_token_ids=(0,), max_position=200)
    return LanguageModel(cfg, params_of(cfg), Tokenizer.byte_level())


@pytest.mark.core
def test_batched_prompts_give_what_each_gives_alone(lm):
    prompts = ["a", "some longer text, beyond one bucket", "mid size"]
    together = lm.generate(prompts, NEW, HOT, seed=5)
    for prompt, out in zip(prompts, together, strict=True):
        [alone] = lm.generate([prompt], NEW, HOT, seed=5)
        assert alone.tokens == out.tokens and alone.text == out.text
        np.testing.assert_allclose(alone.logprobs, out.logprobs, atol=1e-4)


def test_token_ids_are_prompts_too(lm):
    ids = [list(b"hello"), list(b"bye")]
    by_ids = lm.generate(ids, NEW, HOT)
    by_text = lm.generate(["hello", "bye"], NEW, HOT)
    assert [out.tokens for out in by_ids] == [out.tokens for out in by_text]


def test_a_long_prompt_tells_how_far_it_is(lm):
    prompts, told = [list(range(3, 43)), [5] * 9, [7]], []
    sampling = Sampling(repetition_penalty=1.3)
    options = {"max_new_tokens": 6, "sampling": sampling, "chunk": 16}
    want = lm.generate(prompts, **options)
    got = lm.generate(prompts, **options, on_prompt=lambda *pair: told.append(pair))
    assert told == [(16, 40), (32, 40), (40, 40)]
    assert [out.tokens for out in got] == [out.tokens for out in want]
    lm.generate("short", 2, on_prompt=lambda *pair: told.append(pair))
    assert len(told) == 3


def test_text_is_optional(lm):
    mute = dataclasses.replace(lm, tokenizer=None)
    [out] = mute.generate([list(b"hello")], NEW, HOT)
    assert out.text == "" and out.tokens == lm.generate("hello", NEW, HOT)[0].tokens
    with pytest.raises(JaxLlamaError, match="no tokenizer"):
        mute.generate("hello")
    with pytest.raises(JaxLlamaError, match="stop strings need a tokenizer"):
        mute.generate([[1]], stop="x")


def test_streamed_pieces_add_up_to_the_text(lm):
    pieces = {0: "", 1: ""}

    def hear(row, text):
        pieces[row] += text

    outs = lm.generate(["ab", "cdefg"], NEW, HOT, seed=[1, 2], on_text=hear)
    assert [pieces[0], pieces[1]] == [out.text for out in outs]
    quiet = lm.generate(["ab", "cdefg"], NEW, HOT, seed=np.array([1, 2]))
    assert [out.tokens for out in quiet] == [out.tokens for out in outs]


def test_seeds_make_rows_differ_and_repeat(lm):
    first, second = lm.generate(["x"] * 2, NEW, HOT, seed=[1, 2])
    assert first.tokens != second.tokens
    assert lm.generate(["x"] * 2, NEW, HOT, seed=np.int64(1)) == [first] * 2


@pytest.mark.core
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_a_row_and_are_not_shown(lm, stream):
    [free] = lm.generate("hello", NEW, HOT, seed=3)
    middle = free.text[10:13]
    shown: list[str] = []
    hear = (lambda row, text: shown.append(text)) if stream else None
    [out] = lm.generate("hello", NEW, HOT, seed=3, stop=[middle, "never there"], on_text=hear)
    assert out.finish_reason == "stop"
    assert out.text == free.text[: free.text.index(middle)]
    assert out.tokens == free.tokens[: len(out.tokens)] and len(out.tokens) < NEW
    assert len(out.logprobs) == len(out.tokens)
    if stream:
        assert "".join(shown) == out.text


def test_stop_tokens_end_a_row(lm):
    [free] = lm.generate("hello", NEW, HOT)
    stop = free.tokens[7]
    stopping = dataclasses.replace(lm, config=lm.config.replace(eos_token_ids=(stop,)))
    [out] = stopping.generate("hello", NEW, HOT)
    assert out.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert out.finish_reason == "stop" and free.finish_reason == "length"


def test_buckets_are_few_and_waste_at_most_half():
    sizes = [bucket(size) for size in range(1, 5000)]
    assert all(size <= got and (got <= 16 or got < 2 * size) for size, got in enumerate(sizes, 1))
    assert len(set(sizes)) < 20


def test_logits_are_the_full_forward(lm):
    tokens = np.asarray([[1, 2, 3, 4]])
    got = lm.logits(tokens, [4])
    want = jl.logits(lm.config, lm.params, tokens, np.asarray([4]))
    assert got.shape == (1, 4, 256) and got.dtype == np.float32
    np.testing.assert_array_equal(got, want)


def test_fp8_names_the_float8_cache(lm):
    def leaves(dtype):
        return jax.tree.leaves(jl.init_cache(lm.config, 1, 8, dtype))

    assert {x.dtype for x in leaves("fp8")} == {x.dtype for x in leaves("float8_e4m3fn")}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.generate([]), "no prompts"),
        (lambda lm: lm.generate(["a", ""]), "prompt 1 is empty"),
        (lambda lm: lm.generate([[1], []]), "prompt 1 is empty"),
        (lambda lm: lm.generate([[256]]), "id 256 is outside the vocabulary of 256"),
        (lambda lm: lm.generate([[-1]]), "id -1 is outside"),
        (lambda lm: lm.generate("a", max_new_tokens=0), "max_new_tokens = 0"),
        (
            lambda lm: lm.generate("a" * 190, max_new_tokens=64),
            "exceed the context of 200: .* at most 10 new tokens",
        ),
        (lambda lm: lm.generate("a" * 200, max_new_tokens=4), "of 200: shorten the prompt"),
        (
            lambda lm: lm.chat([{"role": "user", "contents": "a"}]),
            r"messages\[0\] = .*\"content\" is missing",
        ),
        (lambda lm: lm.generate("a", stop=""), "stop = ''"),
        (lambda lm: lm.generate(["a", "b"], seed=[1]), "seed: 1 entries for 2"),
        (lambda lm: lm.generate(["a"], sampling=[Sampling()] * 2), "sampling: 2 entries for 1"),
        (lambda lm: lm.generate(["a"], kv_dtype="int32"), "cache dtype 'int32'"),
        (lambda lm: lm.generate(["a"], kv_dtype="bf16"), "cache dtype 'bf16'"),
        (lambda lm: lm.generate(5), "prompts = 5: expected text, or a list of texts or token ids"),
        (lambda lm: lm.generate("a", max_new_tokens=2.0), "max_new_tokens = 2.0: must be a whole"),
        (lambda lm: lm.generate("a", chunk="8"), "chunk = '8': must be a whole number"),
        (lambda lm: lm.generate("a", stop=5), "stop = 5: expected text, or a list of texts"),
        (lambda lm: lm.generate("a", stop=["b", 5]), r"stop = \['b', 5\]: expected text"),
        (lambda lm: lm.stream(""), "prompt 0 is empty"),
        (lambda lm: lm.stream(["a", "b"]), r"prompt 0 is \['a', 'b'\]: expected text"),
        (lambda lm: lm.chat("hi"), "messages = 'hi': expected a list of"),
        (lambda lm: lm.chat([{"content": "hi"}]), r"messages = \[{'content': 'hi'}\]: expected"),
        (lambda lm: lm.chat([{"role": "user", "content": "hi"}]), "no chat template"),
        (lambda lm: lm.generate("a", seed=1.5), "seed = 1.5: expected a whole number"),
        (lambda lm: lm.generate("a", sampling={"temperature": 1}), "sampling = {'temperature': 1}"),
        (lambda lm: lm.generate([[1.5]]), r"prompt 0 is \[1.5\]: expected text or a list of"),
        (lambda lm: lm.generate([1, 2]), "prompt 0 is 1: expected text or a list of token ids"),
        (lambda lm: lm.logits([[999999]], [1]), "id 999999 is outside the vocabulary of 256"),
        (lambda lm: lm.logits([[1.0]], [1]), "tokens: float64: expected whole numbers"),
        (lambda lm: lm.logits([[1]], [2]), "lengths: must be from 0 to 1"),
        (lambda lm: lm.logits([1], [1]), r"tokens\[1\], lengths\[1\]: expected \[B, T\]"),
        (lambda lm: jl.load("smollm2-135m", dtype="bf16"), "dtype 'bf16' is not float32, bfloat16"),
    ],
)
def test_bad_input_is_one_line_that_names_it(lm, call, message):
    with pytest.raises(JaxLlamaError, match=message) as caught:
        call(lm)
    assert "\n" not in str(caught.value)


TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hello"}]


def talker(lm: LanguageModel, **changes) -> LanguageModel:
    tokenizer = Tokenizer(Tokenizer.byte_level()._backend, "test", chat_template=TEMPLATE)
    return dataclasses.replace(lm, tokenizer=tokenizer, **changes)


def test_chat_continues_the_template_with_the_models_own_sampling(lm, monkeypatch):
    own = Sampling(temperature=0.9, top_k=40)
    heard = []
    out = talker(lm, sampling=own).chat(MESSAGES, NEW, seed=3, on_text=lambda *x: heard.append(x))
    assert out == lm.generate("<u>hello", NEW, own, seed=3)[0]
    assert "".join(text for _, text in heard) == out.text and {row for row, _ in heard} == {0}
    [greedy] = lm.generate("<u>hello", NEW)
    assert talker(lm).chat(MESSAGES, NEW) == greedy, "no sampling of its own"
    assert talker(lm, sampling=own).chat(MESSAGES, NEW, Sampling()) == greedy
    assert talker(lm, sampling=own).generate("<u>hello", NEW) == [greedy], "never of itself"
    with pytest.raises(JaxLlamaError, match="has 203 tokens and the context 200"):
        talker(lm).chat([{"role": "user", "content": "x" * 200}])
    monkeypatch.setattr(LanguageModel, "generate", lambda _, rows, new, *rest, **options: [new])
    assert talker(lm).chat([{"role": "user", "content": "x" * 190}]) == 200 - 193, "what is left"


def test_a_stream_gives_the_text_and_stops_when_it_is_left(lm, monkeypatch):
    steps = []
    [out] = lm.generate("hello", NEW, HOT, seed=4)
    assert "".join(lm.stream("hello", NEW, HOT, seed=4)) == out.text
    advance = ResidentDecoding.advance
    monkeypatch.setattr(
        ResidentDecoding, "advance", lambda *args: steps.append(args[-1]) or advance(*args)
    )
    pieces = lm.stream(list(b"hello"), NEW, HOT, seed=4)
    assert not steps, "nothing runs before it is asked for"
    assert out.text.startswith(next(pieces)) and len(steps) < NEW
    begun = len(steps)
    held = weakref.ref(pieces)
    pieces.close()
    assert list(pieces) == [] and len(steps) == begun
    del pieces
    assert held() is None
    with pytest.raises(JaxLlamaError, match="no tokenizer"):
        dataclasses.replace(lm, tokenizer=None).stream([1])


def test_numpy_scalars_are_numbers(lm):
    plain = lm.generate("ab", NEW, Sampling(temperature=0.5, top_k=9), seed=3)
    sampling = Sampling(temperature=np.float32(0.5), top_k=np.int32(9))
    assert lm.generate("ab", np.int64(NEW), sampling, np.int64(3)) == plain
    assert lm.generate(np.asarray([list(b"ab")]), NEW, sampling, [np.uint8(3)]) == plain
    assert json.loads(json.dumps(dataclasses.asdict(sampling)))["top_k"] == 9
    request = jl.Request("x", np.arange(3), np.int64(5), dataclasses.replace(sampling, seed=3))
    assert json.loads(json.dumps(request.to_json()))["max_new_tokens"] == 5


def test_every_class_of_arrays_prints_no_values():
    """Any class of ours that jax takes for a pytree and that ``repr`` is likely to meet."""
    weight, rows = np.full((64, 64), 0.5, "f"), np.full((2, 64), 7)
    coded = quantize(jax.numpy.asarray(weight))
    cache = jl.init_cache(FAMILIES["hybrid"], 2, 64, jax.numpy.float32)
    packed = jl.init_cache(FAMILIES["gqa"], 2, 64, "int8")
    values = {
        "QTensor": coded,
        "RowBlocks": RowBlocks((coded, weight)),
        "CpuWeight": cpu.prepare(coded),
        "Cache": cache,
        "Rows": Rows(rows, rows, cache.layers),
        "SamplingParams": SamplingParams.stack([Sampling()] * 2, 64),
        "History": History(rows, rows),
    }
    layers = [*cache.layers, *packed.layers]
    values |= {type(layer).__name__: layer for layer in layers}
    assert len(values) >= 9
    for name, value in values.items():
        text = repr(value)
        assert text.startswith(f"{name}(") and len(text) < 1200, name
        assert "array" not in text.lower() and "\n" not in text and "0.5" not in text, name
    cfg = FAMILIES["hybrid"].replace(n_layers=12, layer_types=FAMILIES["hybrid"].layer_types * 6)
    lm = LanguageModel(cfg, params_of(cfg), None, exact=True)
    screen = repr(lm)
    assert type(lm.params) is dict and f"{cfg.name}, 12 layers" in screen
    assert len(screen) < 24 * 80 and screen.count("\n") < 24


@pytest.mark.parametrize("kind", ["bfloat16", "hybrid", "w8a16", "mesh"])
def test_saved_models_come_back_to_the_bit(kind, tmp_path):
    cfg = FAMILIES["hybrid" if kind == "hybrid" else "gqa"].replace(vocab_size=260)
    # Of numpy: compiling an initializer would be most of the test.
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    shapes = jax.eval_shape(lambda: params_of(cfg, dtype=jax.numpy.dtype(dtype)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    lm = talker(
        LanguageModel(cfg, params, None, sampling=Sampling(temperature=0.6, top_p=0.9, min_p=0.1))
    )
    if kind == "w8a16":
        lm = dataclasses.replace(lm, params=jl.quantize_params(lm.params, kind), exact=True)
    if kind == "mesh":
        mesh = make_mesh("model=1")
        on_mesh = shard_params(cfg, params, mesh)[1]
        assert dataclasses.replace(lm, params=on_mesh).save(tmp_path / "m") == tmp_path / "m"
    else:
        assert lm.save(tmp_path / "m", progress=True) == tmp_path / "m"
    back = jl.load(tmp_path / "m", lm.dtype, exact=True)
    assert jax.tree.structure(back.params) == jax.tree.structure(lm.params)
    for ours, theirs in zip(jax.tree.leaves(lm.params), jax.tree.leaves(back.params), strict=True):
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    assert back.sampling == lm.sampling and back.config.eos_token_ids == lm.config.eos_token_ids
    assert back.encode_chat(MESSAGES) == lm.encode_chat(MESSAGES)
    with pytest.raises(JaxLlamaError, match="m: already exists; nothing is overwritten"):
        lm.save(tmp_path / "m")


def test_presets_without_weights_say_so():
    with pytest.raises(JaxLlamaError, match="without published weights"):
        jl.load("llama-3.1-8b")
    with pytest.raises(JaxLlamaError, match="unknown model 'no-such-model'"):
        jl.load("no-such-model")
    with pytest.raises(JaxLlamaError, match="dtype 'int8'"):
        jl.load("smollm2-135m", dtype="int8")


def test_gla_presets_come_with_random_weights_and_say_so(monkeypatch):
    tiny = FAMILIES["gla"].first_layers(1).replace(vocab_size=256)
    monkeypatch.setattr(loading, "preset_names", lambda: ["gla-340m"])
    monkeypatch.setattr(loading, "load_config", lambda name: tiny)
    with pytest.warns(WeightWarning, match="gla-340m: .* random"):
        model = jl.load("gla-340m")
    assert len(model.generate("hello", 4)[0].tokens) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "bound"), [("w4a16", 0.25), ("w8a8", 0.03), ("w8a16", 0.02), ("fp8", 0.08)]
)
def test_quantized_models_score_near_the_float_ones(scheme, bound):
    """Logits move by the rounding: about 1/254 (int8), 1/14 (int4) of a group's largest, 2^-4 of a
    value (fp8), for weights and, in w8a8 and fp8, activations."""
    cfg = LLAMA.first_layers(1).replace(d_model=64, d_ff=128)
    params = params_of(cfg)
    quantized = jl.quantize_params(params, scheme)
    tokens, lengths = np.asarray([[5, 6, 7, 8]]), [4]
    want = np.asarray(LanguageModel(cfg, params, None).logits(tokens, lengths))
    got = np.asarray(LanguageModel(cfg, quantized, None).logits(tokens, lengths))
    error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert 0 < error < bound


def test_unknown_scheme_is_named():
    with pytest.raises(JaxLlamaError, match="scheme 'w3a16'"):
        jl.quantize_params({}, "w3a16")


@pytest.mark.parametrize(
    "kind", ["bfloat16", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("w8a8", "gla"))]
)
def test_deterministic_rows_have_the_same_bits_in_every_batch(kind):
    """Bitwise, at several batch sizes and in every slot, among neighbours that need other room."""
    cfg = FAMILIES["gla" if kind == "gla" else "gqa"].first_layers(1)
    cfg = cfg.replace(vocab_size=256, max_position=600)
    params = params_of(cfg, dtype="bfloat16" if kind == "bfloat16" else "float32")
    if kind == "w8a8":
        params = jl.quantize_params(params, "w8a8")
    lm = LanguageModel(cfg, params, None, deterministic=True)
    row = list(range(3, 24))
    [alone] = lm.generate([row], max_new_tokens=9)
    rng = np.random.default_rng(0)
    for batch in (2, 9):
        rows = [list(rng.integers(3, 256, size)) for size in rng.integers(1, 60, batch)]
        slot = int(rng.integers(batch))
        rows[slot] = row
        out = lm.generate(rows, max_new_tokens=9)[slot]
        assert out.tokens == alone.tokens and out.logprobs == alone.logprobs
    tokens = rng.integers(3, 256, (9, 21)).astype(np.int32)
    logits = np.asarray(lm.logits(tokens, np.full(9, 21)))
    got = lm.logits(tokens[5:6], np.full(1, 21))
    np.testing.assert_array_equal(got, logits[5:6])


def test_deterministic_streams_tell_the_right_row(lm):
    lm = dataclasses.replace(lm, deterministic=True)
    heard = {0: "", 1: "", 2: ""}
    prompts = ["a", "some longer text, beyond one bucket", "b"]
    outs = lm.generate(
        prompts, max_new_tokens=6, on_text=lambda row, text: heard.update({row: heard[row] + text})
    )
    assert list(heard.values()) == [out.text for out in outs]
