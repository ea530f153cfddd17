import pytest

import decodekit
from decodekit.compare import PLAIN, POOL, Comparison
from decodekit.compare.intervals import interval, paired
from decodekit.compare.metrics import metric_of
from decodekit.compare.plot import plot
from decodekit.compare.rows import Progress, Row, read_rows
from decodekit.core.errors import InputError
from decodekit.recipe import load_recipe

PLAIN_OPTIONS = {"max_new_tokens": 8, "eos_token_id": 96}
RECIPES = {
    "greedy": {"generation": PLAIN_OPTIONS},
    "vote": {
        "strategy": {"kind": "mbr", "n": 3, "utility": "exact"},
        "generation": {**PLAIN_OPTIONS, "do_sample": True, "seed": 0},
    },
}
ROWS = [Row({"prompt": text}, "t") for text in ("Who won?", "a", "The other", "1 + 2", "So?")]


def letters(text, reference):
    return float(text.count(reference))


@pytest.fixture
def compared(dense, tokenizer, tmp_path):
    def make(recipes=RECIPES, resume=False, rows=ROWS, batch=6):
        if not resume:
            (tmp_path / "rows.jsonl").unlink(missing_ok=True)
        loaded = {name: load_recipe(own) for name, own in recipes.items()}
        progress = Progress(tmp_path / "rows.jsonl", {"recipes": recipes}, rows, resume=resume)
        made = Comparison(loaded, rows, letters, progress, batch=batch)
        said = []
        made.run(dense, tokenizer, {key: {} for key in loaded}, lambda *told: said.append(told))
        return made, progress, said

    return make


def test_a_recipe_is_paired_with_as_many_plain_samples_as_its_tokens_buy(compared, dense, tokenizer) -> None:
    made, progress, _ = compared()
    plain, greedy, vote = made.lines()
    assert [plain.recipe, greedy.recipe, vote.recipe] == ["plain", "greedy", "vote"]
    # Greedy decoding buys itself, and gains nothing over itself.
    assert greedy.samples == 1
    assert greedy.quality == greedy.matched == plain.quality
    assert greedy.over_matched.mean == greedy.over_matched.low == greedy.over_matched.high == 0
    outputs = decodekit.load(RECIPES["vote"]).run(dense, tokenizer, [row.prompt["prompt"] for row in ROWS])
    assert vote.quality.mean == pytest.approx(sum(letters(own.text, "t") for own in outputs) / 5)
    assert vote.forwarded_tokens == pytest.approx(sum(own.stats["forwarded_tokens"] for own in outputs) / 5)
    assert vote.gain.mean == pytest.approx(vote.quality.mean - greedy.quality.mean)
    for row, output in enumerate(outputs):
        samples = progress.done[POOL, row]["samples"]
        prompt = output.stats["prompt_tokens"]
        prices = [prompt + sum(own["tokens"] - 1 for own in samples[:count]) for count in range(1, len(samples) + 1)]
        bought = sum(price <= output.stats["forwarded_tokens"] for price in prices)
        assert made._bought(row, output.stats["forwarded_tokens"]) == max(1, bought)
        if bought > 1:
            chosen = max(samples[:bought], key=lambda own: own["score"])
            best = max(letters(own["text"], "t") for own in samples[:bought])
            assert made._best(row, bought) == (letters(chosen["text"], "t"), best)
    assert vote.oracle >= vote.matched.mean
    assert 1 < vote.samples <= 5
    frontier = made.frontier()
    assert [cost for cost, _ in frontier] == sorted(cost for cost, _ in frontier)
    picture = plot([plain, greedy, vote], frontier, "letters")
    assert picture.count("<circle") == 6
    assert "vote" in picture


def test_each_row_has_all_the_samples_that_its_dearest_recipe_buys(compared) -> None:
    made, progress, _ = compared()
    for row in range(len(ROWS)):
        budget = max(progress.done[name, row]["forwarded_tokens"] for name in RECIPES)
        assert made._price(row, len(progress.done[POOL, row]["samples"])) >= budget


def test_the_baseline_chooses_from_the_samples_of_a_recipe_that_draws_plain_ones(compared, dense, tokenizer) -> None:
    vote = {**RECIPES["vote"], "rules": [{"kind": "temperature", "t": 0.7}]}
    made, progress, _ = compared({"greedy": RECIPES["greedy"], "vote": vote})
    outputs = decodekit.load(vote).run(dense, tokenizer, [row.prompt["prompt"] for row in ROWS])
    for row, output in enumerate(outputs):
        texts = [own["text"] for own in output.candidates]
        assert [own["text"] for own in progress.done[POOL, row]["samples"]] == texts
        assert made._bought(row, output.stats["forwarded_tokens"]) == len(texts)


def test_what_two_runs_would_decode_alike_is_decoded_once(compared) -> None:
    sampled = {"generation": {**PLAIN_OPTIONS, "do_sample": True, "seed": 0}}
    unseeded = {"generation": {**PLAIN_OPTIONS, "do_sample": True}}
    greedy = {"generation": {**PLAIN_OPTIONS, "do_sample": False}}
    recipes = {"greedy": greedy, "one": sampled, "same": sampled, "free": unseeded, "other": unseeded}
    _, progress, _ = compared(recipes)
    for row in range(len(ROWS)):
        own = {name: progress.done[name, row] for name in (PLAIN, *recipes)}
        assert own["greedy"] == own[PLAIN]  # to the seconds
        assert own["same"] == own["one"]
        assert own["other"] != own["free"]


def test_batches_have_as_many_rows_of_the_model(compared) -> None:
    recipes = {**RECIPES, "wide": {**RECIPES["vote"], "strategy": {"kind": "mbr", "n": 2, "utility": "exact"}}}
    _, _, said = compared(recipes, batch=4)
    decoded = [what for what, *_ in said if not what.startswith("samples")]
    assert decoded[:4] == [
        "plain: rows 1 to 4 of 5",
        "greedy: rows 1 to 4 of 5",
        "vote: rows 1 to 1 of 5",
        "wide: rows 1 to 2 of 5",
    ]
    assert decoded[4:] == [
        "vote: rows 2 to 2 of 5",
        "vote: rows 3 to 3 of 5",
        "wide: rows 3 to 4 of 5",
        "vote: rows 4 to 4 of 5",
        "plain: rows 5 to 5 of 5",
        "greedy: rows 5 to 5 of 5",
        "vote: rows 5 to 5 of 5",
        "wide: rows 5 to 5 of 5",
    ]


def test_what_was_decoded_is_not_decoded_again(compared, tmp_path) -> None:
    first, *_ = compared()
    text = (tmp_path / "rows.jsonl").read_text()
    lines = text.splitlines(keepends=True)
    kept = "".join(lines[:5]) + lines[5][:9]  # cut while it was written
    (tmp_path / "rows.jsonl").write_text(kept)
    again, *_ = compared(resume=True)
    whole = (tmp_path / "rows.jsonl").read_text()
    assert whole.startswith("".join(lines[:5]))
    assert len(whole.splitlines()) == len(lines)
    strip = ("seconds", "kv_bytes")  # measurements: another batch has others
    ours, theirs = ([vars(line) | dict.fromkeys(strip) for line in own.lines()] for own in (again, first))
    assert ours == theirs


def test_what_is_of_another_comparison_is_not_gone_on_with(compared, tmp_path) -> None:
    compared()
    with pytest.raises(InputError, match="is of another comparison"):
        Progress(tmp_path / "rows.jsonl", {"recipes": "others"}, ROWS, resume=True)
    with pytest.raises(InputError, match="is of another comparison"):
        Progress(tmp_path / "rows.jsonl", {"recipes": RECIPES}, ROWS[::-1], resume=True)


def test_what_is_there_is_never_written_over(compared, tmp_path) -> None:
    compared(rows=ROWS[:1])
    before = (tmp_path / "rows.jsonl").read_text()
    with pytest.raises(InputError, match="is already there: give --resume"):
        Progress(tmp_path / "rows.jsonl", {"recipes": RECIPES}, ROWS, resume=False)
    assert (tmp_path / "rows.jsonl").read_text() == before


def test_a_comparison_of_more_rows_goes_on_with_what_fewer_had(compared) -> None:
    compared(rows=ROWS[:2])
    _, progress, said = compared(resume=True)
    assert {row for _, row in progress.done} == set(range(5))
    alone, *_ = compared()
    again, *_ = compared(resume=True, rows=ROWS[:3])
    assert again.complete() == [0, 1, 2]
    assert alone.complete() == [0, 1, 2, 3, 4]
    assert said
    assert all(done < total for _, done, total in said)


def test_half_a_comparison_is_one_over_the_rows_that_all_have(compared) -> None:
    made, progress, _ = compared()
    for row in (3, 4):
        del progress.done["vote", row]
    assert made.complete() == [0, 1, 2]
    assert [line.rows for line in made.lines()] == [3, 3, 3]
    # Without its plain samples a row would be held against fewer than its recipes would buy.
    del progress.done[POOL, 2]
    assert made.complete() == [0, 1]


def test_a_row_that_fails_counts_as_wrong(compared) -> None:
    made, _, _ = compared(rows=[*ROWS, Row({"prompt": " "}, "t")])
    assert [line.failed for line in made.lines()] == [1, 1, 1]
    assert all(line.rows == 6 for line in made.lines())
    assert PLAIN


def test_intervals() -> None:
    assert interval([2.0] * 9) == (2.0, 2.0, 2.0)
    one = interval([0.0, 1.0] * 200)
    assert one.mean == 0.5
    assert one.low == pytest.approx(0.5 - 1.96 * 0.5 / 20, abs=0.01)
    assert one.high == pytest.approx(0.5 + 1.96 * 0.5 / 20, abs=0.01)
    # What both share does not widen the interval of their difference.
    assert paired([0.1, 5.1, 9.1], [0.0, 5.0, 9.0]).high == pytest.approx(0.1)


def test_rows_and_their_references(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "Why?", "final": 3, "context": "c"}\n{"question": "How?", "final": "4"}\n')
    [first, second] = read_rows(path, template=None, reference=None, limit=None)
    assert first == Row({"prompt": "Why?", "context": "c"}, "3")
    assert second == Row({"prompt": "How?"}, "4")
    [row] = read_rows(path, template="{final}? {question}", reference="question", limit=1)
    assert row == Row({"prompt": "3? Why?", "context": "c"}, "Why?")
    for options, message in [
        ({"template": "{nope}", "reference": None}, r"data\.jsonl:1: no field 'nope', which --template names"),
        ({"template": None, "reference": "nope"}, "no field 'nope', which --reference names"),
    ]:
        with pytest.raises(InputError, match=message):
            read_rows(path, limit=None, **options)
    path.write_text("[]\n")
    with pytest.raises(InputError, match=r"data\.jsonl:1: expected a JSON object such as .*, got '\[\]'"):
        read_rows(path, template=None, reference=None, limit=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"'.*none\.jsonl' cannot be read \(No such file or directory\): give a JSON object such as"),
        ("", r"'.*none\.jsonl' is empty: give a JSON object such as"),
        ("Why?", r"none\.jsonl:1: expected a JSON object such as .*, got 'Why\?'"),
    ],
)
def test_a_file_without_rows_says_what_one_looks_like(tmp_path, text, message) -> None:
    if text is not None:
        (tmp_path / "none.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        read_rows(tmp_path / "none.jsonl", template=None, reference=None, limit=None)


def test_metrics() -> None:
    name, rate = metric_of(None, ["3", "-4.5"])
    assert (name, rate("so it is 1,003 - 1000 = 3.0", "3"), rate("4", "3")) == ("number", 1.0, 0.0)
    name, rate = metric_of(None, ["Paris", "3"])
    assert (name, rate("Paris ", "Paris"), rate("It is Paris", "Paris")) == ("exact", 100.0, 0.0)
    assert metric_of("contains", [])[1]("It is paris.", "Paris") == 1.0
    with pytest.raises(InputError, match="unknown metric 'chrff': did you mean 'chrf'"):
        metric_of("chrff", [])
