"""Words of a task in the tokens of a pretrained model."""

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from contextready.errors import ContextReadyError
from contextready.hf.words import word_ids

VOCABULARY = {"<unk>": 0, "=": 1, "==": 2, "\n": 3, "a": 4, "1": 5, " ": 6, " a": 7, " 1": 8, "ab": 9, "b": 10}


@pytest.fixture
def folder(tmp_path):
    """A tokenizer in which two equals signs, and the letters a and b, are one token together."""
    merges = [("=", "="), (" ", "a"), (" ", "1"), ("a", "b")]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(VOCABULARY, merges, unk_token="<unk>")), unk_token="<unk>"
    )
    fast.save_pretrained(tmp_path)
    return str(tmp_path)


def test_words_are_taken_with_a_space_if_all_of_them_have_such_a_token(folder):
    assert word_ids(folder, ["a", "1"]) == [7, 8]


def test_a_sign_that_merges_with_itself_is_still_a_word(folder):
    assert word_ids(folder, ["a", "1", "="]) == [4, 5, 1]


def test_words_of_several_tokens_are_named(folder):
    with pytest.raises(ContextReadyError, match=r"1 of the 2 words of this task are not single tokens .*'ba'"):
        word_ids(folder, ["a", "ba"])
