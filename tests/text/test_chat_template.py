import shutil

import pytest

from ligermodels.errors import CheckpointError
from tests.text.folders import CONFIG, configure

TALK = [
    {"role": "system", "content": "be <kind> & é"},
    {"role": "user", "content": "hi", "tool_calls": None},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "stop"},
    {"role": "user", "content": "never seen"},
]
CHATML = """{{ bos_token }}{% for message in messages %}
    {% if message.content == 'stop' %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}<|im|>{{ message['role'] }}
{{ message['content'] | trim }}{% endif %}
    {% if message.tool_calls is defined %}CALLS{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im|>assistant
{% endif %}"""
JSON = "{{ messages | tojson(indent=1) }}{{ extra }}{{ tools }}{{ strftime_now('%Y') }}"


@pytest.fixture
def folder(bpe, tmp_path):
    shutil.copy(bpe / "tokenizer.json", tmp_path)
    return tmp_path


def load(folder, template=None):
    return configure(folder, folder, **CONFIG, chat_template=template)


@pytest.mark.parametrize("template", [CHATML, JSON])
def test_rendering_equals_transformers(folder, template):
    theirs, ours = load(folder, template)
    for prompt in (True, False):
        options = {"add_generation_prompt": prompt, "extra": "more"}
        text = ours.apply_chat_template(TALK, tokenize=False, **options)
        assert text == theirs.apply_chat_template(TALK, tokenize=False, **options)
        assert "never seen" not in text or template == JSON
        ids = ours.apply_chat_template(TALK, **options)
        assert ids == theirs.apply_chat_template(TALK, return_dict=False, **options)
        # the template writes its own bos, so the tokenizer adds none
        assert ids == ours.encode(text, add_special_tokens=False)


def test_where_templates_are_found(folder):
    named = [{"name": n, "template": f"{n}!"} for n in ("default", "tool_use", "rag")]
    theirs, ours = load(folder, named)
    assert ours.chat_template == theirs.chat_template
    for options in ({}, {"tools": []}, {"chat_template": "rag"}, {"chat_template": "new {{ 1 }}"}):
        text = ours.apply_chat_template(TALK, tokenize=False, **options)
        assert text == theirs.apply_chat_template(TALK, tokenize=False, **options)

    _, ours = load(folder, named[1:])
    with pytest.raises(CheckpointError, match=r"named 'default', only \['rag', 'tool_use'\]"):
        ours.apply_chat_template(TALK)

    (folder / "chat_template.jinja").write_bytes(b"from\r\nthe {{ 1 }}\rfile\n")
    theirs, ours = load(folder, named)
    assert ours.chat_template == theirs.chat_template == "from\nthe {{ 1 }}\nfile\n"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text("short")
    theirs, ours = load(folder)
    assert ours.chat_template == theirs.chat_template
    assert ours.apply_chat_template(TALK, tokenize=False, chat_template="short") == "short"


def test_a_template_that_fails_says_so(folder, subtests):
    for template, message in (
        ("{{ raise_exception('roles must alternate') }}", "chat template .*: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "chat template .*unsafe"),
        ("{{ messages[0].content + 1 }}", "chat template .*: can only concatenate"),
        (None, "no chat template; write one into chat_template.jinja in"),
    ):
        with subtests.test(str(template)):
            _, ours = load(folder, template)
            with pytest.raises(CheckpointError, match=message) as caught:
                ours.apply_chat_template(TALK)
            assert str(folder) in str(caught.value)
    with pytest.raises(ValueError, match="an empty conversation"):
        ours.apply_chat_template([])
