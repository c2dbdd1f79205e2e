import pytest

from contextready import ContextReadyError, ModelConfig
from contextready.settings import build_settings, parse_assignments

SHAPE = {"vocab_size": "16_000", "width": "64", "layers": "1", "heads": "4"}


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
    ],
)
def test_bad_settings_say_what_is_wrong(words, message):
    with pytest.raises(ContextReadyError) as error:
        build_settings(ModelConfig, parse_assignments(words))
    assert message in str(error.value)
