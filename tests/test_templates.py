"""What a prompt should contain stands in it word for word, with every chat template that TRL has."""

from pathlib import Path

import pytest
from conftest import DATA, default_task
from jinja2 import UndefinedError
from transformers import AutoTokenizer

import grpo

TASK = default_task(grpo)

trl = pytest.importorskip("trl")
TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
# Those of some models with images take contents only as lists of parts.
OF_PARTS = [path for path in TEMPLATES if path.stem.startswith(("idefics3", "llava", "smolvlm"))]
TEMPLATES = [path for path in TEMPLATES if path not in OF_PARTS]
# A message may look like a placeholder, or have spaces that templates trim.
QUESTION = "  <think> How many [[[message 0]]] are 3 + 4?\n{{ x }} </think>\n"


TOKENIZER = AutoTokenizer.from_pretrained(DATA / "smollm2_tokenizer")


def tokenizer_with(template):
    TOKENIZER.chat_template = template.read_text(encoding="utf-8")
    return TOKENIZER


def test_trl_has_templates():
    assert len(TEMPLATES) > 60


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_examples_and_question_stand_in_the_prompt(template):
    tokenizer = tokenizer_with(template)
    chats = [[{"role": "user", "content": QUESTION}]]
    turns = [("user", "Hello <think>"), ("assistant", "<think>so</think>Hi"), ("user", QUESTION)]
    chats.append([{"role": role, "content": text} for role, text in turns])
    for chat in chats:
        prompt = grpo.render(grpo.Args(instructions="Count."), TASK, tokenizer, chat)
        texts = [text for example in TASK.EXAMPLES for text in example]
        texts += [message["content"] for message in chat[:-1]] + ["Count.\n\n" + QUESTION]
        places = [prompt.find(text) for text in texts]
        assert -1 not in places and places == sorted(places)
        assert all(prompt.count(text) == 1 for text in texts)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_response_like_the_examples_has_all_tags(template):
    """A template may open the <think> in the prompt, which the response then closes."""
    tokenizer = tokenizer_with(template)
    prompt = grpo.render(grpo.Args(), TASK, tokenizer, [{"role": "user", "content": QUESTION}])
    given = "<think>3 + 4 = 7</think><answer>7</answer>"
    if prompt.rstrip().endswith("<think>"):
        given = given.removeprefix("<think>")
    problem = {"prompt": prompt, "columns": {"answer": "7"}}
    scores = grpo.apply_rewards(TASK, [given], [problem], "cpu")
    assert scores["accuracy_reward"] == 1 and scores["format_reward"] == pytest.approx(0.4)


# Like SmolLM3's: it reads a switch in the system message and doesn't write it, and deletes the thoughts of earlier
# turns. It also leaves out empty messages.
SWITCH = """{% set mode = "think" -%}
{% for m in messages %}{% if m.role == "system" %}
{%- if "/no_think" in m.content %}{% set mode = "no_think" %}[mode {{ mode }}]{% endif -%}
{% if m.content %}[system {{ m.content.replace("/no_think", "").strip() }}]{% endif %}
{%- elif m.content %}[{{ m.role }} {{ m.content.split("</think>")[-1] }}]{% endif %}{% endfor -%}
{% if add_generation_prompt %}[assistant {% endif %}
{%- if "/no_think" in messages[0].content %}<think></think>{% endif %}"""


@pytest.mark.parametrize(
    ("system", "written"),
    [
        ("Count. /no_think", "[mode no_think][system Count.]"),
        ("/no_think", "[mode no_think][system ]"),
        ("Count.", "[system Count.]"),
        ("", ""),
    ],
)
def test_a_switch_in_the_system_message_works(system, written):
    """The template reads it, although the examples and the question stand in the prompt with their thoughts."""
    TOKENIZER.chat_template = SWITCH
    turns = [("system", system), ("user", "Hello"), ("assistant", "<think>so</think>Hi")]
    turns += [("user", ""), ("user", QUESTION)]
    chat = [{"role": role, "content": text} for role, text in turns]
    for examples in (TASK.EXAMPLES, []):
        prompt = grpo.render(grpo.Args(examples=bool(examples)), TASK, TOKENIZER, chat)
        shown = "".join(f"[user {text}][assistant {answer}]" for text, answer in examples)
        shown += f"[user Hello][assistant <think>so</think>Hi][user {QUESTION}]"
        end = "[assistant <think></think>" if "/no_think" in system else "[assistant "
        assert prompt == written + shown + end


def test_a_template_that_changes_no_message_reads_all_of_them():
    """No placeholder takes the place of a message: the template may look for a switch in any of them."""
    TOKENIZER.chat_template = """{% for m in messages %}[{{ m.content }}]{% endfor -%}
{% if "/no_think" in messages[-1].content %}<think></think>{% endif %}"""
    chat = [{"role": "user", "content": "2 + 2? /no_think"}]
    prompt = grpo.render(grpo.Args(examples=False), TASK, TOKENIZER, chat)
    assert prompt == "[2 + 2? /no_think]<think></think>"


TEXTS_OF_USERS = (
    """{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"""
)


@pytest.mark.parametrize(
    ("template", "dropped"),
    [
        ("{{ messages[-1].content }}", "Hi"),
        (TEXTS_OF_USERS, "Hello"),
    ],
)
def test_the_message_that_a_template_drops_is_named(template, dropped):
    TOKENIZER.chat_template = template
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chat.append({"role": "user", "content": "2 + 2?"})
    with pytest.raises(ValueError, match=f"drops the message '{dropped}'"):
        grpo.render(grpo.Args(examples=False), TASK, TOKENIZER, chat)


@pytest.mark.parametrize("template", OF_PARTS, ids=lambda path: path.stem)
def test_a_template_that_reads_only_lists_of_parts_ends_the_run(template):
    chat = [{"role": "user", "content": QUESTION}]
    with pytest.raises((ValueError, UndefinedError), match="drops the message|has no attribute"):
        grpo.render(grpo.Args(), TASK, tokenizer_with(template), chat)


def test_a_system_message_inside_the_chat_keeps_its_place():
    """Only a system message at the beginning stands before the examples."""
    TOKENIZER.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    turns = [("system", "A"), ("user", "B"), ("assistant", "C"), ("system", "D"), ("user", "E")]
    chat = [{"role": role, "content": text} for role, text in turns]
    shown = "".join(f"<user>{question}<assistant>{answer}" for question, answer in TASK.EXAMPLES)
    expected = f"<system>A{shown}<user>B<assistant>C<system>D<user>E"
    assert grpo.render(grpo.Args(), TASK, TOKENIZER, chat) == expected
    expected = f"{shown}<user>B<assistant>C<system>D<user>E"
    assert grpo.render(grpo.Args(), TASK, TOKENIZER, chat[1:]) == expected
