"""Medusa, EAGLE and MTP heads: random ones over so few tokens that they are sometimes right."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from decodekit.core.draft_heads import Head, run_head
from decodekit.core.errors import InputError, Refused
from decodekit.core.heads import Readout
from decodekit.drafters.eagle import EagleHead, head_config
from decodekit.drafters.medusa import Medusa
from decodekit.drafters.mtp import Mtp
from decodekit.testing.values import check_value
from tests.drafters.making import (
    DEEPSEEK,
    EAGLE_LAYER,
    OPEN,
    PROMPTS,
    QWEN,
    accepted,
    decode,
    eagle_head,
    few,
    ids,
    medusa_head,
    mtp_head,
    near,
)

RULES = [{"kind": "repetition_penalty", "penalty": 1.3}]


def drafters(folder, model) -> dict[str, dict]:
    """A recipe of each kind of head, chains and trees."""
    made = {
        "medusa": {"kind": "medusa", "head": medusa_head(folder / "medusa", model), "max_tokens": 6},
        "eagle": {"kind": "eagle", "head": eagle_head(folder / "eagle", model)},
        "mtp": {"kind": "mtp", "head": mtp_head(folder / "mtp", model, QWEN, "mtp")},
    }
    made["eagle tree"] = {**made["eagle"], "branching": 3, "max_tokens": 8}
    made["mtp tree"] = {**made["mtp"], "branching": 2, "max_tokens": 5}
    return {name: {**own, "head": str(own["head"]), "schedule": "constant"} for name, own in made.items()}


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle tree", "mtp", "mtp tree"])
def test_tokens_are_those_of_plain_decoding(tmp_path, family, name) -> None:
    model = few(family)
    drafter = drafters(tmp_path, model)[name]
    for parts in ({"generation": OPEN}, {"rules": RULES}, {"generation": {**OPEN, "do_sample": True, "seed": 2}}):
        plain, outputs = decode(model, **parts), decode(model, drafter, **parts)
        assert ids(outputs) == ids(plain)
        accepted(outputs)
        assert sum(output.stats["draft_tokens"] for output in outputs) > 0
    # The last of them, alone.
    [alone] = decode(model, drafter, PROMPTS[2:], **parts)
    assert alone.token_ids == plain[2].token_ids


def test_some_are_right(tmp_path) -> None:
    for family in ("dense", "hybrid"):
        model = few(family)
        for name, drafter in drafters(
            tmp_path / family if (tmp_path / family).mkdir() is None else tmp_path, model
        ).items():
            assert accepted(decode(model, drafter, generation={**OPEN, "max_new_tokens": 24})) > 0, name


def test_a_head_reads_piecewise_what_it_reads_at_once() -> None:
    """Rows of other lengths beside it, each after a past of its own."""
    model = few("dense")
    own = EagleHead(head_config(EAGLE_LAYER, 32)).double()
    embed = model.get_input_embeddings()
    head = Head(lambda ids, hidden: own.fuse(embed(ids), hidden), own.decoder, Readout(model))
    generator = torch.Generator().manual_seed(1)
    hidden = [torch.randn(count, 32, generator=generator, dtype=torch.float64) for count in (9, 5)]
    tokens = [torch.randint(3, 7, (len(states),), generator=generator).tolist() for states in hidden]
    whole, pasts = run_head(head, [None, None], tokens, hidden)
    for row, cut in ((0, 4), (1, 3)):
        _, [past] = run_head(head, [None], [tokens[row][:cut]], [hidden[row][:cut]])
        both, grown = run_head(
            head, [past, None], [tokens[row][cut:], tokens[1 - row]], [hidden[row][cut:], hidden[1 - row]]
        )
        torch.testing.assert_close(both[0], whole[row])
        torch.testing.assert_close(both[1], whole[1 - row])
        torch.testing.assert_close(grown[0].keys, pasts[row].keys)
    # And as the decoder itself says, without a cache.
    fused = head.fuse(torch.tensor([tokens[0]]), hidden[0].unsqueeze(0))
    torch.testing.assert_close(head.decoder(inputs_embeds=fused).last_hidden_state[0, -1], whole[0])


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_head_of_another_model_is_refused(tmp_path, kind) -> None:
    model = few("dense")
    drafter = drafters(tmp_path, model)[kind]
    with pytest.raises(Refused, match=r"was trained for another model: its sha256 is .*; give a head of this model"):
        decode(near(model), drafter)
    with pytest.raises(Refused, match="was trained for another model: its model_type is llama"):
        decode(few("hybrid"), drafter)


def test_published_eagle_heads_are_told_by_their_embeddings(tmp_path) -> None:
    model = few("dense")
    folder = eagle_head(tmp_path / "eagle", model)
    (folder / "config.json").write_text(json.dumps(EAGLE_LAYER))
    weights = load_file(folder / "model.safetensors")
    drafter = {"kind": "eagle", "head": str(folder), "schedule": "constant"}
    embeddings = model.get_input_embeddings().weight
    save_file({**weights, "embed_tokens.weight": embeddings.half()}, folder / "model.safetensors")
    assert ids(decode(model, drafter)) == ids(decode(model))
    save_file({**weights, "embed_tokens.weight": embeddings.flip(0).half()}, folder / "model.safetensors")
    with pytest.raises(Refused, match="its embed_tokens"):
        decode(model, drafter)


def test_damaged_and_foreign_files_are_refused(tmp_path) -> None:
    model = few("dense")
    made = drafters(tmp_path, model)
    with pytest.raises(InputError, match="no weights of a head in"):
        decode(model, {**made["medusa"], "head": str(tmp_path)})
    with pytest.raises(InputError, match=r"lacks .*norm.weight.*; is it of another kind\?|no MTP layer"):
        decode(model, {**made["mtp"], "head": made["eagle"]["head"]})
    with pytest.raises(InputError, match="no Medusa heads in"):
        decode(model, {**made["medusa"], "head": made["mtp"]["head"]})
    with pytest.raises(InputError, match="no EAGLE head in"):
        decode(model, {**made["eagle"], "head": made["medusa"]["head"]})
    for kind, name in (("medusa", "medusa_lm_head.pt"), ("eagle", "model.safetensors")):
        file = tmp_path / kind / name
        whole = file.read_bytes()
        # The last two are no archive: torch's older format, whose stack they leave empty.
        for damaged in (whole[:-700], b"\x86" + whole, b"\x85."):
            file.write_bytes(damaged)
            with pytest.raises(InputError, match="is damaged or holds more than tensors"):
                decode(model, made[kind])


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def test_pickled_code_is_not_run(tmp_path, capsys) -> None:
    model = few("dense")
    drafter = drafters(tmp_path, model)["medusa"]
    torch.save({"0.0.linear.weight": Evil()}, tmp_path / "medusa" / "medusa_lm_head.pt")
    with pytest.raises(InputError, match="holds more than tensors"):
        decode(model, drafter)
    assert "run" not in capsys.readouterr().out


def test_deepseek_names_of_an_mtp_layer_are_read(tmp_path) -> None:
    model = few("dense")
    generation = {**OPEN, "max_new_tokens": 10}
    qwen = {"kind": "mtp", "head": str(mtp_head(tmp_path / "a", model, QWEN, "mtp")), "schedule": "constant"}
    deepseek = mtp_head(tmp_path / "b", model, DEEPSEEK, "model.layers.4")
    # Published checkpoints hold copies of the embeddings there.
    copies = {"model.layers.4.embed_tokens.weight": torch.zeros(7, 32), "model.layers.3.mlp.x": torch.zeros(1)}
    save_file({**load_file(deepseek / "model.safetensors"), **copies}, deepseek / "model.safetensors")
    one, other = (
        decode(model, qwen, generation=generation),
        decode(model, {**qwen, "head": str(deepseek)}, generation=generation),
    )
    assert accepted(one) == accepted(other)
    assert one[0].stats["acceptance_by_position"] == other[0].stats["acceptance_by_position"]


def test_medusa_heads_as_safetensors_are_the_same(tmp_path) -> None:
    model = few("dense")
    folders = medusa_head(tmp_path / "a", model), medusa_head(tmp_path / "b", model, name="medusa_lm_head.safetensors")
    drafts = [decode(model, {"kind": "medusa", "head": str(own), "schedule": "constant"}) for own in folders]
    assert accepted(drafts[0]) == accepted(drafts[1])


def test_they_are_values(tmp_path) -> None:
    check_value(Medusa(head=tmp_path))
    check_value(Mtp())
