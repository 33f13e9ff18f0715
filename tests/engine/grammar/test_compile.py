"""Supported constraints and the texts of their grammars; unsupported ones are refused by name."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from stoker_common.errors import RequestError

from .byte_matcher import SPECIAL, SPECIAL_ID, ByteMatcher

INT = {"type": "integer"}
STRING = {"type": "string"}


@pytest.fixture(scope="module")
def bytes_() -> ByteMatcher:
    return ByteMatcher()


def refusal(bytes_: ByteMatcher, **constraint: Any) -> str:
    with pytest.raises(RequestError) as error:
        bytes_.compile(**constraint)
    assert error.value.param is not None
    assert error.value.param.startswith("structured_outputs")
    assert len(error.value.message) < 500
    return error.value.message


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"maxLength": 9},
        {"minLength": 1, "maxLength": 9},
        {"pattern": "a.*"},
        {"pattern": r"^\D+$"},
        {"minLength": 1},
    ],
)
def test_strings_contain_no_raw_control_characters(bytes_: ByteMatcher, limits: dict[str, Any]) -> None:
    source = bytes_.compile(json={**STRING, **limits})
    for character in map(chr, [*range(32), 0x7F, 0x80, 0x2028, 0xFFFF, 0x1F98A]):
        text = f'"a{character}b"'
        if bytes_.accepts(source, text):
            assert jsonschema.Draft202012Validator({**STRING, **limits}).is_valid(json.loads(text, strict=True))
        else:
            assert ord(character) < 0x20 or character == "\x7f"
    for wrong in (b'"a\xff"', b'"a\xed\xa0\x80"', b'"a\xc3"', rb'"a\ud800"', rb'"a\x41"', b'"a', b'a"'):
        assert not bytes_.accepts(source, wrong), wrong
    assert bytes_.accepts(source, r'"a\n\"\\"')


def test_string_lengths_count_characters(bytes_: ByteMatcher) -> None:
    source = bytes_.compile(json={**STRING, "minLength": 2, "maxLength": 3})
    for text in ("a", "ab", "abc", "abcd", "é🦊", "🦊🦊🦊", "🦊🦊🦊🦊", '"\\', "\n\t\r", "\n\t\r\b"):
        assert bytes_.accepts(source, json.dumps(text, ensure_ascii=False)) == (2 <= len(text) <= 3), text


def test_whitespace_follows_the_options_and_patterns(bytes_: ByteMatcher) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": INT}}, "required": ["a"]}
    compact, spaced, indented = '{"a":[1,2]}', '{"a": [1, 2]}', json.dumps({"a": [1, 2]}, indent=8)
    endless = '{"a":' + " " * 99 + "[1,2]}"
    taken = {
        "default": bytes_.compile(json=schema),
        "none": bytes_.compile(json=schema, disable_any_whitespace=True),
        "own": bytes_.compile(json=schema, whitespace_pattern=r"\s?"),
        "object": bytes_.compile(json_object=True),
    }
    texts = (compact, spaced, indented, indented.replace("\n", "\r\n"), endless, f" {compact}", f"{compact}\n")
    accepted = {name: [bytes_.accepts(source, text) for text in texts] for name, source in taken.items()}
    assert accepted == {
        "default": [True, True, True, True, False, False, False],
        "none": [True, False, False, False, False, False, False],
        "own": [True, True, False, False, False, False, False],
        "object": [True, True, True, True, False, False, False],
    }
    by_itself = ("( ", "[ ", "{1}", " ++")
    for pattern in (".*", "[^a]", "a?", r"\S", "1", "[ |]", "[ (?:)]", "[ {1,2}]", "[ ]]", r"[\s*]", *by_itself):
        for constraint in ({"json": {}}, {"json_object": True}, {"structural_tag": {"format": {"type": "any_text"}}}):
            with pytest.raises(RequestError) as error:
                bytes_.compile(**constraint, whitespace_pattern=pattern)
            assert error.value.param == "structured_outputs.whitespace_pattern", pattern
    for pattern in (r"[ \n\t]{0,4}", r"(?:\r?\n)*", "[ ]|\n", r"[\s]*", ""):
        source = bytes_.compile(json=schema, whitespace_pattern=pattern)
        for character in map(chr, range(128)):
            text = f'{{"a":{character}[1,2]}}'
            if bytes_.accepts(source, text):
                json.loads(text)


def test_schemas_may_be_json_text_or_booleans(bytes_: ByteMatcher) -> None:
    schemas: tuple[Any, ...] = ('{"type": "null"}', {"type": "null"})
    for schema in schemas:
        assert bytes_.accepts(bytes_.compile(json=schema), "null")
    for schema in (True, "true", {}, "{}"):
        assert bytes_.accepts(bytes_.compile(json=schema), '[{"a": 1.5e3}, null]')
    for wrong, word in (("{", "valid JSON"), ("NaN", "NaN"), ("[1]", "a list"), ("1", "a number"), (False, "false")):
        assert word in refusal(bytes_, json=wrong)
    assert "surrogate" in refusal(bytes_, choice=["a", "\ud800"])


def test_disable_additional_properties_closes_nested_objects(bytes_: ByteMatcher) -> None:
    schema = {"type": "object", "properties": {"a": {"properties": {"b": INT}}}}
    inner, outer = '{"a": {"b": 1, "c": 2}}', '{"a": {}, "c": 2}'
    open_, closed = bytes_.compile(json=schema), bytes_.compile(json=schema, disable_additional_properties=True)
    for text in (inner, outer):
        assert bytes_.accepts(open_, text)
        assert not bytes_.accepts(closed, text)
    assert bytes_.accepts(closed, '{"a": {"b": 1}}')


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {}}, "not"),
        ({"properties": {"a/b": {"uniqueItems": True}}}, "#/properties/a~1b"),
        ({"if": {}, "then": INT}, "if"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "items": {"contains": INT}}, "contains"),
        ({"$schema": "urn:mine"}, "$schema"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"$ref": "#/$defs/a", "$defs": {"b": INT}}, "#/$defs/a"),
        ({"$ref": "#/default", "default": {"not": {}}}, "not"),
        ({"$ref": "#a"}, "$anchor"),
        ({"$ref": "http://example.com/a"}, "outside"),
        ({"$ref": "#"}, "never ends"),
        ({"const": 2**53 + 1}, "2**53"),
        ({"enum": [1, {"a": [2**60]}]}, "2**53"),
        ({**INT, "maximum": 2**63 - 1}, "2**53"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({**STRING, "format": "idn-email"}, "idn-email"),
        ({**STRING, "pattern": "[a&&b]"}, "&&"),
        ({**STRING, "pattern": "a++"}, "possessive"),
        ({**STRING, "pattern": "(?=a)b"}, "look-around"),
        ({"patternProperties": {"[[a]b]": {}}}, "bracket"),
        ({"oneOf": [INT, {"type": "number"}]}, "oneOf"),
        ({"items": [INT], "additionalItems": STRING, "allOf": [{}]}, "additionalItems"),
        ({"allOf": [INT, STRING]}, "ncompatible types"),
        ({"enum": []}, "nsatisfiable"),
        ({"type": "strin"}, "strin"),
        ({"properties": [1]}, "properties"),
        ({"minimum": float("inf")}, "JSON"),
    ],
)
def test_unsupported_schemas_are_refused_by_name(bytes_: ByteMatcher, schema: dict[str, Any], word: str) -> None:
    assert word in refusal(bytes_, json=schema)


def test_keywords_without_effect_are_accepted(bytes_: ByteMatcher) -> None:
    neutral = {"uniqueItems": False, "not": False, "propertyNames": {"type": "string"}, "dependencies": {}, "then": INT}
    annotations = {"title": "t", "x-mine": {"not": 1}, "examples": [{"not": {}}], "deprecated": True, "default": 2**70}
    assert bytes_.accepts(bytes_.compile(json={"type": "array", **neutral, **annotations}), "[1, 1]")
    closed = bytes_.compile(json={"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False})
    assert not bytes_.accepts(closed, '{"b": 1}')
    formatted = {"type": "integer", "format": "int32"}  # describes its storage only
    assert bytes_.accepts(bytes_.compile(json=formatted), "5")


def test_references_and_anchors_are_resolved(bytes_: ByteMatcher) -> None:
    tree = {
        "$id": "https://example.com/tree",
        "$defs": {
            "x y%/": {"$anchor": "node", "properties": {"next": {"$ref": "https://example.com/tree#node"}}},
            "leaf": {"const": "leaf"},
        },
        "anyOf": [{"$ref": "#/$defs/x%20y%25~1"}, {"$ref": "#/%24defs/leaf"}],
    }
    source = bytes_.compile(json=tree)
    assert bytes_.accepts(source, '{"next": {"next": {}}}')
    assert bytes_.accepts(source, '"leaf"')
    assert not bytes_.accepts(source, '{"next": {"next": {"next": "leaf"')


def test_regexes_match_as_in_python_or_are_refused(bytes_: ByteMatcher) -> None:
    for pattern, texts in {
        r"[a-z]{2,3}-\d+": ("ab-1", "abc-12", "a-1", "ab-", "ab-1\n"),
        r"^(yes|no)$": ("yes", "no", "yess", ""),
        "a\n/b": ("a\n/b", "a/b"),
        r"(?i)é.": ("éx", "Éx", "é\n"),
        "": ("", "a"),
        r"\p{Lu}+": ("AÉ", "a"),
    }.items():
        source = bytes_.compile(regex=pattern)
        for text in texts:
            expected = text.isupper() if r"\p" in pattern else re.fullmatch(pattern, text) is not None
            assert bytes_.accepts(source, text) == expected, (pattern, text)
    for pattern, word in (
        ("(", "unclosed group"),
        (r"(a)\1", "backreferences"),
        ("a(?!b)", "look-around"),
        ("[z-a]", ""),
    ):
        assert word in refusal(bytes_, regex=pattern)
    assert "contradictory" in refusal(bytes_, regex=r"[^\d\D]")


#: Character classes of ECMA-262: its white space, and ASCII digits and letters.
ECMA_SPACES = set("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff") | {chr(c) for c in range(0x2000, 0x200B)}
ECMA: dict[str, Callable[[str], bool]] = {
    "d": lambda char: char in string.digits,
    "w": lambda char: char in string.digits + string.ascii_letters + "_",
    "s": lambda char: char in ECMA_SPACES,
}
ODD = "5٦🯱3\u0661\uff15aZ_éßſK漢\u0301 \t\n\v\f\r\x1c\x85\xa0\u1680\u2003\u200b\u2028\u3000\ufeff-.+]^\\"


@pytest.mark.parametrize(
    "how", ["{}", "[{}]", "[{}.]", "[.{}]", "[{}-.]", "[+-{}]", "[^{}]", "x?{}", "(?:{}|q)", r"\\?{}"]
)
@pytest.mark.parametrize("name", "dwsDWS")
def test_character_classes_are_those_of_ecma_262(bytes_: ByteMatcher, name: str, how: str) -> None:
    extra = {"[{}.]": ".", "[.{}]": ".", "[{}-.]": "-.", "[+-{}]": "+-", "(?:{}|q)": "q"}.get(how, "")
    pattern = how.format(rf"\{name}")
    sources = [
        bytes_.compile(regex=pattern),
        bytes_.compile(grammar=f"start: A // a/b\nA: /{pattern}/"),
        bytes_.compile(json={"type": "string", "pattern": f"^{pattern}$"}),
    ]
    for char in [*ODD, *map(chr, range(0x20, 0x7F))]:
        within = ECMA[name.lower()](char) == name.islower() or char in extra
        allowed = within != how.startswith("[^")
        texts = [char, char, json.dumps(char, ensure_ascii=False)]
        for source, text in zip(sources, texts, strict=True):
            taken = bytes_.accepts(source, text)
            assert allowed or not taken, (pattern, char)
            assert taken == allowed or not char.isascii() or char in "\\\t\n\v\f\r\x1c" or not allowed, (pattern, char)


def test_unicode_classes_apply_only_on_request(bytes_: ByteMatcher) -> None:
    for source in (
        bytes_.compile(regex=r"(?u)\d"),
        bytes_.compile(regex=r"(?u:\d)"),
        bytes_.compile(regex=r"\p{Nd}"),
        bytes_.compile(regex=r"[x\p{Nd}]"),
    ):
        assert bytes_.accepts(source, "٦") and bytes_.accepts(source, "6")
    schema = bytes_.compile(json={"type": "string", "pattern": r"^\d{2}:\d{2}$"})
    assert bytes_.accepts(schema, '"12:30"') and not bytes_.accepts(schema, '"5٦:🯱3"')
    names = {"type": "object", "patternProperties": {r"^\d$": INT, "^[0-9]$": INT}, "additionalProperties": False}
    properties = bytes_.compile(json=names)
    assert bytes_.accepts(properties, '{"1":2}') and not bytes_.accepts(properties, '{"٦":2}')


def test_only_the_choices_are_accepted(bytes_: ByteMatcher) -> None:
    choices = ["a", "ab", 'q"\\\n\x00', "é🦊", "<|x|>", "/x/i", "", *(f"choice {number}" for number in range(5000))]
    source = bytes_.compile(choice=choices)
    for choice in choices[:20] + choices[-20:]:
        assert bytes_.accepts(source, choice), choice
    for other in ("b", "abc", "choice", "choice 5000", "A"):
        assert not bytes_.accepts(source, other), other


SUM = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"  # a sum\n'
SUM_LARK = 'start: term ("+" term)*\n?term: /[0-9]+/ | "(" start ")"\n'
#: vLLM's example.
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


def test_grammars_may_be_gbnf_or_lark(bytes_: ByteMatcher) -> None:
    for grammar in (SUM, SUM_LARK):
        source = bytes_.compile(grammar=grammar)
        for text, is_valid in {"1": True, "1+(22+3)": True, "(1": False, "1+": False, "": False}.items():
            assert bytes_.accepts(source, text) == is_valid, text
    assert bytes_.accepts(bytes_.compile(grammar=SQL), "SELECT col_1  from table_2  where col_1 = 1 ")
    schema = bytes_.compile(grammar='start: "x" %json {"type": "array", "items": {"type": "null"}}')
    assert bytes_.accepts(schema, "x[null]")


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        ("", "root"),
        ("start: undefined", "undefined"),
        ('start: a\na[max_tokens=3]: "a"', "max_tokens"),
        ("start: a\na[temperature=0.5, lazy]: /a/", "temperature"),
        ('start: a "b"\na[stop="b"]: /.*/', "stop"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "allow_invalid_utf8"),
        ('start: %json {"type": "string", "not": {}}', "not"),
        ('start: %json {"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        ("start: @other", "@other"),
        ("start: start", "never ends"),
        ('start: "a" | start "b" <|unknown|>', "special token"),
        ('root ::= "a" (', "GBNF"),
    ],
)
def test_unsupported_grammars_are_refused(bytes_: ByteMatcher, grammar: str, word: str) -> None:
    assert word in refusal(bytes_, grammar=grammar)


CALL = {"type": "object", "properties": {"a": INT}, "required": ["a"]}


def test_structural_tags_constrain_text_after_a_trigger(bytes_: ByteMatcher) -> None:
    tag = {
        "type": "structural_tag",
        "triggers": ["<f"],
        "structures": [
            {"begin": "<f=x>", "schema": CALL, "end": "</f>"},
            {"begin": "<f=y>", "schema": {}, "end": "</f>"},
        ],
    }
    for spec in (tag, json.dumps(tag)):
        source = bytes_.compile(structural_tag=spec)
        for text in ("", "free", 'a <f=x>{"a": 1}</f> b <f=y>[]</f>', "1 < 2 <"):
            assert bytes_.accepts(source, text), text
        for text in ("<f", "<f=z>", '<f=x>{"b": 1}</f>', '<f=x>{"a": 1}', "<f=y>x</f>"):
            assert not bytes_.accepts(source, text), text


MANY = [f"n{number}" for number in range(5000)]


def test_formats_of_structural_tags_accept_and_reject_texts(bytes_: ByteMatcher) -> None:
    def tagged(content: dict[str, Any], end: str | list[str] = "</t>") -> dict[str, Any]:
        return {"type": "tag", "begin": "<t>", "content": content, "end": end}

    number = {"type": "regex", "pattern": "[0-9]"}
    word = {"type": "const_string", "value": 'a"'}
    for spec, good, bad in (
        (tagged({"type": "json_schema", "json_schema": CALL}), ['<t>{"a": 1}</t>'], ["<t>{}</t>", "a<t>"]),
        (tagged({"type": "any_text"}, ["</t>", "END"]), ["<t>x</t>", "<t></t>", "<t>xEND"], ["<t>", "<t></t>x"]),
        ({"type": "sequence", "elements": [number, word]}, ['1a"'], ["1", 'a"1']),
        ({"type": "or", "elements": [number, word]}, ["1", 'a"'], ['1a"', ""]),
        ({"type": "optional", "content": number}, ["", "1"], ["11"]),
        ({"type": "plus", "content": number}, ["1", "123"], [""]),
        ({"type": "star", "content": word}, ["", 'a"a"'], ["1"]),
        ({"type": "repeat", "content": number, "min": 2, "max": 3}, ["12", "123"], ["1", "1234"]),
        ({"type": "grammar", "grammar": SUM}, ["1+2"], ["1+"]),
        (tagged({"type": "choice", "choices": [SPECIAL, "a::=", *MANY]}), ["<t>a::=</t>", "<t>n9</t>"], ["<t>n</t>"]),
        ({"type": "choice", "choices": [SPECIAL]}, [SPECIAL], ["", [SPECIAL_ID]]),
        (
            {"type": "tags_with_separator", "tags": [tagged(number)], "separator": ","},
            ["", "<t>1</t>,<t>2</t>"],
            ["<t>1</t><t>2</t>", "<t>1</t>,"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<t"], "tags": [tagged(number)], "at_least_one": True},
            ["x<t>1</t>y", "<t>1</t><t>2</t>"],
            ["x", "<t>a</t>"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<t"], "tags": [tagged(number)], "stop_after_first": True},
            ["x", "x<t>1</t>"],
            ["x<t>1</t>y"],
        ),
    ):
        source = bytes_.compile(structural_tag={"type": "structural_tag", "format": spec})
        for text in good:
            assert bytes_.accepts(source, text), (spec, text)
        for text in bad:
            assert not bytes_.accepts(source, text), (spec, text)


def test_special_tokens_are_tokens_in_structural_tags(bytes_: ByteMatcher) -> None:
    tag = {"triggers": [SPECIAL], "structures": [{"begin": f"{SPECIAL}f", "schema": INT, "end": f";\n{SPECIAL}"}]}
    source = bytes_.compile(structural_tag=tag)
    assert bytes_.accepts(source, [*b"text", SPECIAL_ID, *b"f12;\n", SPECIAL_ID, *b"more"])
    assert not bytes_.accepts(source, [SPECIAL_ID, *b"g12"])
    assert not bytes_.accepts(source, [SPECIAL_ID, *f"f12;\n{SPECIAL}".encode()])


@pytest.mark.parametrize(
    ("tag", "word"),
    [
        ("{", "JSON"),
        ({}, "structures"),
        ({"triggers": ["a"], "structures": []}, "no tags"),
        ({"triggers": [""], "structures": []}, "triggers"),
        ({"triggers": ["a"], "structures": [3]}, "structures"),
        ({"triggers": ["a"], "structures": [{"begin": "b", "schema": {}, "end": ""}]}, "none of the triggers"),
        ({"triggers": ["a"], "structures": [{"begin": "a", "schema": {"not": {}}, "end": ""}]}, "not"),
        ({"format": {"type": "qwen_xml_parameter"}}, "qwen_xml_parameter"),
        ({"format": {"type": "sequence", "elements": []}}, "elements"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": {}}}, "repeat"),
        ({"format": {"type": "repeat", "min": 0, "max": True, "content": {}}}, "max must be a number"),
        ({"format": {"type": "repeat", "min": False, "max": 2, "content": {}}}, "min must be a number"),
        ({"format": {"type": "or", "elements": [{"type": "any_text"}] * 2_000}}, "its formats, tags and ends"),
        ({"triggers": ["a"], "structures": [{"begin": "a", "schema": False, "end": ""}]}, "Unsatisfiable"),
        ({"format": {"type": "any_text", "excludes": ["a"]}}, "excludes"),
        ({"format": {"type": "any_text", "excludes": False}}, "excludes"),
        ({"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": ""}}, "end"),
        ({"format": {"type": "const_string", "value": "\ud800"}}, "surrogate"),
        ({"format": {"type": "regex", "pattern": "[a&&b]x|[[a]b]y"}}, "&&"),
        ({"format": {"type": "regex", "pattern": "a++"}}, "possessive"),
        ({"format": {"type": "choice", "choices": []}}, "choices"),
        ({"format": {"type": "choice", "choices": ["a", 1]}}, "choices"),
        ({"format": {"type": "regex", "pattern": "\ud800"}}, "surrogate"),
        ({"format": {"type": "regex", "pattern": "a" * (2**20 + 1)}}, "characters"),
        ({"format": {"type": "grammar", "grammar": 'start: "\ud800"'}}, "surrogate"),
    ],
)
def test_unsupported_structural_tags_are_refused(bytes_: ByteMatcher, tag: Any, word: str) -> None:
    assert word in refusal(bytes_, structural_tag=tag)


def test_object_with_too_many_optional_properties_is_refused(bytes_: ByteMatcher) -> None:
    """Such a grammar compiles, but fails where the object starts: therefore the first steps are tried."""

    def within(count: int) -> dict[str, Any]:
        many = {"type": "object", "properties": {f"p{number}": STRING for number in range(count)}}
        return {"type": "object", "properties": {"a": many}, "required": ["a"], "additionalProperties": False}

    bytes_.compile(json=within(300), disable_any_whitespace=True)
    assert "too large" in refusal(bytes_, json=within(2000), disable_any_whitespace=True)
