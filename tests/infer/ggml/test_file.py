import errno
import json

import numpy as np
import pytest
import torch
from helpers import small_config, small_model
from tokenizers.processors import TemplateProcessing
from torch import nn

from contextready import ContextReady, ContextReadyError, Transformer, build_correction
from contextready.data.conventions import Conventions
from contextready.data.tokenizer import Tokenizer
from contextready.model.correction import CORRECTIONS
from contextready.model.correction_module import CorrectionModule

pytest.importorskip("ggml")
gguf = pytest.importorskip("gguf")

from contextready.infer.ggml import config, tokenizer_fields  # noqa: E402
from contextready.infer.ggml.engine import GgmlEngine  # noqa: E402
from contextready.infer.ggml.file import TYPES, read_gguf, write_gguf  # noqa: E402


def single(**changes):
    return small_model(dtype=torch.float32, **changes)


def exported(model, folder, type="f32", trained_length=64, tokenizer=None):
    path = folder / f"{type}.gguf"
    write_gguf(model, path, trained_length, type, tokenizer)
    return path


def test_smaller_types_make_smaller_files(tmp_path):
    model = single(width=256, heads=2)
    sizes = {type: write_gguf(model, tmp_path / "m.gguf", 8, type) for type in TYPES}
    assert sizes["f32"] > 1.9 * sizes["f16"] > 1.9 * 1.8 * sizes["q8_0"] > 1.9 * 1.8 * 1.8 * sizes["q4_0"]
    assert sizes["q4_k"] == sizes["q4_0"]


def test_the_tokenizer_comes_along(tmp_path):
    tokenizer = Tokenizer.train(["some text to learn from, some more of it"] * 3, 262)
    path = exported(single(vocab_size=262), tmp_path, tokenizer=tokenizer)
    read = read_gguf(path)
    assert (read.trained_length, read.config.vocab_size, read.tokenizer().end) == (64, 262, tokenizer.end)
    assert read.tokenizer().sha256 == tokenizer.sha256
    assert read.parameters == sum(p.numel() for p in single(vocab_size=262).parameters())
    with pytest.raises(ContextReadyError, match=r"no tokenizer.*; export a run whose data has a tokenizer"):
        read_gguf(exported(single(), tmp_path, "f16")).tokenizer()


def test_what_cannot_be_exported_is_a_sentence(tmp_path):
    class Other(Transformer):
        pass

    class Mine(CorrectionModule):
        pass

    other, own = Other(small_config()), Transformer(small_config())
    shared = single()
    shared.backbone.unembedding.bias = nn.Parameter(torch.zeros(23))
    for model, changes, sentence in (
        (ContextReady(other, build_correction("add", other)), {}, "around Other cannot be exported"),
        (ContextReady(own, Mine(CORRECTIONS["add"], own)), {}, "correction Mine cannot be exported"),
        (ContextReady(other), {}, "around Other cannot be exported"),
        (shared, {}, "its weights do not match its configuration"),
        (single(), {"type": "q8"}, "did you mean 'q8_0'"),
        (single(), {"trained_length": 0}, "trained_length must be at least 1, but got 0"),
    ):
        with pytest.raises(ContextReadyError, match=sentence):
            write_gguf(model, tmp_path / "m.gguf", **({"trained_length": 8} | changes))
    with pytest.raises(ContextReadyError, match=r"m\.gguf could not be written: .*No such file"):
        write_gguf(single(), tmp_path / "none" / "m.gguf", 8)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model_of_this_package_is_a_sentence(tmp_path):
    with pytest.raises(ContextReadyError, match="around Linear cannot be exported"):
        write_gguf(nn.Linear(2, 2), tmp_path / "m.gguf", 8)
    assert list(tmp_path.iterdir()) == []


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("when", "error"),
    [
        ("write_kv_data_to_file", NO_SPACE),
        ("write_tensor_data", OSError("12288 requested and 0 written")),  # numpy's, without a number
        ("flush", NO_SPACE),
    ],
)
def test_a_full_disk_leaves_nothing_and_keeps_the_earlier_file(when, error, tmp_path, monkeypatch):
    def full(*_):
        raise error

    path = exported(single(), tmp_path)
    earlier = path.read_bytes()
    monkeypatch.setattr(gguf.GGUFWriter, when, full)
    with pytest.raises(ContextReadyError, match=r"disk is full, so .* no partial file"):
        write_gguf(single(seed=5), path, 8, "f32")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == earlier


def test_files_that_are_no_whole_export_are_a_sentence(tmp_path, monkeypatch):
    good, bad = exported(single(), tmp_path), tmp_path / "bad.gguf"
    whole = good.read_bytes()

    def refused(sentence):
        with pytest.raises(ContextReadyError, match=sentence) as caught:
            read_gguf(bad)
        assert str(bad) in str(caught.value)

    refused("no exported model at")
    bad.mkdir()
    refused("is not a regular file")
    bad.rmdir()
    for contents in (b"", b"GG", b"something else entirely"):
        bad.write_bytes(contents)
        refused("not a GGUF file")
    for length in (4, 9, 23, 60, 150, 400, len(whole) // 2, len(whole) - 40):
        bad.write_bytes(whole[:length])
        refused("damaged or incomplete")
    bad.write_bytes(whole.replace(b"contextready", b"contextsteady", 1).replace(b"l.architecture", b"l.architectur", 1))
    refused("damaged or incomplete|another kind")
    with monkeypatch.context() as patch:
        patch.setattr(config, "FORMATS", (4, 5, 6))
        write_gguf(single(), bad, 8)
    refused("has format version 4, but")


SIZES = {"format": 1, "context_length": 8, "vocab_size": 5, "embedding_length": 4, "block_count": 1}
FIELDS = [("uint32", name, value) for name, value in (SIZES | {"attention.head_count": 2}).items()]
FIELDS += [("bool", name, False) for name in ("extra_ffn", "bias", "correction_bias")]
FIELDS += [("float64", "rope.freq_base", 10_000.0), ("string", "correction", "block_head")]
SHAPES = dict(config.ExportedConfig(5, 4, 1, 2, correction="block_head").tensors())
GOOD = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}


def changed(name, type, value):
    return [field for field in FIELDS if field[1] != name] + [(type, name, value)]


def write(path, fields, tensors, architecture="contextready", others=()):
    writer = gguf.GGUFWriter(path, architecture)
    for add, name, value in fields:
        getattr(writer, f"add_{add}")(f"{architecture}.{name}", value)
    for add, name, value in others:
        getattr(writer, f"add_{add}")(name, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_files_with_the_wrong_contents_are_a_sentence(tmp_path):
    bad = tmp_path / "bad.gguf"
    write(bad, FIELDS, GOOD)
    assert GgmlEngine(bad, threads=1).step([1]).shape == (1, 5)
    for case, tensors, sentence in (
        (FIELDS, {n: a for n, a in GOOD.items() if n != "final_norm.weight"}, "tensor final_norm.weight is missing"),
        (FIELDS, GOOD | {"unembedding.weight": np.ones((4, 4), np.float32)}, r"has shape \(4, 4\) instead of \(5, 4\)"),
        (FIELDS, GOOD | {"final_norm.weight": np.ones(4, np.float16)}, "final_norm.weight as f16, which cannot be run"),
        (FIELDS, GOOD | {"unembedding.weight": np.ones((5, 4))}, "unembedding.weight as f64, which cannot be run"),
        (FIELDS[:2] + FIELDS[3:], GOOD, "the field 'contextready.vocab_size' is missing"),
        (changed("embedding_length", "string", "four"), GOOD, "sizes do not describe a model; export"),
        (changed("attention.head_count", "uint32", 3), GOOD, "sizes do not describe a model .*heads=3"),
        (changed("correction", "string", "more"), GOOD, "sizes do not describe a model .*Unknown correction 'more'"),
        (changed("format", "uint32", 4), GOOD, "has format version 4, but this version of contextready reads 1 to 3"),
    ):
        write(bad, case, tensors)
        with pytest.raises(ContextReadyError, match=sentence):
            GgmlEngine(bad)
    write(bad, [("uint32", "block_count", 1)], GOOD, "llama")
    with pytest.raises(ContextReadyError, match=r"another kind of model \(llama\)"):
        read_gguf(bad)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.0.attn.qkv.bias", (12,)),
        ("layers.0.attn.qkv.bias", (1, 1)),
        ("final_norm.bias", (3,)),
        ("correction.norm.bias", (4,)),
        ("unembedding.bias", (5,)),
        ("layers.1.attn_norm.weight", (4,)),
        ("something else", (1, 1, 1, 1)),
    ],
)
def test_a_tensor_that_the_configuration_does_not_name_is_refused(tmp_path, name, shape):
    write(tmp_path / "bad.gguf", FIELDS, GOOD | {name: np.ones(shape, np.float32)})
    with pytest.raises(ContextReadyError, match=f"its configuration has no tensor {name}; export it again"):
        GgmlEngine(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("name", "type", "value", "sentence"),
    [
        ("block_count", "uint32", 10**9, r"layers must be between 1 and \d+, but got 1000000000"),
        ("block_count", "uint64", 2**63, r"layers must be between 1 and \d+, but got"),
        ("block_count", "uint32", 0, "layers must be between 1 and"),
        ("block_count", "bool", True, "sizes do not describe a model; export"),
        ("embedding_length", "uint64", 2**40, "width must be at most"),
        ("vocab_size", "uint32", 2**32 - 1, "vocab_size must be at most"),
        ("vocab_size", "uint32", 2**30, "the tensor embedding.weight has shape"),
        ("attention.head_count", "int32", -2, "heads must be at least 1, but got -2"),
        ("attention.sliding_window", "uint64", 2**62, "window must be at most"),
        ("context_length", "uint64", 2**62, "context_length must be between 1 and 2,147,483,648"),
        ("context_length", "uint32", 0, "context_length must be between 1 and 2,147,483,648, but got 0"),
        ("rope.freq_base", "float64", float("nan"), "rope_base must be greater than 1"),
        ("rope.freq_base", "float64", float("inf"), "rope_base must be greater than 1"),
        ("rope.type", "string", "halves", "rope=halves is unknown"),
        ("rope.type", "uint32", 2, "sizes do not describe a model; export"),
        ("head_bias", "uint32", 1, "sizes do not describe a model; export"),
        ("norm", "string", "rsm", "norm=rsm is unknown"),
        ("norm", "uint32", 1, "sizes do not describe a model; export"),
        ("attention.layer_norm_epsilon", "float64", 0.0, "norm_eps must be greater than 0"),
        ("attention.layer_norm_epsilon", "float64", float("nan"), "norm_eps must be greater than 0"),
        ("attention.layer_norm_epsilon", "uint32", 1, "sizes do not describe a model; export"),
        ("ffn", "string", "relu", "ffn=relu is unknown"),
        ("feed_forward_length", "uint32", 0, "ffn_width must be at least 1, but got 0"),
        ("feed_forward_length", "uint64", 2**40, "ffn_width must be at most"),
        ("feed_forward_length", "uint32", 17, "the tensor layers.0.ffn.up.weight has shape"),
        ("attention.head_count_kv", "uint32", 3, "heads=2 is not divisible by kv_heads=3"),
        ("attention.head_count_kv", "uint64", 2**62, "kv_heads must be at most"),
        ("attention.head_count_kv", "uint32", 1, "the tensor layers.0.attn.qkv.weight has shape"),
        ("attention.key_length", "uint32", 3, "head_width gives an odd head size of 3"),
        ("attention.key_length", "uint32", 2**20, "the tensor layers.0.attn.qkv.weight has shape"),
        ("qk_norm", "uint32", 1, "sizes do not describe a model; export"),
        ("qk_norm", "bool", True, "the tensor layers.0.attn.q_norm.weight is missing"),
        ("qkv_bias", "bool", True, "the tensor layers.0.attn.qkv.bias is missing"),
        ("tied_embeddings", "bool", True, "its configuration has no tensor unembedding.weight"),
        ("rope.type", "string", "linear\0", "rope=linear.* is unknown"),
        ("rope.scaling.factor", "float64", 2.0, "rope_factor=2 does not apply to rope=geometric"),
        ("rope.scaling.low_freq_factor", "float64", float("nan"), "rope_low=nan does not apply to rope=geometric"),
        ("rope.scaling.original_context_length", "uint64", 2**40, "rope_length=.* does not apply"),
        ("no_rope_every", "uint32", 0, "no_rope_every must be at least 1, but got 0"),
    ],
)
def test_sizes_are_limited_before_anything_depends_on_them(tmp_path, name, type, value, sentence):
    write(tmp_path / "bad.gguf", changed(name, type, value), GOOD)
    with pytest.raises(ContextReadyError, match=sentence):
        read_gguf(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("factor", 0.0, "rope_factor must be between 1e-06 and 1e"),
        ("factor", 5e-324, "rope_factor must be between 1e-06 and 1e"),
        ("factor", float("nan"), "rope_factor must be between 1e-06 and 1e"),
        ("low_freq_factor", -1.0, "rope_low must be at least 1e-06 and less than rope_high"),
        ("high_freq_factor", float("inf"), "rope_low must be at least 1e-06 and less than rope_high"),
        ("original_context_length", 0, "rope_length must be at least 1, but got 0"),
        ("original_context_length", 2**31, "rope_length must be at most"),
    ],
)
def test_the_scaling_of_angles_is_limited(tmp_path, name, value, sentence):
    scaling = ("uint64" if isinstance(value, int) else "float64", f"rope.scaling.{name}", value)
    write(tmp_path / "bad.gguf", [*changed("rope.type", "string", "llama3"), scaling], GOOD)
    with pytest.raises(ContextReadyError, match=sentence):
        read_gguf(tmp_path / "bad.gguf")


@pytest.mark.parametrize("name", ["context_length", "attention.sliding_window"])
def test_a_state_larger_than_the_memory_is_refused(tmp_path, name):
    write(tmp_path / "bad.gguf", changed(name, "uint32", 2**31 - 1), GOOD)
    with pytest.raises(
        ContextReadyError, match=r"1 row of 2,147,483,647 tokens would take .* GB, but this machine has"
    ):
        GgmlEngine(tmp_path / "bad.gguf")


def test_the_tokenizer_of_a_file_is_checked(tmp_path):
    bad = tmp_path / "bad.gguf"
    hostile = json.loads(Tokenizer.train(["some text"], 257).inner.to_str())
    hostile["model"]["vocab"]["a"] = 2**31
    for value, sentence in (
        ("nothing", r"The tokenizer in .*bad\.gguf cannot be read as JSON"),
        ("{}", r"The tokenizer in .*bad\.gguf is not a tokenizer: it has no model"),
        (
            json.dumps(hostile),
            r"The tokenizer in .*bad\.gguf is not a tokenizer: the id of the token 'a' is 2,147,483,648",
        ),
    ):
        write(bad, FIELDS, GOOD, others=[("string", tokenizer_fields.JSON_KEY, value)])
        with pytest.raises(ContextReadyError, match=sentence):
            read_gguf(bad).tokenizer()
    good = ("string", tokenizer_fields.JSON_KEY, Tokenizer.train(["some text"], 257).inner.to_str())
    for others in (
        [("uint32", tokenizer_fields.JSON_KEY, 5)],
        [good, ("uint32", tokenizer_fields.END_KEY, 5)],
        [good, ("uint32", tokenizer_fields.TEMPLATE_KEY, 5)],
        [good, ("uint32", tokenizer_fields.BEGINS_KEY, 1)],
        [good, ("uint32", tokenizer_fields.STOPS_KEY, 1)],
        [good, ("string", tokenizer_fields.NAMED["bos_token"], "x")],
        [good, ("uint32", tokenizer_fields.NAMED["bos_token"], 257)],
        [good, ("int32", tokenizer_fields.NAMED["bos_token"], -1)],
    ):
        write(bad, FIELDS, GOOD, others=others)
        with pytest.raises(ContextReadyError, match=r"is damaged: its fields do not describe a tokenizer; export"):
            read_gguf(bad).tokenizer()


def test_the_conventions_of_the_tokenizer_come_along(tmp_path):
    trained = Tokenizer.train(["some text to learn from, some more of it"] * 3, 262)
    trained.inner.add_special_tokens(["<s>", "<pad>"])
    trained.inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 262)])
    named = {"bos_token": "<s>", "eos_token": trained.end, "pad_token": "<pad>"}
    conventions = Conventions(True, (trained.end_id, 263), "{{ bos_token }}{{ messages }}", named)
    tokenizer = Tokenizer(trained.inner, trained.end, conventions=conventions)
    path = exported(single(vocab_size=264), tmp_path, tokenizer=tokenizer)
    fields = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert fields["tokenizer.ggml.bos_token_id"] == 262
    assert fields["tokenizer.ggml.add_bos_token"] is True
    assert fields["tokenizer.chat_template"] == conventions.chat_template
    read = read_gguf(path).tokenizer()
    assert read.conventions == conventions
    assert read.encode_prompts(["some<pad>"]) == tokenizer.encode_prompts(["some<pad>"])
    assert read.encode_prompts(["some"])[0][0] == 262
