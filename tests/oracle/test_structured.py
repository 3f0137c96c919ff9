"""The real model, sampled at temperature 1, writes JSON of a schema: every time."""

import decimal
import json

import jsonschema
import pytest

from workerkit.framework.interfaces.sampling_params import SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.real


def closed(required, **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def array(max_items, items, min_items=0):
    return {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}


def text(longest, **more):
    return {"type": "string", "maxLength": longest, **more}


def integer(low, high):
    return {"type": "integer", "minimum": low, "maximum": high}


NAME, COLOUR = text(12, minLength=1), {"enum": ["red", "green", "bläulich", "深红"]}
SCHEMAS = {
    "a person": closed(["name", "age"], name=NAME, age=integer(0, 120), email=text(20)),
    "nested objects": closed(["a"], a=closed(["b"], b=closed(["c"], c=closed(["d"], d=integer(-9, 9))), e=NAME)),
    "arrays of arrays": array(3, array(3, integer(0, 99), min_items=1), min_items=1),
    "enums": closed(["colour", "sizes"], colour=COLOUR, sizes=array(4, {"enum": ["S", 1, None, True, [2]]})),
    "numbers in ranges": closed(
        ["lat", "n"],
        lat={"type": "number", "minimum": -90, "maximum": 90, "multipleOf": 0.001},
        n={"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5, "multipleOf": 2},
    ),
    "optional fields": closed(["c"], a=integer(1, 3), b=text(5), c={"type": "boolean"}, d=COLOUR, e={"type": "null"}),
    "unicode strings": closed(["título", "詩"], título=text(16), 詩=array(3, text(6, minLength=2))),
    "patterns and formats": closed(
        ["id", "day"], id=text(9, pattern="^[A-Z]{2}-[0-9]{1,4}$"), day=text(10, format="date")
    ),
    "alternatives": array(
        2, {"anyOf": [closed(["kind", "r"], kind={"const": "circle"}, r=integer(1, 9)), NAME, {"type": "boolean"}]}
    ),
    "a tree": {
        "$defs": {
            "leaf": closed(["v"], v=integer(0, 9)),
            "node": closed(["v"], v=NAME, kids=array(2, {"$ref": "#/$defs/leaf"})),
        },
        **closed(["root"], root={"$ref": "#/$defs/node"}),
    },
}
PROMPT = "Write a JSON document for this schema: {}\nJSON: "


FORMATS = jsonschema.FormatChecker()


def exact(document):
    """In floats 1.777 is no multiple of 0.001."""
    return json.loads(document, parse_float=decimal.Decimal)


def ask(engine, requests):
    """A completion for each (schema, seed); the engine runs 32 of them at once."""
    prompts = [PROMPT.format(json.dumps(schema, ensure_ascii=False)[:200]) for schema, _ in requests]
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=400, structured_outputs=StructuredOutputsParams(json=schema)
        )
        for schema, seed in requests
    ]
    return engine.generate(prompts, params)


def check(engine, seeds, capsys):
    requests = [(schema, seed) for seed in seeds for schema in SCHEMAS.values()]
    failed = []
    for (schema, seed), done in zip(requests, ask(engine, requests), strict=True):
        try:
            assert done.finish_reason == "stop"
            validator = jsonschema.Draft202012Validator(exact(json.dumps(schema)), format_checker=FORMATS)
            validator.validate(exact(done.text))
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            failed.append((schema, seed, done.finish_reason, done.text, str(error)))
    with capsys.disabled():
        print(f"\n{len(requests) - len(failed)} of {len(requests)} are valid")
    assert not failed
    engine.check_integrity()


def test_json_of_ten_schemas(smollm2_engines, capsys):
    check(smollm2_engines["v2"], range(4), capsys)


@pytest.mark.long
def test_json_of_ten_schemas_200_times(smollm2_engines, capsys):
    check(smollm2_engines["v2"], range(20), capsys)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_choices_regexes_and_grammars_beside_free_requests(runner, smollm2_engines):
    engine = smollm2_engines[runner]
    prompt, free = "The sky is", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    alone = engine.generate([prompt], free)[0].text
    wanted = [
        StructuredOutputsParams(choice=("grün", "blue", "深红")),
        StructuredOutputsParams(regex=r"[0-9]{3}-[A-F]{2}"),
        StructuredOutputsParams(grammar='root ::= "(" [a-c]{2} ")"'),
    ]
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, structured_outputs=structured)
        for structured in wanted
    ]
    choice, regex, beside, grammar = engine.generate([prompt] * 4, [params[0], params[1], free, params[2]])
    assert choice.text in ("grün", "blue", "深红")
    assert jsonschema.Draft202012Validator({"pattern": r"^[0-9]{3}-[A-F]{2}$"}).is_valid(regex.text)
    assert jsonschema.Draft202012Validator({"pattern": r"^\([a-c]{2}\)$"}).is_valid(grammar.text)
    assert beside.text == alone
    assert [done.finish_reason for done in (choice, regex, beside, grammar)] == ["stop", "stop", "length", "stop"]
