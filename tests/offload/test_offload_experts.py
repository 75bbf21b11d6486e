"""A mixture's experts lie one by one: tokens are the same wherever they are computed."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.offloaded import expert_programs as programs
from jaxllama.executors.offloaded import experts as experts_of_layers
from jaxllama.executors.offloaded.experts import GROUP, divided, streams
from jaxllama.executors.offloaded.mailbox import Mailbox
from jaxllama.language_model import LanguageModel
from jaxllama.offload import units
from jaxllama.offload.expert_places import ExpertPlace, ExpertUse, places
from jaxllama.offload.experts import HotExperts, HotSlots, kept, warmed
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import Store
from jaxllama.placement import Placement
from jaxllama.planner.trial import given_run, spread_routes
from jaxllama.quantization.quantize import quantize_params
from jaxllama.typing import Params
from pallas_kernels.cpu.mail import MailLayout
from tests.helpers.cases import slow
from tests.helpers.models import FAMILIES, check_same, params_of

EXPERTS = ExpertsConfig(8, 2, 32, bias=True, router_bias=True, gate_limit=7.0)
CFG = FAMILIES["gqa"].first_layers(1).replace(eos_token_ids=(), experts=EXPERTS)
TWO = CFG.replace(n_layers=2, layer_types=("attention",) * 2)
DEEP = FAMILIES["gqa"].replace(
    eos_token_ids=(),
    d_ff=64,
    experts=ExpertsConfig(8, 3, 32, shared=32, shared_gate=True),
    expert_layers=(1,),
)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [3, 4]]
NEW = 4
USE = {"layers": {"0": [0.1, 0.5, 0.02, 0.3, 0.4, 0.2, 0.4, 0.08]}}


def offloaded(cfg: ModelConfig, params: Params, text: str, folder, **options) -> LanguageModel:
    place = Placement(Policy.parse(text), jnp.float32, directory=folder, **options)
    return place.model(cfg, place.tree(jax.tree.map(np.asarray, params)), None)


def check_policies(cfg: ModelConfig, params: Params, policies: list[str], folder: Path) -> None:
    """Twice the resident model's tokens, of two states of the slots."""
    want = LanguageModel(cfg, params, None).generate(PROMPTS, NEW)
    for text in policies:
        off = offloaded(cfg, params, text, folder)
        for _ in range(2):
            check_same(off.generate(PROMPTS, NEW), want, of=text)


@pytest.mark.parametrize(
    ("cfg", "scheme", "policies"),
    [
        pytest.param(
            CFG,
            None,
            ["100 0 100 0 100 0 experts=25/50 cpu_expert=0.7 gpu_batch_size=2 num_gpu_batches=2"],
            id="mixed",
        ),
        *slow(
            (
                CFG,
                None,
                [
                    "100 0 100 0 100 0 experts=100/0",
                    "0 100 0 100 0 100 experts=0/100 gpu_batch_size=2 num_gpu_batches=2",
                    "100 0 100 0 100 0 experts=0/100 cpu_expert=1e-6 overlap=false",
                    "100 0 100 0 100 0 experts=0/0 cpu_expert=0.5 sep_layer=true",
                    "0 100 0 100 100 0 experts=50/50 cpu_attention=true prefill_batch_size=3",
                ],
            ),
            (
                DEEP,
                None,
                [
                    "30 40 30 40 30 40 experts=40/30 cpu_expert=0.4 cpu_token=0.3",
                    "100 0 100 0 100 0 experts=0/100",
                ],
            ),
            (
                CFG,
                "mxfp4",
                [
                    "100 0 100 0 100 0 experts=25/50 cpu_expert=0.7",
                    "100 0 100 0 100 0 experts=0/100",
                    "100 0 100 0 100 0 experts=0/100 cpu_expert=1e-6",
                ],
            ),
            (CFG, "fp8-block", ["100 0 100 0 100 0 experts=25/50 cpu_expert=0.7"]),
            (DEEP, "w4a16-g32-zero", ["100 0 100 0 100 0 experts=25/50 cpu_expert=0.7"]),
        ),
    ],
)
def test_every_placement_gives_the_resident_model_s_tokens(tmp_path, cfg, scheme, policies):
    params = params_of(cfg)
    if scheme is not None:
        params = quantize_params(params, scheme)
    check_policies(cfg, params, policies, tmp_path)


READS = "100 0 100 0 100 0 experts="


@pytest.fixture
def reads(monkeypatch) -> None:
    """Devices read pinned memory, as on a GPU; here the host reads for them."""
    begin = Store.__init__

    def reading(store, *args) -> None:
        begin(store, *args)
        store.fetches = True

    monkeypatch.setattr(Store, "__init__", reading)


def test_experts_that_the_cpu_gets_by_mail_give_the_same_tokens(reads, monkeypatch, tmp_path):
    cfg = TWO
    params = quantize_params(params_of(cfg), "none,experts_*=w8a16-g32")
    turns, serving = [], Mailbox.serving
    monkeypatch.setattr(
        Mailbox,
        "serving",
        lambda box, kind, sizes, experts: (
            turns.append((sizes, len(experts.tables[0]))) or serving(box, kind, sizes, experts)
        ),
    )
    want = offloaded(cfg, params, f"{READS}100/0", tmp_path).generate(PROMPTS, NEW)
    for part in ("0/100 cpu_expert=1e-6", "25/75 cpu_expert=0.7", "25/75 cpu_expert=0.3"):
        off = offloaded(cfg, params, READS + part, tmp_path)
        for _ in range(2):  # of two states of the slots
            turns.clear()
            check_same(off.generate(PROMPTS, NEW), want, of=part)
            assert turns == [(MailLayout(3, cfg.d_model, 6), cfg.n_layers)] * (NEW - 1)


def test_a_prompt_s_experts_are_loaded_where_the_cpu_computes_all_of_a_step(
    reads, monkeypatch, tmp_path
):
    cfg = TWO.replace(experts=ExpertsConfig(64, 2, 32, bias=True))
    params = quantize_params(params_of(cfg), "none,experts_*=w8a16-g32")
    turns, serving = [], Mailbox.serving
    monkeypatch.setattr(
        Mailbox, "serving", lambda box, *args: turns.append(args[1].rows) or serving(box, *args)
    )
    prompt = [np.random.default_rng(0).integers(0, cfg.vocab_size, 65).tolist()]  # 130 pairs
    want = offloaded(cfg, params, f"{READS}100/0", tmp_path).generate(prompt, NEW)
    off = offloaded(cfg, params, f"{READS}0/100 cpu_expert=1e-6", tmp_path)
    check_same(off.generate(prompt, NEW), want, of="a long prompt")
    assert turns == [1] * (NEW - 1)  # none of the prompt's


def test_a_layer_without_mail_takes_no_turn(reads, monkeypatch, tmp_path):
    cfg = TWO
    params = quantize_params(params_of(cfg), "none,experts_*=w8a16-g32")
    want = offloaded(cfg, params, f"{READS}100/0", tmp_path).generate(PROMPTS, NEW)
    made, begin = [], experts_of_layers._Cold.__init__

    def every_other(cold, *args) -> None:
        begin(cold, *args)
        cold.may_compute = cold.may_compute and len(made) % 2 == 1
        made.append(cold.may_compute)

    monkeypatch.setattr(experts_of_layers._Cold, "__init__", every_other)
    found = offloaded(cfg, params, f"{READS}0/100 cpu_expert=1e-6", tmp_path).generate(PROMPTS, NEW)
    assert made[:2] == [False, True]
    assert [one.tokens for one in found] == [one.tokens for one in want]


def test_a_thread_that_fails_lets_the_device_go_on(reads, monkeypatch, tmp_path):
    params = quantize_params(params_of(CFG), "none,experts_*=w8a16-g32")
    off = offloaded(CFG, params, f"{READS}0/100 cpu_expert=1e-6", tmp_path)

    def fails(*args):
        raise ValueError("no")

    monkeypatch.setattr(programs, "served", fails)
    with pytest.raises(ValueError, match="no"):
        off.generate(PROMPTS, 8)


def test_nobody_waits_for_a_span_that_was_not_dispatched(reads, monkeypatch, tmp_path):
    params = quantize_params(params_of(TWO), "none,experts_*=w8a16-g32")
    off = offloaded(TWO, params, f"{READS}0/100 cpu_expert=1e-6", tmp_path)
    want, run, calls = off.generate(PROMPTS, NEW), programs.fetched, []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 2:
            raise ValueError("no")
        return run(*args)

    monkeypatch.setattr(programs, "fetched", fails_once)
    with pytest.raises(ValueError, match="no"):
        off.generate(PROMPTS, NEW)
    found = off.generate(PROMPTS, NEW)
    assert [one.tokens for one in found] == [one.tokens for one in want]


@pytest.mark.parametrize(
    ("cfg", "policies"),
    [
        (TWO, [f"{READS}25/75"]),
        *slow(
            (TWO, [f"{READS}25/75 gpu_batch_size=2 num_gpu_batches=2", f"{READS}100/0"]),
            (CFG, [f"{READS}25/75 cpu_expert=0.7", f"{READS}100/0"]),
            (CFG, [f"{READS}0/100 sep_layer=true"]),
            (CFG, [f"{READS}25/75 gpu_batch_size=2 num_gpu_batches=2"]),
            (DEEP, [f"{READS}0/100", f"{READS}40/60", "30 70 30 70 30 70 experts=40/60"]),
        ),
    ],
)
def test_a_device_that_reads_pinned_memory_gives_the_same_tokens(reads, tmp_path, cfg, policies):
    check_policies(cfg, params_of(cfg), policies, tmp_path)


@pytest.mark.parametrize("part", ["", " cpu_expert=0.3"])
def test_layers_in_one_program_have_the_bits_of_layers_alone(reads, part, monkeypatch, tmp_path):
    params = quantize_params(params_of(TWO), "none,experts_*=w8a16-g32")
    found, run = [], programs.fetched
    for longest in (units.SPAN, 1):
        calls: list[int] = []

        def counted(kinds, *rest, calls=calls):
            calls.append(len(kinds))
            return run(kinds, *rest)

        monkeypatch.setattr(units, "SPAN", longest)
        monkeypatch.setattr(programs, "fetched", counted)
        off = offloaded(TWO, params, f"{READS}25/75{part}", tmp_path)
        out = [off.generate(PROMPTS, NEW) for _ in range(2)]  # of two states of the slots
        assert set(calls) == {min(longest, 2)}
        found.append([(row.tokens, row.logprobs) for rows in out for row in rows])
    assert found[0] == found[1]


@pytest.mark.parametrize("chunk", [30, pytest.param(15, marks=pytest.mark.slow)])
def test_a_long_prompt_loads_a_layer_s_experts_once_for_each_piece(tmp_path, chunk):
    cfg = TWO
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (8, 30))
    params = spread_routes(params_of(cfg), cfg)
    want = [out.tokens for out in LanguageModel(cfg, params, None).generate(tokens.tolist(), 2)]
    off = offloaded(cfg, params, "100 0 100 0 100 0 experts=0/100", tmp_path)
    run = given_run(off, tokens, 2, 32, jnp.float32, chunk)
    run.step()
    pieces, n_experts = ceil(30 / chunk), 8
    assert streams(cfg.layers[0], chunk) and not streams(cfg.layers[0], 4)
    assert run.experts.loads == pieces * cfg.n_layers * n_experts
    # Those of the second layer are on their way before its router has chosen for the first piece.
    assert run.experts.tally.ahead == min(n_experts, 2 * GROUP)
    run.step()
    assert run.report.tokens.tolist() == want


def skewed(params: Params) -> Params:
    """Return the parameters with routers that nearly always choose the experts 5 and 6."""
    params = jax.tree.map(lambda leaf: leaf, params)
    for name in [name for name in params if name.startswith("layer_")]:
        router = params[name]["mlp"]["router"]
        params[name]["mlp"]["router"] = {**router, "bias": router["bias"].at[5:7].set(20.0)}
    return params


@pytest.mark.parametrize("learns", [True, *slow(False)])
def test_the_experts_that_are_chosen_take_the_slots(tmp_path, learns):
    params, tokens = skewed(params_of(CFG)), np.array([PROMPTS[0][:2], PROMPTS[1][:2]])
    want = [out.tokens for out in LanguageModel(CFG, params, None).generate(tokens.tolist(), 4)]
    off = offloaded(CFG, params, f"{READS}25/75", tmp_path, deterministic=not learns)
    for _ in range(2):  # the second call finds the slots as the first one has left them
        run = given_run(off, tokens, 4, 8, jnp.float32, 8)
        for _ in range(4):
            run.step()
        assert run.report.tokens.tolist() == want
    held, loads = ([5, 6], 0) if learns else ([0, 1], 2 * 4)
    assert run.experts.loads == loads
    tensor = off.params["layer_0"]["mlp"]["experts_gate_up"]["weight"]
    assert sorted(np.asarray(tensor.held.experts).tolist()) == held
    assert sorted(np.flatnonzero(np.asarray(tensor.held.slots) < 2).tolist()) == held
    # An expert is in its slot, as it is in host memory.
    data = np.asarray(tensor.stored(off.executor.store, int(tensor.held.experts[1])))
    np.testing.assert_array_equal(np.asarray(tensor.hot[1]).reshape(-1), data.view(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", " cpu_expert=0.7"])
def test_threads_that_share_the_slots_give_the_same_tokens(tmp_path, options):
    params = params_of(CFG)
    lm, prompts = LanguageModel(CFG, params, None), [PROMPTS, [row[::-1] for row in PROMPTS]]
    want = [[out.tokens for out in lm.generate(rows, 8)] for rows in prompts]
    off = offloaded(CFG, params, f"{READS}25/75{options}", tmp_path)

    def generated(rows: list[list[int]]) -> list[list[list[int]]]:
        return [[out.tokens for out in off.generate(rows, 8)] for _ in range(3)]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(generated, prompts))
    assert found == [[tokens] * 3 for tokens in want]


def test_learned_slots_are_hit_more_often_than_the_most_used_experts(tmp_path):
    """Skewed use, whose favourites change: 32 experts, 4 a token, 8 slots."""
    rng, n_experts, n_slots = np.random.default_rng(0), 32, 8
    shares = 1.0 / np.arange(1, n_experts + 1)
    topics = [rng.permutation(n_experts) for _ in range(4)]
    chosen = [
        topic[np.argsort(-(np.log(shares) + rng.gumbel(size=(400, n_experts))), axis=1)[:, :4]]
        for topic in topics
    ]
    use = np.bincount(np.concatenate(chosen).reshape(-1), minlength=n_experts)
    most_used = np.argsort(-use)[:n_slots]
    static = np.isin(np.concatenate(chosen), most_used).mean()
    place = ExpertPlace(tuple(range(n_slots)), tuple(range(n_slots, n_experts)), ())
    weights = jnp.arange(n_experts, dtype=jnp.float32)  # an expert's weight is its number
    hot = HotExperts(
        (weights[:n_slots], weights[:n_slots]), HotSlots.of(Store("."), n_experts, place)
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(hot: HotExperts, experts: jax.Array) -> tuple[HotExperts, jax.Array]:
        cold = hot.held.slots[experts] == n_slots
        hot = hot._replace(held=warmed(hot.held, experts[None]))
        loaded = jnp.where(cold, experts, n_experts)
        return kept(hot, loaded, (weights[loaded], weights[loaded])), jnp.sum(~cold)

    hits = 0
    for experts in np.concatenate(chosen):
        hot, count = step(hot, jnp.asarray(experts, jnp.int32))
        hits += int(count)
        held = np.asarray(hot.held.experts)
    np.testing.assert_array_equal(np.asarray(hot.weights[0]), held)
    np.testing.assert_array_equal(np.asarray(hot.held.slots)[held], np.arange(n_slots))
    assert (np.asarray(hot.held.slots) < n_slots).sum() == n_slots
    best = np.mean(
        [np.isin(own, topic[:n_slots]).mean() for own, topic in zip(chosen, topics, strict=True)]
    )
    assert hits / 6400 > static + 0.1 and hits / 6400 > 0.9 * best, (static, hits / 6400, best)


@pytest.mark.slow
def test_drafts_logits_and_the_engine_s_blocks(tmp_path):
    params = params_of(CFG)
    lm = LanguageModel(CFG, params, None)
    off = offloaded(
        CFG, params, "100 0 100 0 100 0 experts=25/50 cpu_expert=0.7 gpu_batch_size=2", tmp_path
    )
    want = [out.tokens for out in lm.generate(PROMPTS, 8)]
    found = off.generate(PROMPTS, 8, draft="ngram", draft_tokens=3)
    assert [out.tokens for out in found] == want
    requests = [Request(str(row), tuple(prompt), 8) for row, prompt in enumerate(PROMPTS)]
    events = Engine(off, max_len=32).generate(requests)
    for row, tokens in enumerate(want):
        assert [token for event in events[str(row)] for token in event.tokens] == tokens
    tokens = np.array([[4, 5, 6, 7], [9, 8, 0, 0]], np.int32)
    scores, own = lm.logits(tokens, [4, 2]), off.logits(tokens, [4, 2])
    np.testing.assert_allclose(own[0], scores[0], atol=1e-5)
    np.testing.assert_allclose(own[1, :2], scores[1, :2], atol=1e-5)


def test_the_most_used_experts_are_on_the_device_and_the_least_used_on_disk(tmp_path):
    path = tmp_path / "use.json"
    path.write_text(json.dumps(USE))
    policy = Policy.parse(f"100 0 100 0 100 0 experts=25/50 expert_use={path}")
    assert Policy.parse(str(policy)) == policy
    [place] = places(policy, {0: 8}, ExpertUse.load(path)).values()
    assert (place.device, place.host, place.disk) == ((1, 4), (6, 3, 5, 0), (7, 2))
    # Over all layers: the second one is used less.
    use = ExpertUse({0: np.array([0.9, 0.6, 0.3, 0.2]), 1: np.array([0.5, 0.5, 0.5, 0.5])})
    both = places(Policy(experts="50/50"), {0: 4, 1: 4}, use)
    assert [len(both[layer].device) for layer in (0, 1)] == [2, 2]
    both = places(Policy(experts="25/50"), {0: 4, 1: 4}, use)
    assert [both[layer].device for layer in (0, 1)] == [(0, 1), ()]
    assert both[0].disk == (2, 3) and both[1].disk == ()
    counted = ExpertUse.of_counts({0: np.array([3, 1, 0, 0])}, 2)
    counted.save(path)
    np.testing.assert_allclose(ExpertUse.load(path).layers[0], [1.5, 0.5, 0, 0])


def test_tenths_of_a_percent_sum_to_all_experts():
    assert Policy(experts="82.7/17.3").expert_shares == (82.7, 17.3)  # 100 - 82.7 - 17.3 < 0
    assert places(Policy(experts="82.7/17.3"), {0: 8}, None)[0].disk == ()


def test_experts_are_divided_between_link_and_cpu():
    def split(tokens, loaded=(), **costs):
        return divided(tokens, set(loaded), Policy(experts="0/100", **costs))

    assert split({1: 1, 2: 9}) == ([2, 1], [])
    assert split({1: 1, 2: 9}, cpu_expert=1e-6) == ([], [2, 1])
    policy = Policy(experts="0/100", cpu_expert=1e-6)
    assert policy.of_pairs(128) == policy
    assert policy.of_pairs(129).cpu_expert == 0  # a long prompt's
    assert split({1: 1, 2: 9}, cpu_expert=0.5, cpu_token=1.0) == ([2], [1])
    assert split({1: 1, 2: 1, 3: 1, 4: 1}, cpu_expert=1.0) == ([1, 2], [3, 4])
    assert split({1: 1, 2: 9}, [1], cpu_expert=0.1, cpu_token=1.0) == ([1, 2], [])
    # The hottest of equal ones are loaded, because they may get a slot.
    rng = np.random.default_rng(0)
    for share, more in ((1e-6, 0.0), (0.5, 0.15), (0.8, 0.25), (4.0, 1.0)):  # as a device does it
        experts, cold = rng.integers(0, 16, (6, 2)), rng.random(16) < 0.7
        heat = rng.integers(0, 3, 16).astype(np.float32)
        needed = cold & np.isin(np.arange(16), experts)
        tokens = {e: int((experts == e).sum()) for e in np.flatnonzero(needed)}
        policy = Policy(experts="0/100", cpu_expert=share, cpu_token=more)
        mail = programs.Mail(None, *(jnp.float32(x) for x in (share, more)))
        passed = programs.tokens_of(jnp.asarray(experts), 16)
        found = programs._for_cpu(mail, passed, jnp.asarray(needed), heat)
        assert np.flatnonzero(found).tolist() == sorted(divided(tokens, set(), policy, heat)[1])
    heat, policy = np.arange(5), Policy(experts="0/100", cpu_expert=1.0)
    assert divided(dict.fromkeys((1, 2, 3, 4), 1), set(), policy, heat) == ([4, 3], [2, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experts=70/40", "experts = 70/40: percentages must be 0 to 100"),
        ("experts=nan/50", "experts = nan/50: percentages must be 0 to 100"),
        ("experts=70", "expected DEVICE/HOST"),
        ("experts=a/b", "expected a percentage"),
        ("cpu_expert=0.5", "cpu_expert needs experts=DEVICE/HOST"),
        ("experts=0/100 cpu_token=-1", "cpu_token = -1.0: must be at least 0"),
    ],
)
def test_policies_of_experts_are_checked(text, message):
    with pytest.raises(JaxLlamaError, match=message):
        Policy.parse(f"100 0 100 0 100 0 {text}")


def test_a_table_or_a_model_that_does_not_fit_is_named(tmp_path):
    path = tmp_path / "use.json"
    path.write_text("{}")
    with pytest.raises(JaxLlamaError, match="use.json: expected"):
        Placement(Policy(experts="0/100", expert_use=str(path)), jnp.float32)
    path = tmp_path / "seven.json"
    path.write_text(json.dumps({"layers": {"0": [0.25] * 7}}))
    with pytest.raises(JaxLlamaError, match="layer 0: 7 experts, expected 8"):
        offloaded(
            CFG, params_of(CFG), f"100 0 100 0 100 0 experts=0/100 expert_use={path}", tmp_path
        )
    with pytest.raises(JaxLlamaError, match="is no mixture of experts"):
        dense = FAMILIES["gqa"].first_layers(1)
        offloaded(dense, params_of(dense), "100 0 100 0 100 0 experts=0/100", tmp_path)
