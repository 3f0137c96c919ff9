"""`workerkit chat`: one question, and the conversation loop."""

from __future__ import annotations

import builtins

import pytest


@pytest.fixture
def lines(monkeypatch):
    """What a person types; an exception is raised in its place. Ends with Ctrl-D."""

    def typed(*entries):
        left = [*entries, EOFError()]

        def read(prompt):
            entry = left.pop(0)
            if isinstance(entry, BaseException):
                raise entry
            return entry

        monkeypatch.setattr(builtins, "input", read)

    return typed


def test_once_answers_and_prints_its_speed(cli, engines, capsys):
    assert cli("chat", "--once", "hello", "--system", "be brief", "--temperature", "0") == 0
    out, err = capsys.readouterr()
    assert out == "HELLO\n"
    assert "5 tokens in " in err
    assert "tokens/s" in err
    assert engines[0].messages == [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    ]
    assert engines[0].calls == ["start(progress=True)", "shutdown"]


def test_the_conversation_grows_and_reset_and_system_start_anew(cli, engines, lines, capsys):
    lines("one", "  ", "two", "/reset", "three", "/system short", "four", "/system", "five", "/exit", "never")
    assert cli("chat") == 0

    def user(text):
        return {"role": "user", "content": text}

    assert engines[0].messages == [
        [user("one")],
        [user("one"), {"role": "assistant", "content": "ONE"}, user("two")],
        [user("three")],
        [{"role": "system", "content": "short"}, user("four")],
        [user("five")],
    ]
    assert capsys.readouterr().out == "ONE\nTWO\nTHREE\nFOUR\nFIVE\n"


def test_ctrl_d_leaves_and_ctrl_c_at_the_prompt_does_not(cli, engines, lines):
    lines(KeyboardInterrupt(), "hi")
    assert cli("chat") == 0
    assert len(engines[0].messages) == 1
    assert engines[0].calls[-1] == "shutdown"


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(cli, engines, lines, capsys):
    lines("abcdef", "go on")
    assert cli("chat", "--set", "components.engine.ctrl_c_at_step=3") == 0
    assert "(stopped)" in capsys.readouterr().err
    assert engines[0].aborted == ["r1"]
    assert engines[0].messages[1][:2] == [
        {"role": "user", "content": "abcdef"},
        {"role": "assistant", "content": "AB"},
    ]


def test_a_refused_question_is_said_and_forgotten(cli, engines, lines, capsys, monkeypatch):
    lines("!", "next")
    assert cli("chat") == 0
    assert "a bad character" in capsys.readouterr().err
    assert engines[0].messages[1] == [{"role": "user", "content": "next"}]


def test_once_that_fails_is_exit_code_1(cli, capsys):
    assert cli("chat", "--once", "a!") == 1
    assert capsys.readouterr().err.endswith("workerkit: a bad character\n")


def test_an_unknown_command_lists_the_known_ones(cli, engines, lines, capsys):
    lines("/quit")
    assert cli("chat") == 0
    assert "no command /quit; /reset" in capsys.readouterr().err
    assert engines[0].messages == []
