import pytest

from contextready import ContextReadyError, ModelConfig
from contextready.settings import build_settings, parse_assignments

SHAPE = {"vocab_size": "16_000", "width": "64", "layers": "1", "heads": "4"}
REST = ["vocab_size=9", "layers=1", "heads=1"]


def test_words_become_typed_fields():
    words = [
        "vocab_size=100",
        "width=64",
        "layers=1",
        "heads=4",
        "window=none",
        "dropout=0.1",
        "bias=yes",
        "correction=add",
    ]
    config = build_settings(ModelConfig, parse_assignments(words))
    assert config == ModelConfig(100, 64, 1, 4, window=None, dropout=0.1, bias=True, correction="add")
    assert build_settings(ModelConfig, SHAPE | {"window": "8"}).window == 8
    assert build_settings(ModelConfig, SHAPE).vocab_size == 16_000


def test_plain_values_are_checked_too():
    values = {"vocab_size": 9, "width": 4, "layers": 1, "heads": 1, "dropout": 0, "window": None}
    assert build_settings(ModelConfig, values).dropout == 0.0
    with pytest.raises(ContextReadyError, match=r"width must be a whole number, but got 4\.5"):
        build_settings(ModelConfig, values | {"width": 4.5})
    with pytest.raises(ContextReadyError, match="layers must be a whole number, but got True"):
        build_settings(ModelConfig, values | {"layers": True})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["widht=64"], "Unknown setting 'widht'; did you mean 'width'?"),
        (["colour=red"], "Unknown setting 'colour'; choose one of: vocab_size, width"),
        (["width=64"], "Missing settings: vocab_size, layers, heads"),
        (["width=wide", "vocab_size=9", "layers=1", "heads=1"], "width must be a whole number, but got wide"),
        (
            ["bias=perhaps", "width=8", "vocab_size=9", "layers=1", "heads=1"],
            "bias must be true or false, but got perhaps",
        ),
        (
            ["window=1.5", "width=8", "vocab_size=9", "layers=1", "heads=1"],
            "window must be a whole number, but got 1.5",
        ),
        (["width=8", "width=9"], "'width' is set twice"),
        (["width"], "'width' is not a setting; write it as key=value"),
        (["w" * 5000], "'" + "w" * 59 + "…' is not a setting"),
        (["x" * 5000 + "=1"], "Unknown setting '" + "x" * 59 + "…'"),
        (["width=", "vocab_size=9", "layers=1", "heads=1"], "width must be a whole number, but it is empty."),
        (["width=" + "9" * 400, *REST], "width must be at most 1,048,576, but got a number with more than 15 digits."),
        (["width=" + "9" * 5000, *REST], "width is a number with 5,000 digits, which is too large."),
        (["width=-" + "9" * 5000, *REST], "width must be a whole number, but got -9999"),
        (["rope_base=" + "9" * 400, "width=8", *REST], "rope_base must be greater than 1 (usually 10000) and at most"),
        (["rope_base=nan", "width=8", *REST], "but got nan."),
        (["window=4611686018427387904", "width=8", *REST], "window must be at most 2,147,483,647"),
    ],
)
def test_bad_settings_say_what_is_wrong(words, message):
    with pytest.raises(ContextReadyError) as error:
        build_settings(ModelConfig, parse_assignments(words))
    assert message in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("name", "most"),
    [("vocab_size", 2**31 - 1), ("width", 2**20), ("layers", 10**6), ("heads", 2**20), ("window", 2**31 - 1)],
)
def test_every_size_of_a_model_has_a_limit(name, most):
    values = {"vocab_size": 9, "width": 2**20, "layers": 1, "heads": 2}
    if name != "heads":
        assert getattr(build_settings(ModelConfig, values | {name: most}), name) == most
    with pytest.raises(ContextReadyError, match=f"{name} must be at most {most:,}, but got {most + 1}"):
        build_settings(ModelConfig, values | {name: most + 1})


@pytest.mark.parametrize("value", [10**5000, 10**400, [10**5000]], ids=["5000 digits", "400 digits", "list"])
def test_long_numbers_from_files_are_refused(value):
    values = {"vocab_size": 9, "width": 8, "layers": 1, "heads": 2}
    for name in ("width", "dropout", "window", "bias", "correction"):
        with pytest.raises(ContextReadyError, match=name):
            build_settings(ModelConfig, values | {name: value})
