"""Calls in Python syntax, compared with Python's own parser."""

from __future__ import annotations

import ast
import json
import random
import warnings
from typing import Any

import pytest

from .drawn_calls import draw_calls, draw_text, parse, pythonic


def by_python(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse the calls in a list with `ast`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes
        body = ast.parse(text.strip(), mode="eval").body
    assert isinstance(body, ast.List)
    calls = []
    for call in body.elts:
        assert isinstance(call, ast.Call)
        assert not call.args
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert len(arguments) == len(call.keywords)
        calls.append((ast.unparse(call.func), json.loads(json.dumps(arguments))))
    return calls


@pytest.mark.parametrize(
    "text",
    [
        "[f(a='it\\'s', b=\"\\\"\", c='\\x41\\101\\u00e9\\U0001F600\\n\\d')]",
        "[f(a='''it's \"q\"\n''', b=\"\"\"\"x\"\" \"\"\", c='' '' 'ab' \"c\")]",
        "[ f ( a = ( 1 , ) , b = ( 1 ) , c = ( ) , d = [ 1 , ] , e = { 'k' : { } , } , ) , g ( ) ]",
        "[a.b.c(x=-1, y=+2, z=1_000, w=.5, v=5., u=1e3, t=-1.5E-3, s=0)]",
        "[f(a={1: 2, None: 3, True: 4})]",
        "[f(a='\\ud83d\\ude00')]",
        "[f(a='one \\\ntwo')]",
    ],
)
def test_literals_have_pythons_values(text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse("pythonic", pieces).calls == by_python(text)


def test_json_keywords_are_parsed_too() -> None:
    assert parse("pythonic", ["[f(a=true, b=false, c=null)]"]).calls == [("f", {"a": True, "b": False, "c": None})]


def test_names_may_be_python_keywords_and_contain_hyphens() -> None:
    assert parse("pythonic", ["[mcp-x.find(from='a', class=1)]"]).calls == [("mcp-x.find", {"from": "a", "class": 1})]


def test_random_calls_are_parsed_as_by_python() -> None:
    draw = random.Random(0)
    read = 0
    for _ in range(1_500):
        text = pythonic(draw_calls(draw))
        assert parse("pythonic", [text]).calls == by_python(text)
        at = draw.randrange(1, len(text))
        text = text[:at] + draw.choice(("", text[at], *"'\"\\()[]{},=:", draw_text(draw))) + text[at + 1 :]
        found = parse("pythonic", [text])
        if found.calls and not found.content and text[-1] == "]" and "\0" not in text:  # NUL is refused by Python
            assert found.calls == by_python(text)
            read += 1
    assert read > 100


@pytest.mark.parametrize(
    "text",
    [
        *("[f(1)]", "[f(a=b)]", "[f(a=1, a=2)]", "[f(**a)]", "[f(a=g())]", "[f(a=1+1)]", "[f(a={[]: 1})]", "[f(=1)]"),
        *("[f(a=1e999)]", f"[f(a={'1' * 5_000})]", f"[f(a={'[' * 70}{']' * 70})]", f"[f(a={'-' * 9_999}1)]"),
        *(
            "[f(a='\n')]",
            "[f(a=007)]",
            "[f(a=0x10)]",
            "[f(a=b'')]",
            "[f(a='\\U00ffffff')]",
            "[f(a=1 b=2)]",
            "[f]",
            "[]",
        ),
    ],
)
def test_invalid_python_calls_are_content(text: str) -> None:
    whole = parse("pythonic", [text])
    assert (whole.calls, whole.content) == ([], text)
