import json
import math
import shutil

import pytest

import decodekit
from decodekit.core.errors import InputError
from decodekit.view import page

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
RECIPE = {
    "strategy": {"kind": "dola", "layers": [0, 1, 2], "relative_top": 0.0},
    "rules": [{"kind": "temperature", "t": 0.5}, {"kind": "top_k", "k": 4}],
    "generation": {"do_sample": True, "seed": 2**63 - 1, "max_new_tokens": 8, "eos_token_id": 96},
}


@pytest.fixture
def write(dense, tokenizer, tmp_path):
    """Decode with a trace, and the page of it."""

    def make(recipe, prompts, name="trace.jsonl"):
        decodekit.load(recipe).run(dense, tokenizer, prompts, trace=tmp_path / name)
        path = tmp_path / "page.html"
        path.write_text(page([tmp_path / name]), encoding="utf-8")
        return path

    return make


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium with its driver is installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")
    for flag in (*flags, "disable-component-update", "disable-sync", "window-size=1400,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield made
    made.quit()


@pytest.fixture
def see(browser):
    """Open a page, and the elements of a selector in it; whatever it logs or requests fails the test."""

    def open_page(path):
        browser.get_log("performance")
        browser.get(path.as_uri())
        return lambda selector: browser.find_elements("css selector", selector)

    yield open_page
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [own["params"]["request"]["url"] for own in messages if own["method"] == "Network.requestWillBeSent"]
    assert sent
    assert all(url.startswith("file:") and url.endswith("page.html") for url in sent)


def press(browser, *keys):
    browser.switch_to.active_element.send_keys(*keys)


def test_a_click_shows_what_a_token_was_chosen_from(see, write) -> None:
    path = write(RECIPE, ["Who won?", "</script><b>x</b>"])
    find = see(path)
    assert len(find(".token")) == 16
    assert [own.text for own in find(".prompt")] == ["Who won?", "</script><b>x</b>"]
    assert str(2**63 - 1) in find(".trace .about")[0].text
    find(".token")[9].click()
    panel = find("#detail")[0].text
    assert "token 1, id" in panel
    assert "contrasted layer" in panel
    assert [own.text.split("\n")[0] for own in find("#detail .stage b")] == [
        "model", "after the strategy", "after temperature", "after top_k",
    ]  # fmt: skip
    assert len(find("#detail .bar.chosen")) >= 2
    assert "4 legal" in find("#detail .stage")[-1].text


def test_the_keyboard_reaches_everything(see, browser, write) -> None:
    from selenium.webdriver.common.keys import Keys

    find = see(write(RECIPE, ["Who won?", "a"]))
    press(browser, Keys.ARROW_RIGHT)
    places = []
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.END, Keys.ARROW_UP, Keys.HOME):
        press(browser, key)
        places.append(find(".token").index(browser.switch_to.active_element))
    assert places == [1, 9, 15, 7, 0]
    press(browser, Keys.ENTER)
    assert "token 0" in find("#detail")[0].text
    colours = set()
    modes = [option.text.split()[1] for option in find("#mode option")]
    assert modes == ["probability", "entropy", "shift", "divergence", "layer", "effect"]
    for number in range(1, 7):
        press(browser, str(number))
        colours.add(tuple(token.get_attribute("style") for token in find(".token")))
    assert len(colours) == 6
    press(browser, "t")
    background = find("body")[0].value_of_css_property("background-color")
    press(browser, "t")
    assert find("body")[0].value_of_css_property("background-color") != background
    press(browser, "?")
    assert find("#help")[0].is_displayed()
    press(browser, Keys.ESCAPE)
    assert "Point at a token" in find("#detail")[0].text


def test_candidates_votes_and_utilities_are_shown(see, write) -> None:
    sampled = {"rules": [], "generation": {"do_sample": True, "seed": 0, "max_new_tokens": 6, "eos_token_id": 96}}
    find = see(write({"strategy": {"kind": "mbr", "n": 3, "utility": "chrf"}, **sampled}, ["a"]))
    assert len(find(".row")) == 3
    assert find(".matrix tr:nth-child(2) td")[0].text == "100"
    assert len(find(".matrix td")) == 9
    assert len(find(".row.best")) == 1
    find(".link")[1].click()
    assert "token 0" in find("#detail")[0].text
    votes = {"kind": "self_consistency", "n": 3, "extract": {"kind": "regex", "pattern": "(.)"}}
    find = see(write({"strategy": votes, **sampled}, ["a"]))
    assert [own.text for own in find("h3")][:2] == ["Votes", "Candidates, the best first"]


def test_drafts_the_tree_and_the_cache_are_shown(see, write) -> None:
    plain = {"max_new_tokens": 12, "eos_token_id": 96}
    bias = [{"kind": "logit_bias", "bias": {"th": 30.0, "the": 30.5}}]
    drafter = {"kind": "ngram", "schedule": "constant"}
    find = see(write({"drafter": drafter, "rules": bias, "generation": plain}, ["the the the"]))
    assert len(find(".token.drafted")) == len(find(".chip.accepted")) > 0
    assert find("rect.used")
    find = see(write({"strategy": {"kind": "beam", "num_beams": 3}, "generation": plain}, ["a"]))
    assert len(find(".row")) >= 3
    nodes = find("svg .node")
    assert len(nodes) >= 12 * 3 - 3
    nodes[4].click()
    assert "log-probability so far" in find("#detail")[0].text


def test_traces_stand_side_by_side(see, write, tmp_path) -> None:
    write(RECIPE, ["a"], "one.jsonl")
    path = write({**RECIPE, "rules": []}, ["a"], "two.jsonl")
    path.write_text(page([tmp_path / "one.jsonl", tmp_path / "two.jsonl"]), encoding="utf-8")
    find = see(path)
    assert [own.text for own in find("h2")] == ["one.jsonl", "two.jsonl"]
    ids = [[own["id"] for own in map(json.loads, (tmp_path / name).read_text().splitlines()) if own.get("type") == "token"]
           for name in ("one.jsonl", "two.jsonl")]  # fmt: skip
    assert len(find(".token.other")) == sum(a != b for a, b in zip(*ids, strict=True)) > 0


def test_a_candidate_without_a_score_is_shown_without_one(see, write) -> None:
    scorer = {"kind": "regex", "pattern": "."}
    recipe = {"strategy": {"kind": "best_of_n", "n": 2, "scorer": scorer}, "rules": []}
    options = {"do_sample": True, "seed": 0, "max_new_tokens": 3, "eos_token_id": 96}
    path = write({**recipe, "generation": options}, ["a"])
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"score": 1.0', '"score": null').replace('"score": 0.0', '"score": null'))
    assert [own.text for own in see(path)("table td:nth-child(2)")] == ["–", "–"]


def test_numbers_that_json_does_not_have_are_left_out(tmp_path) -> None:
    header = {"trace": 1, "seed": 0, "rows": [{"prompt": 0}], "prompt_ids": [[1]], "recipe": {}, "decodekit": "0"}
    lines = [header, {"type": "event", "event": "candidates", "row": 0, "candidates": [{"score": math.nan}]}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = page([tmp_path / "t.jsonl"])
    assert "NaN" not in text.split('id="data">')[1].split("</script>")[0]


def test_the_page_is_whole(write) -> None:
    text = write(RECIPE, ["</script><img src=x>"]).read_text(encoding="utf-8")
    assert text.count("</script>") == 2
    assert "</script><img" not in text
    assert "default-src 'none'" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_what_is_no_trace_makes_no_page(tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"is not a decodekit trace: .* give a trace, which decodekit run"):
        page([tmp_path / "x.jsonl"])
