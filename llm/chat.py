"""Conversations with an imported model through its own chat template."""

import contextlib
import datetime
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from llm.config import Config
from llm.data.tokenizer import Tokenizer
from llm.generate import continue_prompts, imported_json, open_decoder, stop_ids
from llm.sampling import Sampling
from parallel.errors import UserError

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
Message = dict[str, str]  # role (system, user or assistant) and content


class Template:
    """A chat template: messages to text, and to ids in one go. special: the tokens that it may name."""

    def __init__(self, source: str, special: dict[str, str], tokenizer: Tokenizer):
        self.special = special
        self.compiled = _compile(source)
        # Here the text of a special token is that token; elsewhere it is text like any other.
        self.inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
        self.inner.encode_special_tokens = False

    @classmethod
    def load(cls, workdir: str | Path, tokenizer: Tokenizer) -> "Template":
        """The template that came with an imported model. Raises UserError when there is none."""
        path, about = Path(workdir) / "huggingface" / "chat_template.jinja", imported_json(workdir, "tokenizer_config.json")
        source = path.read_text(encoding="utf-8") if path.is_file() else about.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {one["name"]: one["template"] for one in source}
            source = named.get("default") or next(iter(named.values()), None)
        if not source:
            raise UserError(
                f"the model in {workdir} has no chat template (chat_template in huggingface/tokenizer_config.json, or "
                "huggingface/chat_template.jinja): chat needs an imported instruction model; continue texts with generate"
            )
        values = {name: about.get(name) for name in SPECIAL}
        special = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items() if value}
        return cls(source, special, tokenizer)

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to where the assistant answers. Raises UserError when the template refuses it."""
        import jinja2

        try:
            return self.compiled.render(messages=messages, tools=None, add_generation_prompt=True, **self.special)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template does not take this conversation: {error}") from None

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the text. The template says everything, so nothing is added, a second beginning of sequence least of all."""
        return self.inner.encode(self.render(messages), add_special_tokens=False).ids


def _compile(source: str) -> Any:
    """A template in a sandbox, with what transformers lets it use."""
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise UserError("chat templates need the package jinja2: pip install jinja2") from None

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what the assistant says, for training; here it is shown as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def refuse(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template cannot be read: {error}") from None


class Conversation:
    """What was said, and the model that goes on with it; only what is new is read."""

    def __init__(self, decoder: Any, tokenizer: Tokenizer, template: Template, sampling: Sampling, stop: set[int], system: str):
        self.decoder, self.tokenizer, self.template = decoder, tokenizer, template
        self.sampling, self.stop = sampling, stop
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.system)

    def forget(self) -> None:
        """Begin a new conversation."""
        self.messages = list(self.system)

    def say(self, message: str, on_text: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
        """The answer to a message: message, text, token_ids. on_text is told the text as it comes. Raises UserError."""
        asked = [*self.messages, {"role": "user", "content": message}]
        ids = self.template.encode(asked)
        answer = continue_prompts(self.decoder, [ids], self.sampling, self.tokenizer, self.stop, lambda _, text: on_text(text))[
            0
        ]
        self.messages = [*asked, {"role": "assistant", "content": answer["text"]}]
        return {"message": message, **answer}


def open_conversation(
    workdir: str | Path,
    sampling: Sampling | None = None,
    system: str = "",
    step: int | None = None,
    config: Config | None = None,
) -> Conversation:
    """A conversation with a checkpoint of a run. step and config: as for `evaluate`. Raises UserError."""
    from llm.run import TOKENIZER
    from llm.workdir import load_config

    sampling = (sampling or Sampling()).validate()
    config = config or load_config(workdir)
    tokenizer = Tokenizer.load(Path(workdir) / TOKENIZER, config.model.vocab)
    template = Template.load(workdir, tokenizer)
    decoder, _ = open_decoder(workdir, 1, step, config)
    return Conversation(decoder, tokenizer, template, sampling, stop_ids(workdir, tokenizer), system)


def typed(prompt: str) -> Iterable[str]:
    """The lines of stdin, asked for with a prompt on a terminal, until the end of it."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history in input()
    with contextlib.suppress(EOFError):
        while True:
            yield input(prompt)
    print()


def talk(conversation: Conversation, lines: Iterable[str], show: Callable[[str], None]) -> list[dict[str, Any]]:
    """Answer line after line; /new forgets what was said, and what cannot be answered is told and left out."""
    answers = []
    for line in filter(str.strip, lines):
        if line.strip() == "/new":
            conversation.forget()
            continue
        try:
            answers.append(conversation.say(line, show))
        except UserError as error:
            show(f"({error}; /new begins a new conversation)")
        show("\n")
    return answers
