"""Masks of schemas, regular expressions, choices and grammars; what is refused; what does not hang the engine."""

import contextlib
import importlib.util
import json
import logging
import random
import time

import jsonschema
import pytest

from workerkit.components.structured.none import NoStructuredOutputs
from workerkit.framework.choices import Chooser
from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.sampling_params import StructuredOutputsParams
from workerkit.framework.plugins import load_plugins

EOS, EOT, USER, OPEN, A_AGAIN = 256, 257, 258, 259, 266


def array_of(**schema):
    return {"type": "array", "items": schema, "maxItems": 3}


def object_of(required, **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


# Masks


def test_the_mask_is_of_tokens_not_of_bytes(probe):
    matcher = probe.compile(regex="[a-b]|12|é|😀")
    assert probe.allowed(matcher) == {*b"ab1", 0xC3, 0xF0, 263, 264, 265, A_AGAIN}
    matcher.accept([265])  # half of the emoji
    assert probe.allowed(matcher) == {"😀".encode()[2]}


def test_special_tokens_and_ids_that_are_no_token_are_never_text(probe):
    allowed = probe.allowed(probe.compile(regex="(?s:.)*"))
    assert {EOS, EOT} <= allowed  # both ends of the model
    assert USER not in allowed
    assert allowed <= set(range(probe.tokenizer.vocab_size))
    assert not probe.matches("<user>x", regex="<user>y")
    assert USER not in probe.allowed(probe.compile(regex="<user>"))  # its name as text is other tokens


def test_fill_changes_nothing(probe):
    matcher = probe.compile(json=array_of(type="integer", minimum=0, maximum=99))
    matcher.accept(b"[1")
    for _ in range(3):
        assert probe.masks(matcher, b"2,3") == [
            {*b"0123456789,]"},
            {*b",]"},
            {*b"0123456789", 263},
            {*b"0123456789,]"},
        ]
    matcher.accept(b"]")
    assert matcher.is_finished


def test_everything_may_follow_a_draft_that_is_not_allowed(probe):
    matcher = probe.compile(regex="abcd")  # what is certain is cut as the tokenizer would: not the second "a"
    assert probe.masks(matcher, b"abxd") == [{*b"a"}, {*b"b"}, {*b"c"}, None, None]
    assert probe.masks(matcher, [USER]) == [{*b"a"}, None]
    assert probe.masks(matcher, b"abcd") == [{*b"a"}, {*b"b"}, {*b"c"}, {*b"d"}, {EOS, EOT}]
    assert probe.masks(matcher, [*b"abcd", EOS, 5])[4:] == [{EOS, EOT}, None, None]
    matcher.accept(b"abcd")
    assert matcher.is_finished


def test_drafts_in_a_grammar_that_cannot_be_rolled_back(probe):
    matcher = probe.compile(grammar='start: x "!"\nx[max_tokens=2]: /[a-z]*/')
    assert [row and ord("!") in row for row in probe.masks(matcher, b"ab!")] == [True, True, True, False]
    matcher.accept(b"q")
    assert ord("z") in probe.allowed(matcher)


def test_a_matcher_is_finished_after_the_last_byte_or_the_end(probe):
    matcher = probe.compile(regex="ab*")
    matcher.accept(b"a")
    assert not matcher.is_finished  # more b may follow
    assert probe.allowed(matcher) == {*b"b", EOS, EOT}
    matcher.accept([EOT])
    assert matcher.is_finished
    closed = probe.compile(regex="ab")
    closed.accept(b"ab")
    assert closed.is_finished
    assert probe.allowed(closed) == {EOS, EOT}
    closed.accept([EOS])  # the engine may have sampled it before it knew
    assert closed.is_finished
    with pytest.raises(RequestError, match="token 97 cannot follow"):
        closed.accept(b"a")


def test_b07_a_complete_text_allows_the_end_and_nothing_else(probe):
    """What min_tokens then does is the sampler's; the mask is never empty."""
    matcher = probe.compile(choice=("yes",))
    matcher.accept(b"yes")
    assert probe.allowed(matcher) == {EOS, EOT}


def test_a_token_that_is_not_allowed_is_refused_and_changes_nothing(probe):
    matcher = probe.compile(regex="abc")
    with pytest.raises(RequestError, match="token 120 cannot follow: the grammar does not allow it"):
        matcher.accept(b"x")
    with pytest.raises(RequestError, match="token 256 cannot follow"):
        matcher.accept([EOS])
    matcher.accept(b"abc")
    assert matcher.is_finished


def test_matchers_of_one_grammar_are_independent(probe):
    one, two = (probe.compile(regex="a{4}") for _ in range(2))
    one.accept(b"aaa")
    two.accept(b"a")
    assert not one.is_finished
    one.accept(b"a")
    assert one.is_finished
    assert not two.is_finished


# Kinds


@pytest.mark.parametrize("text", ['{"a":1}', "{}", '{"x":[null,{"y":"é😀"}]}'])
def test_json_object(probe, text):
    assert probe.matches(text, json_object=True)


@pytest.mark.parametrize("text", ["[1]", '"a"', "1", "", '{"a":1', "{} "])
def test_no_json_object(probe, text):
    assert not probe.matches(text, json_object=True)


def test_regex_is_of_the_whole_text(probe):
    for pattern in ("a[0-9]{2}", "^a[0-9]{2}$"):
        assert probe.matches("a12", regex=pattern)
        assert not probe.matches("a123", regex=pattern)
        assert not probe.matches("xa12", regex=pattern)
    assert probe.matches("漢字", regex=r"\p{Han}+")
    assert probe.matches("", regex="")
    assert not probe.matches("a", regex="")


CHOICES = (
    "yes",
    "yes!",
    'qu"ote',
    "back\\slash",
    "new\nline",
    "tab\t",
    "a|b",
    ".*",
    "(x",
    "é漢😀",
    "\x00\x7f",
    "🇩🇪 ",
    "/",
)


@pytest.mark.parametrize("choice", CHOICES)
def test_choices_of_any_characters(probe, choice):
    assert probe.matches(choice, choice=CHOICES)
    assert not probe.matches(choice + "x", choice=CHOICES)


def test_a_choice_may_be_empty_and_regex_syntax_means_nothing(probe):
    assert probe.matches("", choice=("", "a"))
    assert not probe.matches("anything", choice=CHOICES)
    assert not probe.matches("a", choice=("a|b",))


LARK = """
start: sum
sum: sum ("+" | "-") NUMBER | NUMBER
NUMBER: /[0-9]+/
"""
GBNF = """
root ::= item (", " item)*   # a list
item ::= [a-z]+ | "\\u00e9" "\\n"? | quoted
quoted ::= "\\"" [^"\\\\]* "\\""
"""


@pytest.mark.parametrize("text", ["1", "12+3-44"])
def test_lark(probe, text):
    assert probe.matches(text, grammar=LARK)
    assert not probe.matches(text + "+", grammar=LARK)


@pytest.mark.parametrize("text", ["abc", "a, é\n", '"x y", b'])
def test_gbnf(probe, text):
    assert probe.matches(text, grammar=GBNF)
    assert not probe.matches(text + ",", grammar=GBNF)


def test_gbnf_whose_first_rule_is_called_start_is_not_taken_for_lark(probe):
    with pytest.raises(RequestError, match="No 'root' rule"):
        probe.compile(grammar='start ::= "a"')


SCHEMAS = {
    "nested": object_of(["a"], a=object_of(["b", "c"], b={"type": "integer", "minimum": -3, "maximum": 12}, c={})),
    "arrays": array_of(type="array", items={"type": "boolean"}, minItems=1, maxItems=2),
    "enums": array_of(enum=["red", 'qu"ote', "é😀", 3, None, True, {"k": [1]}]),
    "numbers": array_of(type="number", exclusiveMinimum=-1.5, maximum=20.25),
    "multiples": array_of(type="integer", multipleOf=7, minimum=-30, maximum=30),
    "optional": object_of(["b"], a={"enum": [1]}, b={"enum": [2]}, c={"enum": [3]}),
    "strings": array_of(type="string", minLength=1, maxLength=3),
    "patterns": array_of(type="string", pattern="^(é|[a-c]){2}$"),
    "formats": array_of(type="string", format="date"),
    "any of": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, object_of([], é={"type": "null"})]},
    "all of": {"allOf": [{"type": "integer", "maximum": 9}, {"minimum": 3}]},
    "tuple": {"type": "array", "prefixItems": [{"const": 1}, {"const": "x"}], "items": False, "minItems": 2},
    "references": {
        "$defs": {"tree": object_of(["v"], v={"enum": [0]}, l={"$ref": "#/$defs/tree"})},
        "$ref": "#/$defs/tree",
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
def test_whatever_the_masks_allow_is_valid_json_of_the_schema(make_probe, name, whitespace):
    schema, rng = SCHEMAS[name], random.Random(name)
    probe = make_probe(whitespace=whitespace)
    texts = []
    for _ in range(15):
        matcher, text = probe.compile(json=schema), b""
        while not matcher.is_finished:
            allowed = probe.allowed(matcher) & set(range(256)) | probe.allowed(matcher) & {EOS}
            if name == "nested" and len(text) > 30:  # its member `c` may be anything
                allowed = allowed & {*b'"}]0123456789,:'} or allowed
                allowed = {max(allowed, key=lambda byte: byte in b'}]"')} if allowed & {*b'}]"'} else allowed
            token = EOS if EOS in allowed and rng.random() < 0.5 else rng.choice(sorted(allowed))
            matcher.accept([token])
            text += b"" if token == EOS else bytes([token])
            assert len(text) < 2000
        value = json.loads(text.decode())
        jsonschema.Draft202012Validator(schema).validate(value)
        texts.append(text)
        if whitespace == "compact":
            assert text.decode() == text.decode().strip()
    assert len(set(texts)) > 1 or name == "tuple"


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ('{"a":1}', object_of([], a={}, b={})),
        ('{"b":2}', object_of([], a={}, b={})),
        ('"é漢😀"', {"type": "string", "maxLength": 3}),
        ('"\\n\\u001f"', {"type": "string", "maxLength": 2}),
        ("true", True),
        ('{"anything":[1]}', "true"),
    ],
)
def test_texts_that_must_be_possible(probe, text, schema):
    assert probe.matches(text, json=schema)


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ('"éé漢😀"', {"type": "string", "maxLength": 3}),
        ("13", {"type": "integer", "maximum": 12}),
        ('{"a":1,"a":1}', object_of([], a={"const": 1})),
        ("01", {"type": "integer"}),
        ("1.", {"type": "number"}),
        ('{"c":1}', object_of([], a={})),
    ],
)
def test_texts_that_must_not_be_possible(probe, text, schema):
    assert not probe.matches(text, json=schema)


def test_whitespace_is_none_or_bounded(probe, make_probe):
    """A model at a high temperature must not be able to go on with blanks for ever."""
    schema = array_of(const=1)
    assert probe.matches("[1,1]", json=schema)
    assert not probe.matches("[1, 1]", json=schema)
    assert not probe.matches("[1, 1]", json={**schema, "x-guidance": {"whitespace_flexible": True}})
    flexible = make_probe(whitespace="flexible")
    assert flexible.matches("[\n  1, 1\n]", json=schema)
    assert flexible.matches("[" + " " * 8 + "1]", json=schema)
    assert not flexible.matches("[" + " " * 9 + "1]", json=schema)
    assert not flexible.matches(" [1]", json=schema)


# Refusals


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json": '{"type": '}, r"structured_outputs\.json: EOF while parsing"),
        ({"json": "[1]"}, r"structured_outputs\.json: Expecting object schema"),
        ({"json": {"type": "strin"}}, r"structured_outputs\.json: Invalid type: strin"),
        ({"json": {"$ref": "#/$defs/x"}}, r"structured_outputs\.json: Pointer '/\$defs/x' does not exist"),
        ({"json": {"$ref": "https://example.com/x"}}, r"structured_outputs\.json: .*not present"),
        ({"json": {"minimum": 5, "maximum": 3, "type": "integer"}}, r"structured_outputs\.json: Unsatisfiable schema"),
        ({"json": {"$ref": "#"}}, r"structured_outputs\.json: no text is possible"),
        ({"json": False}, r"structured_outputs\.json: "),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, r"structured_outputs\.json: regex parse error: .*look-a"),
        ({"regex": "a{5,2}"}, r"structured_outputs\.regex: .*regex parse error: error: invalid repetition count"),
        ({"regex": r"(a)\1"}, r"structured_outputs\.regex: .*backreferences are not supported"),
        ({"regex": "["}, r"structured_outputs\.regex: .*unclosed character class"),
        ({"regex": "\ud800"}, r"structured_outputs\.regex: .*surrogates not allowed"),
        ({"choice": ("a", "\ud800")}, r"structured_outputs\.choice: .*surrogates not allowed"),
        ({"grammar": ""}, r"structured_outputs\.grammar: Empty grammar"),
        ({"grammar": "start: foo"}, r'structured_outputs\.grammar: .*unknown name: "foo"'),
        ({"grammar": 'start "a"'}, r"structured_outputs\.grammar: .*Expected token ':'"),
        ({"grammar": "root ::= ("}, r"structured_outputs\.grammar: the GBNF is not understood: Expected '\)'"),
        ({"grammar": "root ::= bar"}, r"structured_outputs\.grammar: the GBNF is not understood: Rule 'bar' not found"),
        (
            {"grammar": "root ::= " + "(" * 9999},
            r"structured_outputs\.grammar: the GBNF is not understood: maximum r",
        ),
        ({"grammar": 'start: a\na[temperature=0.5]: "x"'}, r"structured_outputs\.grammar: the attribute temperature"),
    ],
)
def test_what_cannot_be_compiled_is_refused_naming_the_field(probe, params, message):
    """B106 (c): a bad grammar is its request's failure and no one else's."""
    with pytest.raises(RequestError, match=message) as raised:
        probe.compile(**params)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 800


KEYWORDS = {  # of JSON schema that llguidance does not enforce
    "not": {"type": "string"},
    "if": {"type": "string"},
    "uniqueItems": True,
    "contains": {"const": 1},
    "minContains": 2,
    "maxContains": 2,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
    "propertyNames": {"pattern": "a"},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "$dynamicRef": "#x",
    "$recursiveRef": "#",
}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_keywords_that_would_be_ignored_are_refused(probe, keyword):
    schema = {"type": ["object", "array"], keyword: KEYWORDS[keyword], "x-guidance": {"lenient": True}}
    with pytest.raises(RequestError, match=r'Unimplemented keys: .*"' + keyword.replace("$", r"\$")):
        probe.compile(json=object_of([], a=schema) | {"x-guidance": {"lenient": True}})
    with pytest.raises(RequestError, match="Unimplemented keys"):
        probe.compile(grammar=f"start: %json {json.dumps(schema)}")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "format": "phone"}, "Unknown format: phone"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, "min/maxProperties only supported"),
        ({"patternProperties": {"^a": {}, "^ab": {}}}, "are not disjoint"),
    ],
)
def test_forms_that_would_be_approximated_are_refused(probe, schema, message):
    with pytest.raises(RequestError, match=message):
        probe.compile(json={**schema, "x-guidance": {"coerce_one_of": True}})


def test_annotations_and_unknown_words_are_let_be(probe):
    schema = {"const": 1, "title": "t", "examples": [2], "$comment": "c", "contentEncoding": "base64", "x-mine": 3}
    assert probe.matches("1", json=schema)


def test_auto_takes_llguidance_where_it_is_installed(monkeypatch):
    registry, find_spec = load_plugins().registry, importlib.util.find_spec

    def chosen():
        chooser = Chooser(registry, {}, [])
        chooser.choose()
        return chooser.chosen["structured_outputs"]

    assert chosen() == "llguidance"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llguidance" else find_spec(name))
    assert chosen() == "none"


def test_none_names_the_extra():
    with pytest.raises(UnsupportedError, match=r"pip install 'workerkit\[structured\]'"):
        NoStructuredOutputs().compile(StructuredOutputsParams(json_object=True))


# Hostile inputs


def chain(length):
    """A reference to a reference to …"""
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    "nested quantifiers": {"regex": "(a{1,5000}){1,5000}"},
    "three nested quantifiers": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "long string": {"json": {"type": "string", "maxLength": 10**9}},
    "many items": {"json": {"type": "array", "minItems": 10**9}},
    "endless recursion": {"json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}},
    "a tree of references": {
        "json": {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)} | {"d30": {}}}
        | {"$ref": "#/$defs/d0"}
    },
    "nested parentheses": {"grammar": "start: " + "(" * 9999 + '"a"' + ")" * 9999},
    "tokens of tokens": {
        "grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"'
    },
    "ambiguous": {"grammar": 'start: s\ns: s s | s s s | "a" |'},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_inputs_are_refused_or_harmless(probe, name):
    began = time.monotonic()
    with contextlib.suppress(RequestError):  # when it is compiled, or at the step where it is too much
        matcher = probe.compile(**HOSTILE[name])
        for _ in range(5):
            token = min(probe.allowed(matcher) - {EOS, EOT}, default=None)
            if token is not None:
                matcher.accept([token])
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "params",
    [
        {"json": {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(40)]}},
        {"json": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967)]}},
        {"grammar": 'start: %json {"type":"integer","multipleOf":99999989}'},
        {"json": chain(1200)},
    ],
    ids=["patterns", "multiples", "in a grammar", "chain"],
)
def test_what_would_compile_for_hours_or_crash_is_given_up(make_probe, params):
    """Hours and gigabytes, or an overflow of the stack: in a process of its own, which is then replaced."""
    probe = make_probe(max_seconds=0.5)
    probe.compile(regex="a")
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"too complex: it cannot be compiled in 0\.5 s"):
        probe.compile(**params)
    assert time.monotonic() - began < 3
    assert probe.matches("b", regex="b")


def test_the_process_ends_with_its_part(make_probe):
    probe = make_probe()
    probe.compile(regex="a")
    process = probe.part._compiler[1]._process
    assert process.poll() is None
    del probe
    assert process.poll() is not None


def test_what_is_too_long_is_refused(probe, make_probe):
    with pytest.raises(RequestError, match=r"structured_outputs\.json: \d+ bytes are too many; right: at most 65536"):
        probe.compile(json={"enum": [f"value {i}" for i in range(50000)]})
    with pytest.raises(RequestError, match=r"structured_outputs\.choice: 12 bytes are too many; right: at most 10"):
        make_probe(max_bytes=10).compile(choice=("ééé", "éé", "12"))
    with pytest.raises(RequestError, match="it has 501 rules of GBNF"):
        probe.compile(grammar='root ::= "a"\n' + "".join(f'r{i} ::= "a"\n' for i in range(500)))


def test_a_grammar_that_turns_out_too_complex_allows_nothing(probe, caplog):
    """llguidance's own mask would be the end of the sequence: half a text that looks whole."""
    matcher = probe.compile(regex="((a{1,1000}){1,1000}){1,1000}")
    allowed = probe.allowed(matcher)
    for _ in range(200):
        if not allowed:
            break
        matcher.accept(b"a")
        allowed = probe.allowed(matcher)
    assert allowed == set()
    assert not matcher.is_finished
    assert probe.masks(matcher, b"aa") == [set()] * 3
    with pytest.raises(RequestError, match="cannot follow: lexer error: too many expressions"):
        matcher.accept(b"a")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_a_tokenizer_without_an_end_is_refused(make_probe):
    probe = make_probe()
    probe.tokenizer.eos_token_ids = ()
    with pytest.raises(UnsupportedError, match="end-of-sequence"):
        probe.compile(regex="a")
