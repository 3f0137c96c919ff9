"""Config files: YAML, `extends`, settings, merging, and strict structuring with every problem in one report."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from attrs import validators

from workerkit.framework import config
from workerkit.framework.errors import ConfigError
from workerkit.framework.plan import make_plan
from workerkit.framework.registry import Registry, Role


@attrs.frozen(kw_only=True)
class Inner:
    low: int = attrs.field(default=1, validator=validators.ge(1))
    high: float = attrs.field(default=1.0, validator=validators.le(2.0))


@attrs.frozen(kw_only=True)
class Options:
    need: int
    flag: bool = False
    maybe: bool | None = None
    mode: Literal["fast", "exact"] = "fast"
    ids: tuple[int, ...] = ()
    inner: Inner = Inner()
    either: str | int = "x"
    name: str = "n"
    ratio: float = 0.5

    def __attrs_post_init__(self) -> None:
        if self.need > 100 and not self.flag:
            raise ValueError("need > 100 asks for flag: true")


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.yaml"


def structured(**values: Any) -> tuple[Options | None, list[str]]:
    problems: list[str] = []
    return config.structure(values, Options, "components.z", problems), problems


# ---- YAML


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: [1\n", ["f.yaml, line 3, column 1: expected ',' or ']', but got '<stream end>'"]),
        ("a: 1\nb: {c: 1,\n  c: 2}\n", ["f.yaml, line 3, column 3: key 'c' is given twice"]),
        ("a: 1\na: 2\n", ["f.yaml, line 2, column 1: key 'a' is given twice"]),
        ("1: x\n", ["f.yaml, line 1, column 1: keys must be strings"]),
        ("yes: x\n", ["f.yaml, line 1, column 1: keys must be strings"]),
        ("? [a]\n: x\n", ["f.yaml, line 1, column 3: keys must be strings"]),
        ("base: &b {x: 1}\nc:\n  <<: *b\n", ["f.yaml, line 3, column 3: keys must be strings"]),
    ],
)
def test_broken_yaml_is_refused_with_line_and_column(text: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse_yaml(text, "f.yaml")
    assert list(caught.value.problems) == expected


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!mine x"])
def test_yaml_tags_run_nothing(tag: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml, line 1, column 4: could not determine a constructor"):
        config.parse_yaml(f"a: {tag}\n", "f.yaml")


def test_a_control_character_is_refused_by_file_name() -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml: unacceptable character"):
        config.parse_yaml("a: \x00", "f.yaml")


@pytest.mark.parametrize("text", ["1e-5", "1E5", "-2.5e-3", "1e+5", "3.e2"])
def test_exponents_are_numbers_though_yaml_1_1_says_string(text: str) -> None:
    value = config.parse_yaml(f"a: {text}", "f")["a"]
    assert type(value) is float
    assert value == float(text)


VALUES = ["1e-5", "5", "true", "null", "", "no", " x ", "a: b", "é", "1:30", "~", "-", "[x]", 5, 5.0, 1e-05, True, None]


@pytest.mark.parametrize("value", VALUES)
def test_dumped_values_are_read_back_as_they_were(value: Any) -> None:
    same = [value]
    back = config.parse_yaml(config.dump_yaml({"a": value, "b": same, "c": same}), "f")
    assert back == {"a": value, "b": [value], "c": [value]}
    assert type(back["a"]) is type(value)


# ---- files and `extends`


def test_extends_merges_underneath(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        top="extends: mid.yaml\nlimits: {b: 3}\n",
        mid="extends: base.yaml\nlimits: {a: 2, b: 2}\ncomponents: {sampler: {top_k: 5}}\n",
        base="limits: {a: 1, b: 1, c: 1}\ncomponents: {sampler: {use: torch, top_p: 0.9}}\n",
    )
    assert config.read_file(path) == {
        "limits": {"a": 2, "b": 3, "c": 1},
        "components": {"sampler": {"use": "torch", "top_p": 0.9, "top_k": 5}},
    }


def test_extends_is_relative_to_the_file_that_says_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, base="limits: {a: 1}")
    assert config.read_file(write(tmp_path / "sub", top="extends: ../base.yaml")) == {"limits": {"a": 1}}


def test_a_circle_of_extends_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, a="extends: b.yaml", b="extends: c.yaml", c="extends: a.yaml")
    with pytest.raises(ConfigError, match=r"extends: a\.yaml -> b\.yaml -> c\.yaml -> a\.yaml is a circle"):
        config.read_file(path)


def test_the_same_base_twice_is_no_circle(tmp_path: Path) -> None:
    path = write(tmp_path, top="extends: base.yaml\na: 1", base="b: 2")
    assert config.read_file(path) == config.read_file(path) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: gone.yaml", "cannot read .*gone.yaml"),
        ("extends: [a, b]", r"top\.yaml: extends: expected a file name, got \['a', 'b'\] \(list\)"),
        ("- a\n- b", r"top\.yaml: expected a mapping of sections, got \['a', 'b'\] \(list\)"),
        ("just text", r"top\.yaml: expected a mapping of sections, got 'just text' \(str\)"),
        ("0", r"top\.yaml: expected a mapping of sections, got 0 \(int\)"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.read_file(write(tmp_path, top=text))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe")
    for path in (tmp_path / "gone.yaml", tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(ConfigError, match=f"cannot read {path}"):
            config.read_file(path)


@pytest.mark.parametrize("text", ["", "# nothing\n", "null", "{}"])
def test_an_empty_file_is_all_defaults(tmp_path: Path, text: str) -> None:
    assert config.read_file(write(tmp_path, top=text)) == {}


# ---- merging and settings


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ({"x": {"a": 1, "b": 2}}, {"x": {"b": 3}}, {"x": {"a": 1, "b": 3}}),
        ({"x": [1, 2]}, {"x": [3]}, {"x": [3]}),
        ({"x": {"a": 1}}, {"x": None}, {"x": None}),
        ({"x": 1}, {}, {"x": 1}),
        (
            {"s": {"use": "p", "k": 1}},
            {"s": {"use": "q"}},
            {"s": {"use": "q"}},
        ),  # another part: old options are not its
        ({"s": {"use": "p", "k": 1}}, {"s": {"use": "p", "j": 2}}, {"s": {"use": "p", "k": 1, "j": 2}}),
        ({"s": {"use": "p", "k": 1}}, {"s": {"j": 2}}, {"s": {"use": "p", "k": 1, "j": 2}}),
        ({"s": {"use": "p", "k": 1}}, {"s": "q"}, {"s": "q"}),
        ({"s": {"use": "p", "k": 1}}, {"s": "p"}, {"s": {"use": "p", "k": 1}}),
        ({"s": "p"}, {"s": {"k": 2}}, {"s": {"use": "p", "k": 2}}),
        ({"s": "p"}, {"s": {"use": "q", "k": 2}}, {"s": {"use": "q", "k": 2}}),
    ],
)
def test_merge_rules(base: dict[str, Any], over: dict[str, Any], merged: dict[str, Any]) -> None:
    assert config.merge(base, over) == merged


def test_merging_changes_neither_side() -> None:
    base, over = {"x": {"a": 1}}, {"x": {"b": 2}}
    config.merge(base, over)
    assert (base, over) == ({"x": {"a": 1}}, {"x": {"b": 2}})


@pytest.mark.parametrize("value", [False, 0, None, "", []])
def test_b149_false_zero_and_null_win_on_each_level(tmp_path: Path, value: Any) -> None:
    """B149: YAML `x: false` counts, and command line > file > default, whatever the value."""
    path = write(
        tmp_path, top=config.dump_yaml({"extends": "base.yaml", "limits": {"x": value}}), base="limits: {x: true, y: 7}"
    )
    document = config.read_file(path)
    assert document["limits"] == {"x": value, "y": 7}
    document = config.with_overrides(document, config.setting("limits.x=true"))
    assert document["limits"]["x"] is True
    document = config.with_overrides(document, {"limits.x": value})
    assert document["limits"]["x"] == value
    assert type(document["limits"]["x"]) is type(value)


@pytest.mark.parametrize("value", [True, False])
def test_b149_a_given_value_beats_the_default(value: bool) -> None:
    done, problems = structured(need=0, flag=value, maybe=value)
    assert problems == []
    assert done is not None
    assert (done.need, done.flag, done.maybe) == (0, value, value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b.c=5", 5),
        ("a.b.c=false", False),
        ("a.b.c=null", None),
        ("a.b.c=", None),
        ("a.b.c='7'", "7"),
        ("a.b.c=[x, y]", ["x", "y"]),
        ("a.b.c={use: p}", {"use": "p"}),
        ("a.b.c=x=y", "x=y"),
        ("a.b.c=1e-5", 1e-5),
    ],
)
def test_a_setting_is_a_path_and_a_yaml_value(text: str, value: Any) -> None:
    assert config.setting(text) == {"a": {"b": {"c": value}}}


@pytest.mark.parametrize("text", ["a.b", "=5", "a..b=1", ".a=1", "a.=1"])
def test_a_setting_without_path_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected PATH=VALUE"):
        config.setting(text)


def test_a_setting_with_broken_yaml_names_itself() -> None:
    with pytest.raises(ConfigError, match=r"--set a\.b, line 1"):
        config.setting("a.b=[1")


def test_overrides_may_be_dotted_or_nested() -> None:
    document = {"a": {"b": 1, "c": 1}, "d": 1}
    assert config.with_overrides(document, {"a.b": 2, "a": {"c": 3}, "e.f": 4}) == {
        "a": {"b": 2, "c": 3},
        "d": 1,
        "e": {"f": 4},
    }
    assert document == {"a": {"b": 1, "c": 1}, "d": 1}


def test_the_short_form_of_a_section_merges_like_the_long_one(tmp_path: Path) -> None:
    path = write(tmp_path, top="extends: base.yaml\nmodel: other", base="model: {source: first, dtype: float32}")
    document = config.read_file(path)
    assert document == {"model": {"source": "other", "dtype": "float32"}}
    assert config.with_overrides(document, config.setting("model=third"))["model"]["source"] == "third"
    assert config.with_overrides({"model": "short"}, {"model.dtype": "float32"}) == {
        "model": {"source": "short", "dtype": "float32"}
    }


def test_the_short_form_of_a_section_inside_another(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        top="extends: base.yaml\nmodel: {quantization: keep}",
        base="model: {source: x, quantization: {head: none}}",
    )
    expected = {"source": "x", "quantization": {"head": "none", "default": "keep"}}
    assert config.read_file(path) == {"model": expected}
    assert config.with_overrides({"model": {"quantization": "keep"}}, {"model.quantization.head": "int8"}) == {
        "model": {"quantization": {"default": "keep", "head": "int8"}}
    }
    assert config.with_overrides({"cache": {"quantization": "int8"}}, {"cache.quantization.sliding": "none"}) == {
        "cache": {"quantization": {"default": "int8", "sliding": "none"}}
    }
    assert config.with_overrides({"model": "x"}, {"model.quantization": "w8a8"}) == {
        "model": {"source": "x", "quantization": {"default": "w8a8"}}
    }


# ---- strict structuring


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("need", "7", "expected int, got '7' (str)"),
        ("need", True, "expected int, got True (bool)"),
        ("need", 7.0, "expected int, got 7.0 (float)"),
        ("need", None, "expected int, got None (NoneType)"),
        ("flag", 1, "expected bool, got 1 (int)"),
        ("flag", "yes", "expected bool, got 'yes' (str)"),
        ("maybe", "null", "expected bool, got 'null' (str)"),
        ("ratio", "0.5", "expected float, got '0.5' (str)"),
        ("ratio", False, "expected float, got False (bool)"),
        ("name", 5, "expected str, got 5 (int)"),
        ("either", 1.5, "expected str or int, got 1.5 (float)"),
        ("ids", "12", "expected a list, got '12' (str)"),
        ("ids", 3, "expected a list, got 3 (int)"),
        ("inner", 3, "expected a mapping, got 3 (int)"),
        ("mode", "exakt", "'exakt' (str) is not one of 'fast', 'exact'; did you mean 'exact'?"),
    ],
)
def test_types_are_strict(field: str, value: Any, expected: str) -> None:
    done, problems = structured(**{"need": 1, field: value})
    assert done is None
    assert problems == [f"components.z.{field}: {expected}"]


@pytest.mark.parametrize("written", ['"false"', '"true"', "true,", "'no'"])
def test_b150_b172_a_quoted_boolean_is_an_error_with_its_key(written: str) -> None:
    """B150, B172: `"false"` is never True, and `true,` names the key."""
    value = config.parse_yaml(f"flag: {written}", "f")["flag"]
    done, problems = structured(need=1, flag=value)
    assert done is None
    assert problems == [f"components.z.flag: expected bool, got {value!r} (str)"]


def test_b150_a_list_stays_a_list_of_its_names() -> None:
    """B150: `[a, b]` is two names, not `"a b"`."""
    document = config.parse_yaml("ids: [3, 4]\nnames: [a, b]", "f")
    assert document["names"] == ["a", "b"]
    done, _ = structured(need=1, ids=document["ids"])
    assert done is not None
    assert done.ids == (3, 4)


def test_b172_a_misspelt_option_is_an_error_with_the_nearest_key() -> None:
    done, problems = structured(need=1, flagg=True)
    assert done is None
    assert problems == ["components.z: unknown key 'flagg'; did you mean 'flag'?"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"raito": 0.1}, "components.z: unknown key 'raito'; did you mean 'ratio'?"),
        ({"inner": {"lo-w": 1}}, "components.z.inner: unknown key 'lo-w'; did you mean 'low'?"),
        ({"low": 1}, "components.z: unknown key 'low'; known: " + ", ".join(sorted(attrs.fields_dict(Options)))),
    ],
)
def test_b79_unknown_keys_are_errors_at_every_level(given: dict[str, Any], problem: str) -> None:
    """B79: a typing error, `-` for `_`, and a right key in the wrong section: key, section, nearest valid key."""
    assert structured(need=1, **given) == (None, [problem])


def test_every_problem_comes_at_once_each_with_its_path() -> None:
    done, problems = structured(
        flag=1, mode="x", ids=[1, "b", 2.5], inner={"low": 0, "high": 9, "lo": 1}, ratio="r", zz=1
    )
    assert done is None
    assert sorted(problems) == [
        "components.z.flag: expected bool, got 1 (int)",
        "components.z.ids[1]: expected int, got 'b' (str)",
        "components.z.ids[2]: expected int, got 2.5 (float)",
        "components.z.inner.high: 'high' must be <= 2.0: 9.0",
        "components.z.inner.low: 'low' must be >= 1: 0",
        "components.z.inner: unknown key 'lo'; did you mean 'low'?",
        "components.z.mode: 'x' (str) is not one of 'fast', 'exact'; known: exact, fast",
        "components.z.ratio: expected float, got 'r' (str)",
        "components.z: required key 'need' is missing",
        "components.z: unknown key 'zz'; known: " + ", ".join(sorted(a.name for a in attrs.fields(Options))),
    ]


def test_a_check_across_fields_is_a_problem_too() -> None:
    assert structured(need=101) == (None, ["components.z: need > 100 asks for flag: true"])
    done, problems = structured(need=101, flag=True)
    assert problems == []
    assert done is not None


def test_an_int_is_a_fine_float_and_becomes_one() -> None:
    done, _ = structured(need=1, ratio=1)
    assert done is not None
    assert type(done.ratio) is float


def test_unions_take_the_member_that_fits_without_converting() -> None:
    for value in ("5", 5):
        done, _ = structured(need=1, either=value)
        assert done is not None
        assert done.either == value
        assert type(done.either) is type(value)


# ---- the whole document: who owns which section


class Engine:
    """A role."""


class Stage:
    """A nested role."""


class PlainStage(Stage):
    """A stage."""


@attrs.frozen(kw_only=True)
class LimitsSection:
    size: int = attrs.field(default=4, validator=validators.ge(1))


@attrs.frozen(kw_only=True)
class MineSection:
    level: int = 1


class Small(Engine):
    """An engine."""

    def __init__(self, config: Inner, stages: tuple[Stage, ...], limits: LimitsSection) -> None:
        self.config, self.stages, self.limits = config, stages, limits


class Other(Engine):
    """An engine without options."""


class Follower(Inner):
    """A part with options that another part brings along."""

    def __init__(self, config: Inner) -> None:
        self.config = config


def registry() -> Registry:
    made = Registry()
    made.sections["limits"] = LimitsSection
    engine = Role("engine", Engine, "an engine", default="small")
    stage = Role("stage", Stage, "a stage", many=True, nested=True)
    for role in (engine, stage):
        made.add_role(role)
    made.add(stage, "plain", PlainStage, suits=lambda chosen: f"engine is {chosen['engine']}")
    made.add(engine, "small", Small, parts={"stages": ("plain",)})
    made.add(engine, "other", Other, suits=lambda chosen: "always")
    made.add_section("mine", MineSection)
    return made


def problems_of(document: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make_plan(registry(), document)
    return list(caught.value.problems)


def test_b173_each_plugin_owns_its_section_and_strictness_stops_there() -> None:
    """B173: a plugin's section is checked by its own schema; a section without an owner is an error."""
    plan = make_plan(registry(), {"plugins": {"mine": {"level": 2}}})
    assert plan.sections[MineSection] == MineSection(level=2)
    assert problems_of({"plugins": {"mine": {"levle": 2}, "theirs": {"anything": 1}}}) == [
        "plugins.theirs: no installed plugin owns this section; known: mine",
        "plugins.mine: unknown key 'levle'; did you mean 'level'?",
    ]


def test_b173_parts_get_their_own_section_only() -> None:
    """B172, B173: nothing hands the raw document to a part."""
    plan = make_plan(registry(), {"limits": {"size": 2}, "plugins": {"mine": {"level": 2}}})
    wires = plan.nodes["engine"].wires
    assert set(wires) == {"stages", "limits"}
    assert wires["limits"].value == LimitsSection(size=2)


def test_problems_of_all_sections_come_in_one_report() -> None:
    assert problems_of(
        {
            "limit": {},
            "limits": {"size": 0},
            "plugins": {"mine": {"level": "1"}},
            "components": {"engin": "small", "stage": "plain", "engine": {"low": 0, "stages": ["plane"], "x": 1}},
        }
    ) == [
        "limit: no such section; did you mean 'limits'?",
        "limits.size: 'size' must be >= 1: 0",
        "plugins.mine.level: expected int, got '1' (str)",
        "components.engin: no such role; did you mean 'engine'?",
        "components.stage: no such role (it belongs into the section of the part that uses it); known: engine",
        "components.engine.stages[0].use: no stage 'plane'; did you mean 'plain'?",
        "components.engine.low: 'low' must be >= 1: 0",
        "components.engine: unknown key 'x'; known: high, low",
    ]


@pytest.mark.parametrize("value", [0, False, "", [], "small"])
def test_a_section_that_is_no_mapping_is_refused_even_when_falsy(value: Any) -> None:
    kind = type(value).__name__
    assert problems_of({"limits": value}) == [f"limits: expected a mapping, got {value!r} ({kind})"]
    assert problems_of({"plugins": {"mine": value}}) == [f"plugins.mine: expected a mapping, got {value!r} ({kind})"]


def test_null_sections_are_all_defaults() -> None:
    plan = make_plan(registry(), {"limits": None, "plugins": {"mine": None}, "components": None})
    assert plan.document == make_plan(registry(), {}).document


@pytest.mark.parametrize("value", [None, 5, {"use": None}, {"use": 5}])
def test_a_part_must_be_named(value: Any) -> None:
    assert problems_of({"components": {"engine": value}})[0].startswith(
        "components.engine: expected the name of a part"
    )


def test_the_resolved_document_has_every_option_and_resolves_to_the_same_plan() -> None:
    plan = make_plan(registry(), {"components": {"engine": {"low": 3, "stages": "auto"}}})
    assert plan.document == {
        "limits": {"size": 4},
        "plugins": {"mine": {"level": 1}},
        "components": {"engine": {"use": "small", "stages": [{"use": "plain"}], "low": 3, "high": 1.0}},
    }
    again = make_plan(registry(), config.parse_yaml(config.dump_yaml(plan.document), "f"))
    assert again.document == plan.document
    assert again.nodes["engine"].config == Inner(low=3)


def test_auto_looks_at_what_is_named_anywhere_in_the_config() -> None:
    made = registry()
    late = Role("late", Stage, "named after the role that looks at it", default="plain")
    made.add_role(late)
    made.add(late, "plain", PlainStage)
    early = Role("early", Other, "auto")
    made.add_role(early)
    made.add(early, "it", Other, suits=lambda chosen: f"late is {chosen['late']}" if chosen["late"] == "rare" else None)
    made.add(late, "rare", PlainStage)
    plan = make_plan(made, {"components": {"early": "auto", "late": "rare"}})
    assert plan.nodes["early"].why == "auto: late is rare"
    with pytest.raises(ConfigError, match=r"components\.early: nothing suits `auto`; known: it"):
        make_plan(made, {"components": {"early": "auto"}})


def test_options_without_use_belong_to_the_part_that_another_brings() -> None:
    made = registry()
    follower = Role("follower", Inner, "goes with the leader")
    leader = Role("leader", PlainStage, "brings a follower", default="one")
    for role in (leader, follower):
        made.add_role(role)
    made.add(leader, "one", PlainStage, defaults={"follower": "first"})
    made.add(leader, "two", PlainStage, defaults={"follower": "second"})
    for name in ("first", "second"):
        made.add(follower, name, Follower)
    node = make_plan(made, {"components": {"follower": {"low": 5}}}).nodes["follower"]
    assert (node.name, node.config.low, node.why) == ("first", 5, "goes with leader: one")
    node = make_plan(made, {"components": {"follower": {"low": 5}, "leader": "two"}}).nodes["follower"]
    assert (node.name, node.config.low, node.why) == ("second", 5, "goes with leader: two")
    node = make_plan(made, {"components": {"follower": "first", "leader": "two"}}).nodes["follower"]
    assert (node.name, node.why) == ("first", "")


def test_auto_of_a_role_whose_parts_are_all_nested_is_its_default() -> None:
    made = Registry()
    role = Role("engine", Engine, "an engine", default="only")
    made.add_role(role)
    made.add(role, "only", Other)
    assert make_plan(made, {"components": {"engine": "auto"}}).nodes["engine"].name == "only"
