"""Chat templates: equal to transformers on honest ones, typed and prompt on hostile ones."""

# ruff: noqa: E501
from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import ChatTemplateError
from deepinfer.models import JinjaChatFormat, open_checkpoint
from deepinfer.models.sandbox_filters import chat_filters

from .templates import TEMPLATES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"What {name} does,\nin two lines <b>&'\" 你好 and more of the same so that it is long.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "O'Fallon"]},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "forecast")
]
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "n": 1.5, "x": None}},
}
PLAIN = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "  Hello <|im_end|> {{ 1 }} \n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi 🙂"},
    {"role": "user", "content": "And now?"},
]
WITH_CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "look it up"},
    {"role": "tool", "content": "12 °C", "tool_call_id": "1"},
    {"role": "tool", "content": "dry"},
    {"role": "assistant", "content": "Mild.", "reasoning_content": "done"},
]
CONVERSATIONS = {"plain": PLAIN, "one": PLAIN[1:2], "calls": WITH_CALLS, "no-system": PLAIN[1:]}


@pytest.fixture(scope="module")
def transformers_tokenizer(smollm2_folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", [*TEMPLATES, "smollm2"])
def test_equals_transformers(transformers_tokenizer, template, conversation, tools):
    source = TEMPLATES.get(template, transformers_tokenizer.chat_template)
    chat = JinjaChatFormat(
        source, tokens={k: v for k, v in transformers_tokenizer.special_tokens_map.items() if isinstance(v, str)}
    )
    for prompt in (True, False):
        expected = transformers_tokenizer.apply_chat_template(
            CONVERSATIONS[conversation], tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False
        )
        assert chat.render(CONVERSATIONS[conversation], tools=tools, add_generation_prompt=prompt) == expected


def test_template_variables_equal_transformers(transformers_tokenizer):
    chat = JinjaChatFormat(TEMPLATES["thinking"])
    for value in (True, False):
        expected = transformers_tokenizer.apply_chat_template(
            PLAIN,
            chat_template=TEMPLATES["thinking"],
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=value,
        )
        assert chat.render(PLAIN, variables={"enable_thinking": value}) == expected


def test_demo_model_brings_its_template(smollm2_gguf):
    text = open_checkpoint(smollm2_gguf).chat_format().render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_named_templates():
    chat = JinjaChatFormat({"default": "plain", "tool_use": "{{ tools | length }} tools"})
    assert chat.render(PLAIN) == "plain"
    assert chat.render(PLAIN, tools=TOOLS) == "2 tools"
    assert JinjaChatFormat({"default": "plain"}).render(PLAIN, tools=TOOLS) == "plain"
    with pytest.raises(ChatTemplateError, match="no template is named default; there are other"):
        JinjaChatFormat({"other": "x"}).render(PLAIN)


def test_clock_and_tokens():
    chat = JinjaChatFormat(
        "{{ strftime_now('%d %b %Y') }} {{ bos_token }}", bos_token="<s>", clock=lambda: datetime(2024, 7, 26)
    )
    assert chat.render([]) == "26 Jul 2024 <s>"
    assert chat.config() == {"templates": chat.templates, "tokens": {"bos_token": "<s>"}}


def test_callers_messages_are_never_touched():
    messages = [{"role": "user", "content": ["a"], "reasoning": "r"}]
    JinjaChatFormat("{% set x = messages[0].content + ['b'] %}{{ x }}").render(messages)
    assert messages == [{"role": "user", "content": ["a"], "reasoning": "r"}]


@pytest.mark.parametrize(
    "messages",
    [["text"], [{"role": "user", "content": {1, 2}}], [{"role": "user", "content": object()}]],
    ids=["text", "set", "object"],
)
def test_messages_that_are_not_json_like(messages):
    with pytest.raises(ChatTemplateError, match="expected"):
        JinjaChatFormat("x").render(messages)


def test_self_nested_message_is_refused():
    message: dict = {"role": "user"}
    message["content"] = message
    with pytest.raises(ChatTemplateError, match="nested more than"):
        JinjaChatFormat("x").render([message])


def test_refusal_of_the_template_is_shown():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        JinjaChatFormat("{{ raise_exception('roles must alternate') }}").render(PLAIN)


def test_syntax_error_names_the_line():
    with pytest.raises(ChatTemplateError, match=r"compiling .* \(line 2\)"):
        JinjaChatFormat("a\n{% for %}")


def test_every_filter_of_the_list_works():
    values = {"groupby": "messages|groupby('role')|list", "map": "messages|map(attribute='role')|list", "attr": "messages|attr('count')|string|length",
              "batch": "[1,2,3]|batch(2)|list", "slice": "[1,2,3]|slice(2)|list", "format": "'%s'|format(1)", "replace": "'a'|replace('a','b')",
              "selectattr": "messages|selectattr('role')|list", "rejectattr": "messages|rejectattr('role')|list", "items": "{'a': 1}|items|list",
              "dictsort": "{'a': 1}|dictsort", "sum": "[1,2]|sum", "round": "1.2|round", "abs": "-1|abs", "filesizeformat": "1|filesizeformat"}  # fmt: skip
    for name in chat_filters():
        if name == "attr":
            continue  # Gives a bound method, which only a call can use.
        expression = values.get(
            name,
            f"[1]|{name}"
            if name in ("first", "last", "list", "max", "min", "length", "count", "join")
            else f"'12'|{name}",
        )
        JinjaChatFormat("{{ " + expression + " }}").render(PLAIN)


# --- hostile templates ---------------------------------------------------------------------------

FORBIDDEN = [
    "{{ ''.__class__ }}", "{{ ''['__class__'] }}", "{{ ''|attr('__class__') }}", "{{ messages.__class__.__mro__ }}",
    "{{ [''] | map(attribute='__class__') | list }}", "{{ cycler.__init__.__globals__ }}", "{{ self.__init__ }}", "{{ namespace.__init__ }}",
    "{{ range.__globals__ }}", "{{ raise_exception.__globals__ }}", "{{ strftime_now.__code__ }}", "{{ ''.format.__wrapped__ }}",
    "{{ '{0.__class__}'.format('') }}", "{{ '{0[__class__]}'.format('') }}", "{{ messages.append(1) }}", "{{ messages[0].update({}) }}", "{{ messages.clear() }}",
    "{% include 'x' %}", "{% import 'os' as os %}", "{% extends 'x' %}", "{% set ns = namespace(__class__=1) %}", "{{ (1).to_bytes(9, 'big') }}",
    "{{ dict.fromkeys('ab') }}", "{{ ''.encode() }}", "{{ ''.translate({}) }}", "{{ lipsum() }}", "{{ ''|pprint }}", "{{ loop }}", "{{ foo.bar }}", "{{ foo() }}",
    "{{ 1 / 0 }}", "{{ messages[0] < 1 }}", "{{ namespace() }}", "{{ cycler }}", "{{ strftime_now('%9999999d') }}",
]  # fmt: skip


@pytest.mark.parametrize("source", FORBIDDEN)
def test_forbidden_reach_is_a_typed_error(source):
    if source == "{{ loop }}":
        source = "{% for i in [1] %}{{ loop }}{% endfor %}"
    with pytest.raises(ChatTemplateError):
        JinjaChatFormat(source).render(PLAIN)


NEST = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"
BOMBS = {
    "text": "{{ 'a' * 10**10 }}",
    "list": "{{ [1] * 10**10 }}",
    "reversed operands": "{{ 10**10 * 'a' }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "number": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "silent loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loud loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "loops into a variable": "{% set s %}{% for i in range(99999) %}{% for j in range(99999) %}xxxx{% endfor %}{% endfor %}{% endset %}",
    "loops in a filter": "{% filter upper %}{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}{% endfilter %}",
    "doubling by ~": NEST.replace("STEP", "ns.x ~ ns.x"),
    "doubling by +": NEST.replace("STEP", "ns.x + ns.x"),
    "doubling by join": NEST.replace("STEP", "[ns.x, ns.x]|join"),
    "doubling by replace": NEST.replace("STEP", "ns.x|replace('a', 'aa')"),
    "doubling by format": NEST.replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "doubling by str.format": NEST.replace("STEP", "'{0}{0}'.format(ns.x)"),
    "doubling by str.join": NEST.replace("STEP", "ns.x.join(['a', 'a', 'a'])"),
    "doubling by macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}" + NEST.replace("STEP", "d(ns.x)"),
    "doubling lists": NEST.replace("STEP", "[ns.x, ns.x]"),
    "doubling tuples": NEST.replace("STEP", "(ns.x, ns.x)"),
    "doubling dicts": NEST.replace("STEP", "dict(a=ns.x, b=ns.x)"),
    "doubling batches": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x|batch(2, ns.x)|list %}{% endfor %}{{ ns.x }}",
    "doubling arguments": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "equal copies": "{% set a = namespace(x=1, y=1) %}{% for i in range(90) %}{% set a.x = [a.x, a.x] %}{% set a.y = [a.y, a.y] %}{% endfor %}{{ a.x == a.y }}",
    "long equal texts": "{% set a = ['x' * 1000000] * 99999 %}{% set b = [('x' * 999999) ~ 'x'] * 99999 %}{{ a == b }}",
    "long text in a list": "{% set a = 'x' * 1000000 %}{% set b = [('x' * 999999) ~ 'y'] * 99999 %}{{ a in b }}",
    "sorting long texts": "{{ ([('x' * 999999) ~ 'y', ('x' * 999999) ~ 'z'] * 49999) | sort | length }}",
    "counting long texts": "{{ ([('x' * 999999) ~ 'y'] * 99999).count('x' * 1000000) }}",
    "selecting long texts": "{{ ([('x' * 999999) ~ 'y'] * 99999) | select('equalto', 'x' * 1000000) | list }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "center": "{{ 'a' | center(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent precision": "{{ '%.9999999999f' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "percent key": "{{ '%(a)9999999999d' % {'a': 1} }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "format width": "{{ '{:>9999999999}'.format(1) }}",
    "format nested": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "format map": "{{ '{a:>9999999999}'.format_map({'a': 1}) }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "replace nothing": "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "replace filter": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "join": "{{ (['a'] * 99999) | join('b' * 10**6) }}",
    "str.join": "{{ ('b' * 10**6).join(['a'] * 99999) }}",
    "split": "{{ ('a,' * 8 * 10**6).split(',') }}",
    "indent": "{{ ('\n' * 10**6) | indent(10**5) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9) }}",
    "round up": "{{ 1.5 | round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 50000) | sum(start=[]) }}",
    "tojson indent": "{{ messages | tojson(indent=10**9) }}",
    "tojson wide": "{{ ((('x' * 1000) | list) * 100) | tojson(indent=1000) }}",
    "shared texts": "{{ (['a' * 10**6] * 99999) | tojson }}",
    "printing shared texts": "{{ ['a' * 10**6] * 99999 }}",
    "slices kept": "{% set x = 'a' * 4000000 %}" + "".join(f"{{% set x{i} = x[1:] %}}" for i in range(50)),
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "wide recursive loop": "{% for x in [1] recursive %}{% if loop.depth < 9 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "generator chain": "{% set ns = namespace(g=[1]) %}{% for i in range(99999) %}{% set ns.g = ns.g|map('string') %}{% endfor %}{{ ns.g|list }}",
    "self reference": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000,
    "long sum": "{{ 1" + " + 1" * 20_000 + " }}",
    "many tokens": "{{ a }}" * 30_000,
    "too long": "x" * 300_000,
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_a_typed_error_within_about_a_second(name):
    threads = threading.active_count()
    begin = time.thread_time()
    with pytest.raises(ChatTemplateError):
        JinjaChatFormat(BOMBS[name]).render(PLAIN)
    assert time.thread_time() - begin < 1.6
    assert threading.active_count() == threads


def test_bombs_leave_memory_alone():
    """Those that aim at memory, in one process that may not grow by more than 512 MiB."""
    program = (
        "import resource, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from deepinfer.models import JinjaChatFormat\n"
        "from deepinfer.errors import ChatTemplateError\n"
        "import ast\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "JinjaChatFormat('x').render([]); before = peak()\n"
        "for source in ast.literal_eval(sys.stdin.read()):\n"
        "    try: JinjaChatFormat(source).render([])\n"
        "    except ChatTemplateError: pass\n"
        "    else: raise SystemExit(source)\n"
        "print(peak() - before)\n"
    )
    names = [
        *(
            "text",
            "list",
            "reversed operands",
            "doubling by ~",
            "doubling by +",
            "doubling by replace",
            "ljust",
            "center",
        ),
        *("percent width", "format width", "replace", "replace filter", "join", "str.join", "split", "indent", "batch"),
        *("slice", "shared texts", "printing shared texts", "slices kept", "loud loops", "loops into a variable"),
    ]
    package = str(Path(sys.modules["deepinfer"].__file__).parents[1])
    answer = subprocess.run(
        [sys.executable, "-c", program, package],
        input=repr([BOMBS[n] for n in names]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(answer.stdout) < 512 * 1024  # KiB


def test_template_works_after_another_was_ended():
    with pytest.raises(ChatTemplateError):
        JinjaChatFormat(BOMBS["silent loops"]).render(PLAIN)
    chat = JinjaChatFormat(
        "{% if go %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}done"
    )
    with pytest.raises(ChatTemplateError):
        chat.render(PLAIN, variables={"go": True})
    assert chat.render(PLAIN) == "done"


def test_large_honest_conversation_fits_its_budget():
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 200} for i in range(1000)]
    text = JinjaChatFormat(TEMPLATES["thinking"]).render(messages, tools=TOOLS)
    assert len(text) > 2_000_000


def test_rendering_imports_no_torch():
    program = "import sys; from deepinfer.models import JinjaChatFormat; JinjaChatFormat('x').render([]); print('torch' in sys.modules)"
    package = str(Path(sys.modules["deepinfer"].__file__).parents[1])
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": package}
    )
    assert answer.stdout.strip() == "False"


PIECES = st.sampled_from(
    ["{{ messages }}", "{{ messages|tojson }}", "{% for m in messages %}", "{% endfor %}", "{% if", " m.role %}", "{% endif %}", "{{ m['content']", "|trim",
     "|join(", "*", "10**9", " }}", "{% set x =", "range(9999)", "[", "]", "(", ")", "%}", "~", "x", "'a'", "{% macro f(x) %}", "{% endmacro %}", "{{ f(f)", "\n", "-%}", "{#"]
)  # fmt: skip


@given(parts=st.lists(PIECES, max_size=25))
def test_any_template_ends_in_text_or_a_typed_error(parts):
    with contextlib.suppress(ChatTemplateError):
        assert isinstance(JinjaChatFormat("".join(parts)).render(PLAIN), str)
