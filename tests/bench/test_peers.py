"""Models in other programs have the requested shape, and report what they read and how long it took."""

import contextlib
import sys

import numpy as np
import pytest
import torch

from contextready.bench import peers
from contextready.bench.llama import PRECISIONS, Shape, is_llama, random_weights, weights_of, write_gguf
from contextready.bench.peers import HuggingFacePeer, LlamaCppPeer
from contextready.errors import ContextReadyError
from contextready.model.config import ModelConfig, TransformerConfig
from contextready.model.context_ready import build_model

SHAPE = Shape(layers=2, width=64, heads=2, vocab_size=96, ffn_width=160, kv_heads=2)


def weights_from(model, shape):
    """The weights of transformers' Llama under the names of llama.cpp."""
    held = model.state_dict()
    for name in shape.tensors():
        yield name, held[peers._in_transformers(name)].numpy()


def randomised(shape):
    """A peer whose every weight matters: norms differ from 1, and large matrices make attention sharp."""
    peer = HuggingFacePeer(shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in peer.model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * 0.2 if weight.dim() == 2 else 1 + 0.3 * noise)
    return peer


@pytest.mark.parametrize(
    ("width", "ffn_width"),
    [(1088, 2912), (768, 2048), (64, 160), (8, 32)],
)
def test_the_gated_mlp_has_about_the_weights_of_the_baseline(width, ffn_width):
    shape = Shape.like(TransformerConfig(32, width, 1, 2))
    assert shape.ffn_width == ffn_width
    if width >= 768:
        assert 3 * width * ffn_width == pytest.approx(8 * width**2, rel=0.005)


def test_transformers_reports_a_time_for_each_token():
    pytest.importorskip("transformers")
    with contextlib.closing(HuggingFacePeer(SHAPE)) as peer:
        seconds = peer.decode(context=5, new=3)
        assert len(seconds) == 3
        assert min(seconds) > 0
        assert (peer.name, peer.precision) == ("transformers", "f32")


def test_transformers_generates_what_its_own_argmax_does():
    pytest.importorskip("transformers")
    with contextlib.closing(randomised(SHAPE)) as peer:
        prompt = [3, 1, 4, 1, 5]
        tokens, _ = peer.generate(prompt, 6)
        with torch.no_grad():
            logits = peer.model(torch.tensor([prompt + tokens[:-1]])).logits[0]
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_transformers_reads_all_of_its_weights_but_the_embedding():
    pytest.importorskip("transformers")
    with contextlib.closing(HuggingFacePeer(SHAPE)) as peer:
        held = {name: tensor.nbytes for name, tensor in peer.model.state_dict().items()}
        embedding = held.pop("model.embed_tokens.weight")
        assert peer.bytes_per_token == sum(held.values()) + embedding // SHAPE.vocab_size
        assert peer.bytes_per_token == 4 * (
            sum(int(np.prod(size)) for size in SHAPE.tensors().values()) - (SHAPE.vocab_size - 1) * SHAPE.width
        )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_llama_cpp_reports_a_time_for_each_token(precision):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    with contextlib.closing(LlamaCppPeer(SHAPE, precision, capacity=256)) as peer:
        for _ in range(2):  # a second stream starts from an empty cache
            seconds = peer.decode(context=5, new=3)
            assert len(seconds) == 3
            assert min(seconds) > 0
        assert (peer.name, peer.precision) == ("llama.cpp", precision)


@pytest.mark.parametrize(("precision", "bits"), [("f32", 32), ("f16", 16), ("q8_0", 8.5), ("q4_0", 4.5)])
def test_llama_cpp_reads_all_of_its_weights_but_the_embedding(precision, bits, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    read = write_gguf(path, SHAPE, precision, random_weights(SHAPE))
    with contextlib.closing(llama_cpp.Llama(str(path), n_ctx=64, n_batch=64, n_threads=1, verbose=False)) as llama:
        held = llama_cpp.llama_model_size(llama.model)
        assert llama_cpp.llama_model_n_params(llama.model) == sum(int(np.prod(s)) for s in SHAPE.tensors().values())
    assert read == held - (SHAPE.vocab_size - 1) * SHAPE.width * bits / 8


@pytest.mark.parametrize("heads", [2, 4])
def test_both_compute_the_same_model(heads, tmp_path):
    """The file is a real model of this shape: the same weights give the same logits and the same greedy tokens."""
    pytest.importorskip("transformers")
    llama_cpp = pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    shape = SHAPE._replace(width=136, heads=heads)  # heads of 68, the paper's size at width 1088, and of 34
    prompt = np.random.default_rng(2).integers(shape.vocab_size, size=40).tolist()
    with contextlib.closing(randomised(shape)) as theirs:
        path = tmp_path / "model.gguf"
        write_gguf(path, shape, "f32", weights_from(theirs.model, shape))
        exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        llama = llama_cpp.Llama(str(path), n_ctx=64, n_batch=64, n_threads=1, logits_all=True, verbose=False, **exact)
        with contextlib.closing(llama):
            llama.eval(prompt)
            scores = llama.scores[: len(prompt)].copy()
        with torch.no_grad():
            logits = theirs.model(torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(scores, logits, atol=1e-4 * np.abs(logits).max())

        weights = weights_from(theirs.model, shape)
        with contextlib.closing(LlamaCppPeer(shape, "f32", capacity=256, weights=weights)) as ours:
            expected, _ = theirs.generate(prompt, 20)
            assert len(set(expected)) > 5  # not a constant, which a wrong model could produce too
            assert ours.generate(prompt, 20)[0] == expected
            assert ours.generate(prompt, 20)[0] == expected


LLAMA = {"norm": "rms", "ffn": "swiglu", "ffn_width": 96, "kv_heads": 1, "rope_base": 5000.0, "norm_eps": 1e-6}


@pytest.mark.parametrize("tied", [True, False])
def test_both_run_the_weights_of_a_native_llama(tied):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = ModelConfig(96, 64, 2, 4, **LLAMA, tied_embeddings=tied, correction=None)
    assert is_llama(config)
    backbone = build_model(config).eval().backbone
    with torch.no_grad():
        for weight in backbone.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 if weight.dim() == 2 else 1 + 0.3 * torch.randn_like(weight))
    prompt = np.random.default_rng(2).integers(96, size=30).tolist()
    shape = Shape.like(config)
    with contextlib.closing(HuggingFacePeer(shape, weights_of(backbone))) as peer:
        expected, _ = peer.generate(prompt, 20)
        with torch.no_grad():
            ids = torch.tensor([prompt + expected[:-1]])
            theirs = peer.model(ids).logits
            torch.testing.assert_close(
                backbone.head(backbone.blocks(backbone.embed(ids))[0]), theirs, atol=1e-4, rtol=1e-4
            )
        matrices = sum(w.numel() for w in backbone.parameters())
        assert peer.bytes_per_token == 4 * (matrices - (0 if tied else 95 * 64))
    assert len(set(expected)) > 5
    # The comparison with transformers above runs even where llama.cpp is missing.
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    with contextlib.closing(LlamaCppPeer(shape, "f32", capacity=256, weights=weights_of(backbone))) as peer:
        assert peer.generate(prompt, 20)[0] == expected


@pytest.mark.parametrize("setting", [{"qk_norm": True}, {"qkv_bias": True}, {"norm": "layer"}, {"head_width": 32}])
def test_other_families_are_not_llama(setting):
    assert not is_llama(ModelConfig(96, 64, 2, 4, **LLAMA | setting, correction=None))


def test_a_prompt_longer_than_a_batch_is_read_whole(monkeypatch):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    prompt = np.random.default_rng(3).integers(SHAPE.vocab_size, size=50).tolist()
    with contextlib.closing(LlamaCppPeer(SHAPE, "f32", capacity=256)) as peer:
        whole, _ = peer.generate(prompt, 8)
    monkeypatch.setattr(peers, "_BATCH", 16)
    with contextlib.closing(LlamaCppPeer(SHAPE, "f32", capacity=256)) as peer:
        assert peer.generate(prompt, 8)[0] == whole


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("transformers", lambda: HuggingFacePeer(SHAPE)),
        ("llama_cpp", lambda: LlamaCppPeer(SHAPE, "f32")),
    ],
)
def test_a_missing_package_is_named(module, make, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ContextReadyError, match=rf"package {module} is not installed; .*pip install"):
        make()


def test_a_missing_gguf_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ContextReadyError, match=r"package gguf is not installed; .*pip install"):
        write_gguf(tmp_path / "model.gguf", SHAPE, "f32", [])


@pytest.mark.parametrize(
    ("shape", "precision", "words"),
    [
        (SHAPE, "q5_1", "choose one of: f32, f16, q8_0, q4_0"),
        (SHAPE._replace(width=68), "q8_0", "needs a multiple of 32"),
        (SHAPE._replace(heads=3), "f32", "not divisible by heads=3"),
    ],
)
def test_what_cannot_be_stored_is_refused(shape, precision, words, tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(ContextReadyError, match=words):
        write_gguf(tmp_path / "model.gguf", shape, precision, random_weights(shape))


def test_weights_of_another_shape_are_refused(tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    with pytest.raises(ContextReadyError, match="is not a weight of"):
        write_gguf(path, SHAPE, "f32", random_weights(SHAPE._replace(width=32)))
    with pytest.raises(ContextReadyError, match="are missing: blk"):
        write_gguf(path, SHAPE._replace(layers=3), "f32", random_weights(SHAPE))


def test_a_stream_that_has_no_room_is_refused():
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    with contextlib.closing(LlamaCppPeer(SHAPE, "f32", capacity=16)) as peer:
        with pytest.raises(ContextReadyError, match="room for 16 tokens, but 22 are needed; create it with a larger"):
            peer.decode(context=10, new=10)
        with pytest.raises(ContextReadyError, match="must be at least 1, but got 10 and 0"):
            peer.decode(context=10, new=0)
        with pytest.raises(ContextReadyError, match="out of range"):
            peer.generate([SHAPE.vocab_size], 1)
