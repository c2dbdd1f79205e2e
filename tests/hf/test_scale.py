"""The kind and the size of a correction in Hugging Face models: set from the model, kept in every format."""

import pytest
import torch
from hf_finetune_helpers import WORDS, make_place
from hf_helpers import KNOWN, crt, logits, randomise, refused, save, some_tokens, tiny_lm, train_tokenizer
from train_helpers import make_data, run
from transformers import AutoModelForCausalLM

import contextready.hf.modeling  # noqa: F401  (registers its classes)
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.hf.sizes import LARGE, embedding_size, output_ratio
from contextready.runs.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("scale"))


def words(place, out, **changes):
    settings = {"pretrained": place / "llama", "data": place / "corpus" / "data", "out": out} | WORDS | changes
    return ["train", "convert", *(f"{key}={value}" for key, value in settings.items())]


def test_the_size_of_embeddings_is_their_root_mean_square():
    lm = tiny_lm("llama")
    weight = lm.get_input_embeddings().weight
    torch.nn.init.normal_(weight, std=0.37)
    assert embedding_size(lm) == pytest.approx(weight.float().pow(2).mean().sqrt().item(), rel=1e-3)


def test_it_is_measured_after_a_family_has_multiplied_its_embeddings():
    lm = tiny_lm("gemma")
    tokens = torch.arange(lm.config.vocab_size)[None]
    e = ContextReadyForCausalLM.wrap(lm).model.backbone.embed(tokens)
    assert embedding_size(lm) == pytest.approx(e.float().pow(2).mean().sqrt().item(), rel=1e-2)


def test_embeddings_of_zero_give_no_factor():
    lm = tiny_lm("llama")
    torch.nn.init.zeros_(lm.get_input_embeddings().weight)
    assert embedding_size(lm) == 1.0


def test_crt_convert_sets_it_from_the_embeddings_unless_it_is_given(place, tmp_path, capsys):
    lm = AutoModelForCausalLM.from_pretrained(place / "llama")
    crt("convert", place / "llama", tmp_path / "default")
    crt("convert", place / "llama", tmp_path / "one", "--scale", "1")
    found = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("default", "one")]
    assert [model.config.correction_scale for model in found] == [embedding_size(lm), 1.0]
    assert [model.model.correction.scale for model in found] == [embedding_size(lm), 1.0]
    said = refused(capsys, "convert", place / "llama", tmp_path / "bad", "--scale", "0")
    assert "correction_scale must be greater than 0" in said


@pytest.mark.parametrize("gain", [None, "scalar", "channel"])
def test_a_scaled_model_is_saved_and_loaded_with_its_factor(gain, tmp_path):
    lm = tiny_lm("llama", vocab_size=KNOWN).float()
    model = ContextReadyForCausalLM.wrap(lm, correction_scale=0.3, correction_gain=gain)
    randomise(model)
    save(tmp_path / "model", model, train_tokenizer(tmp_path / "tokenizer"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = some_tokens()
    assert torch.equal(logits(again, tokens, passes=4), logits(model, tokens, passes=4))
    model.model.correction.scale, model.model.correction.gain = 1.0, None
    assert not torch.equal(logits(again, tokens, passes=4), logits(model, tokens, passes=4))


@pytest.mark.parametrize("gain", [None, "channel"])
def test_a_scaled_run_goes_to_hugging_face_and_back(gain, tmp_path, capsys):
    data = make_data(tmp_path / "corpus")
    run(data, tmp_path / "run", steps=2, correction_scale=0.3, correction_gain=gain)
    crt("convert", tmp_path / "run", tmp_path / "hf")
    crt("convert", tmp_path / "hf", tmp_path / "back")
    for source in ("run", "hf"):
        said = refused(capsys, "convert", tmp_path / source, tmp_path / "no", "--scale", "1")
        assert "--scale applies to a correction that is added to a model" in said
    native, back = (open_checkpoint(tmp_path / name).model().eval() for name in ("run", "back"))
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = native(tokens, passes=10)
        assert torch.equal(back(tokens, passes=10), expected)
        assert torch.equal(hf(tokens, passes=10).logits, expected)


def test_a_run_keeps_the_factor_that_it_began_with(place, tmp_path):
    crt(*words(place, tmp_path / "run", steps=2))
    checkpoint = open_checkpoint(tmp_path / "run")
    size = embedding_size(AutoModelForCausalLM.from_pretrained(place / "llama"))
    assert checkpoint.described["correction_scale"] == size
    # Training has changed the embeddings, but not the factor.
    trained = float(checkpoint.model().backbone.embedding.weight.detach().pow(2).mean().sqrt())
    assert trained != pytest.approx(size, rel=1e-4)
    assert checkpoint.model().correction.scale == size
    crt("convert", tmp_path / "run", tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.correction_scale == size
    crt(*words(place, tmp_path / "run", steps=3))
    assert open_checkpoint(tmp_path / "run").model().correction.scale == size


def test_the_factor_of_a_converted_folder_is_kept_or_changed_while_it_is_untrained(place, tmp_path, capsys):
    crt("convert", place / "llama", tmp_path / "folder", "--scale", "0.5")
    crt(*words(place, tmp_path / "kept", steps=1, pretrained=tmp_path / "folder"))
    assert open_checkpoint(tmp_path / "kept").model().correction.scale == 0.5
    crt(*words(place, tmp_path / "other", steps=1, pretrained=tmp_path / "folder", correction_scale=0.25))
    assert open_checkpoint(tmp_path / "other").model().correction.scale == 0.25
    crt("convert", tmp_path / "kept", tmp_path / "trained")
    said = refused(capsys, *words(place, tmp_path / "bad", pretrained=tmp_path / "trained", correction_scale=0.25))
    assert "already has a trained correction with correction_scale=0.5; set correction_scale=0.5" in said


@pytest.fixture(scope="module")
def small(place, tmp_path_factory):
    """A model whose embeddings are small beside its block outputs."""
    lm = AutoModelForCausalLM.from_pretrained(place / "llama")
    with torch.no_grad():
        lm.get_input_embeddings().weight.mul_(1e-3)
    folder = tmp_path_factory.mktemp("small") / "small"
    save(folder, lm, train_tokenizer(folder.parent / "tokenizer"))
    return folder


def test_the_ratio_is_that_of_the_norms(place, small):
    ratios = []
    for folder in (place / "llama", small):
        backbone = ContextReadyForCausalLM.wrap(AutoModelForCausalLM.from_pretrained(folder)).model.backbone
        tokens = torch.randint(KNOWN, (8, 40), generator=torch.Generator().manual_seed(3))
        e = backbone.embed(tokens)
        z, _ = backbone.blocks(e)
        ratios.append(output_ratio(backbone))
        typical = (z.norm(dim=-1) / e.norm(dim=-1)).median().item()
        assert ratios[-1] == pytest.approx(typical, rel=0.5)
    assert ratios[0] < LARGE < ratios[1]


def test_a_model_gets_the_correction_that_fits_it_unless_one_is_named(place, small, tmp_path):
    for folder, name, word in ((place / "llama", "add", ()), (small, "balanced", ()), (small, "add", ("add",))):
        out = tmp_path / f"{folder.name}-{'-'.join(word)}"
        said = crt("convert", folder, out, *(["--correction", *word] if word else []))
        assert f"with a zero correction ({name})" in said
        assert AutoModelForCausalLM.from_pretrained(out).config.correction == name


def test_training_takes_the_correction_of_the_folder_or_the_one_that_fits(place, small, tmp_path):
    crt("convert", small, tmp_path / "folder", "--correction", "concat")
    for folder, name in ((tmp_path / "folder", "concat"), (small, "balanced"), (place / "llama", "add")):
        out = tmp_path / f"run-{name}"
        crt(*words(place, out, steps=2, pretrained=folder))
        checkpoint = open_checkpoint(out)
        assert checkpoint.described["correction"] == name
        assert checkpoint.model().correction.definition.name == name
        # Resuming rebuilds the same correction, although training has changed what it was chosen from.
        crt(*words(place, out, steps=3, pretrained=folder))
        crt("convert", out, tmp_path / f"hf-{name}")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / f"hf-{name}").config.correction == name
