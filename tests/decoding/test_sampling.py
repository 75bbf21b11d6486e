"""sampling: values against numpy and transformers, frequencies, independence of rows, bad input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.decoding.cutoff import by_digits, by_halves
from jaxllama.decoding.sampling import (
    History,
    Sampling,
    SamplingParams,
    _add_bias,
    _kept,
    _likeliest,
    _penalize,
    _pick,
    log_sum_exp,
    logprobs_of,
    sample,
)
from jaxllama.errors import JaxLlamaError
from pallas_kernels.fixed_sums import fixed_sums
from tests.helpers.arrays import as_jax

run = jax.jit(sample)
kept = jax.jit(_kept)


# One program instead of seven for each shape.
of_prompt = jax.jit(History.of_prompt, static_argnums=2)


def logits_of(batch: int, vocab: int, seed: int = 0, ties: bool = False) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(batch, vocab)).astype(np.float32) * 3
    return np.round(x) if ties else x


def draw(logits, rows, positions=None, history=None, seed=0):
    logits = as_jax(logits, jnp.float32)
    positions = np.zeros(len(rows), np.int32) if positions is None else positions
    params = SamplingParams.stack(rows, logits.shape[1], seed)
    tokens, logprobs = run(logits, params, as_jax(positions, jnp.int32), history)
    return np.asarray(tokens), np.asarray(logprobs)


def many(logits, row: Sampling, n: int) -> np.ndarray:
    """n draws from one distribution: n positions of one seed."""
    rows = np.broadcast_to(np.asarray(logits, np.float32), (n, len(logits)))
    return draw(rows, [row] * n, np.arange(n))[0]


def reference_kept(x: np.ndarray, s: Sampling) -> np.ndarray:
    """Which tokens of one row remain, by sorting in float64; ties as the module documents."""
    z = x.astype(np.float64) / s.temperature
    keep = np.isfinite(z)
    if 0 < s.top_k < len(z):
        keep &= z >= np.sort(z)[-s.top_k]
    p = np.where(keep, np.exp(z - z.max()), 0.0)
    p /= p.sum()
    if s.top_p < 1:
        mass_above = np.array([p[z > value].sum() for value in z])
        keep &= mass_above < s.top_p
    return keep & (p >= s.min_p * p.max())


CUTS = {
    "none": {},
    "k1": {"top_k": 1},
    "k7": {"top_k": 7},
    "k=V": {"top_k": 301},
    "k>V": {"top_k": 10**6},
    "p tiny": {"top_p": 1e-6},
    "p half": {"top_p": 0.5},
    "p 0.99": {"top_p": 0.99},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
}


def kept_of(x: np.ndarray, rows: list[Sampling]) -> np.ndarray:
    """Return which tokens of each row remain by the compiled cutoff."""
    temperature = np.array([row.temperature for row in rows], np.float32)[:, None]
    below = (x.max(1, keepdims=True) - x) / temperature
    return np.asarray(kept(below, SamplingParams.stack(rows, x.shape[1])))


@pytest.mark.core
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_kept_tokens_are_those_of_a_sort(ties):
    """Every cut at every temperature, as rows of one batch."""
    rows = [
        Sampling(temperature=temperature, **cut)
        for cut in CUTS.values()
        for temperature in (0.3, 1.0, 2.5)
    ]
    x = logits_of(len(rows), 301, ties=ties)
    got = kept_of(x, rows)
    for name, found, one, row in zip(np.repeat([*CUTS], 3), got, x, rows, strict=True):
        np.testing.assert_array_equal(found, reference_kept(one, row), err_msg=f"{name} {row}")


@pytest.mark.parametrize("cut", ["none", "k7", "p half", "min_p"])
def test_a_batch_of_one_cut_is_cut_alike(cut):
    """Each of these is another program: it leaves out what no row wants."""
    rows, x = [Sampling(temperature=1.3, **CUTS[cut])] * 5, logits_of(5, 301, ties=True)
    np.testing.assert_array_equal(kept_of(x, rows), [reference_kept(one, rows[0]) for one in x])


@pytest.mark.slow
def test_kept_tokens_are_those_of_transformers():
    """By default a sort in float64 stands for it."""
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    rows = [Sampling(temperature=0.7, **cut) for cut in CUTS.values()]
    x = logits_of(len(rows), 301, seed=1)
    for found, one, row in zip(kept_of(x, rows), x, rows, strict=True):
        chain = [warpers.TemperatureLogitsWarper(row.temperature)]
        if row.top_k:
            chain.append(warpers.TopKLogitsWarper(row.top_k))
        chain += [warpers.TopPLogitsWarper(row.top_p), warpers.MinPLogitsWarper(row.min_p)]
        scores = torch.from_numpy(one[None].copy())
        for warper in chain:
            scores = warper(None, scores)
        np.testing.assert_array_equal(found, torch.isfinite(scores[0]).numpy(), err_msg=f"{row}")


@pytest.mark.parametrize("search", [by_halves, by_digits])
def test_cutoff_is_exact_over_the_whole_range_of_floats(search):
    rng = np.random.default_rng(2)
    below = np.abs(rng.normal(size=(3, 50))) * 10.0 ** rng.integers(-30, 30, (3, 50))
    below = below.astype(np.float32)
    below[:, :3] = [0.0, np.inf, np.finfo(np.float32).max]
    compiled = jax.jit(search)
    for k in (1, 2, 25, 49, 50):
        got = compiled(below, None, np.full(3, k, np.int32))
        np.testing.assert_array_equal(np.asarray(got), np.sort(below, axis=1)[:, k - 1])


def test_both_searches_end_at_the_same_mass():
    """Dyadic weights, so that every sum is exact and in no order of additions another."""
    rng = np.random.default_rng(3)
    below = np.round(np.abs(rng.normal(size=(4, 300))), 1).astype(np.float32)
    mass = rng.integers(0, 8, (4, 300)).astype(np.float32) / 8
    searches = jax.jit(by_digits), jax.jit(by_halves)
    for share in (0.0, 0.1, 0.5, 0.97, 1.0):
        enough = np.float32(share) * mass.sum(axis=1)
        got, want = (np.asarray(search(below, mass, enough)) for search in searches)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("vocab", [1, 97, 3000])
def test_one_reduction_picks_what_several_do(vocab):
    """Rows of ties, of huge values, of -inf and of nothing else."""
    x = logits_of(6, vocab, ties=True)
    x[1] *= 1e37
    x[2, ::2] = -np.inf
    x[3] = -np.inf
    x[4] = np.finfo(np.float32).max
    tokens, logprobs = jax.jit(_likeliest)(as_jax(x))
    want, _ = jax.jit(_pick)(as_jax(x), as_jax(x))
    np.testing.assert_array_equal(np.asarray(tokens), np.asarray(want))
    with np.errstate(invalid="ignore"):
        exact = -np.log(np.exp(x.astype(np.float64) - x.max(1, keepdims=True)).sum(1))
    # A CPU adds one after the other, each time with half a unit of rounding.  NaN: nothing is left.
    np.testing.assert_allclose(np.asarray(logprobs), exact, atol=2e-6 + vocab * 2**-24)


@pytest.mark.core
def test_greedy_is_the_first_maximum_and_logprobs_are_log_softmax():
    x = logits_of(4, 97, ties=True)
    tokens, logprobs = draw(x, [Sampling()] * 4)
    np.testing.assert_array_equal(tokens, np.argmax(x, axis=1))
    want = x - np.log(np.exp(x.astype(np.float64)).sum(1, keepdims=True))
    np.testing.assert_allclose(logprobs, want[np.arange(4), tokens], atol=2e-6)


def test_greedy_batch_compiles_to_no_random_numbers_and_no_loop():
    x = jnp.zeros((2, 9))
    text = {}
    for name, row in {"greedy": Sampling(), "top_k": Sampling(temperature=1.0, top_k=3)}.items():
        params = SamplingParams.stack([row] * 2, 9)
        text[name] = run.lower(x, params, jnp.zeros(2, jnp.int32)).as_text()
    ops = ("stablehlo.shift", "stablehlo.while", "stablehlo.sort")
    found = {name: [op in text[name] for op in ops] for name in text}
    assert found == {"greedy": [False, False, False], "top_k": [True, True, False]}


def test_logprobs_ignore_temperature_bias_and_penalties():
    x = logits_of(1, 50)
    row = Sampling(temperature=3.0, logit_bias={7: 50.0}, presence_penalty=1.5, top_k=1)
    history = of_prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), 50)
    tokens, logprobs = draw(x, [row], history=history)
    assert tokens[0] == 7
    want = x[0, 7] - np.log(np.exp(x[0].astype(np.float64)).sum())
    np.testing.assert_allclose(logprobs[0], want, atol=2e-6)


# Draws


@pytest.mark.parametrize("name", ["none", pytest.param("all", marks=pytest.mark.core)])
def test_frequencies_follow_the_distribution(name):
    """Chi-squared over 20,000 draws; the bound is the 1 - 1e-4 quantile (Wilson, Hilferty)."""
    x, n = logits_of(1, 24, seed=3)[0], 20_000
    row = Sampling(temperature=1.3, seed=11, **CUTS[name])
    counts = np.bincount(many(x, row, n), minlength=24)
    keep = reference_kept(x, row)
    p = np.where(keep, np.exp(x.astype(np.float64) / 1.3), 0.0)
    p /= p.sum()
    assert counts[~keep].sum() == 0
    rare = keep & (p * n < 10)  # pooled, as the test wants some counts in every cell
    seen = np.append(counts[keep & ~rare], counts[rare].sum())
    want = np.append(p[keep & ~rare], p[rare].sum()) * n
    seen, want = seen[want > 0], want[want > 0]
    degrees = max(len(want) - 1, 1)
    bound = degrees * (1 - 2 / (9 * degrees) + 3.72 * np.sqrt(2 / (9 * degrees))) ** 3
    assert np.sum((seen - want) ** 2 / want) < bound


@pytest.mark.core
def test_a_row_depends_on_nothing_but_itself():
    """Same row alone, in every slot, among different neighbours: the same bits."""
    vocab = 1003
    kinds = [
        Sampling(temperature=0.9, seed=5),
        Sampling(temperature=1.2, top_k=50, seed=6),
        Sampling(temperature=0.8, top_p=0.9, min_p=0.01, seed=7),
        Sampling(),
        Sampling(temperature=1.0, logit_bias={3: 2.0, 5: -1.0, 9: 4.0}, seed=8),
        Sampling(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=9),
    ]
    n = len(kinds)
    x = logits_of(n, vocab, seed=4)
    prompt = np.random.default_rng(0).integers(0, vocab, (n, 40))
    positions = np.arange(n) * 17
    history = of_prompt(as_jax(prompt, jnp.int32), jnp.full(n, 40, jnp.int32), vocab)
    together = draw(x, kinds, positions, history)
    history = jax.tree.map(np.asarray, history)
    order = np.array([3, 5, 0, 2, 4, 1])
    moved = draw(
        x[order],
        [kinds[i] for i in order],
        positions[order],
        jax.tree.map(lambda leaf: leaf[order], history),
    )
    np.testing.assert_array_equal(moved[0], together[0][order])
    np.testing.assert_array_equal(moved[1], together[1][order])
    for i in (2, 3, 5):  # each alone is a program of its own
        one = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], history)
        alone = draw(x[i : i + 1], kinds[i : i + 1], positions[i : i + 1], one)
        assert (alone[0][0], alone[1][0]) == (together[0][i], together[1][i])


def test_seeds_and_positions_decide_the_draw():
    x = np.zeros((1, 4000), np.float32)
    hot = Sampling(temperature=1.0)

    def token(row, position=0, seed=0):
        return int(draw(x, [row], [position], seed=seed)[0][0])

    assert token(hot, seed=1) == token(Sampling(temperature=1.0, seed=1), seed=99)
    tokens = {token(hot, position, seed) for position in range(3) for seed in range(3)}
    assert len(tokens) == 9
    by_key = [token(hot, seed=key) for key in (jax.random.key(7), jax.random.PRNGKey(7), 7)]
    assert len(set(by_key)) == 1
    assert len({token(Sampling(temperature=1.0, seed=s)) for s in (1, 1 + 2**32, -1)}) == 3
    key = SamplingParams.stack([Sampling(seed=7)], 4).key
    np.testing.assert_array_equal(np.asarray(key[0]), jax.random.key_data(jax.random.key(7)))
    other = jax.random.key(7, impl="rbg")
    assert token(hot, seed=other) == token(hot, seed=other)


def test_vmap_over_batches_gives_the_same():
    x = logits_of(6, 64).reshape(2, 3, 64)
    params = SamplingParams.stack([Sampling(temperature=1.0, top_k=5, top_p=0.8, seed=1)] * 3, 64)
    positions = jnp.arange(3, dtype=jnp.int32)
    tokens, _ = jax.jit(jax.vmap(lambda one: sample(one, params, positions)))(x)
    want = [np.asarray(run(one, params, positions)[0]) for one in x]
    np.testing.assert_array_equal(np.asarray(tokens), want)


# Penalties and bias


add = jax.jit(History.add)


def history_of(prompt, output, vocab):
    tokens = as_jax([prompt + [0]], jnp.int32)  # the last one is padding
    history = of_prompt(tokens, as_jax([len(prompt)], jnp.int32), vocab)
    for token in output:
        history = add(history, np.asarray([token], np.int32))
    return history


def test_history_counts_prompt_and_output_apart():
    history = history_of([4, 4, 6], [1, 1, 6], 9)
    np.testing.assert_array_equal(np.flatnonzero(history.prompt[0]), [4, 6])
    np.testing.assert_array_equal(np.asarray(history.counts[0]), [0, 2, 0, 0, 0, 0, 1, 0, 0])
    frozen = add(history, np.asarray([3], np.int32), np.asarray([False]))
    np.testing.assert_array_equal(np.asarray(frozen.counts), np.asarray(history.counts))


BY_HAND = {
    "none": (Sampling(), [2.0, 1.9, -1.0, 1.8]),
    "repetition": (Sampling(repetition_penalty=2.0), [1.0, 0.95, -2.0, 1.8]),
    "frequency": (Sampling(frequency_penalty=0.3), [2.0, 1.3, -1.3, 1.8]),
    "presence": (Sampling(presence_penalty=0.4), [2.0, 1.5, -1.4, 1.8]),
    "negative": (Sampling(frequency_penalty=-1.0), [2.0, 3.9, 0.0, 1.8]),
    "bias": (Sampling(logit_bias={3: 1.0}, repetition_penalty=2.0), [1.0, 0.95, -2.0, 2.8]),
    "all": (
        Sampling(repetition_penalty=2.0, frequency_penalty=0.3, presence_penalty=0.4),
        [1.0, -0.05, -2.7, 1.8],
    ),
}


@pytest.mark.core
def test_penalties_by_hand():
    """Prompt [0], output [1, 1, 2]: token 3 is in neither. Each row of a batch has another."""
    rows = [row for row, _ in BY_HAND.values()]
    want = np.array([scores for _, scores in BY_HAND.values()])
    x = np.tile(np.float32([2.0, 1.9, -1.0, 1.8]), (len(rows), 1))
    one = history_of([0], [1, 1, 2], 4)
    history = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), len(rows), axis=0), one)
    params = SamplingParams.stack(rows, 4)

    @jax.jit
    def penalized(x, params, history):
        return _penalize(_add_bias(x, params.bias_ids, params.bias_values), params, history)

    np.testing.assert_allclose(penalized(x, params, history), want, atol=1e-6)
    tokens, _ = draw(x, rows, history=history)
    np.testing.assert_array_equal(tokens, want.argmax(1))


@pytest.mark.slow
def test_repetition_penalty_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    x, prompt, output = logits_of(1, 60, seed=5), [5, 9, 9, 30], [2, 30, 44]
    ids = torch.tensor([prompt + output])
    process = processors.RepetitionPenaltyLogitsProcessor(1.7)
    want = process(ids, torch.from_numpy(x.copy())).numpy()
    params = SamplingParams.stack([Sampling(repetition_penalty=1.7)], 60)
    got = _penalize(as_jax(x), params, history_of(prompt, output, 60))
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6)


def test_bias_forces_and_forbids():
    x = logits_of(1, 30)
    best = int(np.argmax(x))
    rows = [Sampling(logit_bias={12: 100.0}), Sampling(logit_bias={best: float("-inf")})]
    tokens, _ = draw(np.repeat(x, 2, 0), rows)
    assert tokens.tolist() == [12, int(np.argsort(x[0])[-2])]
    hot = Sampling(temperature=5.0, logit_bias={t: float("-inf") for t in range(25)})
    assert set(many(x[0], hot, 400)) == {25, 26, 27, 28, 29}


def test_penalties_without_a_history_are_an_error():
    with pytest.raises(ValueError, match="history"):
        draw(logits_of(1, 5), [Sampling(presence_penalty=1.0)])


# Not a number, infinities


@pytest.mark.core
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinities(temperature):
    """Each row under each cut."""
    nan, inf = np.nan, np.inf
    x = np.array(
        [[nan, 1.0, nan, 2.0], [-inf, -inf, 0.5, -inf], [0.0, inf, nan, -inf], [nan, -inf] * 2],
        np.float32,
    )
    cuts = ["none", "k7", "p half", "min_p", "all"]
    rows = [Sampling(temperature=temperature, seed=3, **CUTS[cut]) for cut in cuts for _ in x]
    tokens, logprobs = draw(np.tile(x, (len(cuts), 1)), rows)
    for found, logs in zip(tokens.reshape(-1, 4), logprobs.reshape(-1, 4), strict=True):
        assert found[0] in (1, 3) and found[1:].tolist() == [2, 1, 0]
        want = {1: -np.log(1 + np.e), 3: -np.log(1 + 1 / np.e)}[int(found[0])]
        np.testing.assert_allclose(logs[:3], [want, 0.0, 0.0], atol=1e-6)
        assert np.isnan(logs[3])


def test_coldest_and_hottest_temperatures():
    x = logits_of(1, 40)[0]
    assert set(many(x, Sampling(temperature=1e-30), 50)) == {int(np.argmax(x))}
    assert len(set(many(x, Sampling(temperature=100.0), 400))) > 35


# Bad input


BAD = {
    "temperature": (-0.1, 1e6, float("nan"), float("inf"), "hot", True),
    "top_k": (-1, 2.5),
    "top_p": (0.0, 1.1, float("nan")),
    "min_p": (-0.1, 1.5),
    "repetition_penalty": (0.0, -1.0),
    "frequency_penalty": (2.1,),
    "presence_penalty": (-5.0,),
    "logit_bias": (3, {-1: 1.0}, {"a": 1.0}, {1: float("nan")}, {1: float("inf")}, {1: 10**400}),
    "seed": (1.5, 2**64),
}


@pytest.mark.parametrize("key", BAD)
def test_bad_values_name_the_key(key):
    for value in BAD[key]:
        with pytest.raises(JaxLlamaError, match=key) as caught:
            Sampling(**{key: value})
        assert "\n" not in str(caught.value)


def test_bias_beyond_the_vocabulary_is_an_error():
    with pytest.raises(JaxLlamaError, match="logit_bias: token id 10 .*vocabulary of 10"):
        SamplingParams.stack([Sampling(logit_bias={10: 1.0})], 10)


def test_sampling_is_hashable_and_keeps_its_bias():
    row = Sampling(logit_bias={3: 1, 4: -2.0})
    assert row.logit_bias == ((3, 1.0), (4, -2.0))
    assert hash(row) == hash(Sampling(logit_bias=((3, 1.0), (4, -2.0))))
    assert Sampling(logit_bias={}).logit_bias is None


@pytest.mark.parametrize("vocab", [1, 97, 5000])
def test_a_rows_exponentials_are_added_in_one_order(vocab):
    """The same bits in any number of rows and beside other reductions; as jax.nn.logsumexp."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((40, vocab)) * 5, jnp.float32)

    def sums(logits):
        with fixed_sums(True):
            return log_sum_exp(logits)

    want = jax.jit(sums)(logits)
    beside = jax.jit(lambda x: (sums(x + 0), jnp.sum(x, 1), jnp.max(jnp.exp(x), 1)))(logits)[0]
    np.testing.assert_array_equal(beside, want)
    np.testing.assert_array_equal(jax.jit(lambda x: sums(x))(logits[3:4]), want[3:4])
    np.testing.assert_allclose(want, jax.nn.logsumexp(logits, axis=1), rtol=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_a_deterministic_program_does_not_get_the_trace_of_a_plain_one(sampling):
    """jax keeps traces of named functions, and a process may have models of both kinds."""
    params = SamplingParams.stack([sampling], 97, seed=0)

    def program(fixed: bool) -> str:
        def draw(logits, positions):
            with fixed_sums(fixed):
                return sample(logits, params, positions, None)

        return str(jax.make_jaxpr(draw)(jnp.zeros((1, 97)), jnp.zeros(1, jnp.int32)))

    plain, fixed = program(False), program(True)
    assert plain == program(False) and fixed == program(True) and "pad[" in fixed
    assert "pad[" not in plain


def test_given_tokens_have_the_log_probabilities_that_they_were_drawn_with():
    logits = as_jax(np.random.default_rng(0).normal(0, 3, (5, 97)), jnp.float32)
    params = SamplingParams.stack([Sampling(temperature=1.0)] * 5, 97, seed=0)
    for fixed in (False, True):
        with fixed_sums(fixed):
            tokens, logprobs = sample(logits, params, jnp.arange(5, dtype=jnp.int32), None)
            np.testing.assert_array_equal(logprobs_of(logits, tokens), logprobs)
