"""`crt convert` of GGUF files."""

import json
import socket

import huggingface_hub
import numpy as np
import pytest
import torch
from hf_helpers import KNOWN, TEXTS, crt, generated, logits, refused_conversion, some_tokens, tiny_lm
from hf_hostile_helpers import adapter, own_generation_config, own_model, own_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import contextready.hf.modeling  # noqa: F401  (registers its classes)


def write_gguf(path, lm, tokenizer):
    """A Llama in the format of llama.cpp, all in float32."""
    import gguf

    config, writer = lm.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    inner = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(inner["vocab"], key=inner["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if i == tokenizer.eos_token_id else gguf.TokenType.NORMAL for i in range(KNOWN)]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in inner["merges"]])
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)

    def interleaved(w, heads):
        """llama.cpp turns neighbours where transformers turns halves."""
        return w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)

    state = {name: tensor.numpy() for name, tensor in lm.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for i in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            w = state[f"model.layers.{i}.{ours}.weight"]
            w = interleaved(w, heads[theirs]) if theirs in heads else w
            writer.add_tensor(f"blk.{i}.{theirs}.weight", np.ascontiguousarray(w))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted(tmp_path, tokenizer):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    lm = tiny_lm("llama", vocab_size=KNOWN).float()
    write_gguf(tmp_path / "x.gguf", lm, tokenizer)
    crt("convert", tmp_path / "x.gguf", tmp_path / "out", "--correction", "blind")
    model, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), some_tokens()
    assert type(model.lm) is type(lm)
    assert torch.equal(logits(model, tokens), logits(lm, tokens))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [text for text in TEXTS if text]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == tokenizer(texts)["input_ids"]
    assert generated(tmp_path / "out").strip()


def test_what_is_beside_a_gguf_file_is_not_read(tmp_path, tokenizer, monkeypatch):
    """transformers would apply the adapter, look up its model on the Hub, and load the tokenizer that is named."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    place, lm = tmp_path / "place", tiny_lm("llama", vocab_size=KNOWN).float()
    place.mkdir()
    write_gguf(place / "x.gguf", lm, tokenizer)
    for attack in (adapter, own_tokenizer, own_generation_config, own_model):
        attack(place)
    monkeypatch.setattr(socket, "getaddrinfo", None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    crt("convert", place / "x.gguf", tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    model, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), some_tokens()
    assert torch.equal(logits(model, tokens), logits(lm, tokens))
    saved = "".join(path.read_text() for path in (tmp_path / "out").glob("*.json"))
    assert "contextready-" not in saved
    assert str(tmp_path) not in saved


@pytest.mark.parametrize("content", [b"", b"nope" * 9, b"GGUF", b"GGUF\x09\0\0\0" + bytes(99), b"GGUF\x03\0\0\0"])
def test_what_is_no_gguf_file_is_refused(tmp_path, capsys, content):
    (tmp_path / "x.gguf").write_bytes(content)
    assert "x.gguf" in refused_conversion(capsys, tmp_path, tmp_path / "x.gguf")
    assert "does not exist" in refused_conversion(capsys, tmp_path, tmp_path / "y.gguf")
