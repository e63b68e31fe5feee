"""Chat templates in the styles that are in use, written for these tests."""

# ruff: noqa: E501
from __future__ import annotations

CHATML = """
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou answer briefly.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

HEADERS = """{{ bos_token }}
{%- set date = strftime_now is defined and '26 Jul 2024' or '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

Today is {{ date }}
{% if tools is not none %}
You may call these functions:
{% for tool in tools %}
{{ tool | tojson(indent=4) }}

{% endfor %}
{% endif %}
{{ system }}<|eot_id|>
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('only one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' ~ call.name ~ '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

BRACKETS = """
{%- set ns = namespace(system='', last=-1, index=0) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}{%- set ns.system = ns.system + message['content'] + '\\n\\n' -%}{%- continue -%}{%- endif -%}
  {%- if message['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{ bos_token }}
{%- for message in messages if message['role'] != 'system' %}
{%- set position = loop.index0 %}
{%- if message['role'] == 'user' %}
{%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS] [' }}{% for tool in tools %}{{ '{' }}
{%- for key, value in tool.function.items() if key != 'return' %}
{{- '"%s": ' % key }}{{ value | tojson if value is not string else '"' ~ value ~ '"' }}{{ ', ' if not loop.last }}
{%- endfor %}{{ '}' }}{{ ', ' if not loop.last else ']' }}{% endfor %}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (ns.system if loop.first else '') + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' and message.tool_calls is not defined %}
{{- ' ' + message['content'] | trim + eos_token }}
{%- elif message.tool_calls is defined %}
{{- '[TOOL_CALLS] ' }}{{ message.tool_calls | map(attribute='function') | list | tojson }}{{ eos_token }}
{%- else %}
{{- '[TOOL_RESULTS] ' ~ {'content': message.content | string} | tojson ~ '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""

THINKING = """
{%- macro show(content, first) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is sequence -%}
    {%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}<|{{ part.type }}|>{%- endif -%}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | length - 1 -%}
{%- set ns = namespace(seen=-1) -%}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.seen = ns.seen + 1 %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- set content = show(message.content, false) %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if ns.seen >= last and thought %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
        {%- generation %}{{- content }}{%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '\\n</tool_call>' }}
        {%- endfor %}{%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- show(message.content, false) }}{{- '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ show(message.content, loop.first) ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}
{%- set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{% for message in rest %}
    {% if message['role'] == 'assistant' %}
        {% set role = 'model' %}
    {% else %}
        {% set role = message['role'] %}
    {% endif %}
<start_of_turn>{{ role }}
{{ (first if loop.first else '') ~ (message['content'] | trim) }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}
"""

TYPED_TOOLS = """
{%- macro kind_of(spec) -%}
    {%- if spec.type == 'string' -%}{{ spec.enum | map('tojson') | join(' | ') if spec.enum else 'string' }}
    {%- elif spec.type == 'array' -%}{{ kind_of(spec['items']) ~ '[]' }}
    {%- elif spec.type == 'object' -%}{
        {%- for name, inner in spec.properties | dictsort -%}
            {{ name }}{{ '' if name in (spec.required or []) else '?' }}: {{ kind_of(inner) }}{{ ', ' if not loop.last }}
        {%- endfor -%} }
    {%- else -%}{{ spec.type | default('any', true) }}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
namespace functions {
{% for tool in tools | sort(attribute='function.name') %}
// {{ tool.function.description | replace('\\n', ' ') | truncate(60) }}
type {{ tool.function.name }} = (_: {{ kind_of(tool.function.parameters) | indent(2) }}) => any;
{% endfor %}
}
{% endif -%}
{%- for role, group in messages | groupby('role') %}{{ role | upper | center(12) }}:{{ group | length }}
{% endfor -%}
{%- for message in messages -%}
<|{{ message.role | title }}|>{{ message.content | default('', true) if message.content is string else message.content | tojson }}<|end|>
{% endfor -%}
{{ range(3) | map('string') | join('-') }} {{ '{:>5}|{}'.format(messages | length, 'x') }} {{ 7 // 2 }} {{ 2 ** 5 }} {{ 1.005 | round(2) }}
"""

TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "brackets": BRACKETS,
    "thinking": THINKING,
    "turns": TURNS,
    "typed-tools": TYPED_TOOLS,
}
