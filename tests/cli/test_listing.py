import json

import jsonschema
import pytest


def test_plugins_as_json_has_the_promised_fields(cli) -> None:
    rows = cli("plugins", "--json").json
    assert set(rows[0]) == {"group", "kind", "distribution", "version", "module", "status", "error", "needs", "cost"}
    by_kind = {(row["group"], row["kind"]): row for row in rows}
    assert by_kind["rules", "top_n_sigma"]["distribution"] == "decodekit-nsigma"
    assert by_kind["strategies", "instructive"]["needs"] == ["text", "tokenizer"]
    assert by_kind["strategies", "dola"]["status"] == "ok"


def test_the_allow_list_shows_in_plugins(cli, monkeypatch) -> None:
    monkeypatch.setenv("DECODEKIT_PLUGINS", "decodekit-nsigma")
    rows = cli("plugins", "--json").json
    status = {row["distribution"]: row["status"] for row in rows}
    assert status.pop("decodekit") == status.pop("decodekit-nsigma") == "ok"
    assert set(status.values()) == {"not allowed"}
    assert "decodekit-instructive" in status


def test_plugins_as_a_table(cli) -> None:
    result = cli("plugins")
    assert result.code == 0
    assert "top_n_sigma" in result.out
    assert "decodekit-nsigma" in result.out


def test_plugins_in_a_pipe_have_a_line_each(cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = cli("plugins", "--json").json
    lines = cli("plugins").out.splitlines()
    assert len(lines) == len(rows) + 1
    assert all(row["cost"] in line for row, line in zip(rows, lines[1:], strict=True))


def test_plugins_shows_one_with_its_options(cli) -> None:
    shown = cli("plugins", "best_of_n").out
    assert "best_of_n (strategies)" in shown
    options = {line.split()[0]: line for line in shown.splitlines() if line}
    assert options["n"].split()[:3] == ["n", "8", "candidates"]
    assert options["scorer"].split()[1] == "required"
    [document] = cli("plugins", "best_of_n", "--json").json
    assert {option["name"] for option in document["options"]} == {"inner", "n", "scorer", "soft", "pruning"}
    assert cli("plugins", "json_schema").out.count("schema") > 1
    wrong = cli("plugins", "dolla")
    assert wrong.code == 2
    assert "did you mean 'dola'?" in wrong.err


def test_check_says_ok_without_a_model(cli, recipe) -> None:
    result = cli("check", recipe("strategy: dola\nrules: [{kind: top_p, p: 0.9}, {kind: top_n_sigma}]\n"))
    assert (result.code, result.out) == (0, "ok: strategy dola, rules top_p, top_n_sigma\n")


def test_check_names_file_line_and_column(cli, recipe) -> None:
    path = recipe("strategy: dola\nrules:\n  - {kind: top_p, q: 0.9}\n")
    result = cli("check", path)
    assert result.code == 2
    assert f"{path}:3:" in result.err
    assert "rules.0.q" in result.err
    assert "unknown option" in result.err


def test_check_names_every_fault(cli, recipe) -> None:
    result = cli("check", recipe("fallback: none\ngeneration: {max_new_tokens: 0, max_newtokens: 1}\n"))
    assert result.code == 2
    lines = result.err.strip().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)


def test_check_names_constraint_drafter_and_cache(cli, recipe) -> None:
    text = "constraint: {kind: regex, pattern: a+}\ndrafter: ngram\ncache: {kind: paged, block_size: 8}\n"
    assert cli("check", recipe(text)).out.startswith(
        "ok: strategy sample, rules none, constraint regex, drafter ngram, cache paged\n"
    )


@pytest.mark.parametrize(
    ("constraint", "place"),
    [
        ('{kind: regex, pattern: "(["}', "1:13: constraint: "),
        ("{kind: json_schema, schema: {type: objec}}", "1:13: constraint: "),
        ("{kind: grammar, lark: 'start: ('}", "1:13: constraint: "),
        ("{kind: grammar, gbnf: 'root ::= missing'}", "1:13: constraint: "),
        (
            "\n  kind: all_of\n  constraints:\n    - {kind: choice, choices: [a]}\n    - {kind: regex, pattern: '*'}",
            "5:7: ",
        ),
    ],
)
def test_check_compiles_the_constraint(cli, recipe, constraint, place) -> None:
    path = recipe(f"constraint: {constraint}\n")
    result = cli("check", path)
    assert result.code == 2
    assert f"{path}:{place}" in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) == 1


def test_schema_is_a_json_schema_that_knows_installed_plugins(cli) -> None:
    schema = cli("schema").json
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(
        {"strategy": {"kind": "dola", "layers": "high"}, "rules": [{"kind": "top_n_sigma", "n": 2.0}]}
    )
    assert not validator.is_valid({"strategy": {"kind": "dola", "layerz": "high"}})
    assert "top_n_sigma" in json.dumps(schema)
