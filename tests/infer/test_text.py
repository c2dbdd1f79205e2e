"""Text as it comes: equal to decoding all at once, never half a character, never past a stop string."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.infer.text import IncrementalText

TEXTS = [
    "the cat sat on the mat, the dog did not.",
    "Grüße aus Köln, çà et là, naïve façade",
    "日本語のテキスト、中文文本，한국어",
    "Привет, мир! Γειά σου Κόσμε",
    "😀😃 👩‍👩‍👧‍👦 🇩🇪 ½ ∑ ‖z‖ �",
]
BYTE_LEVEL = Tokenizer.train(TEXTS * 3, 340)


def _byte_ids():
    ids = {}
    for token in range(BYTE_LEVEL.vocab_size):
        name = BYTE_LEVEL.inner.id_to_token(token)
        if len(name) == 1:
            ids[ord(name)] = token
    # GPT-2's alphabet: printable bytes stand for themselves, the other 68 are moved up in order from 256.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: ids[byte if byte in printable else 256 + moved.index(byte)] for byte in range(256)}


BYTE_IDS = _byte_ids()


def bytes_to_ids(data):
    return [BYTE_IDS[byte] for byte in data]


def sentencepiece_tokenizer():
    """As Llama's: ▁ for spaces, the first of a text stripped, unknown characters as bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "▁a", "▁he", "llo", "a", "b", "!", "日", "▁▁"]
    vocabulary = {name: i for i, name in enumerate(names)}
    inner = Inner(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(inner, "</s>"), vocabulary


PIECES, VOCABULARY = sentencepiece_tokenizer()


def run(tokenizer, tokens, stops=(), after=()):
    """Every piece, the flushed rest last, and what gave them."""
    shown = IncrementalText(tokenizer, stops, after)
    return [*(shown.push(token) for token in tokens), shown.flush()], shown


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60))
def test_random_ids_give_what_decoding_them_at_once_gives(tokens):
    pieces, _ = run(BYTE_LEVEL, tokens)
    assert "".join(pieces) == BYTE_LEVEL.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes_give_what_decoding_them_at_once_gives(data):
    tokens = bytes_to_ids(data)
    pieces, _ = run(BYTE_LEVEL, tokens)
    assert "".join(pieces) == BYTE_LEVEL.decode(tokens) == data.decode(errors="replace")


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_real_text_never_shows_half_a_character(text):
    pieces, _ = run(BYTE_LEVEL, BYTE_LEVEL.encode_batch([text])[0])
    assert "".join(pieces) == text
    # Only characters of the text were ever shown, and nothing waited for the flush but a real U+FFFD.
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert set(pieces[-1]) <= {"\ufffd"}


def test_a_character_appears_with_its_last_byte():
    pieces, _ = run(BYTE_LEVEL, bytes_to_ids("a😀é".encode()))
    assert pieces == ["a", "", "", "", "😀", "", "é", ""]


def test_plain_text_is_shown_token_by_token():
    tokens = BYTE_LEVEL.encode_batch(["the cat sat on the mat"])[0]
    pieces, _ = run(BYTE_LEVEL, tokens)
    assert pieces == [*(BYTE_LEVEL.decode([token]) for token in tokens), ""]


def test_wrong_bytes_come_out_and_do_not_swallow_what_follows():
    assert run(BYTE_LEVEL, bytes_to_ids(b"\xff\xffA"))[0] == ["", "", "\ufffd\ufffdA", ""]
    assert run(BYTE_LEVEL, bytes_to_ids(b"a\xe2\x82"))[0] == ["a", "", "", "\ufffd"]
    pieces, _ = run(BYTE_LEVEL, bytes_to_ids(b"\x80" * 100))
    assert "".join(pieces) == "\ufffd" * 100
    assert len("".join(pieces[:-1])) > 70, "they do not all wait for the end"


# The last is one token of a letter and half a character, as byte-level BPE learns them from "Köln".
JOINED = BYTE_LEVEL.inner.token_to_id("KÃ")
UNITS = [*map(bytes_to_ids, [b"\x80", b"\xff", b"\xe2\x82", b"\xf0\x9f\x98", b"\xf0", b"\xf0\x9f\xff"]), [JOINED]]


@pytest.mark.parametrize("unit", UNITS, ids=str)
def test_an_endless_run_of_wrong_bytes_stays_cheap_and_right(unit):
    tokens, most = unit * (400 // len(unit)), 0

    class Counting:
        special_ids = frozenset()

        def decode(self, ids):
            nonlocal most
            most = max(most, len(ids))
            return BYTE_LEVEL.decode(ids)

    tokens += bytes_to_ids("é😀".encode())
    pieces, _ = run(Counting(), tokens)
    assert "".join(pieces) == BYTE_LEVEL.decode(tokens)
    assert most < 64


def test_end_token_and_unknown_ids_between_bytes():
    smile = bytes_to_ids("😀".encode())
    for tokens in ([*smile[:2], BYTE_LEVEL.end_id, *smile], [10**6, *smile, 10**6, 10**6], [10**6] * 100 + smile):
        pieces, _ = run(BYTE_LEVEL, tokens)
        assert "".join(pieces) == BYTE_LEVEL.decode(tokens)


WORDS = [token for name, token in VOCABULARY.items() if not name.startswith("<0x")]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from(WORDS), st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")),
        max_size=20,
    )
)
def test_sentencepiece_gives_what_decoding_at_once_gives(items):
    """Leading spaces, and valid characters byte by byte."""
    tokens = []
    for item in items:
        tokens += [item] if isinstance(item, int) else [VOCABULARY[f"<0x{byte:02X}>"] for byte in item.encode()]
    pieces, _ = run(PIECES, tokens)
    assert "".join(pieces) == PIECES.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


def test_sentencepiece_u_fffd_itself_byte_by_byte():
    """Looks like a wrong byte, and is followed by a character that must not suffer from it."""
    tokens = [VOCABULARY[f"<0x{byte:02X}>"] for byte in "\ufffd日\ufffd\ufffd".encode()] + [VOCABULARY["▁a"]]
    assert "".join(run(PIECES, tokens)[0]) == "\ufffd日\ufffd\ufffd a"


def test_sentencepiece_wrong_byte_after_shown_characters_takes_nothing_back():
    e1, e2, wrong, a = (VOCABULARY[name] for name in ("<0xC3>", "<0xA9>", "<0xFF>", "▁a"))
    assert run(PIECES, [e1, e2, wrong, a])[0] == ["", "é", "", "\ufffd a", ""]
    assert run(PIECES, [e1, e2, wrong])[0] == ["", "é", "", "\ufffd"]
    assert run(PIECES, [wrong, wrong, a])[0] == ["", "", PIECES.decode([wrong, wrong, a]), ""]
    assert "".join(run(PIECES, [wrong] * 50 + [a])[0]) == PIECES.decode([wrong] * 50 + [a])


def test_ids_without_text_do_not_make_a_beginning():
    he, a = VOCABULARY["▁he"], VOCABULARY["▁a"]
    assert run(PIECES, [he, 10**6, a])[0] == ["he", "", " a", ""]
    assert run(PIECES, [he, *[10**6] * 40, a])[0] == ["he", *[""] * 40, " a", ""]
    assert run(PIECES, [VOCABULARY["▁"], a])[0] == ["", " a", ""]


def test_the_rest_is_given_once():
    _, shown = run(BYTE_LEVEL, bytes_to_ids(b"a\xe2"))
    assert shown.flush() == ""


def test_text_after_a_prompt_keeps_its_space():
    he, llo, a = (VOCABULARY[name] for name in ("▁he", "llo", "▁a"))
    assert run(PIECES, [he, a])[0] == ["he", " a", ""]
    assert run(PIECES, [he, a], after=[he, llo])[0] == [" he", " a", ""]
    assert run(PIECES, [llo], after=[he])[0] == ["llo", ""]
    assert run(BYTE_LEVEL, bytes_to_ids("é".encode()), after=bytes_to_ids(b"abc"))[0] == ["", "é", ""]


def letters(text):
    return bytes_to_ids(text.encode())


def test_stop_string_is_cut_and_its_beginning_held_back():
    pieces, shown = run(BYTE_LEVEL, letters("one END two"), ["END"])
    assert pieces == ["o", "n", "e", " ", "", "", "", "", "", "", "", ""]
    assert shown.stopped


def test_a_false_start_is_shown_when_it_is_one():
    pieces, shown = run(BYTE_LEVEL, letters("ENENx"), ["END"])
    assert pieces == ["", "", "EN", "", "ENx", ""]
    assert not shown.stopped
    pieces, shown = run(BYTE_LEVEL, letters("aEN"), ["END"])
    assert pieces == ["a", "", "", "EN"]
    assert not shown.stopped


def test_a_stop_string_that_overlaps_itself_is_found():
    pieces, shown = run(BYTE_LEVEL, letters("xaaab"), ["aab"])
    assert "".join(pieces) == "xa"
    assert shown.stopped


def test_stop_string_inside_and_across_tokens():
    token = next(t for t in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.decode([t]) == " the")
    pieces, shown = run(BYTE_LEVEL, [*letters("so"), token, *letters("n")], ["he"])
    assert pieces == ["s", "o", " t", "", ""]
    assert shown.stopped
    pieces, _ = run(BYTE_LEVEL, [*letters("so"), token, *letters("n")], ["o then"])
    assert "".join(pieces) == "s"


def test_multibyte_stop_strings():
    pieces, shown = run(BYTE_LEVEL, bytes_to_ids("あ。い".encode()), ["。"])
    assert "".join(pieces) == "あ"
    assert shown.stopped
    # Two characters that share their first bytes: nothing is held for bytes, only for whole characters.
    pieces, shown = run(BYTE_LEVEL, bytes_to_ids("あ、い".encode()), ["。"])
    assert "".join(pieces) == "あ、い"
    assert not shown.stopped


def test_a_stop_string_that_the_flush_completes():
    pieces, shown = run(BYTE_LEVEL, bytes_to_ids(b"ab\xe2"), ["b\ufffd"])
    assert "".join(pieces) == "a"
    assert shown.stopped


@settings(max_examples=150, deadline=None)
@given(st.text("abc", max_size=24), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_the_stop_string_that_is_complete_first_counts_however_the_text_is_cut(text, stops, data):
    class Chunks:
        """Each id is one chunk of the text."""

        special_ids = frozenset()

        def decode(self, ids):
            return "".join(chunks[i] for i in ids)

    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    chunks = [text[a:b] for a, b in pairwise(cuts)]
    pieces, shown = run(Chunks(), range(len(chunks)), stops)
    ends = [(n, n - len(stop)) for n in range(len(text) + 1) for stop in stops if text[:n].endswith(stop)]
    assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)
    assert shown.stopped == bool(ends)


@pytest.mark.parametrize("stops", ["END", [""], ["a", ""], [3]])
def test_bad_stop_strings_are_refused(stops):
    with pytest.raises(ContextReadyError, match="Stop strings must be a list"):
        IncrementalText(BYTE_LEVEL, stops)
