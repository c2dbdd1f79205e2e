"""`crt export` of converted models: the files generate the same text, without torch, and are measured and refused."""

import json

import pytest
import torch
from hf_helpers import KNOWN, LLAMA_LIKE, crt, generated, randomise, refused, save, some_tokens, tiny_lm
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("ggml")
pytest.importorskip("gguf")

import contextready
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.infer.ggml.engine import GgmlEngine
from contextready.infer.ggml.file import read_gguf

FAMILIES = {
    "llama": {**LLAMA_LIKE, "tie_word_embeddings": True},
    "mistral": {**LLAMA_LIKE, "sliding_window": 5},
    "qwen2": {key: value for key, value in LLAMA_LIKE.items() if key != "head_dim"},
    "qwen3": {**LLAMA_LIKE, "head_dim": 12},
    "smollm3": {
        **{key: value for key, value in LLAMA_LIKE.items() if key != "head_dim"},
        **{"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    },
}


def ready(folder, tokenizer, family, correction="add"):
    """A folder with a model of this family whose correction is random."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family] | {"vocab_size": KNOWN})
    lm = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in lm.parameters():
            weight.copy_(0.2 * torch.randn_like(weight) + (1.0 if weight.dim() == 1 else 0.0))
        # With large embeddings, the recurrence does not enlarge what float32 rounds.
        lm.get_input_embeddings().weight.mul_(5.0)
    lm.generation_config.eos_token_id = None
    model = ContextReadyForCausalLM.wrap(lm, correction=correction)
    randomise(model, std=0.1)
    return save(folder, model, tokenizer)


@pytest.mark.parametrize("correction", ["add", "balanced"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same_from_a_file(family, correction, tokenizer, tmp_path):
    folder, file = ready(tmp_path / "ready", tokenizer, family, correction), tmp_path / "f32.gguf"
    said = crt("export", folder, file, "--type", "f32", "--tokens", 0)
    assert "matrices in f32. Next: crt generate" in said
    model, engine = contextready.load(folder).model, GgmlEngine(file, threads=1)
    tokens = some_tokens(1, 20)
    with torch.no_grad():
        expected, _ = model.stream(tokens, model.init_state(1))
        plain, _ = model.backbone.blocks(model.backbone.embed(tokens))
    for token, wanted in zip(tokens[0].tolist(), expected[0], strict=True):
        assert (torch.from_numpy(engine.step([token])[0]) - wanted).abs().max() < 1e-4
    assert (model.backbone.head(plain) - expected).abs().max() > 1e-2
    assert generated(file) == generated(folder)


def test_a_model_without_a_correction_is_exported_too(base, tmp_path):
    file = tmp_path / "plain.gguf"
    crt("export", base, file, "--type", "f32", "--tokens", 0)
    assert read_gguf(file).config.correction is None
    assert generated(file) == generated(base)
    assert read_gguf(file).trained_length == contextready.load(base).trained_length


def test_the_cost_is_measured_on_data_with_its_tokens(converted, tmp_path, capsys):
    folder, _ = converted
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("\n\n".join("river stone light " * 40 for _ in range(60)))
    crt("data", "prepare", tmp_path / "data", texts, "--tokenizer", folder, "--val-fraction", 0.5)
    words = ("export", folder, tmp_path / "m.gguf", "--type", "f32", "--data", tmp_path / "data", "--json")
    found = json.loads(crt(*words))
    assert found["perplexity"] == pytest.approx(found["original_perplexity"], rel=1e-4)
    assert found["in_f16"] == 0
    said = refused(capsys, "export", folder, tmp_path / "n.gguf")
    assert "does not record its training data" in said
    assert "pass --data FOLDER, or --tokens 0 to skip measuring" in said
    assert not (tmp_path / "n.gguf").exists()


def test_matrices_that_cannot_be_quantised_are_counted(converted, tmp_path):
    folder, _ = converted
    said = crt("export", folder, tmp_path / "m.gguf", "--type", "q4_k", "--tokens", 0)
    matrices = sum(len(weight.shape) == 2 for weight in read_gguf(tmp_path / "m.gguf").weights.values())
    assert f"matrices in q4_k ({matrices} of {matrices} in f16, whose rows do not divide into blocks)." in said


def test_a_model_that_does_not_run_natively_is_refused(tokenizer, tmp_path, capsys):
    folder = save(tmp_path / "gpt2", tiny_lm("gpt2", vocab_size=KNOWN).float(), tokenizer)
    for words in (("export", folder, tmp_path / "m.gguf", "--tokens", 0), ("bench", folder)):
        said = refused(capsys, *words)
        assert "does not run natively" in said
        assert f"crt convert {folder} OUT" in said
    assert not (tmp_path / "m.gguf").exists()


def test_bench_measures_a_folder_and_its_file(converted, tmp_path):
    folder, _ = converted
    file = tmp_path / "m.gguf"
    crt("export", folder, file, "--type", "f32", "--tokens", 0)
    words = ("--contexts", 8, "--rounds", 1, "--tokens", 2, "--threads", 1, "--json")
    of_folder = json.loads(crt("bench", folder, "--engines", "eager,ggml", "--precisions", "f32,q4_k", *words))
    assert [(one["engine"], one["precision"]) for one in of_folder["decode"]] == [
        ("eager", "f32"),
        ("ggml", "f32"),
        ("ggml", "q4_k"),
    ]
    of_file = json.loads(crt("bench", file, *words))
    assert of_file["decode"][0]["bytes_per_token"] == of_folder["decode"][1]["bytes_per_token"]
    assert of_file["memory"][0]["kv_bytes_per_token"] == of_folder["memory"][0]["kv_bytes_per_token"]
    assert of_file["memory"][0]["parameters"] == of_folder["memory"][0]["parameters"]
