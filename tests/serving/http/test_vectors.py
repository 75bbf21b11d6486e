"""Vectors and scores of texts: pooling, dimensions, /v1/rerank and /v1/score."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

pytest.importorskip("uvicorn")

from jaxllama.checkpoints import pooling
from jaxllama.checkpoints.pooling import Pooling
from jaxllama.engine.embeddings import Embedder, cut
from jaxllama.errors import JaxLlamaError
from jaxllama.model.decoder import final_norm, forward
from jaxllama.serving.api.ranking import INSTRUCTION, JUDGE
from tests.helpers.http_server import CFG, NAME, byte_tokenizer, client, error_of, serving
from tests.helpers.seeded import seeded_params

DOCUMENTS = ["a cat", "", "two dogs"]


def written(folder, modules, config):
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling/config.json").write_text(json.dumps(config))
    return folder


MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def test_the_pooling_of_old_and_new_files(tmp_path):
    assert pooling.read(tmp_path) is None
    old = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}
    written(tmp_path, MODULES, old)
    assert pooling.read(tmp_path) == Pooling("last", True)
    (tmp_path / "modules.json").write_text(json.dumps(MODULES[:2]))
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    assert pooling.read(tmp_path) == Pooling("mean", False)


@pytest.mark.parametrize(
    ("modules", "config", "words"),
    [
        (MODULES, {"pooling_mode": ["cls", "mean"]}, "pooling_mode = "),
        (MODULES, {"pooling_mode": "weightedmean"}, "weightedmean"),
        (MODULES, {}, "pooling_mode = "),
        ([*MODULES[:2], {"path": "2_Dense", "type": "x.Dense"}], {"pooling_mode": "cls"}, "Dense"),
        ([MODULES[0], {**MODULES[1], "path": "../x"}], {}, "outside"),
        ({}, {}, "expected a list"),
        (MODULES, {"pooling_mode": [["cls"]]}, "pooling_mode = "),
        (MODULES, {"pooling_mode": {"cls": True}}, "pooling_mode = "),
        (MODULES, {"pooling_mode_lasttoken": "no"}, "pooling_mode_lasttoken = 'no': expected true"),
        ([MODULES[0], {**MODULES[1], "path": ["1_Pooling"]}], {}, r"path = \['1_Pooling'\]"),
        ([MODULES[0], {**MODULES[1], "path": "x" * 5000}], {}, "there is no 'xxx"),
    ],
)
def test_a_pooling_that_is_not_supported_is_named(tmp_path, modules, config, words):
    with pytest.raises(JaxLlamaError, match=words):
        pooling.read(written(tmp_path, modules, config))


def test_each_mode_pools_its_states(lm):
    row = [5, 80, 33, 9, 7]
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, :5] = row
    hidden, _ = jax.jit(forward, static_argnums=0)(CFG, lm.params, tokens, np.array([5], np.int32))
    states = np.asarray(final_norm(CFG, lm.params, hidden)[0, :5], np.float64)
    want = {
        "mean": states.mean(0),
        "last": states[-1],
        "cls": states[0],
        "max": states.max(0),
    }
    for number, (mode, vector) in enumerate(want.items()):
        is_unit = number % 2 == 1
        got = Embedder(dataclasses.replace(lm, pooling=Pooling(mode, is_unit)))(row)
        vector = vector / np.linalg.norm(vector) if is_unit else vector
        np.testing.assert_allclose(got, vector, rtol=0, atol=2e-6, err_msg=mode)


def test_a_vector_is_cut_and_scaled():
    vector = np.float32([3, 4, 12])
    assert cut(vector, None, True) is vector and cut(vector, 3, True) is vector
    np.testing.assert_allclose(cut(vector, 2, True), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(cut(vector, 2, False), [3, 4])


@pytest.fixture(scope="module")
def judge(lm):
    return dataclasses.replace(lm, tokenizer=byte_tokenizer(special=["yes", "no"]))


def test_a_chat_model_judges_documents(judge, engine):
    """Each score is the softmax of the logits of "yes" and "no" after the template's prompt."""
    body = {"model": NAME, "query": "pets", "documents": DOCUMENTS, "top_n": 2}
    with serving(judge, engine, max_len=512) as url, client(url) as http:
        reply = http.post("/v1/rerank", json=body).json()
        pairs = {"model": NAME, "text_1": "pets", "text_2": DOCUMENTS}
        scores = http.post("/v1/score", json=pairs).json()
        longer = {**pairs, "text_1": ["a", "b"]}
        assert error_of(http.post("/v1/score", json=longer))["param"] == "text_2"
    tokens, lengths = np.zeros((3, 512), np.int32), np.zeros(3, np.int32)
    for row, document in enumerate(DOCUMENTS):
        text = f"<Instruct>: {INSTRUCTION}\n<Query>: pets\n<Document>: {document}"
        ids = judge.tokenizer.encode_chat(
            [{"role": "system", "content": JUDGE}, {"role": "user", "content": text}]
        )
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    logits = np.asarray(judge.logits(tokens, lengths), np.float64)
    last = logits[np.arange(3), lengths - 1]
    want = 1 / (1 + np.exp(last[:, 257] - last[:, 256]))
    np.testing.assert_allclose([item["score"] for item in scores["data"]], want, rtol=1e-5)
    best = sorted(range(3), key=lambda i: -want[i])[:2]
    assert [item["index"] for item in reply["results"]] == best
    assert [item["document"]["text"] for item in reply["results"]] == [DOCUMENTS[i] for i in best]
    assert reply["results"][0]["relevance_score"] == scores["data"][best[0]]["score"]
    assert reply["usage"] == scores["usage"]


def test_vectors_and_heads_score_too(lm, engine):
    """With a pooling from its files the score is a cosine; a head of one class gives a sigmoid."""
    body = {"model": NAME, "text_1": ["ab", "xyz"], "text_2": ["xyz", "xyz"]}
    embeds = dataclasses.replace(lm, pooling=Pooling("last", False))
    with serving(embeds, engine) as url, client(url) as http:
        cosines = [item["score"] for item in http.post("/v1/score", json=body).json()["data"]]
        short = {"model": NAME, "input": "ab", "dimensions": 8}
        vector = http.post("/v1/embeddings", json=short).json()["data"][0]["embedding"]
    first, second = (Embedder(embeds)(list(text)) for text in (b"ab", b"xyz"))
    want = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    np.testing.assert_allclose(cosines, [want, 1], rtol=1e-5)
    np.testing.assert_array_equal(np.float32(vector), first[:8])
    head = np.random.default_rng(0).normal(size=(1, CFG.d_model)).astype(np.float32)
    ranks = dataclasses.replace(lm, classifier=jax.device_put(head))
    with serving(ranks, engine) as url, client(url) as http:
        scores = [item["score"] for item in http.post("/v1/score", json=body).json()["data"]]
    state = Embedder(embeds)(list(b"abxyz")).astype(np.float64)
    np.testing.assert_allclose(scores[0], 1 / (1 + np.exp(-head[0] @ state)), rtol=1e-5)
    two = dataclasses.replace(lm, classifier=jax.device_put(np.repeat(head, 2, 0)))
    for model, words in ((two, "2 classes"), (lm, "splits")):
        with serving(model, engine) as url, client(url) as http:
            refused = http.post("/v1/score", json=body)
            assert refused.status_code == 400 and words in error_of(refused)["message"]


# sentence-transformers as the oracle


def tokenizer_files(folder):
    """A word tokenizer that appends <end>, as Qwen3-Embedding's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<end>", "<unk>", "<pad>", *(f"w{i}" for i in range(60))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A <end>", pair="$A <end> $B <end>", special_tokens=[("<end>", 0)]
    )
    options = {"unk_token": "<unk>", "eos_token": "<end>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)


def sizes(**more):
    return dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        pad_token_id=2,
        eos_token_id=0,
        initializer_range=0.2,
        **more,
    )


TEXTS = ["w1 w2 w3", "w9", "w5 w5 w40 w2 w8 w11 w30", "w3 w2 w1"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), [("qwen3", "lasttoken"), ("llama", "mean")])
def test_vectors_are_those_of_sentence_transformers(tmp_path, family, mode):
    st = pytest.importorskip("sentence_transformers")
    torch = pytest.importorskip("torch")
    import transformers
    from sentence_transformers.sentence_transformer import modules

    import jaxllama as jl

    torch.manual_seed(0)
    tokenizer_files(tmp_path / "base")
    kinds = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3Model),
        "llama": (transformers.LlamaConfig, transformers.LlamaModel),
    }
    config, model = kinds[family]
    model(config(**sizes())).save_pretrained(tmp_path / "base")
    transformer = modules.Transformer(str(tmp_path / "base"))
    parts = [transformer, modules.Pooling(32, pooling_mode=mode)]
    parts += [modules.Normalize()] if mode == "lasttoken" else []
    theirs = st.SentenceTransformer(modules=parts, device="cpu")
    theirs.save(str(tmp_path / "saved"))
    lm = jl.load(tmp_path / "saved", "float32")
    assert lm.pooling == Pooling("last" if mode == "lasttoken" else "mean", mode == "lasttoken")
    embed = Embedder(lm)
    ours = np.stack([embed(lm.tokenizer.encode(text)) for text in TEXTS])
    np.testing.assert_allclose(ours, theirs.encode(TEXTS), rtol=0, atol=2e-5)
    for index in (3, 0, 2, 1):
        np.testing.assert_array_equal(embed(lm.tokenizer.encode(TEXTS[index])), ours[index])


@pytest.mark.slow
def test_scores_are_those_of_a_cross_encoder(tmp_path, engine):
    st = pytest.importorskip("sentence_transformers")
    torch = pytest.importorskip("torch")
    import transformers

    import jaxllama as jl

    torch.manual_seed(0)
    tokenizer_files(tmp_path)
    config = transformers.Qwen3Config(**sizes(num_labels=1))
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path)
    pairs = [("w1 w2", text) for text in TEXTS]
    want = st.CrossEncoder(str(tmp_path), device="cpu").predict(pairs)
    lm = jl.load(tmp_path, "float32")
    body = {"model": NAME, "text_1": "w1 w2", "text_2": TEXTS}
    with serving(lm, engine) as url, client(url) as http:
        reply = http.post("/v1/score", json=body).json()
    np.testing.assert_allclose([item["score"] for item in reply["data"]], want, rtol=0, atol=2e-5)


def test_a_bare_decoder_and_a_classifier_are_read(tmp_path):
    """Their tensors lack "model." or a head; the tree is that of the tied language model."""
    from safetensors.numpy import load_file, save_file

    from jaxllama.checkpoints.hf import load as hf

    cfg = CFG.replace(tie_embeddings=True)
    params = jax.tree.map(np.asarray, seeded_params(cfg))
    hf.save(tmp_path / "lm", cfg, params, [])
    tensors = load_file(tmp_path / "lm/model.safetensors")
    config = json.loads((tmp_path / "lm/config.json").read_text())
    config["tie_word_embeddings"] = False
    head = np.random.default_rng(0).normal(size=(1, cfg.d_model)).astype(np.float32)
    forms = {
        "LlamaModel": {name.removeprefix("model."): value for name, value in tensors.items()},
        "LlamaForSequenceClassification": {**tensors, "score.weight": head},
    }
    for architecture, stored in forms.items():
        folder = tmp_path / architecture
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        save_file(stored, folder / "model.safetensors")
        found, tree = hf.load(folder)
        assert found.tie_embeddings and "head" not in tree
        jax.tree.map(np.testing.assert_array_equal, tree, params)
        classifier = hf.read_classifier(folder)
        assert (classifier is None) == (architecture == "LlamaModel")
        if classifier is not None:
            np.testing.assert_array_equal(classifier, head)
