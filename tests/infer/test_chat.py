"""Conversations: the tokens of the chat template, exact undo, forks and files."""

import json

import pytest
import torch
from chat_helpers import BEGINNING, FORGETFUL, TEMPLATE, WITHOUT_SYSTEM, native, stories
from transformers import AutoTokenizer

import contextready
from contextready.errors import ContextReadyError
from contextready.infer.chat import Chat
from contextready.infer.sampling import Sampling
from contextready.model.state import State

GREEDY = Sampling(temperature=0)
QUESTIONS = ("seven stones", "the river", "green <|endoftext|> light")


def chat_with(model, **changes):
    return Chat(model, **{"sampling": GREEDY, "max_tokens": 9} | changes)


def ask(chat, question):
    return "".join(chat.ask(question))


def state(chat):
    """The exact state of the engine."""
    found = chat.engine.state(0)
    return [*(tensor for kv in found.cache.layers for tensor in kv), found.z_prev_B1C]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def reads(monkeypatch):
    """The numbers of tokens that engines read at once."""
    lengths = []

    def watch(chat):
        read = chat.engine.read
        chat.engine.read = lambda row, tokens: lengths.append(len(tokens)) or read(row, tokens)
        return lengths

    return watch


def test_tokens_are_those_of_the_template_and_each_is_read_once(tmp_path, reads):
    folder = stories(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = chat_with(contextready.load(folder), system="a story", max_tokens=12)
    lengths, messages = reads(chat), [{"role": "system", "content": "a story"}]
    for question in ("Once upon a time", "Lily saw a  big\nbox</s>", "é漢"):
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        before = chat.position
        answer = ask(chat, question)
        assert chat.tokens[: len(ids)] == ids
        assert lengths.pop() == len(ids) - before
        new = chat.tokens[len(ids) :]
        assert answer == tokenizer.decode(ids + new)[len(tokenizer.decode(ids)) :].removesuffix("</s>")
        messages.append({"role": "assistant", "content": answer})
    assert not lengths
    assert [*chat.messages] == messages[1:]


@pytest.mark.parametrize("changes", [{}, {"window": 7}, {"correction": "balanced"}, {"vocab_size": 290}])
def test_undo_is_exact_and_reads_nothing(changes, reads):
    chat = chat_with(native(**changes))
    answers, states = [], []
    for question in QUESTIONS:
        answers.append(ask(chat, question))
        states.append((state(chat), list(chat.tokens), chat.messages))
    # One vector is enough to return to a place, unless keys and values are forgotten or read again.
    cheap = all(point.place.whole is None for point in chat._points)
    assert cheap != bool(changes.keys() & {"window", "vocab_size"})
    lengths = reads(chat)
    for question, before in zip(QUESTIONS[:0:-1], states[-2::-1], strict=True):
        assert chat.undo() == {"role": "user", "content": question}
        assert same(state(chat), before[0])
        assert (chat.tokens, chat.messages) == before[1:]
    assert not lengths
    assert ask(chat, QUESTIONS[1]) == answers[1]
    assert same(state(chat), states[1][0])
    chat.undo()
    chat.undo()
    assert (chat.position, chat.messages) == (0, ())
    with pytest.raises(ContextReadyError, match="There is nothing to undo; the conversation is at its start"):
        chat.undo()
    assert ask(chat, QUESTIONS[0]) == answers[0]


@pytest.mark.parametrize("changes", [{}, {"window": 7}])
def test_a_template_that_changes_earlier_messages_is_read_again_from_there(changes, reads):
    model = native(FORGETFUL, **changes)
    chat, states, lengths = chat_with(model), [], None
    for question in QUESTIONS:
        lengths = lengths if lengths is not None else reads(chat)
        ask(chat, question)
        whole = model.tokenizer.encode_prompts([chat.template.render(chat.messages[:-1])])[0]
        assert chat.tokens[: len(whole)] == whole
        # The same as reading all of it at once.
        alone = chat_with(model)
        alone.engine.read(0, chat.tokens[: chat.position])
        assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(state(chat), state(alone), strict=True))
        states.append((state(chat), list(chat.tokens)))
    del lengths[:]
    for before in states[-2::-1]:
        chat.undo()
        assert same(state(chat), before[0])
        assert chat.tokens == before[1]
    assert not lengths


def test_a_fork_is_returned_to_exactly():
    chat = chat_with(native())
    ask(chat, QUESTIONS[0])
    chat.fork("start")
    at_start, messages = state(chat), chat.messages
    first = ask(chat, QUESTIONS[1])
    after_first = state(chat)
    chat.switch("start")
    assert same(state(chat), at_start)
    assert chat.messages == messages
    second = ask(chat, QUESTIONS[2])
    assert second
    chat.switch("start")
    assert ask(chat, QUESTIONS[1]) == first
    assert same(state(chat), after_first)
    chat.switch("last")
    assert chat.messages[-1]["content"] == second
    chat.undo()
    assert same(state(chat), at_start)
    with pytest.raises(ContextReadyError, match=r"There is no fork 'stat'; did you mean 'start'\?"):
        chat.switch("stat")
    with pytest.raises(ContextReadyError, match="A fork needs a name other than last"):
        chat.fork("last")


@pytest.mark.parametrize("changes", [{}, {"window": 7}, {"template": FORGETFUL}])
def test_a_saved_conversation_goes_on_exactly(changes, tmp_path):
    model = native(**changes)
    chat = chat_with(model, system="small water")
    ask(chat, QUESTIONS[0])
    at_first = state(chat)
    ask(chat, QUESTIONS[1])
    chat.save(tmp_path / "talk")
    kept = state(chat)
    other = chat_with(model)
    ask(other, "under")
    other.load(tmp_path / "talk")
    assert same(state(other), kept)
    assert (other.messages, other.tokens, other.system) == (chat.messages, chat.tokens, "small water")
    assert ask(other, QUESTIONS[2]) == ask(chat, QUESTIONS[2])
    other.undo()
    other.undo()
    assert same(state(other), at_first) != bool(changes)
    chat.undo()
    chat.undo()
    assert ask(other, QUESTIONS[1]) == ask(chat, QUESTIONS[1])
    other.switch("last")
    assert other.messages[0]["content"] == "under"
    chat.save(tmp_path / "talk")  # over another conversation


def test_only_conversations_are_replaced_and_loaded(tmp_path):
    chat = chat_with(native())
    with pytest.raises(ContextReadyError, match="There is nothing to save; ask something first"):
        chat.save(tmp_path / "talk")
    ask(chat, QUESTIONS[0])
    before = state(chat), chat.messages
    (tmp_path / "letter").write_text("dear all")
    with pytest.raises(ContextReadyError, match="letter exists and is not a saved conversation; choose another name"):
        chat.save(tmp_path / "letter")
    assert (tmp_path / "letter").read_text() == "dear all"
    chat.engine.state(0).save(tmp_path / "state")
    for name, sentence in (
        ("letter", "not a complete safetensors file"),
        ("none", "There is no state file"),
        ("state", r"state is not a conversation to continue \(its note cannot be read as JSON"),
    ):
        with pytest.raises(ContextReadyError, match=sentence):
            chat.load(tmp_path / name)
    chat.save(tmp_path / "talk")
    for other in (native(width=18), native(layers=1)):
        with pytest.raises(ContextReadyError, match="This state does not match the model"):
            chat_with(other).load(tmp_path / "talk")
    small = chat_with(native(), context=10)
    with pytest.raises(ContextReadyError, match="do not fit into a context of 10"):
        small.load(tmp_path / "talk")
    assert small.messages == ()
    assert not small.forks
    assert same(state(chat), before[0])
    assert chat.messages == before[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "letter"),
        ("tokenizer", "0" * 64),
        ("tokenizer", "x"),
        ("system", 5),
        ("messages", []),
        ("messages", [{"role": "system", "content": "x"}]),
        ("messages", [{"role": "user", "content": "x"}] * 2),
        ("tokens", [1, 2]),
        ("tokens", [-1]),
        ("tokens", "all"),
        ("places", [{"position": 2**61, "carried": None}]),
        ("places", [{"position": 3, "carried": "AAAA"}]),
        ("places", [{"position": 3, "carried": "no base64!"}]),
        ("points", []),
        ("points", [{"place": {"position": 2**61}, "unread": None}]),
        ("points", [{"place": {"position": 0}, "unread": 2**30}]),
        ("more", 1),
    ],
)
def test_a_hostile_file_is_one_sentence_and_changes_nothing(key, value, tmp_path):
    chat = chat_with(native())
    ask(chat, QUESTIONS[0])
    chat.save(tmp_path / "talk")
    saved, note = State.load_with_note(tmp_path / "talk")
    saved.save(tmp_path / "bad", note=json.dumps(json.loads(note) | {key: value}))
    before = state(chat), chat.messages
    with pytest.raises(ContextReadyError, match="bad is not a conversation to continue") as error:
        chat.load(tmp_path / "bad")
    assert "\n" not in str(error.value)
    assert same(state(chat), before[0])
    assert chat.messages == before[1]


def test_an_answer_that_is_closed_stays_as_it_is():
    chat = chat_with(native())
    ask(chat, QUESTIONS[0])
    before, messages = state(chat), chat.messages
    pieces = chat.ask(QUESTIONS[1])
    shown = next(pieces) + next(pieces)
    pieces.close()
    assert chat.finish == "interrupted"
    assert chat.messages[-1] == {"role": "assistant", "content": shown}
    ask(chat, QUESTIONS[2])
    whole = chat.tokenizer.encode_prompts([chat.template.render(chat.messages[:-1])])[0]
    assert chat.tokens[: len(whole)] == whole
    chat.undo()
    chat.undo()
    assert same(state(chat), before)
    assert chat.messages == messages


def test_an_answer_that_nobody_reads_on_is_ended_by_the_next_question():
    chat, other = chat_with(native()), chat_with(native())
    answers = []
    for one in (chat, other):
        pieces = one.ask(QUESTIONS[0])
        next(pieces)
        if one is other:
            pieces.close()
        answers.append(ask(one, QUESTIONS[1]))
        assert list(pieces) == []
    assert answers[0] == answers[1]
    assert (chat.tokens, chat.messages) == (other.tokens, other.messages)
    unread = chat.ask(QUESTIONS[2])
    chat.undo()
    assert list(unread) == []
    assert len(chat.messages) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ContextReadyError("full")])
@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL])
def test_a_failure_loses_nothing(error, template):
    chat = chat_with(native(template))
    ask(chat, QUESTIONS[0])
    before, messages, step, calls = state(chat), chat.messages, chat.engine.step, []

    def failing(tokens):
        calls.append(tokens)
        if len(calls) == 4:
            raise error
        return step(tokens)

    chat.engine.step = failing
    with pytest.raises(BaseException) as raised:  # noqa: PT011  (three kinds)
        ask(chat, QUESTIONS[1])
    assert raised.type is (error if isinstance(error, type) else type(error))
    assert same(state(chat), before)
    assert chat.messages == messages
    other = chat_with(native(template))
    ask(other, QUESTIONS[0])
    assert ask(chat, QUESTIONS[1]) == ask(other, QUESTIONS[1])


def test_without_a_template_the_text_is_plain():
    model = native(None)
    chat = chat_with(model)
    assert chat.template is None
    answer = ask(chat, QUESTIONS[0])
    assert answer == model.generate(QUESTIONS[0], max_tokens=9, temperature=0)
    again = ask(chat, " and")
    assert again == model.generate(f"{QUESTIONS[0]}{answer} and", max_tokens=9, temperature=0)
    with pytest.raises(ContextReadyError, match="has no chat template, so there is no place for a system prompt"):
        chat.system = "x"
    with pytest.raises(ContextReadyError, match="The message is empty"):
        ask(chat_with(model), "")
    with pytest.raises(ContextReadyError, match="a-model has no chat template; use a model that was made for"):
        Chat(model, template="model")
    assert Chat(native(), template="none").template is None
    with pytest.raises(ContextReadyError, match=r"Unknown template 'modle'; did you mean 'model'\?"):
        Chat(model, template="modle")


def test_a_system_prompt_that_the_template_refuses_changes_nothing():
    chat = chat_with(native(WITHOUT_SYSTEM))
    answer = ask(chat, QUESTIONS[0])
    with pytest.raises(ContextReadyError, match="does not accept this conversation: no system here"):
        chat.system = "x"
    assert chat.system is None
    chat.undo()
    assert ask(chat, QUESTIONS[0]) == answer


def test_another_system_prompt_applies_to_the_whole_conversation():
    model = native()
    chat = chat_with(model, system="small")
    ask(chat, QUESTIONS[0])
    before = state(chat)
    chat.system = "green"
    ask(chat, QUESTIONS[1])
    messages = [{"role": "system", "content": "green"}, *chat.messages[:-1]]
    whole = model.tokenizer.encode_prompts([chat.template.render(messages)])[0]
    assert chat.tokens[: len(whole)] == whole
    chat.undo()
    assert same(state(chat), before)


def test_a_full_context_is_one_sentence_and_loses_nothing():
    chat = chat_with(native(), context=40, max_tokens=100)
    ask(chat, "the")
    assert (chat.finish, chat.position) == ("length", 40)
    messages = chat.messages
    with pytest.raises(ContextReadyError, match=r"The conversation would have \d+ tokens, but the context has room"):
        ask(chat, "river")
    assert chat.messages == messages
    chat.undo()
    assert chat.messages == ()


def test_answers_differ_after_undo_but_not_between_runs():
    def talk():
        chat = Chat(native(), sampling=Sampling(temperature=3.0), max_tokens=9, seed=5)
        one = ask(chat, "the")
        chat.undo()
        return one, ask(chat, "the")

    assert talk() == talk()
    assert len(set(talk())) == 2


def test_begin_tokens_come_from_the_template_only(tmp_path):
    folder = stories(tmp_path / "model", BEGINNING)
    chat = chat_with(contextready.load(folder), max_tokens=2)
    ask(chat, "Once")
    assert chat.tokens[0] == 1
    assert chat.tokens.count(1) == 1
    plain = chat_with(contextready.load(folder), max_tokens=2, template="none")
    ask(plain, "Once")
    assert plain.tokens[0] == 1
