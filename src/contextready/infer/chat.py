"""A conversation with a model: history, streamed answers, exact undo, forks, and files to continue it later.

chat = Chat(contextready.load("smollm2-crt"), system="You answer briefly.")
for piece in chat.ask("What is a transformer?"):
    print(piece, end="")
chat.undo()
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from contextready.errors import ContextReadyError, nearest
from contextready.infer.chat_state import Moment, Place, Point, place_of, restored, state_of
from contextready.infer.sampling import Sampling, choose, rng_for
from contextready.infer.template import ChatTemplate, Message
from contextready.infer.text import IncrementalText

if TYPE_CHECKING:
    from contextready.infer.engine import Logits
    from contextready.infer.language_model import LanguageModel

CONTEXT = 4096
"""The most tokens that a conversation has room for, unless another number is requested."""
BEFORE = 32
"""Preceding tokens with which new ones are turned into text."""
LEFT = "last"
"""The name under which the conversation is kept that another one replaces."""

Finish = Literal["stop", "length", "interrupted"]


class Chat:
    """A conversation that one engine has read.

    With the model's chat template, the tokens are always those of the template applied to all messages; only the new
    ones are read. Without one, the messages are one plain text. `template` chooses: `auto` (the model's, if it has
    one), `model` (it must have one) or `none`.
    """

    def __init__(
        self,
        model: "LanguageModel",
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        max_tokens: int = 512,
        context: int | None = None,
        seed: int = 0,
        template: str = "auto",
    ) -> None:
        if template not in ("auto", "model", "none"):
            raise ContextReadyError(f"Unknown template '{template}'; {nearest(template, ('auto', 'model', 'none'))}")
        if max_tokens < 1:
            raise ContextReadyError(f"max_tokens must be at least 1, but got {max_tokens}.")
        self.model, self.tokenizer = model, model.tokenizer
        self.sampling, self.max_tokens, self.seed = sampling or Sampling(), max_tokens, seed
        conventions = self.tokenizer.conventions
        source = None if template == "none" else conventions.chat_template
        if source is None and template == "model":
            raise ContextReadyError(
                f"{model.path} has no chat template; use a model that was made for conversations, or continue plain "
                "text with the template none."
            )
        self.template = None if source is None else ChatTemplate(source, conventions.named, str(model.path))
        self.context = context or min(model.trained_length, CONTEXT)
        self.engine = model.engine(1, self.context)
        self.messages: tuple[Message, ...] = ()
        """The questions and answers so far, without the system prompt."""
        self.tokens: list[int] = []
        """All tokens of the conversation. The engine has read them, except the last one of an answer."""
        self.finish: Finish | None = None
        """Why the newest answer ended."""
        self.forks: dict[str, Moment] = {}
        """Conversations to return to, by name."""
        self._places: tuple[Place, ...] = ()
        self._points: tuple[Point, ...] = ()
        self._answers = 0
        self._current: Generator[str, None, None] | None = None
        self._system: str | None = None
        if system is not None:
            self.system = system

    @property
    def system(self) -> str | None:
        """The system prompt, which precedes all messages. Setting it applies from the next question on."""
        return self._system

    @system.setter
    def system(self, text: str) -> None:
        if self.template is None:
            raise ContextReadyError(
                f"{self.model.path} has no chat template, so there is no place for a system prompt; begin the text "
                "with it instead."
            )
        before, self._system = self._system, text
        try:
            self._written([{"role": "user", "content": "?"}])
        except ContextReadyError:
            self._system = before
            raise

    @property
    def position(self) -> int:
        """How many tokens the engine has read."""
        return self.engine.position(0)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Add a message and return the pieces of the answer as they come.

        Closing the iterator ends the answer there, and so does any other method. If anything fails, the conversation is
        as it was before.
        """
        self._settle()
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._written(messages)
        if not prompt:
            raise ContextReadyError("The message is empty; write some text.")
        if len(prompt) > self.context:
            raise ContextReadyError(
                f"The conversation would have {len(prompt):,} tokens, but the context has room for {self.context:,}; "
                "undo some of it, or start with a larger context."
            )
        self._current = self._answer(messages, prompt)
        return self._current

    def undo(self) -> Message:
        """Take back the newest question and its answer, exactly, and return the question."""
        self._settle()
        if not self._points:
            raise ContextReadyError("There is nothing to undo; the conversation is at its start.")
        *earlier, point = self._points
        question = self.messages[len(point.messages)]
        self._points = tuple(earlier)
        self._return_to(point)
        self.finish = None
        return question

    def fork(self, name: str) -> None:
        """Keep the present conversation under a name, to return to it with `switch`."""
        if not name or name == LEFT:
            raise ContextReadyError(
                f"A fork needs a name other than {LEFT}, which is the conversation that another one replaced."
            )
        self.forks[name] = self._moment()

    def switch(self, name: str) -> None:
        """Return to a fork. The present conversation is kept under the name `last`."""
        if name not in self.forks:
            raise ContextReadyError(
                f"There is no fork '{name}'; {nearest(name, sorted(self.forks))}"
                if self.forks
                else f"There is no fork '{name}'; keep the present conversation with: fork {name}"
            )
        moment = self.forks[name]
        left = self._moment()
        self._continue(moment)
        self.forks[LEFT] = left

    def save(self, path: Path) -> None:
        """Write the conversation and the exact state of the model to a file, completely or not at all."""
        from contextready.infer.chat_file import save_chat

        save_chat(path, self._moment(), self.tokenizer)

    def load(self, path: Path) -> None:
        """Continue a conversation that `save` wrote. The present one is kept under the name `last`."""
        from contextready.infer.chat_file import load_chat

        moment, left = load_chat(path, self.tokenizer), self._moment()
        self._continue(moment)
        self.forks[LEFT] = left

    def _settle(self) -> None:
        """End an answer that is still being written."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def _written(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where the next answer begins."""
        if self.template is None:
            return self.tokenizer.encode_prompts(["".join(message["content"] for message in messages)])[0]
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return self.tokenizer.encode_prompts([self.template.render([*system, *messages])], begin=False)[0]

    def _answer(self, messages: list[Message], prompt: list[int]) -> Generator[str, None, None]:
        point, pieces = self._point_before(prompt), list[str]()
        try:
            logits_V = self._read(prompt)
            self._places = (*self._places, place_of(self.engine))
            for piece in self._write(logits_V):
                pieces.append(piece)
                if piece:
                    yield piece
        except GeneratorExit:
            self.finish = "interrupted"
            if not any(pieces):
                self._return_to(point)
                raise
            self._keep(messages, pieces, point)
            raise
        except BaseException:
            self._return_to(point)
            raise
        self._keep(messages, pieces, point)

    def _keep(self, messages: list[Message], pieces: list[str], point: Point) -> None:
        self.messages = (*messages, {"role": "assistant", "content": "".join(pieces)})
        self._points = (*self._points, point)

    def _read(self, prompt: list[int]) -> "Logits":
        """Read what the engine has not read of a prompt, after going back to where they differ."""
        start = self._kept(prompt)
        if start < self.position:
            self._places = tuple(place for place in self._places if place.position <= start)
            start = self._go_to(self._places[-1] if self._places else Place(0))
        self.tokens = prompt[:start]
        logits_V, _ = self.engine.read(0, prompt[start:])
        self.tokens = prompt
        return logits_V

    def _kept(self, prompt: list[int]) -> int:
        """How many tokens that the engine has read are those of the prompt, of which at least one must be read."""
        both = min(self.position, len(prompt) - 1)
        equal = (a == b for a, b in zip(self.tokens[:both], prompt[:both], strict=True))
        return next((i for i, same in enumerate(equal) if not same), both)

    def _write(self, logits_V: "Logits") -> Iterator[str]:
        """Choose and read the tokens of an answer; yields a piece of text for each, which may be empty."""
        text = IncrementalText(self.tokenizer, after=self.tokens[-BEFORE:])
        rng, stops = rng_for(self.seed, self._answers), {*self.tokenizer.stop_ids, self.tokenizer.end_id}
        self._answers += 1
        seen_V = np.zeros(self.engine.vocab_size, np.bool_)
        seen_V[self.tokens] = True
        # The last token is chosen but never read.
        most = min(self.max_tokens, self.context - self.position + 1)
        for count in range(1, most + 1):
            token = choose(logits_V, self.sampling, rng, seen_V)
            self.tokens.append(token)
            seen_V[token] = True
            if token in stops or count == most:
                self.finish = "stop" if token in stops else "length"
                yield ("" if token in stops else text.push(token)) + text.flush()
                return
            yield text.push(token)
            logits_V = self.engine.step([token])[0]

    def _point_before(self, prompt: list[int]) -> Point:
        """Everything needed to return to the present, cheap unless the prompt changes what the engine has read."""
        whole = self._kept(prompt) < self.position
        return Point(self.messages, self.tokens, self._places, place_of(self.engine, whole=whole))

    def _return_to(self, point: Point) -> None:
        """Restore everything but `_points`."""
        self.messages = point.messages
        if self._go_to(point.place) == point.place.position:
            self.tokens, self._places = point.tokens, point.places
        else:
            # The state there is not known, so the next question reads everything again, and what was carried at
            # earlier places belongs to other keys and values.
            self.tokens, self._places = [], ()
            self._points = tuple(replace(one, place=Place(one.place.position)) for one in self._points)

    def _go_to(self, place: Place) -> int:
        """Put the engine back to a place, or to the start if that was not kept; returns where it is."""
        self.engine.load(0, restored(self.engine, place))
        return self.position

    def _moment(self) -> Moment:
        self._settle()
        return Moment(
            self._system, self.messages, tuple(self.tokens), self._places, self._points, state_of(self.engine)
        )

    def _continue(self, moment: Moment) -> None:
        """Replace the conversation; it stays as it is if the state is not one of this model."""
        self.engine.load(0, moment.state)
        self._system, self.messages, self.finish = moment.system, moment.messages, None
        self._places, self._points = moment.places, moment.points
        self.tokens = list(moment.tokens) if self.position else []
