"""Chat templates, the ids they give, conversations and the commands `generate` and `chat`."""

import io
import json

import pytest
import tokenizers
from golden import llama
from tokenizers import AddedToken, processors

from llm import chat
from llm.chat import Template, open_conversation, talk
from llm.commandline import dispatch
from llm.data.tokenizer import Tokenizer
from llm.huggingface import import_model
from llm.sampling import Sampling
from main import COMMANDS
from parallel.errors import UserError

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'tool' %}{{ raise_exception('no tools: ' ~ message.role) }}{% endif %}\n"
    "{{ '<|turn|>' + message['role'] + '\\n' + message['content'] | trim + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": " the end "}]
GREEDY = Sampling(temperature=0, max_tokens=6, repetition_penalty=1.5)


@pytest.fixture(scope="module")
def tokenizer():
    """One with special tokens of its own that puts its beginning of sequence in front of every text."""
    inner = Tokenizer.train(["the end of the world is the end of the story\n"] * 5, 290).inner
    inner.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>", "<|turn|>")])
    inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", inner.token_to_id("<s>"))])
    return Tokenizer(inner)


@pytest.fixture(scope="module")
def imported(tmp_path_factory, tokenizer):
    """The run folder of an imported random model with a chat template."""
    folder, workdir = (tmp_path_factory.mktemp(name) for name in ("source", "imported"))
    llama(folder, vocab_size=300, eos_token_id=tokenizer.inner.token_to_id("</s>"), max_position_embeddings=128)
    about = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer.save(folder / "tokenizer.json")
    import_model(folder, workdir)
    return workdir


# ------------------------------------------------------------------------------------------- templates
@pytest.mark.smoke
def test_a_template_says_everything_and_one_beginning(imported, tokenizer):
    template = Template.load(imported, tokenizer)
    assert template.render(USER) == "<s><|turn|>user\nthe end</s><|turn|>assistant\n"
    ids = template.encode(USER)
    begin, end, turn = (tokenizer.inner.token_to_id(name) for name in ("<s>", "</s>", "<|turn|>"))
    assert [ids.count(i) for i in (begin, end, turn)] == [1, 1, 2] and ids[:2] == [begin, turn]
    plain = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    plain.encode_special_tokens = False
    assert ids == plain.encode(template.render(USER), add_special_tokens=False).ids  # in one go
    without = Template(TEMPLATE.replace("{{ bos_token }}", ""), template.special, tokenizer)
    assert without.encode(USER) == ids[1:]  # nothing is put in front of what the template says
    assert begin not in tokenizer.encode("<s>")  # in a prompt it is text like any other


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{% generation %}a{{ messages[0].content }}{% endgeneration %}b", "a the end b"),
        ("{%- for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": " the end "}]'),
        ("{{ {'a': 'é<'} | tojson }}{{ tools is none }}", '{"a": "é<"}True'),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_may_use(tokenizer, source, want):
    assert Template(source, {}, tokenizer).render(USER) == want


@pytest.mark.smoke
def test_a_template_that_refuses_or_is_wrong_is_one_sentence(imported, tokenizer):
    template = Template.load(imported, tokenizer)
    with pytest.raises(UserError, match="does not take this conversation: no tools: tool"):
        template.render([{"role": "tool", "content": "a"}])
    with pytest.raises(UserError, match="does not take this conversation"):
        Template("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}, tokenizer).render(USER)
    with pytest.raises(UserError, match="cannot be read"):
        Template("{% for %}", {}, tokenizer)


@pytest.mark.smoke
def test_where_a_template_comes_from(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"no chat template .* continue texts with generate"):
        Template.load(tmp_path, tokenizer)
    folder = tmp_path / "huggingface"
    folder.mkdir()
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert Template.load(tmp_path, tokenizer).render(USER) == "d"
    (folder / "chat_template.jinja").write_text("beside")
    assert Template.load(tmp_path, tokenizer).render(USER) == "beside"


# ------------------------------------------------------------------------------------------- conversations
@pytest.fixture(scope="module")
def conversation(imported):
    return open_conversation(imported, GREEDY, "the story")


def test_a_conversation_goes_on_and_reads_only_what_is_new(conversation):
    shown: list[str] = []
    one = conversation.say("the world", shown.append)
    assert one["message"] == "the world" and one["text"] == "".join(shown) and 0 < len(one["token_ids"]) <= 6
    before = conversation.decoder.place
    two = conversation.say("the end")
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert conversation.messages[2]["content"] == one["text"] and conversation.decoder.place > before
    conversation.decoder.forget()  # the same from the beginning
    asked = conversation.messages
    conversation.messages = asked[:3]
    assert conversation.say("the end") == two and conversation.messages == asked
    conversation.forget()
    assert conversation.say("the world") == one


def test_talk_answers_lines_and_survives_one_that_is_too_long(conversation, monkeypatch):
    conversation.forget()
    shown: list[str] = []
    monkeypatch.setattr("sys.stdin", io.StringIO("the world\n\n" + "~" * 300 + "\n/new\nthe world\n"))
    answers = talk(conversation, chat.typed("> "), shown.append)
    assert [answer["message"] for answer in answers] == ["the world", "the world"] and answers[0] == answers[1]
    assert "at most 128" in "".join(shown) and len(conversation.messages) == 3


def test_the_commands(imported, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    flags = ["--top_k=3", "--top_p=0.9", "--min_p=0.1", "--repetition_penalty=1.2", "--stop=xx", "--stop=yy"]
    common = [f"--workdir={imported}", "--max_tokens=5", "--seed=3", *flags]

    def call(*arguments):
        assert dispatch(COMMANDS, [*arguments, *common]) == 0
        return capsys.readouterr().out

    answers = json.loads(call("chat", "--message=the world", "--message=the end", "--system=the story", "--json"))
    assert [list(answer) for answer in answers] == [["message", "text", "token_ids"]] * 2
    shown = call("chat", "--message=the world", "--message=the end", "--system=the story")
    assert shown == "".join(answer["text"] + "\n" for answer in answers)
    texts = json.loads(call("generate", "--prompt=the world", "--json"))
    assert [list(text) for text in texts] == [["prompt", "text", "token_ids"]]
    assert call("generate", "--prompt=the world") == "the world" + texts[0]["text"] + "\n"


@pytest.mark.smoke
def test_chat_as_json_needs_a_message(imported, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert dispatch(COMMANDS, ["chat", f"--workdir={imported}", "--json"]) == 2
    assert "--message" in capsys.readouterr().err
    assert dispatch(COMMANDS, ["generate", f"--workdir={imported}", "--prompt=a", "--stop="]) == 2
    assert "--stop is empty" in capsys.readouterr().err
